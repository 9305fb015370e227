"""Turns a worker's answer into the batch that `next()` returns, or the error that it raises.

Runs in the consumer, on the thread that calls `next()`. No block is leaked, even if an error is raised.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from fastq_loader.consumer.outcomes import Handed, Outcome, Raised
from fastq_loader.device.staging import DeviceSession, Staging
from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import BATCH, BROKEN, LEFT_OUT, Answer, BatchHandle
from fastq_loader.memory.pool import BlockPool
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.scheduling.progress import START, Progress
from fastq_loader.scheduling.states import Batch
from fastq_loader.statistics.counters import Counters, EpochLog


class Delivery:
    """Delivers the batches of one pool of workers.

    Args:
        unpacker, pool: the unpacker and the blocks of these workers.
        counters: counters of the loader.
        iterable: whether the workers read an iterable dataset.

    Attributes:
        progress: progress of the epoch.
        log: log of the epoch.
        bad_samples: judge of the epoch if it tolerates bad samples, else None; see `ErrorPolicy`.
        staging: copies batches to a device; None if they stay on the host.
    """

    def __init__(
        self, unpacker: Unpacker, pool: BlockPool, counters: Counters, iterable: bool = False
    ) -> None:
        self.progress = START
        self.bad_samples: Any = None
        self._iterable = iterable
        self.staging: Staging | None = None
        self._unpacker = unpacker
        self._pool = pool
        self._counters = counters
        self.log = EpochLog(counters, -1)  # a placeholder, until an epoch begins

    def start_staging(self, session: DeviceSession) -> None:
        """Copy batches to a device from now on."""
        self.staging = Staging(session, self._unpacker, self._pool.arena.mapping)

    def hand_out(self, batch: Batch) -> Handed | Raised | None:
        """Return the batch, or the error at its position: from the sampler, from user code in the worker,
        from unpickling here, or from a transform for the device. Return None if the batch was left out."""
        answer, kind = batch.answer, None if batch.answer is None else batch.answer.kind
        too_many: BaseException | None = None
        if self.bad_samples is not None and kind in (BATCH, LEFT_OUT):  # any other is an error already
            assert answer is not None, "it has a kind"
            remark = pickle.loads(answer.remarks)[0] if answer.remarks else None
            too_many = self.bad_samples.judge(batch.seq, batch.index, remark)
        progress = self.progress
        if progress.workers and batch.worker is not None:
            progress = self._after_worker(progress, batch)
        else:
            progress = progress.after(batch.seq)
        self.progress = progress
        try:
            if answer is None or kind != BATCH:
                return self._outcome_without_batch(batch, too_many)
            handle = answer.handle
            assert handle is not None, "it is a batch"
            if self.staging is not None:
                value = self.staging.deliver(answer)
            elif handle.segments:
                value = self._unpack(answer, handle)
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
            self._counters.bytes += handle.spec.nbytes
            self.log.nbytes += handle.spec.nbytes
            return Handed(value, progress)
        finally:
            del batch, too_many  # an error's traceback references this frame

    def _after_worker(self, progress: Progress, batch: Batch) -> Progress:
        """Return the progress after a batch, if progress is recorded for each worker."""
        assert batch.worker is not None, "a worker has loaded it"
        answer, last = batch.answer, progress.workers[batch.worker].state
        # An error is no proof that the worker has no state: it may be that of `state_dict`.
        state = last if answer is None or (answer.kind != BATCH and not answer.state) else answer.state
        return progress.after_worker(batch.worker, state, None if self._iterable else batch.seq)

    def _outcome_without_batch(self, batch: Batch, too_many: BaseException | None) -> Raised | None:
        """Return the outcome if there is no batch: an error, or None if the batch was left out."""
        answer, error, fatal = batch.answer, batch.error, None
        if answer is not None and answer.kind != LEFT_OUT:
            assert answer.handle is not None
            try:
                error = self._unpacker.exception(answer.handle)
            except ProtocolError as fault:
                self._counters.rejected_frames += 1
                error = fault
            self._pool.drop(offset for offset, _ in answer.used)
            if answer.kind == BROKEN:  # torch's worker instead continues, and fails at every batch
                fatal = f"worker {batch.worker} could not start: {error!r}"
            if isinstance(error, StopIteration):
                error = _wrap_stop_iteration(error, "a worker")
        error = too_many or error
        return None if error is None else self._raised(batch, error, fatal)

    def _raised(self, batch: Batch, error: BaseException, fatal: str | None = None) -> Raised:
        return Raised(error, self.progress, fatal).at(batch.seq, batch.index, batch.worker)

    def _unpack(self, answer: Answer, handle: BatchHandle) -> object:
        try:
            leased, copied, pickled = self._unpacker.open(handle)
        except ProtocolError:
            self._pool.drop(offset for offset, _ in answer.used)
            raise
        self._pool.deliver(leased)
        try:
            return self._unpacker.unpack(handle, pickled)
        finally:
            if copied:
                self._pool.drop(copied)


def finished(outcome: Outcome, finish: Callable[[Any], Any], batch: Batch) -> Outcome:
    """Apply `finish`, the last step, to a batch. Return the batch, or the error that `finish` raised."""
    if not isinstance(outcome, Handed):
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
