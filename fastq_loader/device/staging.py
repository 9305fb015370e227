"""Moves batches to a device: page-lock, copy during the previous step, deliver on the consumer's stream.

Runs in the consumer, on the thread that calls `next()`: a thread of its own would compete for the GIL, and
break the capture of CUDA graphs. A `DeviceSession` lasts from epoch to epoch. It owns one side stream (a new
one in each epoch would strand the memory that torch cached for the old one), the statistics, and the results
of page-locking. `Staging` serves one pool of workers, whose batches lie in blocks, each ready for a single
copy; `SerialStaging` does the same without workers. Both give each `Copy` a function that builds the batch
from its device memory. Only `DecodeImages` works on a thread of its own, for workers.

The order in a call of `next()`: find finished copies, whose blocks are free again; take the head, whose copy
was begun earlier, or begin it; make the consumer's stream wait for that copy; begin the copies of the next
`prefetch` batches that are ready; deliver the head.

An error of a batch that was prepared ahead is stored until its turn (`CapturedCall`), without its frames.
They would keep the caller alive, and with it the loader that stores the error: a loader dropped in the middle
of an epoch would live on until the garbage collector runs.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch

from fastq_loader.device.accelerator import ToDevice, TorchBackend, called
from fastq_loader.device.copies import Build, Copies, Copy
from fastq_loader.device.pinning import Buffers, Pinner, PinPolicy
from fastq_loader.errors import UnpicklableError, WorkerTraceback
from fastq_loader.ipc.messages import BatchHandle
from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.blocks import Extents, device_aligned
from fastq_loader.packing import pickling
from fastq_loader.packing.flattener import TreeFlattener, device_segments, is_leaf, segments_of
from fastq_loader.packing.layout import REMEMBERED, BatchLayout
from fastq_loader.packing.tensors import cloned, moved
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.statistics.counters import StagingCounters


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
            text = "".join(traceback.format_exception(error))
            # Bypasses the class's own `__setattr__`: it may be a frozen dataclass.
            BaseException.__setattr__(error, "__context__", None)
            BaseException.__setattr__(error, "__cause__", EarlierTraceback(text))
            self.error = error.with_traceback(None)

    def take(self) -> Any:
        """Return the result, or raise the error, and forget it."""
        (result, self.result), (error, self.error) = (self.result, None), (self.error, None)
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error  # its traceback refers to this frame


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """In the block tensors can be used for training: a batch that is begun in inference mode may be delivered
    after it."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


class DeviceSession:
    """Per-loader state of the copies to a device.

    Args:
        options: the user's.

    Attributes:
        statistics: counters of all copies.
        policy: the mode of page-locking.
        beside: how a transform on the side stream is called; None: transforms run at delivery.
    """

    def __init__(self, options: ToDevice) -> None:
        self.options = options
        self.beside = CapturedCall if options.transform_stream == "side" else None
        self.statistics = StagingCounters(str(options.target))
        self.policy = PinPolicy(self.statistics)

    @cached_property
    def backend(self) -> TorchBackend:
        """The device, initialised by the first use.

        Raises:
            RuntimeError: it cannot be initialised; with torch's text.
        """
        assert self.options.target is not None, "batches that stay on the host need no session"
        backend = TorchBackend(self.options.target)
        self.statistics.device = str(backend.device)
        return backend

    def open(self, in_blocks: bool) -> Copies:
        """Create the copies of a new pool.

        Args:
            in_blocks: whether its batches lie in the blocks of workers.

        Raises:
            RuntimeError: see `backend`.
        """
        self.policy.choose(self.backend, in_blocks)
        return Copies(self.backend, self.options.prefetch, self.statistics)

    def refuse_capture(self) -> None:
        """Raise RuntimeError while the current stream is captured into a CUDA graph: events cannot be queried
        then, and work queued here would become part of the graph."""
        if "backend" in vars(self) and self.backend.capturing():
            raise RuntimeError(
                "next() was called while a CUDA graph is being captured: take the batch before the capture, "
                "and use copy_into(static_batch) between replays"
            )


class LoadedBatch(Protocol):
    """The part of a batch that the copies need; see `scheduling.in_flight.Batch`."""

    handle: BatchHandle | None
    used: Extents
    copy: Any


class Staging:
    """The copies of one pool of workers.

    Args:
        session: the loader's.
        unpacker: of the pool.
        mapping: the pool's memory.

    Attributes:
        ahead: number of batches copied ahead of `next()`.
    """

    def __init__(self, session: DeviceSession, unpacker: Unpacker, mapping: Mapping) -> None:
        self.ahead = session.options.prefetch
        self._copies = session.open(in_blocks=True)
        self._pinner = Pinner(session.backend, self._copies, mapping, session.policy)
        self._unpacker = unpacker
        self._thread = thread = session.options.start_ahead()  # of the transform; None: it is called here
        self._transform = session.options.apply_transform if thread is None else partial(_begun_by, thread)
        self._beside = session.beside if thread is None else CapturedCall
        self._policy = session.policy

    def reap(self) -> list[int]:
        """Return the offsets of blocks that have become free to write since the last call."""
        return self._copies.reap()

    def begin(self, batches: Iterable[LoadedBatch], wait: bool = True) -> None:
        """Begin the copies of these batches, unless they are under way; with `wait`, also if an older copy
        has to be waited for. A copy that cannot be begun is tried again at the batch's turn, when its error
        can be raised; the batches after it wait, so that transforms are called in batch order."""
        for batch in batches:
            if not wait and self._copies.full:
                return
            if batch.copy is None:
                try:
                    batch.copy = self._copy(batch)
                except Exception:
                    return

    @_outside_inference_mode()
    def _copy(self, batch: LoadedBatch) -> Copy:
        assert batch.handle is not None, "it is a batch"
        part = self._unpacker.part(batch.handle) or (0, 0, 0, 0)
        source = self._pinner.prepare(*part) if part[-1] else None
        build = partial(_unpacked, self._unpacker, self._transform, batch.handle)
        return self._copies.begin(source, part[-1], build, _blocks(batch), self._beside)

    def deliver(self, batch: LoadedBatch) -> Any:
        """Return a batch on the device, ready for work queued on the current stream.

        Raises:
            ProtocolError: the pickle of the batch does not come from this pool.
            Exception: any error of unpickling, or of the user's transform.
            RuntimeError: the device failed, or is out of memory; with torch's text.
            PinFallback: page-locking failed, and the user's filters make warnings errors.
        """
        copy, batch.copy = batch.copy, None
        if copy is None:
            try:
                copy = self._copy(batch)
            except BaseException:
                self._copies.free += _blocks(batch)
                raise
        value = self._copies.take(copy)
        self._policy.warn()
        return value if self._thread is None else called(value[1])

    def drain(self) -> list[int]:
        """Wait for every copy, and drop the batches that were not delivered: the scheduler frees their
        blocks.

        Returns:
            Offsets of the blocks of delivered batches.
        """
        return self._copies.drain()

    def forget(self, offset: int) -> None:
        """Unlock a block whose pages are about to be returned to the system."""
        self._pinner.forget(offset)

    def close(self) -> list[int]:
        """End the pool: wait for every copy, end a transform's thread, and undo every page-lock. Returns the
        same as `drain`."""
        offsets = self.drain()
        if self._thread is not None:
            self._thread.close()
        self._pinner.close()
        return offsets


# Functions, and not methods: a copy under way must not keep alive what keeps the copy.
def _unpacked(
    unpacker: Unpacker, transform: Callable[[Any], Any], handle: BatchHandle, memory: torch.Tensor
) -> Any:
    """The batch of workers whose bytes are in device memory, transformed."""
    return transform(unpacker.unpack(handle, unpacker.open(handle)[2], memory))


def _begun_by(thread: Any, batch: Any) -> tuple[Any, Callable[[], Any]]:
    """A batch whose bytes will be in device memory, and what returns it, transformed."""
    return batch, thread.begin(batch)


def _rebuilt(
    layout: BatchLayout,
    leaves: list[Any],
    values: list[Any],
    objects: list[_Carried],
    options: ToDevice,
    memory: torch.Tensor,
) -> Any:
    """The batch of a loader without workers whose bytes are in device memory."""
    layout.on_device.fill(memory, leaves)
    arrived = [pickling.load(data, leaves) if data else moved(kept, memory.device) for data, kept in objects]
    return options.apply_transform(layout.build(leaves, iter(values), arrived))


def _blocks(batch: LoadedBatch) -> tuple[int, ...]:
    return tuple(offset for offset, _ in batch.used)


#: Address and bytes of a segment, and its offset in the batch on the device.
_Segment = tuple[int, int, int]
#: An object of a batch that is no leaf: its pickle, or b"" and the object itself.
_Carried = tuple[bytes, Any]


class _Flattener(TreeFlattener):
    """Accepts tensors of a graph (`requires_grad`), which only workers cannot send."""

    @staticmethod
    def is_leaf(value: Any) -> bool:
        return not getattr(value, "requires_grad", False) and is_leaf(value)


class SerialStaging:
    """The same without workers: each batch is packed into a buffer, and its copy begins at once.

    Args:
        session: the loader's.

    Attributes:
        user: returns the iterator that uses it, or None.
    """

    def __init__(self, session: DeviceSession) -> None:
        self.session = session
        self.user: Callable[[], Any] = lambda: None
        self._copies = session.open(in_blocks=False)
        self._buffers = Buffers(session.backend, self._copies, session.policy, session.options.prefetch + 1)
        self._flattener = _Flattener()
        self._layouts: dict[Any, BatchLayout] = {}

    @classmethod
    def of(cls, session: DeviceSession, made: list[SerialStaging], user: Any) -> SerialStaging:
        """Return one of a loader's that no iterator uses any more, or a new one."""
        staging = next((each for each in made if each.user() is None), None)
        if staging is None:
            made.append(staging := cls(session))
        staging.user = weakref.ref(user)
        staging.drain()  # an interrupt may have left a batch behind
        return staging

    def drain(self) -> None:
        """Wait for every copy, and drop the batches that were not delivered."""
        self._buffers.drain()

    def close(self) -> None:
        """Wait for every copy, and free the buffers."""
        self._buffers.close()

    def deliver(self, copy: Copy) -> Any:
        """Return a batch with its tensors on the device, ready for work queued on the current stream. Arrays,
        values and objects without tensors remain the same objects; but see `uncopied`.

        Raises:
            Exception: any error of the user's transform.
            RuntimeError: the device failed, or is out of memory; with torch's text.
            PinFallback: as in `Staging.deliver`.
        """
        batch = self._copies.take(copy)
        self.session.policy.warn()
        return batch

    @_outside_inference_mode()
    def begin(self, batch: Any) -> Copy:
        """Begin the copy of a batch.

        Raises:
            UnpicklableError: an object that contains tensors cannot be pickled, which is how they are found.
            RuntimeError: as in `deliver`.
        """
        self._copies.reap()
        beside, backend = self.session.beside, self.session.backend
        try:
            layout, segments, build = self._pack(batch)
        finally:
            self._flattener.clear()
        buffer = self._buffers.take(layout.device_bytes)
        for start, nbytes, offset in segments:
            backend.fill(buffer.memory, offset, start, nbytes)
        copy = self._copies.begin(buffer.memory, layout.device_bytes, build, (), beside)
        buffer.copy = copy
        return copy

    def uncopied(self, value: Any) -> Any:
        """The array, tensor or object to deliver for one that needs no copy to the device."""
        return value

    def _pack(self, batch: Any) -> tuple[BatchLayout, list[_Segment], Build]:
        """Take a batch apart.

        Returns:
            Its layout; the segments that go to the device; and a function that builds the batch once the
            segments have arrived.
        """
        flattener = self._flattener
        tree = flattener.flatten(batch)
        values, objects = flattener.values, [self._carry(value) for value in flattener.objects]
        # The user's own arrays: those in the flattener's list are made contiguous below.
        leaves = [self.uncopied(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in flattener.leaves]
        metas, spans = segments_of(flattener.leaves)
        sizes = tuple([end - start for start, end in spans])
        at, nbytes = dict[int, int](), 0
        for segment in device_segments(metas):  # one after the other
            at[segment] = nbytes
            nbytes += device_aligned(sizes[segment])
        plain = (tree, metas, sizes, tuple([at.get(n, -1) for n in range(len(sizes))]))
        layout = self._layouts.get(plain)
        if layout is None:
            layout = BatchLayout(plain)
            if len(self._layouts) < REMEMBERED:
                self._layouts[plain] = layout
        segments = [(spans[n][0], sizes[n], offset) for n, offset in at.items() if sizes[n]]
        build = partial(_rebuilt, layout, leaves, values, objects, self.session.options)
        return layout, segments, build

    def _carry(self, value: Any) -> _Carried:
        """Take an object apart that contains tensors, which go to the device as leaves."""
        if isinstance(value, torch.Tensor):  # sparse, of a subclass, that requires grad, …
            # A copy from page-locked memory would not be waited for, so it is moved from a clone.
            return b"", self.uncopied(value) if value.device == self.session.backend.device else cloned(value)
        tensors: list[torch.Tensor] = []

        def add_leaf(leaf: Any) -> int:
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            return self._flattener.add_leaf(leaf)

        try:
            data = pickling.dump(value, add_leaf, for_device=True)
        except UnpicklableError:
            if tensors:
                raise
        if tensors:
            return data, None
        return b"", self.uncopied(value)
