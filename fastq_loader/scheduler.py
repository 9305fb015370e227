"""The life of a batch, of a worker and of a grant, as one state machine: events in, instructions out.

Pure: no socket, clock or process; the iterator carries the instructions out on the consumer's thread.
The order of everything is torch's (`_MultiProcessingDataLoaderIter`): tasks go to the active workers in
turn, one index is drawn for every batch delivered and before it is handed out, arrivals are processed
one at a time and only while the wanted batch is not here, and a worker whose stream ended gives its turn
away. What differs on purpose: an error of the sampler or of an index takes the place of its batch instead
of overtaking the batches before it, and a dead worker is reported at the place of the batch that it lost.

How an epoch runs: `EpochStarted` answers with as many `Draw` as the window is wide. Each `Draw` asks for
one index of the sampler, which comes back as `Drawn` or `DrawFailed`, or not at all when the sampler is
exhausted. `Wanted` (the user called `next()`) answers with `Draw` and `Deliver`, or with `Draw` alone
(ask again), `Wait`, `Break` or `Finish`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from fastq_loader.blocks import BlockLedger
from fastq_loader.errors import InvalidTransition
from fastq_loader.events import (
    Arrived,
    Break,
    Deliver,
    Died,
    Draw,
    DrawFailed,
    Drawn,
    EpochStarted,
    Event,
    Finish,
    Instruction,
    Send,
    Undeliverable,
    Wait,
    Wanted,
)
from fastq_loader.messages import ENDED, SKIPPED, Answer
from fastq_loader.ring import ReorderRing

# ---- transition tables: state → event → next state; what is not listed is a defect ------------------

NEW, SENT, READY, LOST, GONE = "new", "sent", "ready", "lost", "gone"

BATCH_TRANSITIONS: dict[str, dict[str, str]] = {
    NEW: {"send": SENT, "fail": READY, "send_to_dead": LOST},
    SENT: {"answer": READY, "end": GONE, "skip": GONE, "fail": READY, "die": LOST},
    READY: {"deliver": GONE},
    LOST: {"break": GONE},
    GONE: {},
}

#: A dry worker's part of an iterable dataset is exhausted: its death hurts nobody in this epoch.
ACTIVE, DRY, DEAD, DRY_DEAD = "active", "dry", "dead", "dry_dead"

WORKER_TRANSITIONS: dict[str, dict[str, str]] = {
    ACTIVE: {"end": DRY, "die": DEAD, "epoch": ACTIVE},
    DRY: {"die": DRY_DEAD, "epoch": ACTIVE},
    DEAD: {"end": DRY_DEAD, "epoch": DEAD},  # its last word came in before its death was noticed
    DRY_DEAD: {"epoch": DEAD},
}

_DRAW = Draw()
_EXHAUSTED = frozenset((DRY, DRY_DEAD))


class _Failed(NamedTuple):
    """In the inbox: a batch that failed before any worker saw it."""

    seq: int
    error: BaseException


class _Batch:
    """A sequence number between its task and its delivery."""

    __slots__ = ("index", "seq", "state", "worker")

    def __init__(self, seq: int, worker: int | None, index: Any) -> None:
        self.seq = seq
        self.worker = worker  # None: its index could not be drawn
        self.index = index
        self.state = NEW

    def move(self, event: str) -> None:
        state = BATCH_TRANSITIONS[self.state].get(event)
        if state is None:
            raise InvalidTransition(f"batch {self.seq} is {self.state}: event {event!r} is not allowed")
        self.state = state


class Scheduler:
    """Schedules the batches of one epoch after the other over a fixed number of workers.

    Args:
        workers: number of workers, at least 1.
        prefetch: batches each worker works ahead (torch's `prefetch_factor`), at least 1.
        in_order: deliver in the order of the sampler; False delivers in the order of arrival.
        ledger: the blocks of the arena.

    Attributes:
        window: batches asked for and not delivered, at most: `prefetch * workers`.
        stale: answers dropped because their epoch was over, since they were last taken.
    """

    def __init__(self, workers: int, prefetch: int, in_order: bool, ledger: BlockLedger) -> None:
        self.workers = workers
        self.window = prefetch * workers
        self.in_order = in_order
        self.ledger = ledger
        self.epoch = 0
        self.stale = 0
        self._states = [ACTIVE] * workers
        self._owed: set[tuple[int, int, int]] = set()  # (worker, epoch, seq): tasks without an answer
        self._reset()

    def _reset(self) -> None:
        self._batches: dict[int, _Batch] = {}
        # A worker whose stream ends makes room for one more draw, so up to `workers` places beyond
        # the window may be waiting at once.
        self._ring: ReorderRing[tuple[Answer | None, BaseException | None]]
        self._ring = ReorderRing(self.window + self.workers)
        self._inbox: deque[Arrived | Died | _Failed] = deque()
        self._next_seq = 0
        self._turn = 0  # the worker whose turn it is
        self._undelivered = [0] * self.workers  # tasks of a worker that were not handed out yet

    @property
    def head(self) -> int:
        """The lowest sequence number that was not delivered."""
        return self._ring.head

    @property
    def undelivered(self) -> int:
        """Batches of this epoch that were asked for and not handed out."""
        return len(self._batches)

    def take_stale(self) -> int:
        """Answers that were dropped as stale since the last call."""
        stale, self.stale = self.stale, 0
        return stale

    def index_of(self, seq: int) -> Any:
        """The index of a batch that is not delivered yet, for error texts; None if it is unknown."""
        batch = self._batches.get(seq)
        return None if batch is None else batch.index

    def handle(self, event: Event) -> list[Instruction]:
        """The only thing that changes the schedule."""
        return _HANDLERS[type(event)](self, event)

    # ---- a new epoch --------------------------------------------------------------------------

    def _epoch_started(self, event: EpochStarted) -> list[Instruction]:
        if event.epoch <= self.epoch:
            raise InvalidTransition(f"epoch {event.epoch} follows epoch {self.epoch}")
        self.abandon()
        self.epoch = event.epoch
        self._states = [self._worker_after(worker, "epoch") for worker in range(self.workers)]
        self._reset()
        return [_DRAW] * self.window

    def abandon(self) -> None:
        """Drop what arrived and was not delivered; answers that are still to come will be stale."""
        self._batches.clear()
        for arrived in self._inbox:
            if type(arrived) is Arrived:
                self._drop(arrived.answer)
        self._inbox.clear()
        for answer, _ in self._ring.drain():
            if answer is not None:
                self._drop(answer)

    def _drop(self, answer: Answer) -> None:
        for offset, _ in answer.used:
            self.ledger.drop(offset)

    def _worker_after(self, worker: int, event: str) -> str:
        state = WORKER_TRANSITIONS[self._states[worker]].get(event)
        if state is None:
            raise InvalidTransition(
                f"worker {worker} is {self._states[worker]}: event {event!r} is not allowed"
            )
        return state

    # ---- indices in ---------------------------------------------------------------------------

    def _drawn(self, event: Drawn) -> list[Instruction]:
        worker = self._next_worker()
        if worker is None:  # torch loses the index here too: nobody is left, or nobody has room
            return []
        batch = self._new_batch(worker, event.index)
        self._undelivered[worker] += 1
        if self._states[worker] == DEAD:
            batch.move("send_to_dead")
            return []
        batch.move("send")
        self._owed.add((worker, self.epoch, batch.seq))
        ledger = self.ledger
        grants, promises = ledger.grant(worker)
        return [Send(worker, self.epoch, batch.seq, event.index, grants, promises, ledger.space(worker))]

    def _new_batch(self, worker: int | None, index: Any) -> _Batch:
        batch = self._batches[self._next_seq] = _Batch(self._next_seq, worker, index)
        self._next_seq += 1
        return batch

    def _next_worker(self) -> int | None:
        for _ in range(self.workers):
            worker = self._turn
            self._turn = (worker + 1) % self.workers
            if self._states[worker] not in _EXHAUSTED and (self.in_order or self._has_room(worker)):
                return worker
        return None

    def _has_room(self, worker: int) -> bool:
        going = sum(state not in _EXHAUSTED for state in self._states)
        return self._undelivered[worker] < self.window // going

    def _draw_failed(self, event: DrawFailed) -> list[Instruction]:
        self._fail(self._new_batch(None, None), event.error)
        return []

    def _undeliverable(self, event: Undeliverable) -> list[Instruction]:
        send = event.send
        self._owed.discard((send.worker, send.epoch, send.seq))
        self.ledger.give_back(send.worker, [offset for offset, _ in send.grants + send.promises])
        self.ledger.keep_space(send.worker, send.space)
        self._fail(self._batches[send.seq], event.error)
        return []

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        batch.move("fail")
        self._inbox.append(_Failed(batch.seq, error))

    # ---- answers in ---------------------------------------------------------------------------

    def _arrived(self, event: Arrived) -> list[Instruction]:
        worker, answer = event
        owed = (worker, answer.epoch, answer.seq)
        if owed not in self._owed:
            raise InvalidTransition(
                f"worker {worker} answered {answer.epoch, answer.seq}, which it does not owe"
            )
        self._owed.remove(owed)
        self.ledger.adopt(worker, answer.fresh)
        self.ledger.give_back(worker, answer.returned)
        self.ledger.fill(worker, answer.used)
        if answer.epoch != self.epoch:
            self.stale += 1
            self._drop(answer)
        elif answer.outcome != SKIPPED:  # else its batch goes when the head of the line comes by
            self._inbox.append(event)
        return []

    def _died(self, event: Died) -> list[Instruction]:
        worker = event.worker
        self._states[worker] = self._worker_after(worker, "die")
        arrived = {e.answer.seq for e in self._inbox if type(e) is Arrived}
        for batch in self._batches.values():
            if batch.worker == worker and batch.state == SENT and batch.seq not in arrived:
                batch.move("die")
        self._owed = {owed for owed in self._owed if owed[0] != worker}
        self.ledger.writer_dead(worker)
        self._inbox.append(event)
        return []

    # ---- batches out --------------------------------------------------------------------------

    def _wanted(self, event: Wanted) -> list[Instruction]:
        while True:
            head = self._head_batch()
            if head is None:
                return [Finish()]
            if self._ring.ready():
                return self._deliver(head, *self._ring.pop_ready())
            if head.state == LOST and (self.in_order or not self._inbox):
                return [self._break(head)]
            if not self._inbox:
                assert head.worker is not None, "a batch without a worker has failed, and is in the inbox"
                return [Wait(head.worker, head.seq)]
            instructions = self._process(self._inbox.popleft())
            if instructions:
                return instructions

    def _process(self, arrival: Arrived | Died | _Failed) -> list[Instruction]:
        """One arrival, as torch takes one item off its result queue; no instruction: look again."""
        if type(arrival) is Died:
            if self.in_order or self._states[arrival.worker] in _EXHAUSTED:
                return []
            return [self._break_out_of_order(arrival.worker)]
        if type(arrival) is _Failed:
            return self._put(self._batches[arrival.seq], None, arrival.error)
        assert type(arrival) is Arrived
        worker, answer = arrival
        batch = self._batches[answer.seq]
        if answer.outcome == ENDED:
            batch.move("end")
            del self._batches[answer.seq]
            self._states[worker] = self._worker_after(worker, "end")
            return [_DRAW]
        batch.move("answer")
        return self._put(batch, answer, None)

    def _put(self, batch: _Batch, answer: Answer | None, error: BaseException | None) -> list[Instruction]:
        if not self.in_order:
            return self._deliver(batch, answer, error)
        self._ring.push(batch.seq, (answer, error))
        return []

    def _head_batch(self) -> _Batch | None:
        """The batch at the head of the line, past those that will never come; None at the end."""
        ring, batches = self._ring, self._batches
        while ring.head < self._next_seq:
            batch = batches.get(ring.head)
            if batch is not None:
                if batch.state != SENT or self._states[batch.worker or 0] not in _EXHAUSTED:
                    return batch
                batch.move("skip")
                del batches[ring.head]
            ring.skip()
        return None

    def _deliver(
        self, batch: _Batch, answer: Answer | None, error: BaseException | None
    ) -> list[Instruction]:
        batch.move("deliver")
        del self._batches[batch.seq]
        if batch.worker is not None:
            self._undelivered[batch.worker] -= 1
        return [_DRAW, Deliver(batch.seq, batch.worker, answer, error)]

    def _break(self, batch: _Batch) -> Break:
        assert batch.worker is not None
        batch.move("break")
        del self._batches[batch.seq]
        self._undelivered[batch.worker] -= 1
        return Break(batch.worker, batch.seq, batch.index)

    def _break_out_of_order(self, worker: int) -> Break:
        for batch in self._batches.values():
            if batch.worker == worker and batch.state == LOST:
                return self._break(batch)
        return Break(worker, None, None)

    # ---- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold; called after every step of the tests."""
        self.ledger.check()
        ring, batches = self._ring, self._batches
        assert len(batches) <= self.window + self.workers, "more batches under way than the window allows"
        arrived = {e.answer.seq for e in self._inbox if type(e) is Arrived}
        failed = {e.seq for e in self._inbox if type(e) is _Failed}
        # Their end waits in the inbox: until it is processed, what they skipped after it is still SENT.
        ending = {e.worker for e in self._inbox if type(e) is Arrived and e.answer.outcome == ENDED}
        for seq, batch in batches.items():
            assert ring.head <= seq < self._next_seq, f"batch {seq} was delivered, or never drawn"
            assert batch.state in (SENT, READY, LOST), f"batch {seq} is {batch.state}"
            if batch.state == SENT and self._states[batch.worker or 0] not in _EXHAUSTED:
                to_come = ((batch.worker, self.epoch, seq) in self._owed) + (seq in arrived)
                assert to_come == 1 or (to_come == 0 and batch.worker in ending), (
                    f"batch {seq} will be answered {to_come} times"
                )
        ready = sum(batch.state == READY for batch in batches.values())
        assert ready == len(ring) + len(failed), "a ready batch is not in the ring"
        waiting = [e.answer for e in self._inbox if type(e) is Arrived]
        waiting += [answer for answer, _ in ring.items() if answer is not None]
        filled = sorted(offset for answer in waiting for offset, _ in answer.used)
        assert filled == self.ledger.filled(), "a filled block belongs to no batch that waits"
        for worker in range(self.workers):
            mine = sum(batch.worker == worker for batch in batches.values())
            assert self._states[worker] in _EXHAUSTED or self._undelivered[worker] == mine
        dead = {w for w, state in enumerate(self._states) if state in (DEAD, DRY_DEAD)}
        assert not any(owed[0] in dead for owed in self._owed), "a dead worker owes an answer"


_HANDLERS: dict[type, Callable[[Scheduler, Any], list[Instruction]]] = {
    Wanted: Scheduler._wanted,
    Arrived: Scheduler._arrived,
    Drawn: Scheduler._drawn,
    DrawFailed: Scheduler._draw_failed,
    Undeliverable: Scheduler._undeliverable,
    Died: Scheduler._died,
    EpochStarted: Scheduler._epoch_started,
}
