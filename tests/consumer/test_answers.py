"""What becomes of the answers of workers: with a scheduler alone, and between real processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from torch.utils.data import IterableDataset

from fastq_loader import DataLoader
from fastq_loader.consumer.answers import Answers
from fastq_loader.errors import ProtocolError, WorkerDied
from fastq_loader.ipc import sockets
from fastq_loader.ipc.messages import (
    BATCH,
    ERROR,
    PART_ENDED,
    SKIPPED,
    Answer,
    BatchHandle,
    Hello,
    decode_for_consumer,
)
from fastq_loader.memory.blocks import SMALLEST
from fastq_loader.scheduling.events import Send
from fastq_loader.scheduling.in_flight import Batch, InOrder
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.statistics.counters import Counters, WorkerCounters
from fastq_loader.workers.worker import Worker
from tests.scheduling.test_scheduler import begin, started, states
from tests.support import invariants

B = SMALLEST
BLOCK = (20 * B, B)


class Group:
    """Workers whose answers have come already."""

    def __init__(self, answers: list[tuple[int, Answer]]) -> None:
        self.answers = answers
        self.token = b""
        self.evicted: list[int] = []
        self.offered = 0
        self.workers = [Worker(number) for number in range(2)]
        for worker in self.workers:
            worker.counters = WorkerCounters(worker.number, 0)

    def receive(self) -> tuple[int, Answer] | None:
        return self.answers.pop(0) if self.answers else None

    def evict(self, worker: int) -> None:
        self.evicted.append(worker)


def receiver(
    scheduler: Scheduler, *answers: tuple[int, Answer], iterable: bool = False, claims: Any = None
) -> tuple[Answers, Group, Counters]:
    group, counters = Group(list(answers)), Counters()
    plan: Any = SimpleNamespace(
        rules=SimpleNamespace(iterable=iterable), in_order=isinstance(scheduler.in_flight, InOrder)
    )
    # Handles are as they should be; only the ledger knows the blocks.
    unpacker: Any = SimpleNamespace(
        check=lambda layouts, handle: (handle, tuple((offset, need) for offset, _, need in handle[4]))
    )
    scheduler.claimant = (claims or {}).get
    inbox = Answers(plan, group, scheduler, unpacker, counters)  # type: ignore[arg-type]
    inbox.log = counters.begin_epoch(1, 0)
    return inbox, group, counters


def answer(send: Send, *blocks: tuple[int, int, int], **fields: Any) -> Answer:
    """A batch in these blocks: (offset, size, bytes needed)."""
    task, handle = send.task, BatchHandle(0, None, (), None, blocks)
    return Answer(task.epoch, task.seq, task.attempt, BATCH, 1, 2, (), (), handle)._replace(**fields)


@pytest.mark.parametrize("shared", [False, True])
def test_an_answer_that_is_not_due_ends_its_worker(shared: bool) -> None:
    scheduler, sends = started(shared_tasks=shared)
    claims = {send.task.ticket: seq % 2 for seq, send in enumerate(sends)}
    due = answer(sends[0])
    strays = [
        (0, due._replace(**fields)) for fields in ({"epoch": 2}, {"seq": 1}, {"seq": 9}, {"attempt": 1})
    ]
    strays.append((1, due))
    for worker, stray in strays:
        inbox, group, counters = receiver(scheduler, (worker, stray), claims=claims)
        assert not inbox.receive()
        assert (group.evicted, counters.rejected_frames) == ([worker], 1)
    inbox, group, counters = receiver(scheduler, (0, due), (0, due), claims=claims)
    assert inbox.receive()
    assert (group.evicted, counters.rejected_frames, group.workers[0].counters.busy) == ([], 0, 1)
    assert not inbox.receive(), "a duplicate"
    assert (group.evicted, counters.rejected_frames, group.workers[0].counters.busy) == ([0], 1, 1)


def test_answers_of_an_older_epoch_are_counted() -> None:
    scheduler, sends = started()
    begin(scheduler)
    inbox, group, counters = receiver(scheduler, (0, answer(sends[0], (*BLOCK, 1), fresh=(BLOCK,))))
    assert inbox.receive()
    assert (counters.stale_answers, counters.blocks_grown, group.evicted) == (1, 1, [])
    assert states(scheduler) == {20 * B: "free"}


MISFITS: list[Any] = [
    {"kind": PART_ENDED, "handle": None},  # the end of a map-style dataset
    *({"kind": SKIPPED}, {"handle": None}, {"kind": ERROR, "handle": None}),
    # A block of another size, and one that is not there.
    *({"handle": BatchHandle(0, None, (), None, (block,))} for block in ((20 * B, 2 * B, 1), (40 * B, B, 1))),
    {"returned": (40 * B,)},
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("fields", MISFITS, ids=str)
def test_an_answer_that_is_due_and_does_not_fit_fails_at_its_position(
    fields: dict[str, Any], shared: bool
) -> None:
    scheduler, sends = started(shared_tasks=shared)
    misfit = answer(sends[0], (*BLOCK, 1), fresh=(BLOCK,))._replace(**fields)
    claims = {send.task.ticket: seq % 2 for seq, send in enumerate(sends)}
    inbox, group, counters = receiver(scheduler, (1, answer(sends[1])), (0, misfit), claims=claims)
    assert inbox.receive()
    invariants.check(scheduler)
    assert (counters.rejected_frames, group.evicted) == (1, [])
    assert states(scheduler) == {}, "no part of it was accepted"
    for seq, error in ((0, ProtocolError), (1, type(None))):
        deliver = scheduler.wanted()
        assert isinstance(deliver, Batch)
        assert (deliver.seq, type(deliver.error)) == (seq, error)


# ---- between processes ------------------------------------------------------------------------------


class Items:
    """`dataset[i]` is a large tensor full of i, and i."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((30_000,), float(index)), index


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield from (Items()[index] for index in range(30))


def is_item(batch: Any, index: int) -> bool:
    tensor, number = batch
    return tensor.shape == (30_000,) and bool((tensor == index).all()) and number == index


Change = Callable[[random.Random, list[Any]], Any]


class Breaking:
    """Breaks every so many-th answer before the consumer reads it."""

    def __init__(self, share: float, change: Change) -> None:
        self.noise = random.Random(1)
        self.share = share
        self.change = change

    def __call__(self, frame: bytes, read: Any) -> Any:
        message = decode_for_consumer(frame, read)
        if isinstance(message, Hello) or self.noise.random() >= self.share:
            return message
        changed = self.change(self.noise, msgpack.unpackb(frame, strict_map_key=False))
        return decode_for_consumer(changed if isinstance(changed, bytes) else msgpack.packb(changed))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("dataset", "change", "text"),
    [
        (Items(), lambda noise, fields: b"\xc1", "its connection to this process broke"),
        (
            Stream(),
            lambda noise, fields: [*fields[:9], [1 << 50], *fields[10:]],
            "sent an answer that fits none of its tasks",
        ),
    ],
    ids=["garbage", "a misfit from an iterable dataset"],
)
def test_a_worker_that_is_broken_is_ended_and_named(
    dataset: Any, change: Change, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(dataset, batch_size=None, num_workers=1)
    iterator = iter(loader)
    assert is_item(next(iterator), 0)
    monkeypatch.setattr(sockets, "decode_for_consumer", Breaking(1, change))
    errors: list[Exception] = []
    while not errors or isinstance(errors[-1], ProtocolError):
        try:
            next(iterator)
        except Exception as error:
            errors.append(error)
    assert isinstance(errors[-1], WorkerDied)
    assert text in str(errors[-1])
    assert loader.statistics().rejected_frames > 0
    loader.close()
