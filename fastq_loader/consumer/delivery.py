"""The last step of a batch: a worker's answer becomes the return value or the error of `next()`.

Runs in the consumer, on the thread that calls `next()`. No block is leaked, also when an error is raised. The
outcome of a call is a value: the event loop stores it for the iterator, which returns or raises it outside of
the loop's frames. These frames reference the loop; in the traceback of an error they would form a cycle that
keeps the loop and its memory until the garbage collector runs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Protocol

from fastq_loader.consumer.bad_samples import BadSampleCounter
from fastq_loader.device.staging import Staging
from fastq_loader.errors import ProtocolError, locate
from fastq_loader.ipc.messages import BATCH, BROKEN, LEFT_OUT, Answer, BatchHandle, decode_index
from fastq_loader.memory.pool import BlockPool
from fastq_loader.packing import pickling
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.scheduling.progress import START, Progress
from fastq_loader.scheduling.states import Batch
from fastq_loader.statistics.counters import Counters
from fastq_loader.system.interrupts import refuse_interrupt


class Outcome:
    """Outcome of a call of `next()`: a batch, an error in the place of one, or the end.

    Attributes:
        batch: None if there is an error.
        progress: progress of the epoch after this outcome; None if it has not changed.
        error: the exception to raise. StopIteration is a class: an instance would collect the tracebacks of
            all its raises.
        fatal: why the iteration is over with the error; None if the next call continues.
    """

    __slots__ = ("batch", "error", "fatal", "progress")

    def __init__(
        self,
        batch: Any = None,
        progress: Progress | None = None,
        error: Any = None,
        fatal: str | None = None,
    ) -> None:
        self.batch, self.progress = batch, progress
        self.error, self.fatal = error, fatal


#: There is no further batch; the engine is closing.
ENDED, CLOSED = Outcome(error=StopIteration), Outcome()


class OutcomeSlot(Protocol):
    """Receives an outcome; iterators implement it."""

    outcome: Outcome | None

    def record_skipped(self, progress: Progress) -> None:
        """Record the progress of the epoch after a batch that was left out."""


class Delivery:
    """Delivers the batches of one pool of workers.

    Args:
        unpacker, pool: the unpacker and the blocks of these workers.
        counters: counters of the loader.
        iterable: whether the workers read an iterable dataset.

    Attributes:
        progress: progress of the epoch.
        bad_samples: counter of the epoch if it tolerates bad samples, else None.
        staging: copies batches to a device; None if they stay on the host.
    """

    def __init__(
        self, unpacker: Unpacker, pool: BlockPool, counters: Counters, iterable: bool = False
    ) -> None:
        self.progress = START
        self.bad_samples: BadSampleCounter | None = None
        self._iterable = iterable
        self.staging: Staging | None = None
        self._unpacker = unpacker
        self._pool = pool
        self._counters = counters

    def hand_out(self, batch: Batch) -> Outcome | None:
        """Return the batch, or the error in its position: from the sampler, from user code in the worker,
        from unpickling here, or from a transform for the device. None if the batch was left out."""
        too_many = None if self.bad_samples is None else self._judge(batch, self.bad_samples)
        answer, error = batch.answer, batch.error
        progress = self._progress_after(batch) if self.progress.workers else self.progress.after(batch.seq)
        outcome: Outcome | None
        if answer is None:
            assert error is not None
            outcome = Outcome(error=error)
        elif answer.kind != BATCH:
            outcome = None if answer.kind == LEFT_OUT else self._error(batch, answer)
        else:
            try:
                handle = answer.handle
                assert handle is not None, "it is a batch"
                if self.staging is not None:
                    value = self.staging.deliver(answer)
                elif handle.segments:
                    value = self._unpack(answer, handle)
                else:
                    value = self._unpacker.unpack(handle, b"")
                outcome = Outcome(value)
                if too_many is None:
                    self._counters.batches += 1
                    self._counters.bytes += handle.spec.nbytes
            except ProtocolError as fault:
                self._counters.rejected_frames += 1
                outcome = Outcome(error=fault)
            except StopIteration as stopped:  # from a user's __setstate__
                outcome = Outcome(error=_not_the_end(stopped, "rebuilding a batch"))
            except Exception as raised:
                refuse_interrupt(raised)
                outcome = Outcome(error=raised)
        if too_many is not None:
            outcome = Outcome(error=too_many)
        self.progress = progress
        if outcome is not None:
            outcome.progress = progress
            if outcome.error is not None:
                _located(outcome, batch)
        try:
            return outcome
        finally:
            del outcome, error, batch, too_many  # an error's traceback references this frame

    def _judge(self, batch: Batch, counter: BadSampleCounter) -> BaseException | None:
        """Count a batch's bad samples. Return the error to raise in its place if there are too many."""
        answer = batch.answer
        if answer is None or answer.kind not in (BATCH, LEFT_OUT):  # an error is raised in its place
            return None
        found, last, _ = pickle.loads(answer.remarks) if answer.remarks else ((), None, ())
        error = None if last is None else pickling.load_exception(last)
        return counter.judge(batch.seq, batch.index, found, error)

    def _progress_after(self, batch: Batch) -> Progress:
        if batch.worker is None:
            return self.progress.after(batch.seq)
        state = b"" if batch.answer is None else batch.answer.state
        return self.progress.after_worker(batch.worker, state, None if self._iterable else batch.seq)

    def _unpack(self, answer: Answer, handle: BatchHandle) -> object:
        try:
            leased, copied, pickled = self._unpacker.open(handle)
        except ProtocolError:
            self._drop(answer)
            raise
        self._pool.deliver(leased)
        try:
            return self._unpacker.unpack(handle, pickled)
        finally:
            if copied:
                self._pool.drop(copied)

    def _error(self, batch: Batch, answer: Answer) -> Outcome:
        assert answer.handle is not None
        try:
            error: BaseException = self._unpacker.exception(answer.handle)
        except ProtocolError as fault:
            self._counters.rejected_frames += 1
            error = fault
        self._drop(answer)
        fatal = None
        if answer.kind == BROKEN:
            # torch's worker goes on after a failed worker_init_fn, and fails at every batch.
            fatal = f"worker {batch.worker} could not start: {error!r}"
        if isinstance(error, StopIteration):
            error = _not_the_end(error, "a worker")
        return Outcome(error=error, fatal=fatal)

    def _drop(self, answer: Answer) -> None:
        self._pool.drop(offset for offset, _ in answer.used)


def finished(delivered: Outcome, finish: Callable[[Any], Any], batch: Batch) -> Outcome:
    """Apply `finish`, the last step, to a batch. Return the batch, or the error that `finish` raised."""
    try:
        delivered.batch = finish(delivered.batch)
        return delivered
    except Exception as error:  # the user's, raised in the position of the batch
        refuse_interrupt(error)
        return _located(Outcome(error=error, progress=delivered.progress), batch)


def _located(raised: Outcome, batch: Batch) -> Outcome:
    """Add the position of a batch to its error, without overwriting existing attributes."""
    locate(raised.error, index=decode_index(batch.index), batch=batch.seq, worker=batch.worker)
    return raised


def _not_the_end(stopped: StopIteration, who: str) -> RuntimeError:
    """Wrap a StopIteration, which would silently end the epoch if `next()` raised it."""
    error = RuntimeError(f"{who} raised StopIteration: {stopped}")
    error.__cause__ = stopped
    return error
