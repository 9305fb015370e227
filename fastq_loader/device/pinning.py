"""Host memory that copies to the device read: blocks locked in place, bounce buffers, or neither.

Pure: a `DeviceBackend` (see `copies`) locks the pages. Used in the consumer, on the thread that calls
`next()`.

A copy from page-locked memory runs by itself, as fast as the bus allows; from pageable memory the driver
copies in steps, on the caller's thread. Workers' blocks are locked in place ("register"), each when the first
batch arrives in it; afterwards this costs nothing, since blocks are reused. Each block is one registration,
so that no copy straddles two. Where registration fails, or a limit is set, a batch is copied from where it is
("pageable"): to copy it to page-locked buffers first was measured to be slower. Without workers batches are
packed into buffers anyway, which are page-locked ("bounce") or not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastq_loader.device.copies import Copies, Copy, DeviceBackend, Memory
from fastq_loader.errors import PinFailed, PinFallback, warn_user

if TYPE_CHECKING:
    from fastq_loader.memory.arena import Mapping
    from fastq_loader.statistics.counters import StagingCounters

AUTO, REGISTER, BOUNCE, PAGEABLE = "auto", "register", "bounce", "pageable"
#: Values of `pin`. "auto" is "register" with workers and "bounce" without, or "pageable" where that fails.
PIN_MODES = (AUTO, REGISTER, BOUNCE, PAGEABLE)


class PinPolicy:
    """The mode of page-locking on this device. One for each loader, so that later pools skip failed modes.

    Args:
        pin, limit: the user's choice, and the maximum of locked bytes; None is no limit.
        statistics: the loader's; its `pin` is the mode for blocks that are not registered.
    """

    def __init__(self, pin: str, limit: int | None, statistics: StagingCounters) -> None:
        self._pin = pin
        self._limit = limit
        self.statistics = statistics
        self._proven = False
        self._refused: dict[str, str] = {}  # mode → why the driver refused it
        self._warned: set[str] = set()

    def choose(self, stager: DeviceBackend, in_blocks: bool) -> None:
        """Choose the mode of a new pool. Before blocks are registered for the first time, check that copies
        from registered memory arrive.

        Args:
            in_blocks: whether its batches lie in blocks, which can be registered.

        Raises:
            PinFailed: they do not arrive, and the user chose "register".
        """
        mode, reason = self._pin, f"pin={self._pin!r} was asked for"
        best = REGISTER if in_blocks else BOUNCE
        if mode == AUTO:
            mode = PAGEABLE if best in self._refused else best
            reason = self._refused.get(best, "it is the fastest here")
        if not in_blocks and (mode == REGISTER or (mode == BOUNCE and self._pin == AUTO)):
            mode, reason = BOUNCE, "without workers, batches are packed into page-locked buffers"
        self.statistics.pin, self.statistics.pin_reason = mode, reason
        if mode == REGISTER and not self._proven:
            try:
                stager.prove()
                self._proven = True
            except PinFailed as error:
                self.refuse(error)

    def refuse(self, error: PinFailed) -> None:
        """Record that the driver refused the current mode: fall back, in this pool and in later ones."""
        self._refused[self.statistics.pin] = str(error)
        self._fall_back(str(error))

    def _fall_back(self, reason: str) -> None:
        """Lock nothing more from here on; warn, once.

        Raises:
            PinFailed: the user chose a mode other than "auto".
        """
        if self._pin != AUTO:
            raise PinFailed(
                f"pin={self._pin!r} cannot be kept: {reason}; pin='auto' would fall back to another mode"
            )
        self.statistics.pin, self.statistics.pin_reason = PAGEABLE, reason
        text = f"batches go to the device with pin={PAGEABLE!r} from here on: {reason}"
        if text not in self._warned:
            self._warned.add(text)
            warn_user(text, PinFallback)

    def allows(self, nbytes: int, what: str) -> bool:
        """Whether `nbytes` more may be page-locked; otherwise fall back.

        Args:
            what: the kind of memory, for the warning: "blocks" or "buffers".
        """
        limit = self._limit
        if limit is None or self.statistics.pinned_bytes + nbytes <= limit:
            return True
        self._fall_back(f"pin_limit_bytes={limit} leaves no room for {what}")
        return False


class Pinner:
    """Page-locks the blocks of one pool of workers.

    Args:
        stager: the device.
        copies: of the pool.
        mapping: the memory of the blocks.
        policy: the loader's.
    """

    def __init__(self, stager: DeviceBackend, copies: Copies, mapping: Mapping, policy: PinPolicy) -> None:
        self._stager = stager
        self._copies = copies
        self._mapping = mapping
        self._policy = policy
        self._statistics = policy.statistics
        self._registered: dict[int, int] = {}  # offset → size of the page-locked blocks

    def prepare(self, offset: int, size: int, start: int, nbytes: int) -> Memory:
        """Return the memory of a batch: `nbytes` from `start` on in the block of `size` bytes at `offset`,
        which is page-locked if possible."""
        if offset not in self._registered and self._statistics.pin == REGISTER:
            self._register(offset, size)
        return self._stager.view(self._mapping.base + offset + start, nbytes)

    def _register(self, offset: int, size: int) -> None:
        statistics, clock = self._statistics, self._stager.clock
        if not self._policy.allows(size, "blocks"):
            return
        began = clock()
        self._mapping.populate(offset, size)
        populated = clock()
        statistics.populate_seconds += populated - began
        # Entered before the call, so that `close` undoes it after an interrupt.
        self._registered[offset] = size
        statistics.pinned_bytes += size
        try:
            self._stager.register(self._mapping.base + offset, size)
        except PinFailed as error:
            statistics.pinned_bytes -= self._registered.pop(offset)
            self.close()  # a pool that is only half locked wastes its locked memory
            self._policy.refuse(error)
        else:
            statistics.register_seconds += clock() - populated

    def forget(self, offset: int) -> None:
        """Unlock a block whose pages are about to be returned to the system."""
        if offset in self._registered:
            self._stager.unregister(self._mapping.base + offset)
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
        memory: as the stager returned it. `nbytes`: its length. `locked`: how many of them are page-locked.
        copy: the last copy from it.
    """

    memory: Memory = None
    nbytes: int = 0
    locked: int = 0
    copy: Copy | None = None


class Buffers:
    """The buffers of a loader without workers, page-locked if possible.

    Args:
        stager: the device.
        copies: from the buffers.
        policy: the loader's.
        count: number of buffers.
    """

    def __init__(self, stager: DeviceBackend, copies: Copies, policy: PinPolicy, count: int) -> None:
        self._stager = stager
        self._copies = copies
        self._policy = policy
        self._statistics = policy.statistics
        # The least recently used comes first.
        self._buffers = deque(Buffer() for _ in range(count))

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer of at least `nbytes` that no copy reads from."""
        buffer = self._buffers[0]
        if buffer.copy is not None and not buffer.copy.over:
            began = self._stager.clock()
            self._copies.wait_for(buffer.copy)
            self._statistics.copy_wait_seconds += self._stager.clock() - began
        if buffer.nbytes < nbytes:
            self._free(buffer)
            self._allocate(buffer, nbytes)
        self._buffers.rotate(-1)
        return buffer

    def _allocate(self, buffer: Buffer, nbytes: int) -> None:
        rounded = 1 << (nbytes - 1).bit_length()  # as torch's allocator of pinned memory does
        if self._statistics.pin == BOUNCE and self._policy.allows(rounded, "buffers"):
            began = self._stager.clock()
            try:
                buffer.memory = self._stager.pinned(rounded)
                buffer.nbytes = buffer.locked = rounded
                self._statistics.pinned_bytes += rounded
                return
            except PinFailed as error:
                self._policy.refuse(error)
            finally:
                self._statistics.register_seconds += self._stager.clock() - began
        buffer.memory, buffer.nbytes = self._stager.pageable(nbytes), nbytes

    def _free(self, buffer: Buffer) -> None:
        self._statistics.pinned_bytes -= buffer.locked
        buffer.memory, buffer.nbytes, buffer.locked = None, 0, 0

    def drain(self) -> None:
        """Wait for every copy, and forget them: those that were not delivered have device memory."""
        self._copies.drain()
        for buffer in self._buffers:
            buffer.copy = None

    def close(self) -> None:
        """Free the buffers, after the copies that are under way."""
        self.drain()
        for buffer in self._buffers:
            self._free(buffer)
