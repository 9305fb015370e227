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
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch

from fastq_loader.memory import nontemporal
from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.blocks import SMALLEST, Extents, FreeRanges, device_aligned, size_class
from fastq_loader.memory.forked_children import moment, owners, seen_before
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
        cut: number of bytes at its start that are allocated to results, if batches go to a device.
        holds: number of arrays in it that user code references.
        opened: the moment when it was opened, see `forked_children`.
    """

    __slots__ = ("address", "cut", "holds", "offset", "opened", "size")

    def __init__(self, offset: int, size: int, address: int) -> None:
        self.offset, self.size, self.address = offset, size, address
        self.cut = self.holds = 0
        self.opened = moment()


class _Hold:
    """A reference of user code to a block: the base of an array from `empty_array`."""

    __slots__ = ("__array_interface__", "_block", "_dropped", "_mapping")

    def __init__(
        self, mapping: Mapping, block: OpenBlock, interface: dict[str, Any], dropped: deque[OpenBlock]
    ) -> None:
        self.__array_interface__ = interface
        self._mapping = mapping  # keeps the address valid
        self._block = block
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped.append(self._block)


class _OpenBlocks(dict[int, OpenBlock]):
    """The blocks in use by a task, or kept by user code, by offset. The allocator's lock guards them.

    Attributes:
        dropped: one entry for each array that user code has dropped; finalizers append to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropped: deque[OpenBlock] = deque()
        self._by_address: list[OpenBlock] = []  # in ascending order

    def open(self, offset: int, size: int, address: int) -> OpenBlock:
        """Add a block."""
        block = self[offset] = OpenBlock(offset, size, address)
        insort(self._by_address, block, key=_address)
        return block

    def close(self, block: OpenBlock) -> None:
        """Remove a block that neither this task nor user code uses any more."""
        del self[block.offset]
        self._by_address.remove(block)

    def at(self, address: int) -> OpenBlock | None:
        """The block that contains an address, if any."""
        at = bisect_right(self._by_address, address, key=_address) - 1
        if at < 0:
            return None
        block = self._by_address[at]
        return block if address < block.address + block.size else None

    def drain(self) -> set[OpenBlock]:
        """Process the arrays that user code has dropped. Return their blocks."""
        blocks = set()
        while self.dropped:
            block = self.dropped.popleft()
            block.holds -= 1
            blocks.add(block)
        return blocks

    def held(self, blocks: Iterable[OpenBlock]) -> set[OpenBlock]:
        """Those of some blocks that user code references, here or in a child that it has forked."""
        seen = seen_before()
        return {block for block in blocks if block.holds or block.opened < seen}


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
        owners.add(self)
        self._lock = threading.RLock()
        self._idle: list[tuple[int, int]] = []  # unused blocks (size, offset), by size
        self._open = _OpenBlocks()
        self._partial: OpenBlock | None = None  # the block for the next result, if it fits
        self._shipping: frozenset[int] = frozenset()  # blocks of the answer, referenced or not
        self._fresh: list[tuple[int, int]] = []  # created here, and unknown to the consumer

    def begin(self, grants: Extents) -> None:
        """Start a task with these blocks (offset, size)."""
        self.new_memory = 0
        if not grants:
            return  # the usual case for small leaves
        with self._lock:
            self._idle = sorted([*self._idle, *[(size, offset) for offset, size in grants]])

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
                self._shipping = frozenset()
                self._reclaim()
            return self._take(nbytes, failed)

    def _take(self, nbytes: int, any_size: bool = False) -> OpenBlock:
        if self._open.dropped:
            self._collect()
        wanted = size_class(nbytes)
        for at, (size, offset) in enumerate(self._idle):
            # Much larger ones are kept for larger results.
            if wanted <= size and (any_size or size <= 2 * wanted):
                del self._idle[at]
                return self._open.open(offset, size, self.mapping.base + offset)
        new = self._space.take(wanted)
        if new is None:
            raise MemoryError(
                f"{nbytes} bytes do not fit into the rest of this worker's part of the shared memory; "
                "are thousands of batches kept alive, or files limited (ulimit -f)?"
            )
        self._fresh.append((new, wanted))
        began = time.monotonic_ns()
        self.mapping.populate(new, nbytes)  # faster than a fault for each page, and timed
        self.new_memory += time.monotonic_ns() - began
        return self._open.open(new, wanted, self.mapping.base + new)

    def empty_array(self, shape: tuple[int, ...], typestr: str, nbytes: int) -> Array | None:
        """Return an uninitialised array in a block; None if it is small, or in a forked child."""
        if nbytes < SMALLEST or process_id.current() != self._pid:
            return None
        with self._lock:
            block = self._partial  # of a batch for a device: behind the previous result
            start = 0 if block is None else device_aligned(block.cut)
            if block is None or block.size - start < nbytes:
                start, wanted = 0, max(nbytes + _SLACK, self.expected) if self.for_device else nbytes
                block = self._take(wanted)
                self._partial = block if self.for_device else None
            block.cut = start + nbytes
            data = block.address + start, False
            interface = {"version": 3, "data": data, "shape": shape, "typestr": typestr}
            hold = _Hold(self.mapping, block, interface, self._open.dropped)
            block.holds += 1
        return np.asarray(hold)

    def block_at(self, address: int) -> OpenBlock | None:
        """The block of this task that contains an address, if any."""
        with self._lock:
            return self._open.at(address)

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

    @property
    def untouched(self) -> bool:
        """Whether no block is open or available: then the task has nothing to ship, return or report."""
        with self._lock:  # a thread of the dataset may be taking a block
            return not (self._open or self._idle or self._fresh or self._open.dropped)

    def ship(self, used: Used) -> None:
        """Mark the blocks of the batch, so that they are not reused before the task is finished."""
        with self._lock:
            self._shipping = frozenset(map(_first, used))

    def copy_held(self, used: Used) -> dict[int, OpenBlock]:
        """Copy the blocks of the batch that user code still references, because it may write to them at any
        time. Return the copies by offset of the original. Called after the worker has dropped its own
        references to the batch."""
        with self._lock:
            self._open.drain()
            needs = {self._open[offset]: need for offset, need in used}
            held, copies = self._open.held(needs), {}
            for block, need in needs.items():
                if block in held:
                    copy = copies[block.offset] = self._take(need)
                    self.write(copy.offset, block.address, need)
            return copies

    def finish(self, used: Used) -> tuple[list[tuple[int, int]], list[int]]:
        """Finish the task; the answer uses these blocks.

        Returns:
            The blocks (offset, size) that the consumer does not know yet, and the offsets of unused blocks,
            which it gets back. Blocks that user code references stay here until it drops them.
        """
        with self._lock:
            self._shipping = frozenset()
            self._large = sum(map(_second, used)) >= self._nontemporal_from
            for offset, _ in used:
                self._open.close(self._open[offset])
            self._reclaim()
            returned = list(map(_second, self._idle))
            self._idle.clear()
            fresh, self._fresh = self._fresh, []
            return fresh, returned

    def _reclaim(self) -> None:
        """Free all blocks that are not referenced, including those of the batch."""
        self._partial = None
        if self._open or self._open.dropped:
            self._open.drain()
            self._free(set(self._open.values()) - self._open.held(self._open.values()))

    def _collect(self) -> None:
        """Free the blocks that user code has dropped."""
        dropped = {block for block in self._open.drain() if self._open.get(block.offset) is block}
        held = self._open.held(dropped)
        self._free(block for block in dropped - held if block.offset not in self._shipping)

    def _free(self, blocks: Iterable[OpenBlock]) -> None:
        for block in blocks:
            self._open.close(block)
            self._idle.append((block.size, block.offset))
            if self._partial is block:
                self._partial = None
        self._idle.sort()


_address, _first, _second = attrgetter("address"), itemgetter(0), itemgetter(1)


# ---- called by collate functions ------------------------------------------------------------------------

_NAMES = "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128"
#: dtypes that numpy has, too, so torch can wrap arrays of them. Other dtypes are allocated as bytes.
TYPESTR = {getattr(torch, name): np.dtype(name).str for name in _NAMES.split()}

_current: Allocator | None = None


def install(allocator: Allocator | None) -> None:
    """Set the allocator that `empty` and the collate functions of this process use."""
    global _current
    _current = allocator


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
    if _current is None:
        return None
    nbytes = math.prod(shape) * dtype.itemsize
    typestr = TYPESTR.get(dtype)
    if typestr is not None:
        array = _current.empty_array(shape, typestr, nbytes)
        return None if array is None else torch.from_numpy(array)
    array = _current.empty_array((nbytes,), "|u1", nbytes)
    return None if array is None else torch.from_numpy(array).view(dtype).view(shape)


def out_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
    """Like `out_tensor`, for an array."""
    if _current is None:
        return None
    return _current.empty_array(shape, dtype.str, math.prod(shape) * dtype.itemsize)


def use_nontemporal(nbytes: int) -> bool:
    """Whether pieces of `nbytes` should be written with non-temporal stores to memory from the functions
    above."""
    return _current is not None and _current.is_nontemporal(nbytes)
