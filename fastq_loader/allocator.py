"""The worker's side of the shared memory: which blocks a batch under construction may be written to.

Runs in a worker process. During a task the worker owns the blocks granted with it, and those it makes
itself in its own part of the arena when none fits. With the answer all of them pass to the consumer,
except blocks that user code still looks at: a dataset that keeps a tensor it allocated here keeps its
block, and the batch is shipped in a copy.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastq_loader.arena import Mapping
from fastq_loader.blocks import SMALLEST, size_class

#: New pages are filled at 1.3 GB/s (design.md, "Why this wins"): waiting takes at most a quarter of that.
_WAIT_BYTES_PER_SECOND = 5e9
_GLANCE = 20e-6  # seconds between two looks at a flag


class _Hold:
    """User code looks at a block: the base of the array that `Allocator.empty` gave out."""

    __slots__ = ("__array_interface__", "__weakref__", "_dropped", "_offset")

    def __init__(self, address: int, nbytes: int, offset: int, dropped: deque[int]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
        }
        self._offset = offset
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped.append(self._offset)


class Allocator:
    """Blocks of one worker.

    Args:
        mapping: the arena in this process.
        worker: the worker's id, which names its part of the arena.
    """

    def __init__(self, mapping: Mapping, worker: int) -> None:
        self.mapping = mapping
        self._next, self._end = mapping.region(worker)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # a dataset may load with threads
        self._idle: list[tuple[int, int]] = []  # blocks (size, offset) to write to, by size
        self._promised: list[tuple[int, int]] = []  # the same, once their flag is up
        self._open: dict[int, int] = {}  # offset → size of the blocks in use by this task
        self._offsets: list[int] = []  # of the open blocks, ascending
        self._holds: dict[int, weakref.ref[_Hold]] = {}  # offset → what user code may look through
        self._dropped: deque[int] = deque()
        self._fresh: list[tuple[int, int]] = []  # made, and unknown to the consumer

    def begin(self, grants: Sequence[tuple[int, int]], promises: Sequence[tuple[int, int]] = ()) -> None:
        """A task starts with these blocks (offset, size), and may use those promised when they are let go."""
        self._promised = [(size, offset) for offset, size in promises]
        self._idle = sorted([*self._idle, *((size, offset) for offset, size in grants)])

    def take(self, nbytes: int) -> tuple[int, int]:
        """A block (offset, size) of at least `nbytes` for this task.

        Raises:
            MemoryError: the worker's part of the arena is used up.
        """
        with self._lock:
            if self._dropped:
                self._collect()
            wanted = size_class(nbytes)
            found = _fit(self._idle, wanted) or self._fit_promised(nbytes, wanted)
            if found is not None:
                size, offset = found
            else:
                size, offset = wanted, self._next
                if offset + size > self._end:
                    raise MemoryError(
                        f"{nbytes} bytes do not fit into what is left of this worker's part of the shared "
                        "memory; are thousands of batches kept alive?"
                    )
                self._next += size
                self._fresh.append((offset, size))
            self._open[offset] = size
            insort(self._offsets, offset)
            return offset, size

    def _fit_promised(self, nbytes: int, wanted: int) -> tuple[int, int] | None:
        """A promised block that was let go. Worth waiting for, for a part of what new pages would cost."""
        found = _fit(self._promised, wanted)
        if found is None:
            return None
        flag = self.mapping.flag(found[1])
        deadline = time.monotonic() + nbytes / _WAIT_BYTES_PER_SECOND
        while not self.mapping.memory[flag]:
            if time.monotonic() > deadline:
                self._promised.append(found)
                return None
            time.sleep(_GLANCE)
        return found

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """An uninitialised tensor in a block of its own; None where a block is not worth it."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST or os.getpid() != self._pid:
            return None
        offset, _ = self.take(nbytes)
        hold = _Hold(self.mapping.base + offset, nbytes, offset, self._dropped)
        self._holds[offset] = weakref.ref(hold)
        return torch.from_numpy(np.asarray(hold)).view(dtype).view(tuple(shape))

    def block_at(self, address: int) -> tuple[int, int] | None:
        """The block (offset, size) of this task in which an address lies, if any."""
        at = address - self.mapping.base
        if not 0 <= at < self.mapping.length:
            return None
        place = bisect_right(self._offsets, at) - 1
        if place < 0:
            return None
        offset = self._offsets[place]
        size = self._open[offset]
        return (offset, size) if at < offset + size else None

    def settle(self, used: Sequence[int]) -> list[int]:
        """The batch lies in the blocks at `used`, and the worker has dropped its own references to it.

        Returns:
            The offsets among them that user code still looks at: their batch must be shipped in a copy.
        """
        held = []
        for offset in used:
            hold = self._holds.get(offset)
            if hold is not None and hold() is not None:
                held.append(offset)
            else:
                self._holds.pop(offset, None)
        return held

    def write(self, offset: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` from an address into the arena."""
        ctypes.memmove(self.mapping.base + offset, source, nbytes)

    def finish(self, used: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """The task is answered with the blocks at `used`.

        Returns:
            The blocks (offset, size) that the consumer has not heard of, and the offsets of blocks that it
            gets back empty. Blocks that user code holds stay here until they are dropped.
        """
        with self._lock:
            for offset in used:
                del self._open[offset]
                self._holds.pop(offset, None)
            self._collect()
            for offset in [o for o in self._open if o not in self._holds]:
                self._idle.append((self._open.pop(offset), offset))
            self._offsets = sorted(self._open)
            returned = [offset for _, offset in self._idle + self._promised]
            self._idle.clear()
            self._promised.clear()
            fresh, self._fresh = self._fresh, []
            return fresh, returned

    def _collect(self) -> None:
        """Blocks that user code dropped can be written to again."""
        while self._dropped:
            offset = self._dropped.popleft()
            hold = self._holds.get(offset)
            if hold is not None and hold() is None:  # else it was shipped, or has a new hold
                del self._holds[offset]
                self._idle.append((self._open.pop(offset), offset))
                self._offsets.remove(offset)
        self._idle.sort()


def _fit(blocks: list[tuple[int, int]], wanted: int) -> tuple[int, int] | None:
    """Take the first block (size, offset) that is large enough, and not more than twice as large."""
    for at, (size, _) in enumerate(blocks):
        if wanted <= size <= 2 * wanted:
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


def out_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """`empty` for collate functions: None where they should allocate as they always do."""
    return None if _current is None else _current.empty(shape, dtype)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where an array's first element lies."""
    return int(array.__array_interface__["data"][0])
