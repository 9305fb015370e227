"""A worker without its process: which task it takes, what it loads and draws, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data._utils import worker as torch_worker

from fastq_loader.ipc.claim_table import ClaimTable
from fastq_loader.ipc.messages import (
    BATCH,
    BROKEN,
    ERROR,
    SKIPPED,
    Answer,
    Epoch,
    Message,
    Pickled,
    Stop,
    Task,
)
from fastq_loader.memory.allocator import Allocator, install
from fastq_loader.memory.arena import AVAILABLE, Arena
from fastq_loader.reading import generators
from fastq_loader.workers.main import WorkerLoop
from fastq_loader.workers.task_queue import TaskQueue
from tests.support.simulation import Table
from tests.support.worker_setup import STREAM, make_setup

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")


@pytest.fixture
def arena() -> Iterator[Arena]:
    """A worker of this arena may run in this process, which is put back afterwards."""
    threads = torch.get_num_threads()
    arena = Arena(1)
    with generators.restored():
        yield arena
    install(None)
    arena.retire([])
    torch_worker._worker_info = None
    torch.set_num_threads(threads)


class Wire:
    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self.sent: list[Message] = []

    def receive(self, block: bool) -> Message | None:
        return self.messages.pop(0) if self.messages else Stop() if block else None

    def send(self, message: Message) -> None:
        self.sent.append(message)


class Asked:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return torch.tensor(index)


def epoch(number: int = 1, base_seed: int | None = None) -> Epoch:
    return Epoch(number, None, base_seed)


def task(seq: int, number: int = 1) -> Task:
    return Task(number, seq, 0, seq, ())


SHARED = [task(0)._replace(ticket=1), task(1)._replace(ticket=2)]


def replies(arena: Arena, dataset: Any, *messages: Message, **fields: Any) -> list[Answer]:
    blocks = Allocator(arena.mapping, 0)
    install(blocks)
    claims = ClaimTable(arena.fd, arena.mapping.claims)
    wire = Wire(list(messages))
    worker = WorkerLoop(make_setup(arena, dataset, **fields), blocks, wire, claims)  # type: ignore[arg-type]
    worker.run()
    claims.close()
    return wire.sent  # type: ignore[return-value]


def kinds(answers: list[Answer]) -> list[tuple[int, int]]:
    return [(answer.seq, answer.kind) for answer in answers]


def test_a_worker_that_could_not_start_says_so_in_every_epoch_once(arena: Arena) -> None:
    messages = [epoch(), task(0), epoch(2), task(0, 2), task(1, 2)]
    broken = replies(arena, Broken(), *messages, rules=STREAM)
    assert kinds(broken) == [(0, SKIPPED), (0, BROKEN), (1, SKIPPED)]


@pytest.fixture
def claims(arena: Arena) -> Iterator[ClaimTable]:
    """The consumer's, with two tickets on offer: those of `SHARED`."""
    claims = ClaimTable(arena.fd, arena.mapping.claims)
    for shared in SHARED:
        claims.offer(shared.ticket)
    yield claims
    claims.close()


def test_a_worker_that_could_not_start_leaves_tasks_to_others(arena: Arena, claims: ClaimTable) -> None:
    found = replies(arena, Broken(), epoch(1, 7), *SHARED, shared_tasks=True, init_fn=Broken.start)
    assert kinds(found) == [(0, BROKEN)]
    assert claims.on_offer(2)


def test_an_index_that_cannot_be_unpickled_is_an_error_of_its_batch(arena: Arena) -> None:
    strange = task(0)._replace(index=Pickled(b"not of this pool"))
    assert kinds(replies(arena, Asked(), epoch(), strange, task(1))) == [(0, ERROR), (1, BATCH)]


class Broken:
    def __iter__(self) -> Iterator[Any]:
        raise ValueError("no stream")

    @staticmethod
    def start(worker: int) -> None:
        raise ValueError("no worker")


def test_what_is_left_of_an_epoch_is_skipped(arena: Arena) -> None:
    dataset = Asked()
    answers = replies(arena, dataset, epoch(1), *map(task, range(3)), epoch(2))
    assert kinds(answers) == [(0, SKIPPED), (1, SKIPPED), (2, SKIPPED)]
    assert dataset.asked == []


def attempt_at(seq: int, attempt: int = 0, epoch: int = 1) -> Task:
    return Task(epoch, seq, attempt, seq, (), 100 * epoch + 50 * attempt + seq)


def queue(claims: Table, *seqs: int, worker: int = 0, shared: bool = True) -> TaskQueue:
    tasks = TaskQueue(claims, shared, worker)  # type: ignore[arg-type]
    for seq in seqs:
        if claims.holder(100 + seq) is None:
            claims.offer(100 + seq)
        tasks.add(attempt_at(seq))
    return tasks


def taken(tasks: TaskQueue) -> list[int]:
    seqs = []
    while (one := tasks.take()) is not None:
        seqs.append(one.seq)
    return seqs


@given(st.permutations(range(6)))
def test_shared_tasks_are_taken_from_the_lowest_and_assigned_ones_as_they_came(order: list[int]) -> None:
    claims = Table(1 << 12)
    assert taken(queue(claims, *order, shared=False)) == order
    assert taken(queue(claims, *order)) == sorted(order)
    assert claims.holder(102) == 0


def test_what_others_have_is_passed_over_and_forgotten_until_it_is_sent_again() -> None:
    claims = Table(1 << 12)
    one, other = (queue(claims, 0, 1, 2, worker=worker) for worker in (0, 1))
    assert [tasks.take() for tasks in (one, other)] == [attempt_at(0), attempt_at(1)]
    claims.offer(150)  # the first worker dies
    other.add(attempt_at(0, attempt=1))
    assert (other.take(), taken(other), taken(one)) == (attempt_at(0, attempt=1), [2], [])
    assert len(one) == len(other) == 0
