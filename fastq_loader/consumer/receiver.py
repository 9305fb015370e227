"""What comes from the workers, and whether it is believed.

Runs in the consumer, on the thread that calls `next()`. A frame is judged in three steps. One that is no
message, or that answers what this worker was not asked, says that an answer that is due will never come: the
worker is ended, like one that hangs. An answer that is due, with a handle that does not fit, is handed on
with the fault that was found: its batch fails at its place. What only the scheduler can judge comes last; see
`audit`.
"""

from __future__ import annotations

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import ENDED, SKIPPED, Answer
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.scheduling.events import Arrived
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.statistics import Counters
from fastq_loader.workers.group import WorkerGroup
from fastq_loader.workers.pool import Plan

_EMPTY = (ENDED, SKIPPED)  # outcomes without a handle


class Receiver:
    """The answers of one pool's workers.

    Args:
        plan: what they do.
        group: the workers.
        scheduler: what was asked of whom.
        unpacker: what they have sent of their specs.
        counters: the loader's.
    """

    def __init__(
        self, plan: Plan, group: WorkerGroup, scheduler: Scheduler, unpacker: Unpacker, counters: Counters
    ) -> None:
        self._group = group
        self._scheduler = scheduler
        self._unpacker = unpacker
        self._counters = counters
        self._iterable = plan.rules.iterable
        # Where only the sampler decides on the order, a second look at the socket is saved.
        self._one_by_one = plan.in_order and not plan.rules.iterable

    def take(self) -> list[Arrived]:
        """What has come, in the order in which the workers finished."""
        arrived: list[Arrived] = []
        scheduler = self._scheduler
        while (received := self._group.receive()) is not None:
            worker, answer = received
            if not scheduler.expects(worker, answer) or (scheduler.dynamic and not self._has(worker, answer)):
                self._counters.rejected_frames += 1
                self._group.evict(worker)
                continue
            self._counters.workers[worker].answered(answer.started, answer.finished)
            try:
                arrived.append(Arrived(worker, self._learn(worker, answer)))
            except ProtocolError as fault:
                arrived.append(Arrived(worker, answer, fault))
            if self._one_by_one:
                break
        if len(arrived) > 1:
            arrived.sort(key=_finished)
        return arrived

    def hand_on(self, arrived: list[Arrived]) -> None:
        """Give the scheduler what `take` has found; it has the last word."""
        scheduler, counters = self._scheduler, self._counters
        grown = scheduler.ledger.grown
        for event in arrived:
            refused = scheduler.refused
            scheduler.handle(event)
            if scheduler.refused > refused:
                counters.rejected_frames += 1
                if self._iterable:  # how far it has come, or whether it has ended, nobody knows now
                    self._group.evict(event.worker)
        counters.blocks_grown += scheduler.ledger.grown - grown
        if scheduler.stale:
            counters.stale_answers += scheduler.take_stale()

    def _has(self, worker: int, answer: Answer) -> bool:
        """Whether it is this worker that has claimed the task, which is its own or anyone's."""
        ticket = self._scheduler.outstanding.ticket_of(answer.epoch, answer.seq)
        return ticket is None or self._group.holder(ticket) == worker

    def _learn(self, worker: int, answer: Answer) -> Answer:
        """The answer with its handle ready to be unpacked.

        Raises:
            ProtocolError: the handle does not fit.
        """
        outcome, handle, used = answer.outcome, answer.handle, answer.used
        if outcome == ENDED and not self._iterable:
            raise ProtocolError(f"worker {worker} says that a dataset with indices has ended")
        if handle is None or outcome in _EMPTY:
            if (handle is None) != (outcome in _EMPTY) or used:
                raise ProtocolError(f"outcome {outcome} with the wrong handle, or none, or with blocks")
            return answer
        learned = Answer(*answer[:-1], self._unpacker.learn(worker, handle))
        if used or handle.places:
            self._check_places(learned)
        return learned

    def _check_places(self, answer: Answer) -> None:
        assert answer.handle is not None
        places = answer.handle.places
        if self._unpacker.used(answer.handle) != answer.used:
            raise ProtocolError("a handle that lies in other blocks than its answer says")
        fresh = dict(answer.fresh)
        for offset, size, _ in places:
            block = self._scheduler.ledger.look(offset)
            if size != (fresh.get(offset) if block is None else block.size):
                raise ProtocolError(f"a handle that names a block of {size} bytes at {offset}, where none is")


def _finished(event: Arrived) -> int:
    return event.answer.finished
