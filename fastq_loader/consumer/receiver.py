"""Receive answers from the workers, and check whether they can be used.

Runs in the consumer, on the thread that calls `next()`. A worker runs the user's own code: it is trusted not
to lie, and accidents are guarded against. A worker that sends what is not a message, or an answer that is not
due, has broken: its real answer will never come, so it is ended like one that hangs. An answer that is due
and whose handle or blocks do not fit goes on with its fault: its batch fails at its position.
"""

from __future__ import annotations

import pickle

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import BATCH, EMPTY, ENDED, LEFT_OUT, PASSED, Answer, unseal
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.scheduling.states import Batch
from fastq_loader.statistics.counters import Counters, EpochLog
from fastq_loader.statistics.epoch import FIRST_BATCHES
from fastq_loader.statistics.records import ANSWERED, STALE
from fastq_loader.workers.config import Plan
from fastq_loader.workers.group import WorkerGroup
from fastq_loader.workers.worker import Worker

#: A batch, the worker that has answered it, its answer, and why that cannot be used.
Arrived = tuple[Batch, int, Answer, ProtocolError | None]


class Receiver:
    """The answers of one pool's workers.

    Args:
        plan: what they do.
        group: the workers.
        scheduler: knows which answers are due.
        unpacker: makes the handles ready.
        counters: the loader's.

    Attributes:
        log: of the epoch, once one has begun.
        said: worker → its state, when its part of an iterable dataset had ended in this epoch.
    """

    def __init__(
        self,
        plan: Plan,
        group: WorkerGroup,
        scheduler: Scheduler,
        unpacker: Unpacker,
        counters: Counters,
    ) -> None:
        self._group = group
        self._scheduler = scheduler
        self._unpacker = unpacker
        self._counters = counters
        self._pool = scheduler.pool
        self.log: EpochLog
        self.said: dict[int, bytes] = {}
        self._iterable = plan.rules.iterable
        # Where only the sampler decides on the order, a second read of the socket is saved.
        self._one_by_one = plan.in_order and not plan.rules.iterable

    def receive(self) -> bool:
        """Give the scheduler what has come, in the order in which the workers finished; False: nothing has.
        Where the sampler decides on the order, it is one answer: the next one may not be wanted yet."""
        scheduler, arrived = self._scheduler, []
        while (received := self._group.receive()) is not None:
            worker, answer = received
            if type(answer) is not Answer:
                self._group.receive_other(worker, answer)
                continue
            batch = scheduler.pending_tasks.due(worker, answer)
            shared = batch is not None and batch.worker is None
            if batch is None or (shared and self._group.holder(batch.ticket) != worker):
                # The task is not its own, and it has not claimed it.
                self._counters.rejected_frames += 1
                self._group.evict(worker)
                continue
            record, fault = self._group.workers[worker], None
            kind = ANSWERED if answer.epoch == scheduler.epoch else STALE
            self.log.steps += ((kind, record.counters, record.counters.pid, answer),)
            try:
                answer = self._learn(record, answer)
                if self._iterable:
                    self._keep_first(worker, answer)
            except ProtocolError as error:
                fault = error
            if self._one_by_one:
                self._hand_on(batch, worker, answer, fault)
                return True
            arrived.append((batch, worker, answer, fault))
        arrived.sort(key=_finished)
        for came in arrived:
            self._hand_on(*came)
        return bool(arrived)

    def _hand_on(self, batch: Batch, worker: int, answer: Answer, fault: ProtocolError | None) -> None:
        scheduler, counters, pool = self._scheduler, self._counters, self._pool
        # The release of a promised block is in our queue before a worker sees it: it comes before the answer.
        if pool.released:
            pool.collect()
        stale, refused, grown = scheduler.stale, scheduler.refused, pool.grown if answer.fresh else 0
        scheduler.arrived(batch, worker, answer, fault)
        if answer.fresh:
            counters.blocks_grown += pool.grown - grown
        if scheduler.stale > stale:
            counters.stale_answers += 1
        elif scheduler.refused > refused:
            counters.rejected_frames += 1
            if self._iterable:  # it may have said that its part has ended
                self._group.evict(worker)

    def _keep_first(self, worker: int, answer: Answer) -> None:
        """Keep a digest of each worker's first batches: do all read the same data? An error is like nothing
        else."""
        if answer.handle is None or answer.epoch != self._scheduler.epoch:
            return
        kept = self.log.first_batches.setdefault(worker, [])
        if len(kept) < FIRST_BATCHES:
            of_error = b"error %d" % answer.seq, 0
            kept.append(self._unpacker.digest(answer.handle) if answer.kind == BATCH else of_error)

    def _learn(self, worker: Worker, answer: Answer) -> Answer:
        """The answer with its handle ready to be unpacked, and the blocks that it uses.

        Raises:
            ProtocolError: the handle does not fit.
        """
        kind, handle = answer.kind, answer.handle
        if kind in (ENDED, PASSED) and not self._iterable:
            raise ProtocolError(f"worker {worker.number} answers with kind {kind} for a dataset with indices")
        if handle is None or kind in EMPTY:
            if (handle is None) != (kind in EMPTY):
                raise ProtocolError(
                    f"an answer of kind {kind} {'without' if handle is None else 'with'} a handle"
                )
            if kind == LEFT_OUT:
                state = unseal(answer.state, self._group.token) if answer.state else b""
                return answer._replace(state=state, remarks=unseal(answer.remarks, self._group.token))
            if answer.state and answer.epoch == self._scheduler.epoch:
                self.said[worker.number] = unseal(answer.state, self._group.token)
            return answer
        learned, used = self._unpacker.learn(worker.specs, handle)
        if used:
            fresh = dict(answer.fresh)
            for offset, size, _ in handle.segments:
                block = self._pool.block_at(offset)
                if size != (fresh.get(offset) if block is None else block.size):
                    raise ProtocolError(f"a handle names a block of {size} bytes at {offset}, where none is")
        state = unseal(answer.state, self._group.token) if answer.state else b""
        remarks = unseal(answer.remarks, self._group.token) if answer.remarks else b""
        if remarks:
            self.log.drawn_from.update(pickle.loads(remarks)[2])
        # As `_replace` does, and several times as fast.
        return tuple.__new__(Answer, (*answer[:8], learned, used, state, *answer[11:-1], remarks))


def _finished(arrived: Arrived) -> int:
    return arrived[2].finished
