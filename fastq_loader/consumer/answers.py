"""The answers of the workers: received and checked, and delivered as a batch or an error.

Runs in the consumer, on the thread that calls `next()`. A worker runs the user's own code: it is trusted not
to be malicious, and the checks guard against accidents. A worker that sends an invalid message, or an answer
that is not expected, is broken: its real answer will never come, so it is killed, like a worker that hangs.
An expected answer with an invalid handle or invalid blocks fails its batch, at its position. No block is
leaked, even if an error is raised.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol

from fastq_loader.consumer.outcomes import Delivered, Outcome, Raised
from fastq_loader.device.staging import DeviceSession, Staging
from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import (
    BATCH,
    BROKEN,
    EMPTY,
    LEFT_OUT,
    PART_ENDED,
    PASSED,
    SKIPPED,
    Answer,
    BatchHandle,
    unseal,
)
from fastq_loader.memory.blocks import Extents
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.scheduling.in_flight import Batch
from fastq_loader.scheduling.progress import Progress
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.statistics.counters import FIRST_BATCHES, Counters, EpochLog
from fastq_loader.workers.config import Plan
from fastq_loader.workers.group import WorkerGroup
from fastq_loader.workers.worker import Worker


class PoolEpoch(Protocol):
    """An epoch of a loader, as its pool of workers needs it; see `epoch.epoch.Epoch`.

    Attributes:
        saves: whether a state of it can be saved: then its progress is recorded batch by batch.
        sources: contains the sampler's iterator. `is_plain`: indices may be drawn from it directly.
    """

    start: Any
    saves: bool
    log: Any
    bad_samples: Any
    sources: deque[Any]
    drawn: int
    ended: bool

    @property
    def is_plain(self) -> bool: ...

    @property
    def progress(self) -> Progress: ...

    def leave_out(self, progress: Progress | int) -> None: ...

    @property
    def resume(self) -> Sequence[tuple[int, dict[str, Any] | None]]: ...


class Answers:
    """The answers of one pool's workers.

    Args:
        plan: configuration of the workers.
        group: the workers.
        scheduler: knows which answers are expected.
        unpacker: checks the handles, and rebuilds the batches.
        counters: counters of the loader.

    Attributes:
        progress: progress of the epoch, after the batch that was delivered last; None where the iterator only
            has to count the batches.
        log: log of the epoch.
        bad_samples: judge of the epoch if it tolerates bad samples, else None; see `ErrorPolicy`.
        end_states: worker → the state that it sent when its part of an iterable dataset ended in this epoch.
        staging: copies batches to a device; None if they stay on the host.
    """

    def __init__(
        self,
        plan: Plan,
        group: WorkerGroup,
        scheduler: Scheduler,
        unpacker: Unpacker,
        counters: Counters,
    ) -> None:
        self.progress: Progress | None = None
        self.log = EpochLog(counters, -1)  # a placeholder, until an epoch begins
        self.bad_samples: Any = None
        self.end_states: dict[int, bytes] = {}
        self.staging: Staging | None = None
        self._group = group
        self._scheduler = scheduler
        self._unpacker = unpacker
        self._counters = counters
        self._pool = scheduler.pool
        self._iterable = plan.rules.iterable
        self._in_order = plan.in_order
        self._one_by_one = plan.in_order and not plan.rules.iterable

    def start_staging(self, session: DeviceSession) -> None:
        """Copy batches to a device from now on."""
        self.staging = Staging(session, self._unpacker, self._pool.arena.mapping)

    def begin_epoch(self, epoch: PoolEpoch) -> None:
        """Begin an epoch."""
        self.log, self.bad_samples, self.end_states = epoch.log, epoch.bad_samples, {}
        self.progress = epoch.progress if epoch.saves or not self._in_order else None

    # ---- from the workers ---------------------------------------------------------------------

    def receive(self) -> bool:
        """Pass the answers that have arrived to the scheduler, in the order in which the workers finished.
        Return False if nothing has arrived. If batches are delivered in the sampler's order, stop at the next
        one: those after it may not be needed yet."""
        group, in_flight, came, arrived = self._group, self._scheduler.in_flight, False, []
        while (received := group.receive()) is not None:
            number, answer = received
            if type(answer) is not Answer:
                group.receive_other(number, answer)
                continue
            worker = group.workers[number]
            worker.answered_at = group.offered
            if not self._one_by_one:
                arrived.append((answer.finished, worker, answer))
                continue
            came |= self._arrived(worker, answer)
            if in_flight.is_next_here:
                break
        arrived.sort(key=itemgetter(0))
        for _, worker, answer in arrived:
            came |= self._arrived(worker, answer)
        return came

    def _arrived(self, worker: Worker, answer: Answer) -> bool:
        """Check an answer, and pass it to the scheduler. Return whether it was expected."""
        number, handle, fault = worker.number, answer.handle, None
        used: Extents = ()
        state, remarks, grown = b"", None, self._pool.grown
        try:
            if handle is not None and answer.kind not in EMPTY:
                layout = None if handle.layout else worker.layouts.get(handle.layout_id)
                if layout is None or layout.needs_blocks or handle.segments or answer.kind != BATCH:
                    handle, used = self._unpacker.check(worker.layouts, handle)
                else:  # Like `_replace`, but several times as fast.
                    handle = tuple.__new__(BatchHandle, (handle[0], layout, *handle[2:]))
            if used or handle is None or answer.kind != BATCH:
                self._check(number, answer, handle)
            if answer.state:
                state = unseal(answer.state, self._group.token)
            if answer.remarks:
                remarks = pickle.loads(unseal(answer.remarks, self._group.token))
        except ProtocolError as error:
            fault = error
        batch = self._scheduler.answered(number, answer, handle, used, fault)
        if batch is None:
            self._counters.rejected_frames += 1
            self._group.evict(number)
            return False
        started, finished, counters = answer.started, answer.finished, worker.counters
        counters.busy += finished - started
        batch.loaded = (
            *(batch.seq, number, counters.pid, batch.sent, started),
            *(answer.fetched, answer.collated, finished, answer.new_memory),
        )
        batch.worker_state, batch.remarks = state, remarks
        if answer.fresh:
            self._counters.blocks_grown += self._pool.grown - grown
        if batch.error is not None:
            self._counters.rejected_frames += 1
            if self._iterable:  # the answer may have reported the end of the worker's part
                self._group.evict(number)
        elif answer.epoch != self._scheduler.epoch:
            self._counters.stale_answers += 1
        elif remarks is not None or self._iterable:
            self._record(batch, answer)
        return True

    def _check(self, number: int, answer: Answer, handle: BatchHandle | None) -> None:
        """Check an answer that is not a batch in a message.

        Raises:
            ProtocolError: answers of this kind need a handle, have none, or are for iterable datasets only;
                or the handle names a block that does not exist.
        """
        kind = answer.kind
        if (handle is None) != (kind in EMPTY):
            found = "without" if handle is None else "with"
            raise ProtocolError(f"an answer of kind {kind} {found} a handle")
        if kind in (PART_ENDED, PASSED) and not self._iterable:
            raise ProtocolError(f"worker {number} answers with kind {kind} for a map-style dataset")
        fresh = dict(answer.fresh)
        for offset, size, _ in () if handle is None else handle.segments:
            block = self._pool.block_at(offset)
            if size != (fresh.get(offset) if block is None else block.size):
                raise ProtocolError(f"a handle names {size} bytes at {offset}, but no such block exists")

    def _record(self, batch: Batch, answer: Answer) -> None:
        """Record what a worker reports besides its batch: the generators that its dataset has for itself,
        samples of its stack, its state when its part has ended, and digests of its first batches, to detect
        workers that read the same data. An error gets a digest that equals no other."""
        number = batch.worker
        assert number is not None, "it has answered"
        if batch.remarks is not None:
            _, private, samples = batch.remarks
            self.log.private_generators.update(private)
            if samples and self._counters.profile is not None:
                self._counters.profile.add(samples)
        if batch.worker_state and answer.kind in (PART_ENDED, PASSED, SKIPPED):
            self.end_states[number] = batch.worker_state
        if self._iterable and batch.handle is not None:
            kept = self.log.first_batches.setdefault(number, [])
            if len(kept) < FIRST_BATCHES:
                of_error = b"error %d" % answer.seq, 0
                kept.append(self._unpacker.digest(batch.handle) if answer.kind == BATCH else of_error)

    # ---- to the user --------------------------------------------------------------------------

    def deliver(self, batch: Batch) -> Delivered | Raised | None:
        """Return the batch, or the error at its position: from the sampler, from user code in the worker,
        from unpickling here, or from a transform for the device. Return None if the batch was left out."""
        answer, too_many = batch.answer, None
        kind = None if answer is None else answer.kind
        if self.bad_samples is not None and kind in (BATCH, LEFT_OUT):  # any other is an error already
            remark = None if batch.remarks is None else batch.remarks[0]
            too_many = self.bad_samples.judge(batch.seq, batch.index, remark)
        if self.progress is not None:
            self.progress = self._after(self.progress, batch)
        try:
            handle = batch.handle
            if handle is None or kind != BATCH:
                return self._outcome_without_batch(batch, too_many)
            if self.staging is not None:
                value = self.staging.deliver(batch)
            elif handle.segments:
                value = self._unpack(batch, handle)
            else:
                value = self._unpacker.unpack(handle, b"")
        except Exception as error:  # raised while it was unpacked or copied
            if isinstance(error, ProtocolError):
                self._counters.rejected_frames += 1
            elif isinstance(error, StopIteration):  # from a user's __setstate__
                too_many = too_many or _wrap_stop_iteration(error, "rebuilding a batch")
            return self._raised(batch, too_many or error)
        else:
            if too_many is not None:
                return self._raised(batch, too_many)
            self._counters.batches += 1
            self._counters.bytes += handle.layout.nbytes
            self.log.nbytes += handle.layout.nbytes
            return Delivered(value, self.progress or 1)
        finally:
            del batch, too_many  # an error's traceback references this frame

    def _after(self, progress: Progress, batch: Batch) -> Progress:
        """Return the progress after a batch."""
        if not progress.workers or batch.worker is None:
            return progress.after(batch.seq)
        answer, state = batch.answer, batch.worker_state
        # An error is no proof that the worker has no state: it may be that of `state_dict`.
        if answer is None or (answer.kind != BATCH and not state):
            state = progress.workers[batch.worker].state
        return progress.after_worker(batch.worker, state, None if self._iterable else batch.seq)

    def _outcome_without_batch(self, batch: Batch, too_many: BaseException | None) -> Raised | None:
        """Return the outcome if there is no batch: an error, or None if the batch was left out."""
        answer, handle, error, fatal = batch.answer, batch.handle, batch.error, None
        if answer is not None and handle is not None:
            try:
                error = self._unpacker.exception(handle)
            except ProtocolError as fault:
                self._counters.rejected_frames += 1
                error = fault
            self._drop(batch)
            if answer.kind == BROKEN:  # torch's worker instead continues, and fails at every batch
                fatal = f"worker {batch.worker} could not start: {error!r}"
            if isinstance(error, StopIteration):
                error = _wrap_stop_iteration(error, "a worker")
        error = too_many or error
        return None if error is None else self._raised(batch, error, fatal)

    def _raised(self, batch: Batch, error: BaseException, fatal: str | None = None) -> Raised:
        return Raised(error, self.progress or 1, fatal).at(batch.seq, batch.index, batch.worker)

    def _unpack(self, batch: Batch, handle: BatchHandle) -> object:
        try:
            leased, copied, pickled = self._unpacker.open(handle)
        except ProtocolError:
            self._drop(batch)
            raise
        self._pool.deliver(leased)
        try:
            return self._unpacker.unpack(handle, pickled)
        finally:
            if copied:
                self._pool.drop(copied)

    def _drop(self, batch: Batch) -> None:
        self._pool.drop(offset for offset, _ in batch.used)


def finished(outcome: Outcome, finish: Callable[[Any], Any], batch: Batch) -> Outcome:
    """Apply `finish`, the last step, to a batch. Return the batch, or the error that `finish` raised."""
    if not isinstance(outcome, Delivered):
        return outcome
    try:
        outcome.batch = finish(outcome.batch)
        return outcome
    except Exception as error:  # of user code; it is raised at the position of the batch
        return Raised(error, outcome.progress).at(batch.seq, batch.index, batch.worker)


def _wrap_stop_iteration(stopped: StopIteration, who: str) -> RuntimeError:
    """Wrap a StopIteration, which would silently end the epoch if `next()` raised it."""
    error = RuntimeError(f"{who} raised StopIteration: {stopped}")
    error.__cause__ = stopped
    return error
