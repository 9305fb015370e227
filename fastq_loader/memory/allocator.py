"""The worker's side of the shared memory: which blocks a batch under construction may be written to.

Runs in a worker process. During a task the worker owns the blocks granted with it, and those it makes
itself in its own part of the arena when none fits. With the answer all of them pass to the consumer,
except blocks that user code still looks at: a dataset that keeps a tensor it allocated here keeps its
block, and the batch is shipped in a copy. So does a child that user code forks, as long as it lives.

Where batches go on to a device, one copy has to take the whole batch: the results of a task are then cut out
of one block, one behind the other, as large as the batch before needed.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastq_loader.memory import nontemporal
from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.forks import Onlookers, moment
from fastq_loader.memory.ledger import SMALLEST, Extents, device_aligned, size_class
from fastq_loader.memory.space import AddressSpace
from fastq_loader.system import process_id

#: New pages are filled at 1.3 GB/s (design.md, "Why this wins"): waiting takes at most a quarter of that.
_WAIT_BYTES_PER_SECOND = 5e9
_GLANCE = 20e-6  # seconds between two looks
#: Bytes left in the first such block for the small fields that come last.
_SLACK = 64 * 1024


Array = np.ndarray[Any, Any]

#: What numpy can describe, torch takes over from it; other dtypes go through bytes.
TYPESTR = {
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int8: "|i1",
    torch.int16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float16: "<f2",
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.complex64: "<c8",
    torch.complex128: "<c16",
}


class _Hold:
    """User code looks at a block: the base of the array that `Allocator.empty` gave out."""

    __slots__ = ("__array_interface__", "__weakref__", "_dropped", "_memory", "_offset")

    def __init__(
        self,
        address: int,
        memory: Any,
        shape: tuple[int, ...],
        typestr: str,
        offset: int,
        dropped: deque[int],
    ) -> None:
        self._memory = memory  # keeps the address valid
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
        }
        self._offset = offset
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped.append(self._offset)


class Allocator:
    """Blocks of one worker.

    The lock is there because a dataset may allocate in threads of its own, also while the worker answers.

    Args:
        mapping: the arena in this process.
        worker: the worker's id, which names its part of the arena.
        space: ranges (offset, size) in which it can make blocks; None is the whole of its part.
        together: cut the results of a task out of one block; else each has one of its own.
        stream_from: bytes of a batch from which on the next one is written past the caches.

    Attributes:
        expected: bytes of a batch, so far as one can tell from the one before.
    """

    def __init__(
        self,
        mapping: Mapping,
        worker: int,
        space: Extents | None = None,
        together: bool = False,
        stream_from: float = math.inf,
    ) -> None:
        self.mapping = mapping
        self.together = together
        self._stream_from = stream_from
        self._large = self._stream_from <= 0  # the last batch was as large as that
        self.expected = 0
        self._cuts: dict[int, int] = {}  # block → bytes of it that are cut out, from its start
        self._rest: tuple[int, int, int] | None = None  # (block, start and end of what is left in it)
        start, end = mapping.region(worker)
        self._space = AddressSpace(((start, end - start),) if space is None else space)
        self._pid = process_id.current()
        self._lock = threading.RLock()
        self._idle: list[tuple[int, int]] = []  # blocks (size, offset) to write to, by size
        self._promised: list[tuple[int, int]] = []  # the same, once they are let go
        self._open: dict[int, int] = {}  # offset → size of the blocks in use by this task, or kept
        # Offset → the moments when it came into use, and when nothing of this process looked at it any more.
        self._opened: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._onlookers = Onlookers()  # counts the open blocks
        # Offset → address, bytes there, and what keeps them there.
        self._reached: dict[int, tuple[int, int, Any]] = {}
        self._asked: dict[int, int] = {}  # offset → size that was asked for; the block may be a larger one
        self._addresses: list[tuple[int, int]] = []  # (address, offset) of the open blocks, ascending
        self._holds: dict[int, list[weakref.ref[_Hold]]] = {}  # offset → what user code may look through
        self._dropped: deque[int] = deque()
        self._shipping: frozenset[int] = frozenset()  # blocks that the answer names, held or not
        self._fresh: list[tuple[int, int]] = []  # made, and unknown to the consumer

    def begin(self, grants: Extents, promises: Extents = ()) -> None:
        """A task starts with these blocks (offset, size), and may use those promised when they are let go."""
        if not (grants or promises or self._promised):
            return  # as for every batch of small leaves
        with self._lock:
            self._promised = [(size, offset) for offset, size in promises]
            self._idle = sorted([*self._idle, *((size, offset) for offset, size in grants)])

    def give(self, ranges: Extents) -> None:
        """New blocks may be made in these ranges (offset, size) again."""
        with self._lock:
            for offset, size in ranges:
                self._space.give(offset, size)

    def take(self, nbytes: int, failed: bool = False) -> tuple[int, int]:
        """A block (offset, size) of at least `nbytes` for this task. Once its batch has `failed`, also one of
        the batch's, however large.

        Raises:
            MemoryError: the worker's part of the arena, or its address space, is used up.
        """
        process_id.stay_in(self._pid)  # the blocks of a forked child are its parent's
        with self._lock:
            if failed:
                self._shipping = frozenset()
                self._reclaim()
            elif self._dropped:
                self._collect()
            wanted = size_class(nbytes)
            found = _fit(self._idle, wanted, failed) or self._fit_promised(nbytes, wanted)
            size, offset = found or (wanted, self._make(nbytes, wanted))
            try:
                reached = size if self.together or self.mapping.whole else nbytes
                address, memory = self.mapping.reach(offset, reached)
            except MemoryError:
                self._idle.append((size, offset))
                raise
            self._reached[offset] = address, reached, memory
            self._asked[offset] = wanted
            self._open[offset] = size
            self._onlookers.count = len(self._open)
            self._opened[offset] = moment()
            insort(self._addresses, (address, offset))
            return offset, size

    def _close(self, offset: int) -> int:
        """The block is not user code's any more; its size."""
        self._holds.pop(offset, None)
        del self._opened[offset]
        self._left.pop(offset, None)
        del self._asked[offset]
        self._addresses.remove((self._reached.pop(offset)[0], offset))
        size = self._open.pop(offset)
        self._onlookers.count = len(self._open)
        return size

    def _make(self, nbytes: int, size: int) -> int:
        offset = self._space.take(size)
        if offset is None:
            raise MemoryError(
                f"{nbytes} bytes do not fit into what is left of this worker's part of the shared memory; "
                "are thousands of batches kept alive?"
            )
        self._fresh.append((offset, size))
        return offset

    def _fit_promised(self, nbytes: int, wanted: int) -> tuple[int, int] | None:
        """A promised block that was let go. Worth waiting for, for a part of what new pages would cost."""
        found = _fit(self._promised, wanted)
        if found is None:
            return None
        deadline = time.monotonic() + nbytes / _WAIT_BYTES_PER_SECOND
        while not self.mapping.was_let_go(found[1]):
            if time.monotonic() > deadline:
                self._promised.append(found)
                return None
            time.sleep(_GLANCE)
        return found

    def empty_array(self, shape: tuple[int, ...], typestr: str, nbytes: int) -> Array | None:
        """An uninitialised array in a block; None where a block is not worth it."""
        if nbytes < SMALLEST or process_id.current() != self._pid:
            return None
        with self._lock:
            offset, start = self._cut(nbytes)
            address, _, memory = self._reached[offset]
            hold = _Hold(address + start - offset, memory, shape, typestr, offset, self._dropped)
            self._holds.setdefault(offset, []).append(weakref.ref(hold))
            self._left.pop(offset, None)
        return np.asarray(hold)

    def _cut(self, nbytes: int) -> tuple[int, int]:
        """A block's offset, and that of `nbytes` in it."""
        if not self.together:
            offset, _ = self.take(nbytes)
            return offset, offset
        rest = self._rest
        if rest is None or rest[2] - rest[1] < nbytes:
            offset, size = self.take(max(nbytes + _SLACK, self.expected))
            rest = offset, offset, offset + size
        block, start, end = rest
        self._rest = block, min(start + device_aligned(nbytes), end), end
        self._cuts[block] = start + nbytes - block
        return block, start

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """The same as a tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        typestr = TYPESTR.get(dtype)
        if typestr is not None:
            array = self.empty_array(shape, typestr, nbytes)
            return None if array is None else torch.from_numpy(array)
        array = self.empty_array((nbytes,), "|u1", nbytes)
        return None if array is None else torch.from_numpy(array).view(dtype).view(shape)

    def block_at(self, address: int) -> tuple[int, int] | None:
        """The block (offset, size) of this task in which an address lies, if any."""
        with self._lock:
            place = bisect_right(self._addresses, (address, self.mapping.length)) - 1
            if place < 0:
                return None
            start, offset = self._addresses[place]
            return (offset, self._open[offset]) if address < start + self._reached[offset][1] else None

    def address(self, offset: int) -> int:
        """Where an open block lies in this process."""
        with self._lock:
            return self._reached[offset][0]

    def cut(self, block: int) -> int:
        """Bytes of a block, from its start, that results of this task or kept ones were cut out of."""
        with self._lock:
            return self._cuts.get(block, 0)

    def streams(self, nbytes: int) -> bool:
        """Whether pieces of `nbytes` are better written to a block past the caches."""
        return self._large and nbytes >= nontemporal.SMALLEST_PIECE

    def write(self, offset: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` from an address elsewhere into the arena."""
        process_id.stay_in(self._pid)
        if not self.mapping.whole:
            self.mapping.write(offset, (ctypes.c_char * nbytes).from_address(source))
        elif self.streams(nbytes):
            nontemporal.copy(self.mapping.base + offset, [source], nbytes)
        else:
            ctypes.memmove(self.mapping.base + offset, source, nbytes)

    @property
    def untouched(self) -> bool:
        """Whether no block is at hand: a task that uses none has nothing to ship, to return or to tell."""
        with self._lock:  # a thread of the dataset may be taking a promised block
            return not (self._open or self._idle or self._promised or self._fresh or self._dropped)

    def ship(self, used: Sequence[int]) -> None:
        """The batch lies in the blocks at `used`: from here on they are not given out again."""
        with self._lock:
            self._shipping = frozenset(used)

    def held(self) -> list[int]:
        """Called when the worker has dropped its own references to the batch.

        Returns:
            The offsets of shipped blocks that user code still looks at: they must be shipped in a copy.
        """
        with self._lock:
            self._onlookers.reap()
            return [offset for offset in self._shipping if self._is_held(offset)]

    def _is_held(self, offset: int) -> bool:
        if any(hold() is not None for hold in self._holds.get(offset, ())):
            return True
        # Not until now: children overlap, and what the first one looks at, the next ones do not.
        left = self._left.setdefault(offset, moment())
        return self._onlookers.saw(self._opened[offset], left)

    def finish(self, used: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """The task is answered with the blocks at `used`.

        Returns:
            The blocks (offset, size) that the consumer has not heard of, and the offsets of blocks that it
            gets back empty. Blocks that user code holds stay here until they are dropped.
        """
        with self._lock:
            self._shipping = frozenset()
            self._large = sum([self._asked[offset] for offset in used]) >= self._stream_from
            for offset in used:
                self._close(offset)
            self._reclaim()
            returned = [offset for _, offset in self._idle + self._promised]
            self._idle.clear()
            self._promised.clear()
            fresh, self._fresh = self._fresh, []
            return fresh, returned

    def _reclaim(self) -> None:
        """Blocks that nobody holds can be written to again, those of the batch too."""
        self._rest = None
        self._dropped.clear()
        self._onlookers.reap()
        for offset in [offset for offset in self._open if not self._is_held(offset)]:
            self._idle.append((self._close(offset), offset))
        self._idle.sort()
        self._cuts = {offset: end for offset, end in self._cuts.items() if offset in self._open}

    def _collect(self) -> None:
        """Blocks that user code dropped can be written to again."""
        while self._dropped:
            offset = self._dropped.popleft()
            if offset in self._holds and offset not in self._shipping and not self._is_held(offset):
                self._idle.append((self._close(offset), offset))
                self._cuts.pop(offset, None)
                if self._rest is not None and self._rest[0] == offset:
                    self._rest = None
        self._idle.sort()


def _fit(blocks: list[tuple[int, int]], wanted: int, any_size: bool = False) -> tuple[int, int] | None:
    """Take the first block (size, offset) that is large enough, and not more than twice as large."""
    for at, (size, _) in enumerate(blocks):
        if wanted <= size and (any_size or size <= 2 * wanted):
            return blocks.pop(at)
    return None


_current: Allocator | None = None


def install(allocator: Allocator | None) -> None:
    """Make `allocator` the one that `empty` and the collate functions of this process use."""
    global _current
    _current = allocator


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor that travels to the consumer without a copy.

    In a worker of this package a result of 64 KiB or more lies in shared memory: when it (or a view of
    it) is part of the batch, it is handed over where it is. Anywhere else, and for smaller results, this
    is `torch.empty`.

    Args:
        shape: the sizes.
        dtype: torch's default dtype if None.

    Returns:
        A contiguous CPU tensor, its memory its own.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    tensor = None if _current is None else _current.empty(sizes, dtype)
    return torch.empty(sizes, dtype=dtype) if tensor is None else tensor


def out_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """`empty` for collate functions: None where they should allocate as they always do."""
    return None if _current is None else _current.empty(shape, dtype)


def out_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
    """The same as an array."""
    if _current is None:
        return None
    return _current.empty_array(shape, dtype.str, math.prod(shape) * dtype.itemsize)


def streams(nbytes: int) -> bool:
    """Whether pieces of `nbytes` are better written past the caches to what the functions above gave out."""
    return _current is not None and _current.streams(nbytes)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where an array's first element lies."""
    return int(array.__array_interface__["data"][0])
