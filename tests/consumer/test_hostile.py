"""Answers that are well formed and cannot be true, in the scheduler and on their way between real processes.

Whatever is changed on the way: an epoch ends, a batch is the one that was asked for or raises at its place,
and the ledger holds.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from torch.utils.data import IterableDataset

from fastq_loader import DataLoader, Processes
from fastq_loader.consumer.receiver import Receiver
from fastq_loader.errors import PoisonousBatch, ProtocolError, WorkerDied, WorkerReplaced
from fastq_loader.ipc import sockets
from fastq_loader.ipc.claim_table import ClaimTable
from fastq_loader.ipc.messages import (
    BATCH,
    ENDED,
    SKIPPED,
    Answer,
    Bundle,
    Epoch,
    Handle,
    Hello,
    Message,
    Ping,
    Space,
    Stop,
    Task,
    decode_for_consumer,
    decode_for_worker,
    encode,
)
from fastq_loader.memory.allocator import Allocator
from fastq_loader.memory.arena import AVAILABLE, Arena
from fastq_loader.memory.ledger import FREE, GRANTED, HELD, PAGE, SMALLEST, BlockLedger
from fastq_loader.scheduling.backlog import Backlog
from fastq_loader.scheduling.events import (
    Arrived,
    Deliver,
    Died,
    Draw,
    Drawn,
    EpochStarted,
    Finish,
    Send,
    Wanted,
)
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.statistics import Counters, WorkerCounters
from fastq_loader.workers.group import WorkerGroup
from fastq_loader.workers.main import Worker
from tests.support.pair import TOKEN
from tests.support.worker_setup import make_setup

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")

REGION = 64 * SMALLEST
B = SMALLEST

# ---- the scheduler ----------------------------------------------------------------------------------


class Game:
    """Two workers, four batches, some free blocks of B bytes, and one at 10 * B that somebody looks at."""

    def __init__(self, dynamic: bool) -> None:
        self.ledger = BlockLedger(lambda worker: (worker * REGION, (worker + 1) * REGION))
        for worker in (0, 1):
            blocks = [(worker * REGION + at * B, B) for at in range(3)]
            self.ledger.adopt(worker, blocks)
            for offset, _ in blocks:
                self.ledger.fill(worker, [(offset, B)])
                self.ledger.drop(offset)
        self.ledger.adopt(0, [(10 * B, B)])
        self.ledger.fill(0, [(10 * B, B)])
        self.ledger.deliver([10 * B])  # somebody looks at it
        self.ledger.adopt(1, [(REGION + 30 * B, B)])  # the other worker's dataset looks at it
        self.ledger.adopt(0, [(11 * B, B)])
        self.ledger.fill(0, [(11 * B, B)])
        self.ledger.drop(11 * B)
        self.scheduler = Scheduler(2, 2, True, self.ledger, dynamic=dynamic)
        self.sends: list[Send] = []
        for _ in self.scheduler.handle(EpochStarted(1)):
            self.draw()

    def draw(self) -> None:
        if len(self.sends) < 4:
            for send in self.scheduler.handle(Drawn(len(self.sends))):
                assert isinstance(send, Send)
                self.sends.append(send)

    def truth(self, seq: int) -> Answer:
        """An answer that uses the block of its task."""
        used = tuple((offset, size) for offset, size in self.sends[seq].grants)
        return Answer(1, seq, 0, BATCH, seq, seq, used, (), (), None)

    def answer(self, seq: int, answer: Answer) -> None:
        self.scheduler.handle(Arrived(seq % 2, answer))
        self.scheduler.check()

    def granted(self) -> dict[int, str]:
        """Blocks that are neither free nor looked at."""
        return {at: state for at, state in self.ledger.states().items() if state not in (FREE, HELD)}

    def play(self) -> list[str]:
        """What is handed out, to the end."""
        out = []
        while True:
            for instruction in self.scheduler.handle(Wanted()):
                if type(instruction) is Draw:
                    self.draw()
                elif type(instruction) is Finish:
                    return out
                else:
                    assert type(instruction) is Deliver
                    out.append(type(instruction.error).__name__ if instruction.error else "batch")
                    for offset, _ in instruction.answer.used if instruction.answer else ():
                        self.ledger.drop(offset)
            self.scheduler.check()


def changed(answer: Answer, **fields: Any) -> Answer:
    return answer._replace(**fields)


#: Lies about the first batch, which worker 0 was asked for; it was granted one block of SMALLEST bytes.
LIES: dict[str, Callable[[Game, Answer], Answer]] = {
    "a new block in the other's part": lambda g, a: changed(a, fresh=((REGION + 20 * B, B),)),
    "a new block across the end of its part": lambda g, a: changed(a, fresh=((REGION - PAGE, B),)),
    "a new block behind the arena": lambda g, a: changed(a, fresh=((1 << 50, B),)),
    "a new block between two pages": lambda g, a: changed(a, fresh=((20 * B + 8, B),)),
    "a new block of no block's size": lambda g, a: changed(a, fresh=((20 * B, B + 1),)),
    "a new block of no bytes": lambda g, a: changed(a, fresh=((20 * B, 0),)),
    "a new block where one is": lambda g, a: changed(a, fresh=((10 * B, B),)),
    "a new block over the end of one": lambda g, a: changed(a, fresh=((10 * B + PAGE, B),)),
    "a new block over the start of one": lambda g, a: changed(a, fresh=((10 * B - PAGE, B),)),
    "a new block over the end of the last": lambda g, a: changed(a, fresh=((11 * B + PAGE, B),)),
    "a new block around others": lambda g, a: changed(a, fresh=((9 * B, 4 * B),)),
    "two new blocks in one place": lambda g, a: changed(a, fresh=((20 * B, B), (20 * B, B))),
    "two new blocks, one in the other": lambda g, a: changed(a, fresh=((20 * B, 4 * B), (21 * B, B))),
    "a block that is not there": lambda g, a: changed(a, used=((20 * B, 1),)),
    "a block that somebody looks at": lambda g, a: changed(a, used=((10 * B, 1),)),
    "a block that is free": lambda g, a: changed(a, used=((free(g), 1),)),
    "the other worker's block": lambda g, a: changed(a, used=g.truth(1).used),
    "a block that the other worker keeps": lambda g, a: changed(a, used=((REGION + 30 * B, 1),)),
    "its next task's block": lambda g, a: changed(a, used=g.truth(2).used),
    "its next task's block, given back": lambda g, a: changed(a, returned=(g.truth(2).used[0][0],)),
    "one block twice": lambda g, a: changed(a, used=(*a.used, *a.used)),
    "one block, used and given back": lambda g, a: changed(a, returned=(a.used[0][0],)),
    "more bytes than the block has": lambda g, a: changed(a, used=((a.used[0][0], B + 1),)),
    "no bytes": lambda g, a: changed(a, used=((a.used[0][0], 0),)),
    "more bytes than a new block has": lambda g, a: changed(a, used=((20 * B, B + 1),), fresh=((20 * B, B),)),
    "a block given back that is not there": lambda g, a: changed(a, returned=(20 * B,)),
    "a block given back that is free": lambda g, a: changed(a, returned=(free(g),)),
    "a block given back twice": lambda g, a: changed(a, used=(), returned=(a.used[0][0],) * 2),
    "a new block given back twice": lambda g, a: changed(a, fresh=((20 * B, B),), returned=(20 * B, 20 * B)),
    "skipped without an end": lambda g, a: changed(a, used=(), outcome=SKIPPED),
}


def free(game: Game) -> int:
    return next(offset for offset, state in game.ledger.states().items() if state == FREE)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_answer_that_cannot_be_true_fails_its_batch_and_nothing_else(
    lie: Callable[[Game, Answer], Answer], dynamic: bool
) -> None:
    game = Game(dynamic)
    assert all(len(send.grants) == 1 for send in game.sends)
    before = game.ledger.states()
    false = lie(game, game.truth(0))
    game.answer(0, false)
    assert game.scheduler.refused == 1
    assert game.ledger.states() == before, "the ledger believed a part of it"
    for seq in (1, 2, 3):
        game.answer(seq, game.truth(seq))
    assert game.play() == ["ProtocolError", "batch", "batch", "batch"]
    # The worker may still be writing to what it was granted.
    kept = {REGION + 30 * B: GRANTED}
    assert game.granted() == kept | dict.fromkeys([game.sends[0].grants[0][0]], GRANTED)
    game.scheduler.handle(Died(0))
    assert game.granted() == kept
    assert game.scheduler.refused == 1


def test_an_answer_is_judged_by_those_before_it() -> None:
    game = Game(dynamic=False)
    new = changed(game.truth(0), fresh=((20 * B, B),), returned=(20 * B,))
    game.answer(0, new)
    game.answer(2, changed(game.truth(2), fresh=((20 * B, B),), returned=(20 * B,)))
    assert game.scheduler.refused == 1
    game.answer(1, game.truth(1))
    game.answer(3, game.truth(3))
    assert game.play() == ["batch", "batch", "ProtocolError", "batch"]


def test_a_lie_about_an_epoch_that_is_over_changes_nothing() -> None:
    game = Game(dynamic=False)
    before = game.ledger.states()
    false = changed(game.truth(0), used=((10 * B, 1),))
    game.scheduler.handle(EpochStarted(2))
    game.answer(0, false)
    assert (game.scheduler.refused, game.scheduler.take_stale()) == (1, 0)
    assert game.ledger.states() == before
    game.scheduler.check()


def test_a_part_of_the_dataset_ends_once() -> None:
    game = Game(dynamic=False)
    game.answer(0, changed(game.truth(0), outcome=ENDED, used=()))
    game.answer(2, changed(game.truth(2), outcome=ENDED, used=()))
    assert game.scheduler.refused == 1
    game.answer(1, game.truth(1))
    game.answer(3, game.truth(3))
    assert game.play() == ["batch", "ProtocolError", "batch"]


def test_trimmed_space_that_a_worker_has_not_heard_of_is_not_its_own_yet() -> None:
    ledger = BlockLedger(lambda worker: (0, REGION))
    ledger.adopt(0, [(B, B)])
    ledger.give_back(0, [B])
    assert not ledger.vacant(0, B, B)
    assert ledger.trim(0) == [(B, B)]
    assert not ledger.vacant(0, B, B)
    assert not ledger.vacant(0, 0, 2 * B)
    assert ledger.vacant(0, 0, B)
    assert ledger.vacant(0, 2 * B, B)
    assert ledger.space(0) == ((B, B),)
    assert ledger.vacant(0, B, B)


# ---- the inbox --------------------------------------------------------------------------------------


class Mail:
    """A group whose answers have come already; `claims` says who claimed which ticket."""

    def __init__(self, answers: list[tuple[int, Answer]], claims: dict[int, int]) -> None:
        self.answers = answers
        self.holder = claims.get
        self.evicted: list[int] = []

    def receive(self) -> tuple[int, Answer] | None:
        return self.answers.pop(0) if self.answers else None

    def evict(self, worker: int) -> None:
        self.evicted.append(worker)


def received(
    game: Game, worker: int, answer: Answer, claims: dict[int, int]
) -> tuple[list[Arrived], Mail, int]:
    """What the inbox makes of an answer: its events, what it did to the group, frames rejected."""
    mail, counters = Mail([(worker, answer)], claims), Counters()
    counters.workers = [WorkerCounters(number, 0) for number in range(2)]
    plan: Any = SimpleNamespace(rules=SimpleNamespace(iterable=False), in_order=True)
    # Handles are as they should be; the blocks' sizes are the ledger's to know.
    unpacker: Any = SimpleNamespace(
        learn=lambda worker, handle: handle,
        used=lambda handle: tuple((offset, need) for offset, _, need in handle.segments),
    )
    inbox = Receiver(plan, mail, game.scheduler, unpacker, counters)  # type: ignore[arg-type]
    return inbox.take(), mail, counters.rejected_frames


def with_handle(answer: Answer, size: int = B) -> Answer:
    places = tuple((offset, size, need) for offset, need in answer.used)
    return answer._replace(handle=Handle(0, None, (), None, places))


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_answer_that_is_not_due_ends_its_worker(dynamic: bool) -> None:
    game = Game(dynamic)
    claims = {send.ticket: seq % 2 for seq, send in enumerate(game.sends)}
    true = with_handle(game.truth(0))
    events, mail, rejected = received(game, 0, true, claims)
    assert (events, mail.evicted, rejected) == ([Arrived(0, true)], [], 0)
    others = {"epoch": 0}, {"epoch": 2}, {"seq": 1}, {"seq": 9}, {"attempt": 1}
    for fields in others:
        events, mail, rejected = received(game, 0, true._replace(**fields), claims)
        assert (events, mail.evicted, rejected) == ([], [0], 1), fields
    events, mail, rejected = received(game, 1, true, claims)
    assert (events, mail.evicted, rejected) == ([], [1], 1)


def test_a_ping_that_nobody_sent_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: list[int] = []
    messages: list[Any] = [None, (0, Ping()), (1, Ping()), (0, Ping())]
    monkeypatch.setattr(WorkerGroup, "evict", lambda self, worker: evicted.append(worker))
    group: Any = WorkerGroup.__new__(WorkerGroup)
    group._socket = SimpleNamespace(receive=messages.pop, take_rejected=lambda: 0)
    group._counters = Counters()
    group._backlog = Backlog(1)
    for worker in (0, 1):
        group._backlog.begin(worker)
    assert group._backlog.offer({1: b"a task"}, lambda ticket: True) == [0, 1]
    assert group.receive() is None
    assert evicted == [0], "its second one"
    assert group._counters.rejected_frames == 1


def test_an_answer_whose_handle_does_not_fit_is_handed_on_with_its_fault() -> None:
    game = Game(dynamic=False)
    true = with_handle(game.truth(0))
    for lie in (
        true._replace(outcome=ENDED, used=(), handle=None),  # a dataset with indices does not end
        true._replace(outcome=SKIPPED),
        true._replace(outcome=SKIPPED, handle=None),
        true._replace(handle=None),
        true._replace(used=()),
        true._replace(used=((true.used[0][0], B - 1),)),
        with_handle(game.truth(0), size=2 * B),
        with_handle(true._replace(used=((40 * B, B),))),
    ):
        events, mail, rejected = received(game, 0, lie, {})
        assert [type(event.fault) for event in events] == [ProtocolError], lie
        assert (mail.evicted, rejected) == ([], 0)
    new = with_handle(true._replace(used=((40 * B, B),), fresh=((40 * B, B),)))
    assert received(game, 0, new, {})[0][0].fault is None


# ---- a worker ---------------------------------------------------------------------------------------


class Wire:
    """Hands out frames as `WorkerSocket` does."""

    def __init__(self, frames: list[bytes]) -> None:
        self.frames = frames
        self.sent: list[Message] = []

    def receive(self, block: bool) -> Message | None:
        while self.frames:
            try:
                message = decode_for_worker(self.frames.pop(0))
            except ProtocolError:
                continue
            if not isinstance(message, Bundle):
                return message
            self.frames[:0] = message.frames
        return Stop() if block else None

    def told_to_stop(self) -> bool:
        return encode(Stop()) in self.frames

    def send(self, message: Message) -> None:
        self.sent.append(message)


class Zeros:
    """Every item fills a block."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(B, dtype=torch.uint8)


def answers_to(frames: list[bytes]) -> list[Answer]:
    """What a worker, the second of two, makes of these frames."""
    arena = Arena(2)
    claims = ClaimTable(arena.fd, arena.mapping.claims)
    wire = Wire(frames)
    Worker(make_setup(arena, Zeros(), worker=1, workers=2), Allocator(arena.mapping, 1), wire, claims).run()  # type: ignore[arg-type]
    return [message for message in wire.sent if isinstance(message, Answer)]


def in_a_child(check: Callable[[], None]) -> None:
    """A worker changes much of its process, and a crash shall be one test's."""
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


EPOCH = encode(Epoch(1, False, None))


@pytest.mark.processes
def test_a_worker_writes_to_no_block_that_is_none() -> None:
    lies = [
        *[((offset, B),) for offset in (1 << 50, 1 << 62, (1 << 63) - 1, 8, PAGE // 2)],
        *[((0, size),) for size in (0, 1, B + 1, 1 << 40, 1 << 62)],
        ((0, B), (1 << 45, B)),
    ]

    def check() -> None:
        frames = [encode(Task(1, 0, 0, 0, ()))]  # before any epoch
        frames.append(EPOCH)
        frames += [encode(Task(1, seq, 0, 0, blocks)) for seq, blocks in enumerate(lies)]
        frames += [encode(Task(1, 50 + seq, 0, 0, (), blocks)) for seq, blocks in enumerate(lies)]
        frames.append(encode(Space(((0, 1 << 40),))))
        frames.append(encode(Space(((1 << 60, B),))))
        frames.append(encode(Task(1, 99, 0, 0, ((0, B),))))
        frames.append(encode(Task(1, 100, 0, 0, ())))
        answers = answers_to(frames)
        assert [answer.seq for answer in answers] == [99, 100]
        assert answers[0].used == ((0, B),)
        assert answers[1].fresh[0][0] > 1 << 20, "a new block in the other worker's part"

    in_a_child(check)


@pytest.mark.processes
def test_a_worker_lives_through_frames_with_wrong_bytes() -> None:
    def check() -> None:
        noise = random.Random(3)
        frames = [EPOCH]
        for seq in range(2000):
            kind = noise.random()
            message: Message = Task(1, seq, 0, noise.choice([0, [1, 2], slice(3)]), ((0, B),), ((B, B),))
            if kind < 0.2:
                message = Epoch(seq, bool(seq % 2), None, seq)
            elif kind < 0.3:
                message = Space(((noise.randrange(1 << 30) * PAGE, B),))
            frame = bytearray(encode(message, TOKEN))
            for _ in range(noise.randrange(4)):
                frame[noise.randrange(len(frame))] = noise.randrange(256)
            try:
                message = decode_for_worker(bytes(frame))
                if isinstance(message, Stop) or (isinstance(message, Epoch) and message.shared_seed):
                    continue  # well formed, and says something else: a dataset without datapipes has no seed
            except ProtocolError:
                pass
            frames.append(bytes(frame))
        frames += [encode(Epoch(9, False, None)), encode(Task(9, 5000, 0, 0, ()))]
        answers = answers_to(frames)
        assert answers[-1].seq == 5000
        assert answers[-1].outcome == BATCH

    in_a_child(check)


# ---- between processes ------------------------------------------------------------------------------


class Items:
    """`dataset[i]` is a large tensor full of i, and i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((30_000,), float(index)), index


def is_item(batch: Any, index: int) -> bool:
    tensor, number = batch
    return tensor.shape == (30_000,) and bool((tensor == index).all()) and number == index


class Tampering:
    """Changes every so many-th answer before the consumer reads it."""

    def __init__(self, seed: int, share: float, change: Callable[[random.Random, list[Any]], Any]) -> None:
        self.noise = random.Random(seed)
        self.share = share
        self.change = change
        self.changed = 0

    def __call__(self, frame: bytes) -> Hello | Answer:
        message = decode_for_consumer(frame)
        if isinstance(message, Hello) or self.noise.random() >= self.share:
            return message
        self.changed += 1
        fields = msgpack.unpackb(frame, strict_map_key=False)
        altered = self.change(self.noise, fields)
        return decode_for_consumer(altered if isinstance(altered, bytes) else msgpack.packb(altered))


SIZES = (
    -1,
    0,
    1,
    7,
    PAGE,
    SMALLEST,
    2 * SMALLEST,
    1 << 40,
    1 << 62,
    1 << 63,
    None,
    "",
    [],
    [[0, SMALLEST]],
    True,
)


def lie_about_blocks(noise: random.Random, fields: list[Any]) -> list[Any]:
    """Another block, spec or place than the worker named; it is an answer still, and one that is due."""
    handle = fields[11]
    what = noise.choice(("used", "fresh", "returned", "handle", "spec", "places"))
    if what == "handle":
        fields[11] = noise.choice((None, [1 << 40, None, [], None, []]))
    elif what == "spec":
        handle[1] = noise.choice((1 << 30, [], ["V", [], []], 7))
    elif what == "places":
        place = noise.choice(handle[4])
        place[noise.randrange(3)] += noise.choice((1, PAGE, SMALLEST, 1 << 40))
    elif what == "used":
        block = noise.choice(fields[8])
        block[noise.randrange(2)] += noise.choice((1, 1 << 20, 1 << 40))
    elif what == "fresh":
        fields[9].append(noise.choice(([0, 7], [1 << 50, SMALLEST])))
    else:
        fields[10].append(noise.choice((7, 1 << 50)))
    return fields


def anything(noise: random.Random, fields: list[Any]) -> Any:
    """Any number of the answer but its times changed, or bytes of the frame cut off."""
    kind = noise.random()
    if kind < 0.3:
        frame: bytes = msgpack.packb(fields)
        return frame[: noise.randrange(len(frame))]
    if kind < 0.6:
        return lie_about_blocks(noise, fields)
    fields[noise.choice((0, 1, 2, 3, 4, 5))] = noise.choice((*SIZES, 1 << 20))
    return fields


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["round_robin", "dynamic"])
@pytest.mark.parametrize("seed", [1, 2])
def test_lies_about_blocks_fail_their_batches_and_no_other(
    schedule: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper = Tampering(seed, 0.2, lie_about_blocks)
    loader = DataLoader(Items(80), batch_size=None, num_workers=2, schedule=schedule)
    iterator = iter(loader)
    assert is_item(next(iterator), 0)
    monkeypatch.setattr(sockets, "decode_for_consumer", tamper)
    refused = 0
    for index in range(1, 80):
        try:
            assert is_item(next(iterator), index)
        except ProtocolError:
            refused += 1
    assert next(iterator, None) is None
    assert loader.statistics().rejected_frames == refused >= tamper.changed > 3
    loader.close()


@pytest.mark.processes
@pytest.mark.parametrize("seed", [1, 2])
def test_with_restarts_a_run_gets_over_anything(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused answer may take a spec along; what names it later is refused as well."""
    tamper = Tampering(seed, 0.1, anything)
    monkeypatch.setattr(sockets, "decode_for_consumer", tamper)
    loader = DataLoader(
        Items(60), batch_size=None, num_workers=2, schedule="dynamic", workers=Processes(max_restarts=1000)
    )
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkerReplaced)
        iterator = iter(loader)
        for index in range(60):
            try:
                assert is_item(next(iterator), index)
            except (ProtocolError, PoisonousBatch):
                refused += 1
        assert next(iterator, None) is None
    statistics = loader.statistics()
    assert statistics.rejected_frames >= max(refused, 1)
    assert statistics.worker_restarts > 0
    assert tamper.changed > 0
    loader.close()


@pytest.mark.processes
def test_a_worker_that_sends_no_message_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Items(40), batch_size=None, num_workers=2)
    iterator = iter(loader)
    assert is_item(next(iterator), 0)
    monkeypatch.setattr(sockets, "decode_for_consumer", Tampering(0, 1, lambda noise, fields: b"\xc1"))
    with pytest.raises(WorkerDied, match="sent what is no answer to any of its tasks"):
        for _ in iterator:
            pass
    assert loader.statistics().rejected_frames > 0
    loader.close()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield from (Items(30)[index] for index in range(30))


@pytest.mark.processes
def test_the_stream_of_a_worker_that_lies_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say how far it has come, or whether its part has ended: the end would never be heard of."""
    loader = DataLoader(Stream(), batch_size=None, num_workers=1)
    iterator = iter(loader)
    assert is_item(next(iterator), 0)

    def lie(noise: random.Random, fields: list[Any]) -> list[Any]:
        fields[10] = [1 << 50]
        return fields

    monkeypatch.setattr(sockets, "decode_for_consumer", Tampering(0, 1, lie))
    errors: list[type[Exception]] = []
    for _ in range(50):
        try:
            next(iterator)
        except StopIteration:
            break
        except Exception as error:
            errors.append(type(error))
            if isinstance(error, WorkerDied):
                break
    assert WorkerDied in errors
    loader.close()
