"""The last step of a batch: an answer becomes what `next()` returns, or raises.

Runs in the consumer, on the thread that calls `next()`. Whatever comes out of here has its place in the order
of the batches, and no block stays behind for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn, Protocol

from fastq_loader.device.staging import Staging
from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import BATCH, BROKEN, Answer, Handle
from fastq_loader.memory.ledger import BlockLedger
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.scheduling.events import Deliver
from fastq_loader.statistics import Counters


class Outcome(NamedTuple):
    """What a call of `next()` has come to: a batch, or what to raise."""

    batch: Any
    error: BaseException | type[BaseException] | None


#: There is no further batch. The class, because an instance would gather the tracebacks of all its raises.
END = Outcome(None, StopIteration)


class OutcomeSlot(Protocol):
    """Where an outcome is put down."""

    outcome: Outcome | None


class Failed(Exception):
    """The next thing to hand out is `error`.

    The iterator raises it, outside of the loop's frames: they look at it, and in its traceback they would
    make a cycle that keeps the loop and its memory until the garbage collector comes.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Delivery:
    """Hands out the batches of one pool.

    Args:
        unpacker, ledger: the pool's.
        counters: the loader's.

    Attributes:
        staging: the pool's way to a device, or None: batches stay on the host.
        fatal: why the iteration is over, once a worker could not start.
    """

    def __init__(self, unpacker: Unpacker, ledger: BlockLedger, counters: Counters) -> None:
        self.staging: Staging | None = None
        self.fatal: str | None = None
        self._unpacker = unpacker
        self._ledger = ledger
        self._counters = counters

    def hand_out(self, deliver: Deliver) -> Any:
        """The batch.

        Raises:
            Failed: user code raised in its place, or nothing can be made of the answer.
            Exception: whatever unpickling the batch here, or a transform for the device, raises.
        """
        answer = deliver.answer
        if answer is None:
            assert deliver.error is not None
            raise Failed(deliver.error)
        handle = answer.handle
        assert handle is not None
        try:
            if answer.outcome != BATCH:
                self._raise(deliver, self._exception(handle))
            batch = self._unpack(answer, handle) if self.staging is None else self.staging.deliver(answer)
        except ProtocolError as error:
            self._counters.rejected_frames += 1
            raise Failed(error) from None
        except StopIteration as stopped:  # of a user's __setstate__; it would end the epoch without a word
            raise RuntimeError(
                f"what makes a batch of an answer raised StopIteration: {stopped}"
            ) from stopped
        self._counters.batches += 1
        self._counters.bytes += handle.spec.nbytes
        return batch

    def free(self, offsets: Iterable[int]) -> None:
        """Nobody will look at what is in these blocks."""
        for offset in offsets:
            self._ledger.drop(offset)

    def _unpack(self, answer: Answer, handle: Handle) -> Any:
        try:
            leased, copied, pickled = self._unpacker.open(handle)
        except ProtocolError:
            self._drop(answer)
            raise
        self._ledger.deliver(leased)
        try:
            return self._unpacker.unpack(handle, pickled)
        finally:
            self.free(copied)

    def _exception(self, handle: Handle) -> BaseException:
        try:
            return self._unpacker.exception(handle)
        except ProtocolError as error:
            self._counters.rejected_frames += 1
            return error

    def _raise(self, deliver: Deliver, error: BaseException) -> NoReturn:
        answer = deliver.answer
        assert answer is not None
        self._drop(answer)
        if answer.outcome == BROKEN:
            # torch's worker goes on after a failed worker_init_fn, and fails at every batch.
            self.fatal = f"worker {deliver.worker} could not start: {error!r}"
        if isinstance(error, StopIteration):
            stopped, error = error, RuntimeError(f"a worker raised StopIteration: {error}")
            error.__cause__ = stopped
        raise Failed(error)

    def _drop(self, answer: Answer) -> None:
        self.free(offset for offset, _ in answer.used)
