"""Host memory that copies to the device read: blocks locked in place, bounce buffers, or neither.

Pure: a backend locks the pages. Used in the consumer, on the thread that calls `next()`.

A copy from page-locked memory runs by itself, as fast as the bus allows; from pageable memory the driver
copies in steps, on the caller's thread. Workers' blocks are locked in place ("register"), each when the first
batch arrives in it; afterwards this costs nothing, since blocks are reused. Each block is one registration,
so that no copy straddles two. Where registration fails, a batch is copied from where it is ("pageable"): to
copy it to page-locked buffers first was measured to be slower. Without workers batches are
packed into buffers anyway, which are page-locked ("bounce") or not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastq_loader.device.copies import Copies, Copy, Memory
from fastq_loader.errors import PinFailed, PinFallback, warn_user

if TYPE_CHECKING:
    from fastq_loader.device.accelerator import TorchBackend
    from fastq_loader.memory.arena import Mapping
    from fastq_loader.statistics.counters import StagingCounters

#: Values of `statistics().staging.pin`.
REGISTER, BOUNCE, PAGEABLE = "register", "bounce", "pageable"


class PinPolicy:
    """Whether memory is page-locked. One for each loader, so that later pools do not try what failed.

    Args:
        statistics: the loader's; its `pin` says how memory is locked from here on.
    """

    def __init__(self, statistics: StagingCounters) -> None:
        self.statistics = statistics
        self._proven = False
        self._warning = ""

    def choose(self, backend: TorchBackend, in_blocks: bool) -> None:
        """Choose how the memory of a new pool is locked. Before blocks are registered for the first time,
        check that copies from registered memory arrive.

        Args:
            in_blocks: whether its batches lie in blocks, which can be registered.
        """
        statistics = self.statistics
        if statistics.pin == PAGEABLE:
            return
        if not in_blocks:
            statistics.pin = BOUNCE
            statistics.pin_reason = "without workers, batches are packed into page-locked buffers"
            return
        statistics.pin, statistics.pin_reason = REGISTER, "workers' blocks can be page-locked in place"
        if not self._proven:
            try:
                backend.prove()
                self._proven = True
            except PinFailed as error:
                self.refuse(error)

    def refuse(self, error: PinFailed) -> None:
        """Lock nothing more, because the driver refused."""
        self.statistics.pin, self.statistics.pin_reason = PAGEABLE, str(error)
        self._warning = f"batches go to the device from pageable memory, which is slower: {error}"

    def warn(self) -> None:
        """Issue the warning of `refuse`, once. Called with a batch that has been taken: where the user's
        filters make warnings errors, this one is raised in place of that batch."""
        if self._warning:
            text, self._warning = self._warning, ""
            warn_user(text, PinFallback)


class Pinner:
    """Page-locks the blocks of one pool of workers.

    Args:
        backend: the device.
        copies: of the pool.
        mapping: the memory of the blocks.
        policy: the loader's.
    """

    def __init__(self, backend: TorchBackend, copies: Copies, mapping: Mapping, policy: PinPolicy) -> None:
        self._backend = backend
        self._copies = copies
        self._mapping = mapping
        self._policy = policy
        self._statistics = policy.statistics
        self._registered: dict[int, int] = {}  # offset → size of the page-locked blocks

    def prepare(self, offset: int, size: int, start: int, nbytes: int) -> Memory:
        """Return the memory of a batch: `nbytes` from `start` on in the block of `size` bytes at `offset`,
        which is page-locked if possible."""
        statistics, backend, address = self._statistics, self._backend, self._mapping.base + offset
        if offset in self._registered or statistics.pin != REGISTER:
            return backend.view(address + start, nbytes)
        began = backend.clock()
        self._mapping.populate(offset, size)
        populated = backend.clock()
        statistics.populate_seconds += populated - began
        # Entered before the call, so that `close` undoes it after an interrupt.
        self._registered[offset] = size
        statistics.pinned_bytes += size
        try:
            backend.register(address, size)
        except PinFailed as error:
            statistics.pinned_bytes -= self._registered.pop(offset)
            self.close()  # a pool that is only half locked wastes its locked memory
            self._policy.refuse(error)
        else:
            statistics.register_seconds += backend.clock() - populated
        return backend.view(address + start, nbytes)

    def forget(self, offset: int) -> None:
        """Unlock a block whose pages are about to be returned to the system."""
        if offset in self._registered:
            self._backend.unregister(self._mapping.base + offset)
            self._statistics.pinned_bytes -= self._registered.pop(offset)

    def close(self) -> None:
        """Undo every registration, after the copies that are under way."""
        self._copies.settle()
        for offset in list(self._registered):
            self.forget(offset)


@dataclass(eq=False)
class Buffer:
    """Host memory that is the source of copies, one at a time.

    Attributes:
        memory: as the backend returned it. `nbytes`: its length. `locked`: how many of them are page-locked.
        copy: the last copy from it.
    """

    memory: Memory = None
    nbytes: int = 0
    locked: int = 0
    copy: Copy | None = None


class Buffers:
    """The buffers of a loader without workers, page-locked if possible.

    Args:
        backend: the device.
        copies: from the buffers.
        policy: the loader's.
        count: number of buffers.
    """

    def __init__(self, backend: TorchBackend, copies: Copies, policy: PinPolicy, count: int) -> None:
        self._backend = backend
        self._copies = copies
        self._policy = policy
        self._statistics = policy.statistics
        # The least recently used comes first.
        self._buffers = deque(Buffer() for _ in range(count))

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer of at least `nbytes` that no copy reads from."""
        buffer = self._buffers[0]
        if buffer.copy is not None and not buffer.copy.over:
            began = self._backend.clock()
            self._copies.wait_for(buffer.copy)
            self._statistics.copy_wait_seconds += self._backend.clock() - began
        if buffer.nbytes < nbytes:
            self._free(buffer)
            self._allocate(buffer, nbytes)
        self._buffers.rotate(-1)
        return buffer

    def _allocate(self, buffer: Buffer, nbytes: int) -> None:
        rounded = 1 << (nbytes - 1).bit_length()  # as torch's allocator of pinned memory does
        if self._statistics.pin == BOUNCE:
            began = self._backend.clock()
            try:
                buffer.memory = self._backend.pinned(rounded)
                buffer.nbytes = buffer.locked = rounded
                self._statistics.pinned_bytes += rounded
                return
            except PinFailed as error:
                self._policy.refuse(error)
            finally:
                self._statistics.register_seconds += self._backend.clock() - began
        buffer.memory, buffer.nbytes = self._backend.pageable(nbytes), nbytes

    def _free(self, buffer: Buffer) -> None:
        self._statistics.pinned_bytes -= buffer.locked
        buffer.memory, buffer.nbytes, buffer.locked = None, 0, 0

    def drain(self) -> None:
        """Wait for every copy, and forget them: undelivered ones have device memory."""
        self._copies.drain()
        for buffer in self._buffers:
            buffer.copy = None

    def close(self) -> None:
        """Free the buffers, after the copies that are under way."""
        self.drain()
        for buffer in self._buffers:
            self._free(buffer)
