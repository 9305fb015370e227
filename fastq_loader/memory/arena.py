"""The shared memory of one pool of workers: one memfd, its mapping, and the leases of users.

Runs in the consumer (`Arena`, `Lease`) and in its workers (`Mapping`). The pool and the worker's allocator
decide how blocks are used; this module only handles addresses.

The memfd is sparse: it has room for all blocks that could ever exist, and costs only the pages that were
written. So every process maps it once, growing takes no coordination, and there is only one descriptor. Each
worker makes new blocks in its own part of the range. The memory of a memfd is not limited by the size of
/dev/shm, has no name, and is freed with its last user.

A lease may die on any thread, at any moment. Its end is then appended to a queue by C code: signal handlers
run where a finalizer in Python begins, and what they raise there is lost. Once the loader is closed, nobody
reads that queue any more. Then the arena consists of the blocks that users reference, without a descriptor
and without other addresses, and each dying lease gives back the pages and the addresses of its own block.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections import deque
from multiprocessing import reduction
from typing import Any

import numpy as np

from fastq_loader.memory import forked_children
from fastq_loader.memory.blocks import PAGE, SMALLEST
from fastq_loader.system import calls, process_id
from fastq_loader.system.torch_names import untraced

AVAILABLE = calls.AVAILABLE

_SMALLEST = 1 << 20  # bytes of an arena: it has room for the claim table
#: Number of words of the claim table, see `ipc.claim_table`.
CLAIMS = 1 << 15


class Mapping:
    """A memfd in this process's memory, shared and writable. In another process to which it is sent (a
    spawned one, or one of a fork server), it is mapped on arrival.

    Args:
        fd: the memfd; it belongs to the caller, and stays open.
        length: its length in bytes.
        regions: number of equal parts of the range, one for each worker.

    Attributes:
        mmap: keeps the addresses valid.
        base: address of its first byte.
        memory: its bytes.
        end: end of the last part, in bytes. Tables follow.
        claims: the claim table, in 64-bit words.

    Raises:
        MemoryError: there is not enough address space.
    """

    def __init__(self, fd: int, length: int, regions: int) -> None:
        self.length = length
        self.fd = fd
        self._regions = regions
        table = length // PAGE * PAGE - CLAIMS * 8  # at the end of the range
        self._region = table // regions // SMALLEST * SMALLEST
        self.end = regions * self._region
        self.mmap = calls.MmapRegion(fd, length)
        self.base: int = self.mmap.address
        self.memory = calls.view(self.base, length)
        self.claims = self.memory[table : table + CLAIMS * 8].cast("Q")

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (reduction.DupFd(self.fd), self.length, self._regions)

    def region(self, worker: int) -> tuple[int, int]:
        """Start and end, in bytes, of the part in which `worker` makes new blocks."""
        return worker * self._region, (worker + 1) * self._region

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return some bytes, to be copied at once."""
        return self.memory[offset : offset + nbytes]

    def write(self, offset: int, data: Any) -> None:
        """Copy bytes in."""
        self.memory[offset : offset + len(data)] = data

    def punch(self, offset: int, size: int) -> None:
        """Give pages back to the system; the range then reads as zeros and can be written again."""
        if size > 0:
            calls.punch_hole(self.fd, offset, size)

    def populate(self, offset: int, size: int) -> None:
        """Put the pages of a range into memory, and into this process's page table."""
        self.mmap.populate(offset, size)

    def unmap_but(self, held: set[int]) -> None:
        """Unmap everything except the blocks at these offsets. May be called again. The views are not used
        any more."""
        for view in (self.memory, self.claims):
            view.release()
        for offset in self.mmap.parts.keys() - held:
            self.mmap.unmap(offset, pages=False)


def _arrived(duplicate: Any, *arguments: Any) -> Mapping:
    return Mapping(duplicate.detach(), *arguments)


@untraced
class Arena:
    """The consumer's side of the shared memory. Everything here runs on the consumer's thread, except what
    follows the death of a lease, which comes on any thread.

    Args:
        regions: number of workers.

    Attributes:
        fd: the memfd, -1 once retired.
        mapping: its mapping in this process.
        released: the ends of leases that died, with the last view of their block.
        leased: offset → end of the leases that `released_blocks` has not returned yet.
        retired: the loader was closed.

    Raises:
        OSError: there is no memfd, or not enough address space.
    """

    def __init__(self, regions: int) -> None:
        self.pid = process_id.current()
        self.fd = calls.memfd_create("fastq_loader")
        length = max(min(calls.arena_room()), _SMALLEST) // PAGE * PAGE
        try:
            os.ftruncate(self.fd, length)
            self.mapping = Mapping(self.fd, length, regions)
        except (OSError, MemoryError) as error:
            raise OSError(
                errno.ENOMEM,
                f"workers need {length:,} bytes of shared memory: {error}; raise the limit of files "
                "(ulimit -f) or of address space (ulimit -v), or use num_workers=0",
            ) from error
        # Prevent every process from truncating the memory while another one uses it (that would be SIGBUS).
        calls.seal_length(self.fd)
        self.released: deque[_End] = deque()
        self.retired = False
        self.leased: dict[int, _End] = {}
        forked_children.owners[id(self)] = self

    def lease(self, block: tuple[int, int], start: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Return a writable array of bytes in a block (offset, size), beginning `start` bytes after the
        block's start.

        The block stays in use until the array and everything derived from it are gone.
        """
        offset = block[0]
        data = self.mapping.base + offset + start, False
        interface = {"version": 3, "data": data, "shape": (nbytes,), "typestr": "|u1"}
        lease = Lease(self, interface)
        self.leased[offset] = end = _End(lease, self.released.append)
        end.offset, end.born = offset, forked_children.now
        return np.asarray(lease)

    def released_blocks(self) -> list[int]:
        """Offsets of the blocks whose last view died, and that no child may see any more. The others stay in
        `released`."""
        if not self.released:
            return []
        released = [self.released.popleft() for _ in range(len(self.released))]
        seen = forked_children.seen_before()
        self.released += [end for end in released if end.born < seen]
        free = [end.offset for end in released if end.born >= seen]
        for offset in free:
            del self.leased[offset]
        return free

    def retire(self, held: list[tuple[int, int]]) -> None:
        """Give all memory and all addresses back to the system when the loader closes, except the blocks
        (offset, size) in `held`: their leases do that when they die. May be called again after an
        interrupt."""
        mapping = self.mapping
        if not self.retired:
            mapping.mmap.cut(held)
            self.retired = True
        if self.fd >= 0:
            for end in list(self.leased.values()):
                lease = end()
                if lease is not None:  # the old end waits in the queue, or dies
                    self.leased[end.offset] = later = _End(lease, self._give_back)
                    later.offset, later.born = end.offset, end.born
            start = 0
            for offset, size in [*sorted(held), (mapping.length, 0)]:
                mapping.punch(start, offset - start)
                start = offset + size
            mapping.unmap_but({offset for offset, _ in held})
            fd, self.fd = self.fd, -1
            os.close(fd)
            forked_children.seen_before()  # closes the pipes of workers, which have ended
        while self.released:  # children see these, or the user's threads have dropped them meanwhile
            self._give_back(self.released.popleft())

    def _give_back(self, end: _End) -> None:
        """Give a block that was held when the loader closed back to the system, when its lease has died. May
        be called on any thread, and twice."""
        self.leased.pop(end.offset, None)
        if self.pid == process_id.pid:  # a forked child has nothing to give back
            self.mapping.mmap.unmap(end.offset, pages=end.born >= forked_children.seen_before())

    def __del__(self) -> None:
        # Retired arenas have closed it; this one's pool was interrupted while it was made.
        if getattr(self, "fd", -1) >= 0 and self.pid == process_id.current():
            os.close(self.fd)


@untraced
class Lease:
    """A reference to a block, which lives as long as the last array or tensor over it.

    numpy's array interface makes this object the base of the array; `torch.from_numpy` keeps the array.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_arena")

    def __init__(self, arena: Arena, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface
        self._arena = arena  # keeps the address valid


class _End(weakref.ref[Lease]):
    """Is called back when a lease dies.

    Attributes:
        offset: where the lease's block begins.
        born: the moment of the lease's birth, see `forked_children`.
    """

    __slots__ = ("born", "offset")

    offset: int
    born: int
