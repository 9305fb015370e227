"""The shared memory of one pool of workers: one memfd, its mapping, and the leases of what users reference.

Runs in the consumer (`Arena`, `Lease`) and in its workers (`Mapping`). The pool and the worker's allocator
decide who may use a block; this module only knows addresses.

The memfd is sparse: it is as long as all that its blocks could ever take, and costs the pages that were
written. So every process maps it once, growing takes no coordination, and there is only one descriptor. Where
a limit of the address space (`ulimit -v`) leaves no room for that, each process maps the blocks that it reads
or writes, one by one, for as long as it does. Each worker makes new blocks in a part of the range that is its
own. The memory of a memfd is not bound by the size of /dev/shm, has no name, and goes with its last holder.

A finalizer may run on any thread, at any moment. So that of a lease only appends to a queue. Once the loader
is closed, that queue is not read any more. What is left of the arena then is the blocks that users hold: no
descriptor, and no other addresses. The dying lease gives back the pages and the addresses of its own block,
to which there is no other way any more.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from multiprocessing import reduction
from typing import Any

import numpy as np

from fastq_loader.memory.blocks import PAGE, SMALLEST
from fastq_loader.memory.forked_children import ForkedChildren, moment
from fastq_loader.system import calls, pages, process_id

AVAILABLE = calls.AVAILABLE

#: Length of an arena: four times the machine's memory. So all of the memory can be in batches that a user
#: keeps, also where some workers make more of them than others. At most 4 TiB: x86-64 gives a process 128 TiB
#: for all the loaders that are open at a time.
_OVERCOMMIT = 4
_LARGEST = 4 << 40
_SMALLEST = 1 << 20  # has room for the tables
#: It is mapped as a whole where that takes at most a quarter of RLIMIT_AS, which is not there for the arena
#: alone. Else it is at most 16 times as long as the limit: its tables, which are mapped, take 1/512 of that.
_SHARE, _BEYOND = 4, 16

#: Words of the claim table, see `ipc.claim_table`.
CLAIMS = 1 << 15


class Mapping:
    """A memfd in this process's memory, shared and writable. Where it arrives in another process (one that is
    spawned, or comes from a fork server), it is mapped there.

    Args:
        fd: the memfd; it stays the caller's, and open.
        length: its bytes.
        regions: equal parts that the range is cut into, one for each worker.
        whole: map all of it. Else parts are mapped while they are in use, see `reach`.

    Attributes:
        base: address of its first byte, if it is mapped as a whole.
        memory: its bytes, if it is mapped as a whole.
        words: two for each block, see `is_released`.
        claims: the table that says who loads which batch, in 64-bit words.

    Raises:
        OSError: there is not enough address space.
    """

    def __init__(self, fd: int, length: int, regions: int, whole: bool = True) -> None:
        self.length = length
        self.whole = whole
        self.fd = fd
        self._regions = regions
        # At the end of the range: two words for every possible start of a block (see `is_released`), claims.
        table = length // PAGE * PAGE - CLAIMS * 8
        words = (table - length // SMALLEST * 8) // PAGE * PAGE
        self._region = words // regions // SMALLEST * SMALLEST
        first = 0 if whole else words  # the tables are always mapped
        self.piece = calls.Piece(fd, first, length - first)
        mapped = calls.view(self.piece.address, length - first)
        self.base = self.piece.address if whole else 0
        self.memory = mapped if whole else memoryview(b"")
        self.words = mapped[words - first : table - first].cast("I")
        self.claims = mapped[table - first : table - first + CLAIMS * 8].cast("Q")

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (reduction.DupFd(self.fd), self.length, self._regions, self.whole)

    def region(self, worker: int) -> tuple[int, int]:
        """Start and end, in bytes, of the part in which `worker` makes new blocks."""
        return worker * self._region, (worker + 1) * self._region

    def reach(self, offset: int, nbytes: int) -> tuple[int, calls.Piece]:
        """The address of some bytes in this process, and what keeps it valid.

        Raises:
            MemoryError: there is not enough address space.
        """
        if self.whole:
            return self.base + offset, self.piece
        piece = calls.Piece(self.fd, offset, nbytes)
        return piece.address, piece

    def read(self, offset: int, nbytes: int) -> memoryview | bytes:
        """Some bytes, to be copied at once."""
        if self.whole:
            return self.memory[offset : offset + nbytes]
        address, _piece = self.reach(offset, nbytes)
        return calls.view(address, nbytes).tobytes()

    def write(self, offset: int, data: Any) -> None:
        """Copy bytes in."""
        if self.whole:
            self.memory[offset : offset + len(data)] = data
        else:
            address, _piece = self.reach(offset, len(data))
            calls.view(address, len(data))[:] = data

    # The words of a block hold the number of its last lease, and the number of the last lease that died.
    # The consumer writes them, and the worker to which the block is promised reads them. Numbers rather
    # than a flag, because a finalizer may be held up on its thread until after the block's next lease.

    def is_released(self, offset: int) -> bool:
        """Whether the last lease on a block has died."""
        at = offset // SMALLEST * 2
        return self.words[at] == self.words[at + 1]

    def punch(self, offset: int, size: int) -> None:
        """Give pages back to the system; the range reads as zeros and can be written again."""
        if size > 0:
            calls.punch_hole(self.fd, offset, size)

    def populate(self, offset: int, size: int) -> None:
        """Put the pages of a range into memory, and into this process's page table, if it is mapped whole."""
        if self.whole:
            self.piece.populate(self.base + offset, size)

    # The end. No view is used any more but by a finalizer that was held up, see `mark_released`.

    def unmap_but(self, held: set[int]) -> None:
        """Unmap all but the blocks at these offsets. May be called again."""
        for view in (self.memory, self.words, self.claims):
            view.release()
        for offset in self.piece.parts.keys() - held:
            self.piece.unmap(offset, pages=False)


def _arrived(duplicate: Any, *arguments: Any) -> Mapping:
    return Mapping(duplicate.detach(), *arguments)


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
            forked child may see the block, else zeros.
        children: those that were forked while a block was leased.
        retired: the loader was closed.

    Raises:
        OSError: no memfd, or not enough address space.
    """

    def __init__(self, regions: int, whole: bool = False) -> None:
        self.pid = process_id.current()
        self.fd = calls.memfd_create("fastq_loader")
        self.mapping = self._map_largest(regions, whole)
        # No process can cut the memory short while another one uses it (that would be SIGBUS).
        calls.seal_length(self.fd)
        self.released: deque[tuple[int, int, int]] = deque()
        self.retired = False
        self.children = ForkedChildren()  # its count: leases that have not been read from `released`
        self._number = 0  # of the last lease
        self._quarantine: list[tuple[int, int, int]] = []  # of `released`: what a forked child may see

    def _map_largest(self, regions: int, whole: bool) -> Mapping:
        machine = pages.installed()
        limit = calls.limit_of("AS")
        length = min(machine * _OVERCOMMIT, _LARGEST, calls.limit_of("FSIZE") or _LARGEST)
        whole = whole or limit is None or length <= limit // _SHARE
        if limit is not None:
            length = min(length, limit // _SHARE if whole else limit * _BEYOND)
        length = max(length, _SMALLEST)
        while True:
            length = length // PAGE * PAGE
            try:
                os.ftruncate(self.fd, length)
                return Mapping(self.fd, length, regions, whole)
            except (OSError, MemoryError) as error:
                length //= 2  # the address space is full: take what there is
                if length < _SMALLEST:
                    text = f"workers need at least {_SMALLEST:,} bytes of shared memory: {error}; raise the"
                    advice = (
                        "limit of files (ulimit -f) or of address space (ulimit -v), or use num_workers=0"
                    )
                    raise OSError(errno.ENOMEM, f"{text} {advice}") from error

    def lease(self, block: tuple[int, int], start: int, nbytes: int) -> np.ndarray[Any, Any]:
        """A writable array of bytes in a block (offset, size), `start` bytes from where that starts.

        The block stays in use until the array and everything made of it are gone.

        Raises:
            MemoryError: there is not enough address space; the block is to be abandoned.
        """
        offset, mapping = block[0], self.mapping
        if mapping.whole:  # as `reach` does
            address, memory = mapping.base + offset, mapping.piece
        else:
            address, memory = mapping.reach(offset, start + nbytes)
        self.children.owned += 1
        number = self._number = self._number % 0xFFFFFFFF + 1  # 32 bits; 0 is what new memory reads
        mapping.words[offset // SMALLEST * 2] = number
        interface = {"version": 3, "data": (address + start, False), "shape": (nbytes,), "typestr": "|u1"}
        return np.asarray(Lease(self, number, offset, memory, interface))

    def abandon(self, offset: int) -> None:
        """A block that should be leased is not: it counts as released."""
        self.children.owned += 1
        self.released.append((offset, 0, 0))

    def released_blocks(self) -> list[int]:
        """Offsets of the blocks whose last view died since the last call, and that no child may see."""
        free = []
        while self.released:
            offset, born, died = self.released.popleft()
            self.children.owned -= 1
            if died:
                self._quarantine.append((offset, born, died))
            else:
                free.append(offset)
        if self._quarantine:
            self.children.reap()
            entries, self._quarantine = self._quarantine, []
            for offset, born, died in entries:
                if self.children.may_see(born, died):
                    self._quarantine.append((offset, born, died))
                else:
                    free.append(offset)
        return free

    def retire(self, held: list[tuple[int, int]]) -> None:
        """The loader closes: all memory and all addresses go back to the system, but those of the blocks
        (offset, size) at `held`, whose leases will do it themselves when they die. May be called again when
        an interrupt cut it short."""
        mapping = self.mapping
        if not self.retired:
            mapping.piece.cut(held if mapping.whole else ())  # pieces are cut already
            self.retired = True
        # The user's threads go on meanwhile: what they dropped has no lease any more.
        dropped = {offset: bool(died) for offset, _, died in [*self.released, *self._quarantine]}
        if self.fd >= 0:
            start = 0
            for offset, size in [*sorted(held), (mapping.length, 0)]:
                if dropped.get(offset, True):  # else no child sees it
                    mapping.punch(start, offset - start)
                    start = offset + size
            mapping.unmap_but({offset for offset, _ in held} - dropped.keys())
            fd, self.fd = self.fd, -1
            os.close(fd)
        self.children.close()

    def __del__(self) -> None:
        # Retired arenas have closed it; this is for one whose engine was interrupted while it was made.
        if getattr(self, "fd", -1) >= 0 and self.pid == process_id.current():
            os.close(self.fd)


class Lease:
    """A reference to a block: lives as long as the last array or tensor over it.

    numpy's array interface makes this object the base of the array; `torch.from_numpy` keeps the array.
    """

    __slots__ = ("__array_interface__", "_arena", "_born", "_memory", "_number", "_offset")

    def __init__(
        self, arena: Arena, number: int, offset: int, memory: calls.Piece, interface: dict[str, Any]
    ) -> None:
        self.__array_interface__ = interface
        self._arena = arena
        self._number = number
        self._offset = offset
        self._memory = memory  # keeps the address valid
        self._born = moment()

    def __del__(self, process: Any = process_id) -> None:
        arena, offset = self._arena, self._offset
        if arena.pid != process.pid:
            return  # the parent's block: a forked child has nothing to give back
        died, children = moment(), arena.children
        seen = bool(children.alive) and children.may_see(self._born, died)
        if not arena.retired:
            arena.released.append((offset, self._born, died) if seen else (offset, 0, 0))
            if not seen:
                try:  # noqa: SIM105 - `suppress` takes three calls
                    arena.mapping.words[offset // SMALLEST * 2 + 1] = self._number
                except ValueError:  # the loader was closed meanwhile on another thread: it is not looked at
                    pass
        if arena.retired:  # or was, on another thread, and the queue is not read
            self._memory.unmap(self._offset, pages=not seen)
