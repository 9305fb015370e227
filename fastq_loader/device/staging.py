"""Moves batches to a device: page-lock, copy during the previous step, deliver on the consumer's stream.

Runs in the consumer, on the thread that calls `next()`: a thread of its own would compete for the GIL, and
break the capture of CUDA graphs. A `DeviceSession` lasts from epoch to epoch. It owns one side stream (a new
one in each epoch would strand the memory that torch cached for the old one), the statistics, and the results
of page-locking. `Staging` serves one pool of workers, whose batches lie in blocks, each ready for a single
copy; `SerialStaging` does the same without workers.

The order in a call of `next()`: find finished copies, whose blocks are free again; take the head, whose copy
was begun earlier, or begin it; make the consumer's stream wait for that copy; begin the copies of the next
`prefetch` batches that are ready; deliver the head.

An error of a batch that was prepared ahead is stored until its turn (`CapturedCall`), without its frames.
They would keep the caller alive, and with it the loader that stores the error: a loader dropped in the middle
of an epoch would live on until the garbage collector runs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from fastq_loader.device.accelerator import ToDevice, TorchBackend
from fastq_loader.device.copies import Copies, Memory
from fastq_loader.device.pinning import Buffer, Buffers, HostMemory, Pinner, PinPolicy
from fastq_loader.errors import UnpicklableError, WorkerTraceback
from fastq_loader.ipc.messages import Answer
from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.blocks import device_aligned
from fastq_loader.packing import pickling
from fastq_loader.packing.spec import BatchLayout, LayoutCache
from fastq_loader.packing.tensors import cloned, moved, tensors_of
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.packing.walker import Metas, Span, TreeFlattener, device_segments, segments_of
from fastq_loader.statistics.counters import StagingCounters
from fastq_loader.system.interrupts import refuse_interrupt


class EarlierTraceback(WorkerTraceback):
    """Traceback, as text, of an error that was raised ahead of its turn: the `__cause__` of that error."""


class CapturedCall:
    """A call made immediately, whose result or error is requested later.

    Args:
        call: called with these arguments.

    Attributes:
        result: of the call, until it is taken. `error`: the exception raised instead.
    """

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        try:
            self.result = call(*arguments)
        except Exception as error:
            refuse_interrupt(error)
            text = "".join(traceback.format_exception(error))
            # Bypasses the class's own `__setattr__`: it may be a frozen dataclass.
            BaseException.__setattr__(error, "__context__", None)
            BaseException.__setattr__(error, "__cause__", EarlierTraceback(text))
            self.error = error.with_traceback(None)

    def again(self) -> Any:
        """Return a copy of the result, or raise the error. May be called any number of times."""
        if self.error is not None:
            raise self.error
        return deepcopy(self.result)

    def take(self) -> Any:
        """Return the result, or raise the error, and forget it."""
        (result, self.result), (error, self.error) = (self.result, None), (self.error, None)
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error  # its traceback refers to this frame


class DeviceSession:
    """Per-loader state of the copies to a device.

    Args:
        options: the user's.

    Attributes:
        statistics: counters of all copies.
        policy: the mode of page-locking.
    """

    def __init__(self, options: ToDevice) -> None:
        self.options = options
        self.statistics = StagingCounters(str(options.target))
        self.policy = PinPolicy(options.pin, options.pin_limit_bytes, self.statistics)

    @cached_property
    def stager(self) -> TorchBackend:
        """The device, initialised by the first use.

        Raises:
            RuntimeError: it cannot be initialised; with torch's text.
        """
        assert self.options.target is not None, "batches that stay on the host need no session"
        stager = TorchBackend(self.options.target)
        self.statistics.device = str(stager.device)
        return stager

    def open(self, in_blocks: bool) -> Copies:
        """Create the copies of a new pool.

        Args:
            in_blocks: whether its batches lie in the blocks of workers.

        Raises:
            PinFailed: the user chose pin="register", and it does not work.
            RuntimeError: see `stager`.
        """
        self.policy.choose(self.stager, in_blocks)
        return Copies(self.stager, self.options.prefetch, self.statistics)

    def refuse_capture(self) -> None:
        """Raise RuntimeError while the current stream is captured into a CUDA graph: events cannot be queried
        then, and work queued here would become part of the graph."""
        if "stager" in vars(self) and self.stager.capturing():
            raise RuntimeError(
                "next() was called while a CUDA graph is being captured: take the batch before the capture, "
                "and use copy_into(static_batch) between replays"
            )


class _Stage:
    """Base class of `Staging` and `SerialStaging`.

    Args:
        session: the loader's.
        in_blocks: whether batches lie in the blocks of workers.
    """

    def __init__(self, session: DeviceSession, in_blocks: bool) -> None:
        self._session = session
        self._options = session.options
        self._beside = session.options.transform_stream == "side"
        self._copies = session.open(in_blocks)

    def _finish(self, key: int, build: Callable[[Memory], Any]) -> Any:
        """Deliver the batch whose copy was begun."""
        copy = self._copies.take(key)
        return build(copy.memory) if copy.result is None else copy.result.take()

    def _no_memory(self) -> torch.Tensor:
        """Empty device buffer, for batches with nothing to copy."""
        return torch.empty(0, dtype=torch.uint8, device=self._session.stager.device)


class Staging(_Stage):
    """The copies of one pool of workers.

    Args:
        session: the loader's.
        unpacker: of the pool.
        mapping: the pool's memory.
    """

    def __init__(self, session: DeviceSession, unpacker: Unpacker, mapping: Mapping) -> None:
        super().__init__(session, in_blocks=True)
        self._pinner = Pinner(session.stager, self._copies, mapping, session.policy)
        self._unpacker = unpacker
        self._free: list[int] = []  # blocks of delivered batches that no copy reads

    @property
    def ahead(self) -> int:
        """Number of batches copied ahead of `next()`."""
        return self._options.prefetch

    def reap(self) -> list[int]:
        """Return the offsets of blocks that have become free to write since the last call."""
        return self._freed(self._copies.reap())

    def _freed(self, offsets: list[int]) -> list[int]:
        free, self._free = self._free + offsets, []
        return free

    def begin(self, answers: Iterable[Answer], wait: bool = True) -> None:
        """Begin the copies of these batches, unless they are under way; with `wait`, also if an older copy
        has to be waited for. A copy that cannot be begun is tried again at the batch's turn, when its error
        can be raised; the batches after it wait, so that transforms are called in batch order."""
        for answer in answers:
            if not wait and self._copies.full:
                return
            if answer.seq not in self._copies:
                if (source := self._source(answer)) is None:
                    return
                try:
                    self._copy(answer, source)
                except Exception as error:
                    refuse_interrupt(error)
                    return

    def _source(self, answer: Answer) -> HostMemory | None:
        """Location of the part of a batch that goes to the device, or None."""
        assert answer.handle is not None
        part = self._unpacker.part(answer.handle)
        return None if part is None else HostMemory(*part)

    def _copy(self, answer: Answer, source: HostMemory) -> None:
        memory, build = self._pinner.prepare(source), partial(self._build, answer)
        then = partial(CapturedCall, build) if self._beside else None
        self._copies.begin(answer.seq, memory, source.nbytes, _blocks(answer), then)

    def _build(self, answer: Answer, memory: torch.Tensor) -> Any:
        assert answer.handle is not None
        pickled = self._unpacker.open(answer.handle)[2]
        return self._options.apply_transform(self._unpacker.unpack(answer.handle, pickled, memory))

    def deliver(self, answer: Answer) -> Any:
        """Return the batch of an answer, on the device, ready for work queued on the current stream.

        Raises:
            ProtocolError: the pickle of the batch does not come from this pool.
            Exception: any error of unpickling, or of the user's transform.
            RuntimeError: the device failed, or is out of memory; with torch's text.
        """
        source = self._source(answer)
        if source is None:
            self._free += _blocks(answer)
            return self._build(answer, self._no_memory())
        if answer.seq not in self._copies:
            try:
                self._copy(answer, source)
            except BaseException:
                self._free += _blocks(answer)
                raise
        return self._finish(answer.seq, partial(self._build, answer))

    def drain(self) -> list[int]:
        """Wait for every copy, and drop the batches that were not delivered: the scheduler frees their
        blocks.

        Returns:
            Offsets of the blocks of delivered batches.
        """
        return self._freed(self._copies.drain())

    def forget(self, offset: int) -> None:
        """Unlock a block whose pages are about to be returned to the system."""
        self._pinner.forget(offset)

    def close(self) -> list[int]:
        """End the pool: wait for every copy, and undo every page-lock. Returns the same as `drain`."""
        offsets = self.drain()
        self._pinner.close()
        return offsets


def _blocks(answer: Answer) -> tuple[int, ...]:
    return tuple(offset for offset, _ in answer.used)


#: Start and end address of a segment, and its offset in the batch on the device.
_Segment = tuple[int, int, int]


class _Walker(TreeFlattener):
    """Accepts tensors of a graph (`requires_grad`), which only workers cannot send."""

    @staticmethod
    def is_leaf(value: Any) -> bool:
        return not getattr(value, "requires_grad", False) and pickling.is_leaf(value)


def _copied(value: Any) -> Any:
    """A copy of an object, or the object itself if it cannot be copied, such as a lock or an open file."""
    try:
        return deepcopy(value)
    except Exception as error:
        refuse_interrupt(error)
        return value


def _owned(leaf: Any) -> Any:
    """An array's own copy; tensors go to the device."""
    return leaf.copy("K") if isinstance(leaf, np.ndarray) else leaf


class SerialStaging(_Stage):
    """The same without workers: each batch is packed into a buffer, and its copy begins at once.

    Args:
        session: the loader's.
    """

    def __init__(self, session: DeviceSession) -> None:
        super().__init__(session, in_blocks=False)
        count = session.options.prefetch + 1
        self._buffers = Buffers(session.stager, self._copies, session.policy, count)
        self._walker = _Walker()
        self._specs = LayoutCache()
        self._batches = 0
        # Whether a batch begun ahead is built only at its delivery; then so are the batches after it, so
        # that transforms are called in the order of the batches.
        self._deferred = False

    @classmethod
    def of(cls, session: DeviceSession, idle: list[SerialStaging]) -> SerialStaging:
        """Return one of `idle`, which no iteration uses any more, or a new one."""
        while idle:
            staging = idle.pop()
            if staging._session is session:
                staging.drain()  # an interrupt may have left a batch behind
                return staging
            staging.close()
        return cls(session)

    def drain(self) -> None:
        """Wait for every copy, and drop the batches that were not delivered."""
        self._deferred = False
        self._copies.drain()

    def close(self) -> None:
        """Wait for every copy, and free the buffers."""
        self.drain()
        self._buffers.close()

    def stage(self, batch: Any) -> Any:
        """Return a batch with its tensors on the device, ready for work queued on the current stream. Arrays,
        values and objects without tensors remain the same objects.

        Raises:
            UnpicklableError: an object that contains tensors cannot be pickled, which is how they are found.
            Exception: any error of the user's transform.
            RuntimeError: the device failed, or is out of memory; with torch's text.
        """
        self.turn()
        return self.begin(batch)()

    def turn(self) -> None:
        """Prepare for the next batch.

        Raises:
            RuntimeError: while a CUDA graph is captured.
        """
        self._session.refuse_capture()
        self._copies.reap()

    def begin(self, batch: Any, ahead: bool = False) -> Callable[[], Any]:
        """Begin the copy of a batch. Returns a function that delivers the batch as `stage` does.

        Args:
            batch: as in `stage`.
            ahead: whether the loader continues before the batch is delivered, and may write to it then. If
                so, everything that can be copied is copied at once, and the device memory is shared with the
                stream of the copies, so that its next owner writes to it only after the copy even if the
                batch is never delivered.

        Raises:
            UnpicklableError, RuntimeError: as in `stage`.
        """
        try:
            segments, nbytes, build, beside = self._pack(batch, ahead)
        finally:
            self._walker.clear()
        if not segments:
            return lambda: build(self._no_memory())
        self._batches += 1
        buffer, then = self._fill_buffer(nbytes, segments), partial(CapturedCall, build) if beside else None
        buffer.copy = copy = self._copies.begin(self._batches, buffer.memory, nbytes, (), then)
        if ahead:
            self._session.stager.share(copy.memory, self._session.stager.side)
        return partial(self._finish, self._batches, build)

    def _pack(self, batch: Any, ahead: bool) -> tuple[list[_Segment], int, Callable[[Memory], Any], bool]:
        """Take a batch apart.

        Returns:
            The segments that go to the device, and their total size there in bytes; a function that builds
            the batch once they have arrived, and whether it may run on the side stream.
        """
        walker, apply_transform = self._walker, self._options.apply_transform
        tree = walker.walk(batch)
        values, objects = walker.values, [self._carry(value, ahead) for value in walker.objects]
        # Tensors that are on the device already were computed on the consumer's stream.
        device = self._session.stager.device
        there = any(tensor.device == device for tensor in tensors_of(walker.objects))
        # The user's own arrays, unless the loader continues; those in the walker's list are contiguous.
        leaves = [_owned(leaf) for leaf in walker.leaves] if ahead else list(walker.leaves)
        metas, spans = segments_of(walker.leaves)
        spec, segments = self._lay_out(tree, metas, spans)
        beside = self._beside and bool(segments) and not (there or self._deferred)
        self._deferred = ahead and not beside

        def build(memory: torch.Tensor) -> Any:
            spec.fill_device(memory, leaves)
            arrived = [carried(leaves, memory.device) for carried in objects]
            return apply_transform(spec.build(leaves, iter(values), arrived))

        return segments, spec.device_bytes, build, beside

    def _lay_out(self, tree: Any, metas: Metas, spans: list[Span]) -> tuple[BatchLayout, list[_Segment]]:
        """The spec of a batch, and the segments that go to the device, one after the other."""
        segments: list[_Segment] = []
        offsets, nbytes = [-1] * len(spans), 0
        for segment in device_segments(metas):
            segments.append((*spans[segment], nbytes))
            offsets[segment] = nbytes
            nbytes += device_aligned(spans[segment][1] - spans[segment][0])
        plain = (tree, metas, tuple([end - start for start, end in spans]), tuple(offsets))
        spec = self._specs.get(plain)
        if spec is None:
            spec = BatchLayout(plain)
            self._specs.remember(plain, spec, plain)
        return spec, segments

    def _carry(self, value: Any, ahead: bool) -> Callable[[list[Any], torch.device], Any]:
        """Return a rebuilder for an opaque object; tensors in it are moved to the device."""
        if isinstance(value, torch.Tensor):  # sparse, of a subclass, that requires grad, …
            # A copy from page-locked memory would not be waited for, so it is moved from a clone.
            own = cloned(value) if ahead or value.device != self._session.stager.device else value
            return lambda leaves, device: moved(own, device)
        has_tensors = False

        def add_leaf(leaf: Any) -> int:
            nonlocal has_tensors
            has_tensors = has_tensors or isinstance(leaf, torch.Tensor)
            return self._walker.add_leaf(leaf)

        data = b""
        try:
            data = pickling.dump(value, add_leaf, for_device=True)
        except UnpicklableError:
            if has_tensors:
                raise
        if has_tensors:
            return lambda leaves, device: pickling.load(data, leaves)
        kept = _copied(value) if ahead else value
        return lambda leaves, device: kept

    def _fill_buffer(self, nbytes: int, segments: list[_Segment]) -> Buffer:
        """Return a buffer filled with these segments."""
        stager, buffer = self._session.stager, self._buffers.take(nbytes)
        for start, end, offset in segments:
            if size := end - start:
                stager.fill(buffer.memory[offset : offset + size], stager.view(start, size), size)
        return buffer
