"""The shared memory of one pool of workers: one memfd, its mapping, and the leases of what users look at.

Runs in the consumer (`Arena`, `Lease`) and in its workers (`Mapping`). Who may use a block is decided by
the ledger (`blocks`) and the worker's allocator; this module only knows addresses.

The memfd is sparse: it is as long as all that its blocks could ever take, and costs the pages that were
written. So everybody maps it once, growing takes no coordination, and one descriptor is all there is. Where
a limit of the address space (`ulimit -v`) leaves no room for that, everybody maps the blocks that it looks at
or writes to, each for as long. Each worker makes new blocks in a part of the range that is its own. memfd
memory is not bound by the size of /dev/shm, has no name, and goes with its last holder.

Leases follow rule 8: the finalizer appends to a queue. After the loader was closed nobody reads that
queue, and the dying lease gives its pages back to the system itself: one system call on addresses that
nobody else can reach any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from collections import deque
from typing import Any

import numpy as np

from fastq_loader.memory.forks import Onlookers, moment
from fastq_loader.memory.ledger import PAGE, SMALLEST
from fastq_loader.system import calls, process_id

AVAILABLE = calls.AVAILABLE

#: Length of an arena: four times the machine's memory, so that all of it fits in batches that a user keeps,
#: also when some workers make more of them than others. At most 4 TiB, because an arena stays mapped as long
#: as one of its batches is kept and x86-64 gives a process 128 TiB.
_OVERCOMMIT = 4
_LARGEST = 4 << 40
_SMALLEST = 64 << 20
#: It is mapped as a whole where that takes at most a quarter of RLIMIT_AS, which others live on too. Where it
#: does not, it is at most 16 times as long as the limit: its tables, which are mapped, take 1/512 of that.
_SHARE, _BEYOND = 4, 16
#: Part of RLIMIT_AS that may be taken by what is kept mapped for the next time.
_KEPT_SHARE = 32

#: Words of the table of claims, see `claims`.
CLAIMS = 1 << 15

# Not every Python knows the names of these; numbers from <asm-generic/mman-common.h>.
_AT_ONCE = 1 << 30  # bytes of one read
_MADV_DONTDUMP, _MADV_REMOVE, _MADV_POPULATE_WRITE = 16, 9, 23


class Mapping:
    """A memfd in this process's memory, shared and writable.

    Args:
        fd: the memfd; it stays the caller's, and open if it is not mapped as a whole.
        length: its bytes.
        regions: equal parts that the range is cut into, one for each worker.
        whole: map all of it. Else parts are mapped while somebody needs them, see `reach`.

    Attributes:
        base: address of its first byte, if it is mapped as a whole.
        memory: its bytes, if it is mapped as a whole.
        claims: the table of who loads which batch, 64-bit words.

    Raises:
        OSError: there is not enough address space.
    """

    def __init__(self, fd: int, length: int, regions: int, whole: bool = True) -> None:
        self.length = length
        self.whole = whole
        self._fd = fd
        # Parts (offset, bytes) that were needed of late: mapping them anew costs a fault for each page.
        self._mapped: dict[tuple[int, int], calls.Piece] = {}
        self._budget = 0 if whole else (calls.address_space_limit() or _LARGEST) // _KEPT_SHARE
        # At the end of the range two words for every possible start of a block: see `was_let_go`.
        table = length // PAGE * PAGE - CLAIMS * 8
        words = (table - length // SMALLEST * 8) // PAGE * PAGE
        self._region = words // regions // SMALLEST * SMALLEST
        first = 0 if whole else words  # the tables are always looked at
        self._map = mmap.mmap(fd, length - first, offset=first)
        self._map.madvise(_MADV_DONTDUMP)
        self._anchor = ctypes.c_char.from_buffer(self._map)  # keeps the address valid
        self.base = ctypes.addressof(self._anchor) if whole else 0
        mapped = memoryview(self._map)
        self.memory = mapped if whole else memoryview(b"")
        self._words = mapped[words - first : table - first].cast("I")
        self.claims = mapped[table - first : table - first + CLAIMS * 8].cast("Q")

    def region(self, worker: int) -> tuple[int, int]:
        """Start and end, in bytes, of the part in which `worker` makes new blocks."""
        return worker * self._region, (worker + 1) * self._region

    def reach(self, offset: int, nbytes: int) -> tuple[int, Any]:
        """The address of some bytes in this process, and what keeps it valid.

        Raises:
            MemoryError: there is not enough address space.
        """
        if self.whole:
            return self.base + offset, self
        piece = self._mapped.pop((offset, nbytes), None) or self._map_piece(offset, nbytes)
        if nbytes <= self._budget:
            self._mapped[offset, nbytes] = piece  # the newest
        return piece.address, piece

    def _map_piece(self, offset: int, nbytes: int) -> calls.Piece:
        kept = sum(length for _, length in self._mapped)
        while self._mapped and kept + nbytes > self._budget:
            oldest = next(iter(self._mapped))
            del self._mapped[oldest]
            kept -= oldest[1]
        try:
            return calls.Piece(self._fd, offset, nbytes)
        except MemoryError:
            if not self._mapped:
                raise
            self.forget()
            return calls.Piece(self._fd, offset, nbytes)

    def forget(self) -> None:
        """Keep nothing mapped that nobody needs now."""
        self._mapped.clear()

    def look(self, offset: int, nbytes: int) -> memoryview | bytes:
        """Some bytes, to be copied at once."""
        if self.whole:
            return self.memory[offset : offset + nbytes]
        return b"".join(
            os.pread(self._fd, min(_AT_ONCE, offset + nbytes - at), at)
            for at in range(offset, offset + nbytes, _AT_ONCE)
        )

    def write(self, offset: int, data: Any) -> None:
        """Copy bytes in."""
        if self.whole:
            self.memory[offset : offset + len(data)] = data
            return
        source = memoryview(data)
        while source:
            written = os.pwrite(self._fd, source, offset)
            source, offset = source[written:], offset + written

    # The words of a block hold the number of its last lease, and the number of the last lease that died.
    # The consumer writes them and the worker to which the block is promised reads them. Numbers rather
    # than a flag, because a finalizer may be held up on its thread until after the block's next lease.

    def leased(self, offset: int, number: int) -> None:
        self._words[offset // SMALLEST * 2] = number

    def let_go(self, offset: int, number: int) -> None:
        self._words[offset // SMALLEST * 2 + 1] = number

    def was_let_go(self, offset: int) -> bool:
        """Whether the last lease on a block has died."""
        at = offset // SMALLEST * 2
        return self._words[at] == self._words[at + 1]

    def punch(self, offset: int, size: int) -> None:
        """Give pages back to the system; the range reads as zeros and can be written again."""
        if size > 0 and self.whole:
            self._map.madvise(_MADV_REMOVE, offset, size)
        elif size > 0:
            calls.punch_hole(self._fd, offset, size)

    def populate(self, offset: int, size: int) -> None:
        """Make this process see the pages of a range, and have them be there."""
        with contextlib.suppress(OSError):  # Linux before 5.14: they come when they are looked at
            self._map.madvise(_MADV_POPULATE_WRITE, offset, size)


class Arena:
    """The consumer's side of the shared memory. Everything here runs on the consumer's thread, except
    the finalizers of leases, which run anywhere.

    Args:
        regions: number of workers.
        whole: map all of it, also where address space is scarce: a device reads blocks where they lie.

    Attributes:
        fd: the memfd, -1 once retired.
        mapping: where it is mapped.
        released: blocks whose last view died: offset, and the moments of the lease's birth and death if a
            forked child may look at it, else zeros.
        onlookers: the children that were forked while somebody looked at a block.
        retired: the loader was closed.

    Raises:
        OSError: no memfd, or not enough address space.
    """

    def __init__(self, regions: int, whole: bool = False) -> None:
        self.pid = process_id.current()
        self.fd = calls.memfd_create("fastq_loader")
        self.mapping = self._map_largest(regions, whole)
        # No process can cut the memory short under another one's feet (that would be SIGBUS).
        calls.seal_length(self.fd)
        self.released: deque[tuple[int, int, int]] = deque()
        self.retired = False
        self.onlookers = Onlookers()  # counts the leases that have not been heard to die
        self._number = 0  # of the last lease
        # Blocks that a forked child may look at, as in `released`.
        self._quarantine: list[tuple[int, int, int]] = []

    def _map_largest(self, regions: int, whole: bool) -> Mapping:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = calls.address_space_limit()
        length = min(machine * _OVERCOMMIT, _LARGEST)
        if limit is not None and whole:
            length = min(length, limit // _SHARE)
        elif limit is not None and length > limit // _SHARE:
            length = min(length, limit * _BEYOND)
        else:
            whole = True
        length = max(length, _SMALLEST) // PAGE * PAGE
        while True:
            try:
                os.ftruncate(self.fd, length)
                return Mapping(self.fd, length, regions, whole)
            except (OSError, OverflowError, ValueError):
                # RLIMIT_FSIZE, or the address space is full: take what there is.
                length = length // 2 // PAGE * PAGE
                if length < _SMALLEST:
                    raise

    def lease(
        self,
        block: tuple[int, int],
        delta: int,
        shape: tuple[int, ...],
        typestr: str,
        strides: tuple[int, ...] | None = None,
    ) -> np.ndarray[Any, Any]:
        """A writable array over a block (offset, size), from `delta` bytes into it.

        The block stays in use until the array and everything made of it are gone.

        Raises:
            MemoryError: there is not enough address space; the block is to be abandoned.
        """
        at = block[0] + delta
        nbytes = 0 if self.mapping.whole else _extent(shape, typestr, strides)
        address, memory = self.mapping.reach(at, nbytes)
        self.onlookers.count += 1
        self._number = self._number % 0xFFFFFFFF + 1  # 32 bits; 0 is what new memory reads
        self.mapping.leased(block[0], self._number)
        return np.asarray(Lease(self, self._number, block, address, memory, shape, typestr, strides))

    def abandon(self, offset: int) -> None:
        """A block that should be leased is not: it counts as released."""
        self.onlookers.count += 1
        self.released.append((offset, 0, 0))

    def released_blocks(self) -> list[int]:
        """Offsets of the blocks whose last view died since the last call, and that no child looks at."""
        free = []
        while self.released:
            offset, born, died = self.released.popleft()
            self.onlookers.count -= 1
            if died:
                self._quarantine.append((offset, born, died))
            else:
                free.append(offset)
        if self._quarantine:
            self.onlookers.reap()
            entries, self._quarantine = self._quarantine, []
            for offset, born, died in entries:
                if self.onlookers.saw(born, died):
                    self._quarantine.append((offset, born, died))
                else:
                    free.append(offset)
        return free

    def retire(self, held: list[tuple[int, int]]) -> None:
        """The loader closes: all pages go back to the system but those of the blocks (offset, size) at
        `held`, whose leases will do it themselves when they die. May be called again when an interrupt cut it
        short."""
        self.retired = True
        if self.fd >= 0:
            start = 0
            for offset, size in sorted(held):
                self.mapping.punch(start, offset - start)
                start = offset + size
            self.mapping.punch(start, self.mapping.length - start)
            self.mapping.forget()
            fd, self.fd = self.fd, -1
            os.close(fd)
        self.onlookers.close()

    def __del__(self) -> None:
        # Retired arenas have closed it; this is for one whose engine was interrupted while it was made.
        if getattr(self, "fd", -1) >= 0 and self.pid == process_id.current():
            os.close(self.fd)


def _extent(shape: tuple[int, ...], typestr: str, strides: tuple[int, ...] | None) -> int:
    """Bytes from the first element of an array to the end of its last one."""
    itemsize = np.dtype(typestr).itemsize
    if strides is None or 0 in shape:
        return math.prod(shape) * itemsize
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + itemsize


class Lease:
    """Somebody looks at a block: lives as long as the last array or tensor over it.

    numpy's array interface makes this object the base of the array; `torch.from_numpy` keeps the array.
    """

    __slots__ = (
        "__array_interface__",
        "__weakref__",
        "_arena",
        "_born",
        "_memory",
        "_number",
        "_offset",
        "_size",
    )

    def __init__(
        self,
        arena: Arena,
        number: int,
        block: tuple[int, int],
        address: int,
        memory: Any,
        shape: tuple[int, ...],
        typestr: str,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self._offset, self._size = block
        self._memory = memory  # keeps the address valid
        self._arena = arena
        self._number = number
        self._born = moment()
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
        }

    def __del__(self, getpid: Any = process_id.current) -> None:
        arena = self._arena
        if arena.pid != getpid():
            return  # the parent's block: a forked child has nothing to give back
        died = moment()
        seen = arena.onlookers.saw(self._born, died)  # by a forked child that may still look at it
        if not arena.retired:
            arena.released.append((self._offset, self._born, died) if seen else (self._offset, 0, 0))
            if not seen:
                arena.mapping.let_go(self._offset, self._number)
        elif not seen and arena.mapping.whole:
            arena.mapping.punch(self._offset, self._size)
        elif not seen:
            self._memory.punch()
