"""Allocates blocks of shared memory in a worker, for the batch under construction.

Runs in a worker process, except `empty`, which may be called anywhere. During a task the worker owns the
blocks that were granted with the task, and blocks that it creates in its own part of the arena if none fits.
The answer passes all of them to the consumer, except blocks that user code still references: if a dataset
keeps a tensor that was allocated here, the worker keeps its block, and sends a copy. The same applies to
blocks that a child process forked by user code may reference.

Where batches go on to a device, one copy has to transfer the whole batch: the results of a task are then
placed in one block, one after the other. The block is as large as the previous batch needed.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from fastq_loader.memory import forked_children, nontemporal
from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.blocks import SMALLEST, Extents, FreeRanges, device_aligned, size_class
from fastq_loader.system import process_id
from fastq_loader.system.unpatched import time

_SLACK = 64 * 1024  # extra bytes in a block for a device, for the small fields that come last

Array = np.ndarray[Any, Any]

#: Blocks of a batch: (offset, bytes of the block that the batch needs).
Used = Sequence[tuple[int, int]]


class OpenBlock:
    """A block that a task uses, or that user code keeps.

    Attributes:
        offset, size: its place in the arena, in bytes.
        address: its address in this process.
        cut: number of bytes at its start that are allocated to results.
        holds: weak references to the bases of the arrays in it; user code references one as long as it lives.
        packed: whether it is part of the answer; then it is not reused before the task ends.
        opened: the moment when it was opened, see `forked_children`.
    """

    __slots__ = ("address", "cut", "holds", "offset", "opened", "packed", "size")

    def __init__(self, offset: int, size: int, address: int) -> None:
        self.offset, self.size, self.address = offset, size, address
        self.cut, self.packed = 0, False
        self.holds: list[weakref.ref[_Hold]] = []
        self.opened = forked_children.now


class _Hold:
    """A reference of user code to a block: the base of an array from `empty_array`."""

    __slots__ = ("__array_interface__", "__weakref__", "mapping")

    __array_interface__: dict[str, Any]
    mapping: Mapping  # keeps the address valid


#: Calls a weak reference: the object, or None.
_referent = weakref.ref.__call__
_second = itemgetter(1)


class Allocator:
    """Allocates the blocks of one worker.

    The lock is needed because a dataset may allocate in threads of its own, also while the worker answers.

    Args:
        mapping: the arena in this process.
        worker: the worker's number, which selects its part of the arena.
        space: ranges (offset, size) in which it can create blocks; None: all of its part.
        for_device: whether the results of a task share one block; else each has its own.
        nontemporal_from: after a batch of at least so many bytes, the next is written non-temporally.

    Attributes:
        expected: expected size in bytes of a batch for a device: that of the previous one.
        new_memory: nanoseconds spent on mapping the pages of new blocks, since this task began.
    """

    def __init__(
        self,
        mapping: Mapping,
        worker: int,
        space: Extents | None = None,
        for_device: bool = False,
        nontemporal_from: float = math.inf,
    ) -> None:
        self.mapping = mapping
        self.for_device = for_device
        self.expected = self.new_memory = 0
        self._nontemporal_from = nontemporal_from
        self._large = nontemporal_from <= 0  # whether the last batch had that many bytes
        start, end = mapping.region(worker)
        self._space = FreeRanges(((start, end - start),) if space is None else space)
        self._pid = process_id.current()
        self._lock = threading.RLock()
        self._idle: list[tuple[int, int]] = []  # unused blocks (size, offset), by size
        self._open: dict[int, OpenBlock] = {}  # by offset
        forked_children.owners[id(self)] = self
        self._partial: OpenBlock | None = None  # the block for the next result, if it fits
        self._fresh: list[tuple[int, int]] = []  # created here, and unknown to the consumer

    @property
    def leased(self) -> bool:
        return bool(self._open)

    def begin(self, grants: Extents) -> None:
        """Start a task with these blocks (offset, size)."""
        self.new_memory = 0
        if not grants:
            return  # the usual case for small leaves
        with self._lock:
            for offset, size in grants:
                self._idle.append((size, offset))
            self._idle.sort()

    def free_ranges(self, ranges: Extents) -> None:
        """Add ranges (offset, size) in which blocks may be created again."""
        with self._lock:
            self._space.free_ranges(ranges)

    def take(self, nbytes: int, failed: bool = False) -> OpenBlock:
        """Return a block of at least `nbytes` for this task. If its batch has `failed`, blocks of that batch
        may be reused, whatever their size.

        Raises:
            MemoryError: the worker's part of the arena is used up.
        """
        process_id.stay_in(self._pid)  # a forked child must not use its parent's blocks
        with self._lock:
            if failed:
                self._reclaim()
            block = self._take(nbytes, failed)
            block.packed = True
            return block

    def _take(self, nbytes: int, any_size: bool = False) -> OpenBlock:
        wanted = size_class(nbytes)
        found = self._fit(wanted, any_size)
        if found is None and self._open:  # user code may have dropped others meanwhile
            self._reclaim(packed=False)
            found = self._fit(wanted, any_size)
        size, offset = found or (wanted, self._space.take(wanted))
        if offset is None:
            raise MemoryError(
                f"{nbytes} bytes do not fit into the rest of this worker's part of the shared memory; "
                "are thousands of batches kept alive, or files limited (ulimit -f)?"
            )
        if found is None:
            self._fresh.append((offset, size))
            began = time.monotonic_ns()
            self.mapping.populate(offset, nbytes)  # faster than a fault for each page, and timed
            self.new_memory += time.monotonic_ns() - began
        block = self._open[offset] = OpenBlock(offset, size, self.mapping.base + offset)
        return block

    def _fit(self, wanted: int, any_size: bool) -> tuple[int, int] | None:
        for at, (size, _) in enumerate(self._idle):
            if wanted <= size and (any_size or size <= 2 * wanted):  # larger ones are left for larger results
                return self._idle.pop(at)
        return None

    def empty_array(self, shape: tuple[int, ...], typestr: str, nbytes: int) -> Array | None:
        """Return an uninitialised array in a block; None if it is small, or in a forked child."""
        if nbytes < SMALLEST or process_id.pid != self._pid:
            return None
        with self._lock:
            start = 0
            if self.for_device:
                block, start = self._room_for_device(nbytes)
            else:
                block = self._take(nbytes)
            block.cut = start + nbytes
            hold = _Hold()
            hold.mapping = self.mapping
            data = block.address + start, False
            hold.__array_interface__ = {"version": 3, "data": data, "shape": shape, "typestr": typestr}
            block.holds.append(weakref.ref(hold))
            return np.asarray(hold)

    def _room_for_device(self, nbytes: int) -> tuple[OpenBlock, int]:
        """Room for a result behind the previous one, or in a new block: the block, and the start in it."""
        block = self._partial
        start = 0 if block is None else device_aligned(block.cut)
        if block is None or block.size - start < nbytes:
            start = 0
            block = self._partial = self._take(max(nbytes + _SLACK, self.expected))
        return block, start

    def block_at(self, address: int) -> OpenBlock | None:
        """The block of this task that contains an address, if any."""
        with self._lock:
            block = self._open.get(address - self.mapping.base)  # in most cases it begins there
            if block is None:
                for each in self._open.values():
                    if 0 <= address - each.address < each.size:
                        return each
            return block

    def is_nontemporal(self, nbytes: int) -> bool:
        """Whether pieces of `nbytes` should be written to a block with non-temporal stores."""
        return self._large and nbytes >= nontemporal.SMALLEST_PIECE

    def write(self, offset: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` from the address `source` into the arena."""
        process_id.stay_in(self._pid)
        address = self.mapping.base + offset
        if self.is_nontemporal(nbytes):
            nontemporal.copy(address, [source], nbytes)
        else:
            ctypes.memmove(address, source, nbytes)

    # ---- the answer ---------------------------------------------------------------------------

    def copy_held(self, used: Used) -> dict[int, OpenBlock]:
        """Copy the blocks of the batch that user code still references, because it may write to them at any
        time. Return the copies by offset of the original. Called after the worker has dropped its own
        references to the batch."""
        with self._lock:
            copies, seen = {}, forked_children.seen_before() if forked_children.living else 0
            for offset, need in used:
                block = self._open[offset]
                if any(map(_referent, block.holds)) or block.opened < seen:
                    copies[offset] = copy = self._take(need)
                    copy.packed = True
                    self.write(copy.offset, block.address, need)
            return copies

    def finish(self, used: Used) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """Finish the task; the answer uses these blocks.

        Returns:
            The blocks (offset, size) that the consumer does not know yet, and the offsets of unused blocks,
            which it gets back. Blocks that user code references stay here until it drops them.
        """
        with self._lock:  # a thread of the dataset may be taking a block
            if not (self._open or self._idle or self._fresh):
                return (), ()  # the usual case for small leaves
            nbytes = 0
            for offset, need in used:
                nbytes += need
                del self._open[offset]
            self._large = nbytes >= self._nontemporal_from
            self._partial = None
            if self._open:
                self._reclaim()
            fresh, returned = tuple(self._fresh), tuple(map(_second, self._idle))
            self._fresh.clear()
            self._idle.clear()
            return fresh, returned

    def _reclaim(self, packed: bool = True) -> None:
        """Free the blocks that are not referenced, here or in a child that user code has forked; those that
        are `packed`, too, or not."""
        seen = forked_children.seen_before()
        for block in list(self._open.values()):
            is_held = any(map(_referent, block.holds)) or block.opened < seen
            if not is_held and (packed or not block.packed):
                del self._open[block.offset]
                self._idle.append((block.size, block.offset))
                if self._partial is block:
                    self._partial = None
        self._idle.sort()


# ---- called by collate functions ------------------------------------------------------------------------

_NAMES = "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128"
#: dtypes that numpy has, too, so torch can wrap arrays of them. Other dtypes are allocated as bytes.
TYPESTR = {getattr(torch, name): np.dtype(name).str for name in _NAMES.split()}

#: The allocator of this process, if it is a worker of this package.
current: Allocator | None = None


def install(allocator: Allocator | None) -> None:
    """Set the allocator that `empty` and the collate functions of this process use."""
    global current
    current = allocator


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor that is sent to the consumer without a copy.

    In a worker of this package a result of 64 KiB or more lies in shared memory: when it (or a view of it) is
    part of the batch, the consumer gets the same memory. Anywhere else, and for smaller results, this is
    `torch.empty`.

    Args:
        shape: the sizes.
        dtype: torch's default dtype if None.

    Returns:
        A contiguous CPU tensor with memory of its own.

    >>> empty((64, 3, 224, 224), torch.uint8).shape
    torch.Size([64, 3, 224, 224])
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    tensor = out_tensor(sizes, dtype)
    return torch.empty(sizes, dtype=dtype, device="cpu") if tensor is None else tensor


def out_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """`empty` for collate functions; None where they should allocate as usual."""
    if current is None:
        return None
    nbytes = math.prod(shape) * dtype.itemsize
    typestr = TYPESTR.get(dtype)
    if typestr is not None:
        array = current.empty_array(shape, typestr, nbytes)
        return None if array is None else torch.from_numpy(array)
    array = current.empty_array((nbytes,), "|u1", nbytes)
    return None if array is None else torch.from_numpy(array).view(dtype).view(shape)


def out_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
    """Like `out_tensor`, for an array."""
    if current is None:
        return None
    return current.empty_array(shape, dtype.str, math.prod(shape) * dtype.itemsize)
