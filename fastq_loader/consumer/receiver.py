"""What comes from the workers, and whether it can be used.

Runs in the consumer, on the thread that calls `next()`. A worker runs the user's own code: it is trusted not
to lie, and accidents are guarded against. A worker that sends what is not a message, or an answer that is not
due, has broken: its real answer will never come, so it is ended like one that hangs. An answer that is due
and whose handle or blocks do not fit goes on with its fault: its batch fails at its position.
"""

from __future__ import annotations

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import BATCH, ENDED, PASSED, SKIPPED, Answer, unseal
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.scheduling.events import Arrived
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.epoch import FIRST_BATCHES
from fastq_loader.statistics.notes import Notes
from fastq_loader.workers.config import Plan
from fastq_loader.workers.group import WorkerGroup

_EMPTY = (ENDED, SKIPPED, PASSED)  # outcomes without a handle


class Receiver:
    """The answers of one pool's workers.

    Args:
        plan: what they do.
        group: the workers.
        scheduler: knows which answers are due.
        unpacker: knows the specs that the workers have sent.
        counters: the loader's.

    Attributes:
        spent: where the time of the epoch goes; None before the first.
        said: worker → its state, when its part of an iterable dataset had ended in this epoch.
    """

    def __init__(
        self, plan: Plan, group: WorkerGroup, scheduler: Scheduler, unpacker: Unpacker, counters: Counters
    ) -> None:
        self._group = group
        self._scheduler = scheduler
        self._unpacker = unpacker
        self._counters = counters
        self.spent: Notes | None = None
        self.said: dict[int, bytes] = {}
        self._iterable = plan.rules.iterable
        # Where only the sampler decides on the order, a second read of the socket is saved.
        self._one_by_one = plan.in_order and not plan.rules.iterable

    def take(self) -> list[Arrived]:
        """What has come, in the order in which the workers finished."""
        arrived: list[Arrived] = []
        while (received := self._group.receive()) is not None:
            worker, answer = received
            if not self._is_due(worker, answer):
                self._counters.rejected_frames += 1
                self._group.evict(worker)
                continue
            self._count(worker, answer)
            try:
                learned = self._learn(worker, answer)
                if self._iterable:
                    self._keep_first(worker, learned)
                arrived.append(Arrived(worker, learned))
            except ProtocolError as fault:
                arrived.append(Arrived(worker, answer, fault))
            if self._one_by_one:
                break
        if len(arrived) > 1:
            arrived.sort(key=_finished)
        return arrived

    def _count(self, worker: int, answer: Answer) -> None:
        of_worker = self._counters.workers[worker]
        if answer.epoch == self._scheduler.epoch and self.spent is not None:
            self.spent.note((self.spent.answered, worker, answer, answer.outcome not in _EMPTY, of_worker))
        else:
            of_worker.answered(answer)

    def _keep_first(self, worker: int, answer: Answer) -> None:
        """Keep a digest of each worker's first batches: do all read the same data? An error is like nothing
        else."""
        if answer.handle is None or answer.epoch != self._scheduler.epoch or self.spent is None:
            return
        kept = self.spent.first_batches.setdefault(worker, [])
        if len(kept) < FIRST_BATCHES:
            of_error = b"error %d" % answer.seq, 0
            kept.append(self._unpacker.digest(answer.handle) if answer.outcome == BATCH else of_error)

    def hand_on(self, arrived: list[Arrived]) -> None:
        """Give the scheduler what `take` has found."""
        scheduler, counters = self._scheduler, self._counters
        grown, stale = scheduler.pool.grown, scheduler.stale
        for event in arrived:
            refused = scheduler.refused
            scheduler.handle(event)
            if scheduler.refused > refused:
                counters.rejected_frames += 1
                if self._iterable:  # it may have said that its part has ended
                    self._group.evict(event.worker)
        counters.blocks_grown += scheduler.pool.grown - grown
        counters.stale_answers += scheduler.stale - stale

    def _is_due(self, worker: int, answer: Answer) -> bool:
        """Whether this worker may give this answer: the task is its own, or it has claimed it."""
        batch = self._scheduler.pending_tasks.due(worker, answer)
        if batch is None:
            return False
        return batch.worker is not None or self._group.claims.holder(batch.ticket) == worker

    def _learn(self, worker: int, answer: Answer) -> Answer:
        """The answer with its handle ready to be unpacked, and the blocks that it uses.

        Raises:
            ProtocolError: the handle does not fit.
        """
        outcome, handle = answer.outcome, answer.handle
        if outcome in (ENDED, PASSED) and not self._iterable:
            raise ProtocolError(f"worker {worker} says outcome {outcome} of a dataset with indices")
        if handle is None or outcome in _EMPTY:
            if (handle is None) != (outcome in _EMPTY):
                raise ProtocolError(f"outcome {outcome} {'without' if handle is None else 'with'} a handle")
            if answer.state and answer.epoch == self._scheduler.epoch:
                self.said[worker] = unseal(answer.state, self._group.token)
            return answer
        state = unseal(answer.state, self._group.token) if answer.state else b""
        handle, used = self._unpacker.learn(worker, handle)
        if used:
            fresh = dict(answer.fresh)
            for offset, size, _ in handle.segments:
                if size != fresh.get(offset, self._scheduler.pool.size_of(offset)):
                    raise ProtocolError(f"a handle names a block of {size} bytes at {offset}, where none is")
        return Answer(*answer[:8], handle, used, state, *answer[11:])


def _finished(event: Arrived) -> int:
    return event.answer.finished
