"""Receives answers from the workers, and validates them.

Runs in the consumer, on the thread that calls `next()`. A worker runs the user's own code: it is trusted not
to be malicious, and the checks guard against accidents. A worker that sends an invalid message, or an answer
that is not expected, is broken: its real answer will never come, so it is killed, like a worker that hangs.
An expected answer with an invalid handle or invalid blocks is passed on together with the error: its batch
fails at its position.
"""

from __future__ import annotations

import pickle

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import BATCH, EMPTY, ENDED, PASSED, SKIPPED, Answer, unseal
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.scheduling.scheduler import REFUSED, STALE, Scheduler
from fastq_loader.scheduling.states import Batch
from fastq_loader.statistics.counters import FIRST_BATCHES, Counters, EpochLog
from fastq_loader.workers.config import Plan
from fastq_loader.workers.group import WorkerGroup
from fastq_loader.workers.worker import Worker


class Receiver:
    """Receives the answers of one pool's workers.

    Args:
        plan: configuration of the workers.
        group: the workers.
        scheduler: knows which answers are expected.
        unpacker: checks the handles.
        counters: counters of the loader.

    Attributes:
        log: log of the current epoch.
        end_states: worker → the state that it sent when its part of an iterable dataset ended in this epoch.
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
        self.log = EpochLog(counters, -1)  # a placeholder, until an epoch begins
        self.end_states: dict[int, bytes] = {}
        self._iterable = plan.rules.iterable
        # If batches are delivered in the sampler's order, this saves a second read of the socket.
        self._one_by_one = plan.in_order and not plan.rules.iterable

    def receive(self) -> bool:
        """Pass the answers that have arrived to the scheduler, in the order in which the workers finished.
        Return False if nothing has arrived. If batches are delivered in the sampler's order, read only one
        answer: the next one may not be needed yet."""
        scheduler, group, arrived = self._scheduler, self._group, []
        while (received := group.receive()) is not None:
            worker, answer = received
            if type(answer) is not Answer:
                group.receive_other(worker, answer)
                continue
            group.answered_at[worker] = group.offered
            batch = scheduler.pending_tasks.match_answer(worker, answer)
            shared = batch is not None and batch.worker is None
            if batch is None or (shared and group.holder(batch.ticket) != worker):
                # The worker was not assigned the task, and has not claimed it.
                self._counters.rejected_frames += 1
                group.evict(worker)
                continue
            record, fault = group.workers[worker], None
            started, finished = answer.started, answer.finished
            record.counters.busy += finished - started
            batch.loaded = (
                *(batch.seq, worker, record.counters.pid, batch.sent),
                *(started, answer.fetched, answer.collated, finished, answer.new_memory),
            )
            try:
                answer = self._check(record, answer)
                if self._iterable:
                    self._record_digest(worker, answer)
            except ProtocolError as error:
                fault = error
            if self._one_by_one:
                self._pass_on(batch, worker, answer, fault)
                return True
            arrived.append((batch, worker, answer, fault))
        arrived.sort(key=lambda each: each[2].finished)
        for each in arrived:
            self._pass_on(*each)
        return bool(arrived)

    def _pass_on(self, batch: Batch, worker: int, answer: Answer, fault: ProtocolError | None) -> None:
        scheduler, counters, pool = self._scheduler, self._counters, self._pool
        grown = pool.grown
        status = scheduler.arrived(batch, worker, answer, fault)
        if answer.fresh:
            counters.blocks_grown += pool.grown - grown
        if status == STALE:
            counters.stale_answers += 1
        elif status == REFUSED:
            counters.rejected_frames += 1
            if self._iterable:  # the answer may have reported the end of the worker's part
                self._group.evict(worker)

    def _record_digest(self, worker: int, answer: Answer) -> None:
        """Record digests of each worker's first batches, to detect workers that read the same data. An error
        gets a digest that equals no other."""
        if answer.handle is None or answer.epoch != self._scheduler.epoch:
            return
        kept = self.log.first_batches.setdefault(worker, [])
        if len(kept) < FIRST_BATCHES:
            of_error = b"error %d" % answer.seq, 0
            kept.append(self._unpacker.digest(answer.handle) if answer.kind == BATCH else of_error)

    def _check(self, worker: Worker, answer: Answer) -> Answer:
        """Check an answer. Return it with its handle ready to be unpacked, the blocks that it uses, and its
        state and remarks without the token. Record the state of a worker whose part has ended.

        Raises:
            ProtocolError: the handle is invalid; or answers of this kind need a handle, have none, or are for
                iterable datasets only.
        """
        handle, kind, token = answer.handle, answer.kind, self._group.token
        if (handle is None) != (kind in EMPTY):
            found = "without" if handle is None else "with"
            raise ProtocolError(f"an answer of kind {kind} {found} a handle")
        if kind in (ENDED, PASSED) and not self._iterable:
            raise ProtocolError(f"worker {worker.number} answers with kind {kind} for a map-style dataset")
        used: tuple[tuple[int, int], ...] = ()
        if handle is not None:
            handle, used = self._unpacker.learn(worker.specs, handle)
            fresh = dict(answer.fresh) if used else {}
            for offset, size, _ in handle.segments:
                block = self._pool.block_at(offset)
                if size != (fresh.get(offset) if block is None else block.size):
                    raise ProtocolError(f"a handle names {size} bytes at {offset}, but no such block exists")
        state = unseal(answer.state, token) if answer.state else b""
        remarks = unseal(answer.remarks, token) if answer.remarks else b""
        if remarks:
            self.log.private_generators.update(pickle.loads(remarks)[1])
        if state and kind in (ENDED, PASSED, SKIPPED) and answer.epoch == self._scheduler.epoch:
            self.end_states[worker.number] = state
        # Equivalent to `_replace`, and several times as fast.
        return tuple.__new__(Answer, (*answer[:8], handle, used, state, *answer[11:-1], remarks))
