"""Host memory that copies to the device read: blocks locked in place, bounce buffers, or neither.

Pure: a `DeviceBackend` (see `copies`) locks the pages. Used in the consumer, on the thread that calls
`next()`.

A copy from page-locked memory runs by itself, as fast as the bus allows; from pageable memory the driver
copies in steps, on the caller's thread. Blocks are locked in place ("register"), each when the first batch
arrives in it; afterwards this costs nothing, since blocks are reused. Each block is one registration, so that
no copy straddles two. Where registration fails, or a limit is set, a batch is first copied into one of a few
page-locked buffers ("bounce"), at the speed of the CPU; where that fails too, it is copied from where it is
("pageable").
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fastq_loader.device.copies import Copies, Copy, DeviceBackend, Memory
from fastq_loader.errors import PinFailed, PinFallback, warn_user

if TYPE_CHECKING:
    from fastq_loader.memory.arena import Mapping
    from fastq_loader.statistics.counters import StagingCounters

AUTO, REGISTER, BOUNCE, PAGEABLE = "auto", "register", "bounce", "pageable"
#: Values of `pin`; "auto" takes the first of the others that works.
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
        if mode == AUTO:
            mode = next(mode for mode in PIN_MODES[1:] if mode not in self._refused)
            reason = "; ".join(self._refused.values()) or "it is the fastest here"
        if mode == REGISTER and not in_blocks:
            if BOUNCE not in self._refused or self._pin != AUTO:
                mode, reason = BOUNCE, "without workers, batches are packed into page-locked buffers"
            else:
                mode = PAGEABLE
        self.statistics.pin, self.statistics.pin_reason = mode, reason
        if mode == REGISTER and not self._proven:
            try:
                stager.prove()
                self._proven = True
            except PinFailed as error:
                self.refuse(REGISTER, error)

    def refuse(self, mode: str, error: PinFailed) -> None:
        """Record that the driver refused a mode: fall back, in this pool and in later ones."""
        self._refused[mode] = str(error)
        self.fall_back(mode, str(error))

    def fall_back(self, mode: str, reason: str) -> None:
        """Use the next mode after `mode` from here on; warn, once.

        Raises:
            PinFailed: the user chose a mode other than "auto".
        """
        if self._pin != AUTO:
            raise PinFailed(
                f"pin={self._pin!r} cannot be kept: {reason}; pin='auto' would fall back to another mode"
            )
        lower = PIN_MODES[PIN_MODES.index(mode) + 1]
        self.statistics.pin, self.statistics.pin_reason = lower, reason
        text = f"batches go to the device with pin={lower!r} from here on: {reason}"
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
        self.fall_back(self.statistics.pin, f"pin_limit_bytes={limit} leaves no room for {what}")
        return False


class HostMemory(NamedTuple):
    """Location of a batch: `nbytes` from `start` bytes into the block (offset, size)."""

    offset: int
    size: int
    start: int
    nbytes: int


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


class Pinner:
    """The host side of one pool's copies.

    Args:
        stager: the device.
        copies: of the pool.
        mapping: the memory of the batches; None if the caller packs them into buffers.
        policy: the loader's.
        buffers: number of buffers, used if batches are copied to buffers.
    """

    def __init__(
        self, stager: DeviceBackend, copies: Copies, mapping: Mapping | None, policy: PinPolicy, buffers: int
    ) -> None:
        self._stager = stager
        self._copies = copies
        self._mapping = mapping
        self._policy = policy
        self._statistics = policy.statistics
        self._registered: dict[int, int] = {}  # offset → size of the page-locked blocks
        # The least recently used comes first.
        self._buffers = deque(Buffer() for _ in range(buffers))

    # ---- the source of a copy -----------------------------------------------------------------

    def prepare(self, source: HostMemory) -> Buffer:
        """Return the source of a batch's copy: its block, or a buffer, which leaves the block free again."""
        start = self._address(source.offset) + source.start
        block = Buffer(self._stager.view(start, source.nbytes))
        if source.offset in self._registered or (self._statistics.pin == REGISTER and self._register(source)):
            return block
        buffer = self.buffer(source.nbytes) if self._statistics.pin == BOUNCE else None
        if buffer is None:
            return block
        self._stager.fill(buffer.memory, block.memory, source.nbytes)
        return buffer

    @property
    def busy(self) -> bool:
        """Whether `prepare` would have to wait for a buffer."""
        copy = self._buffers[0].copy
        return self._statistics.pin == BOUNCE and copy is not None and not copy.over

    def _address(self, offset: int) -> int:
        assert self._mapping is not None
        return self._mapping.base + offset

    def _register(self, source: HostMemory) -> bool:
        assert self._mapping is not None
        offset, size, statistics, clock = source.offset, source.size, self._statistics, self._stager.clock
        if not self._policy.allows(size, "blocks"):
            return False
        began = clock()
        self._mapping.populate(offset, size)
        populated = clock()
        statistics.populate_seconds += populated - began
        # Entered before the call, so that `close` undoes it after an interrupt.
        self._registered[offset] = size
        statistics.pinned_bytes += size
        try:
            self._stager.register(self._address(offset), size)
        except PinFailed as error:
            statistics.pinned_bytes -= self._registered.pop(offset)
            self.close()  # a pool that is only half locked wastes its locked memory
            self._policy.refuse(REGISTER, error)
            return False
        statistics.register_seconds += clock() - populated
        return True

    # ---- buffers ------------------------------------------------------------------------------

    def buffer(self, nbytes: int) -> Buffer | None:
        """Return a buffer of at least `nbytes` that no copy reads from. None if no page-locked one can be
        had and batches lie in blocks, which are as good as other pageable memory."""
        nbytes = max(nbytes, 1)  # a batch of empty tensors has a buffer, too
        buffer = self._buffers[0]
        if buffer.copy is not None and not buffer.copy.over:
            began = self._stager.clock()
            self._copies.wait_for(buffer.copy)
            self._statistics.copy_wait_seconds += self._stager.clock() - began
        if buffer.nbytes < nbytes and not self._enlarge(buffer, nbytes):
            return None
        self._buffers.rotate(-1)
        return buffer

    def _enlarge(self, buffer: Buffer, nbytes: int) -> bool:
        if self._statistics.pin == BOUNCE:
            self._lock(buffer, nbytes)
        if self._statistics.pin == PAGEABLE:
            if self._mapping is not None:
                return False
            self._statistics.pinned_bytes -= buffer.locked
            buffer.memory, buffer.nbytes, buffer.locked = self._stager.pageable(nbytes), nbytes, 0
        return True

    def _lock(self, buffer: Buffer, nbytes: int) -> None:
        nbytes = 1 << (nbytes - 1).bit_length()  # rounded as torch's allocator of pinned memory does
        more = nbytes - buffer.locked
        if not self._policy.allows(more, "buffers"):
            return
        began = self._stager.clock()
        try:
            buffer.memory = self._stager.pinned(nbytes)
        except PinFailed as error:
            self._policy.refuse(BOUNCE, error)
        else:
            buffer.nbytes = buffer.locked = nbytes
            self._statistics.pinned_bytes += more
        self._statistics.register_seconds += self._stager.clock() - began

    # ---- the end ------------------------------------------------------------------------------

    def forget(self, offset: int) -> None:
        """Unlock a block whose pages are about to be returned to the system."""
        if offset in self._registered:
            self._stager.unregister(self._address(offset))
            self._statistics.pinned_bytes -= self._registered.pop(offset)

    def close(self) -> None:
        """Undo every registration and free the buffers, after the copies that are under way."""
        self._copies.settle()
        for offset in list(self._registered):
            self.forget(offset)
        for at, buffer in enumerate(self._buffers):
            self._statistics.pinned_bytes -= buffer.locked
            self._buffers[at] = Buffer()
