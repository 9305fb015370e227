"""Where copies to the device read from: blocks that are page-locked in place, bounce buffers, or neither.

Pure: what locks pages is a `Stager` (see `copies`). Used in the consumer, on the thread that calls `next()`.

A copy from page-locked memory runs by itself, as fast as the bus allows; from pageable memory the driver
copies in steps, with the caller's help. Blocks are locked in place ("register"), each the first time that a
batch arrives in it: from then on it costs nothing, since blocks are reused. A block is one registration, so
that no copy straddles two. Where that fails, or there is a limit, a batch is copied into one of a few
page-locked buffers first ("bounce"), at the speed of the CPU; where that fails, it goes as it is
("pageable").
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fastq_loader.device.copies import Copies, Copy, Memory, Stager
from fastq_loader.errors import PinFailed, PinFallback, warn_user

if TYPE_CHECKING:
    from fastq_loader.memory.arena import Mapping
    from fastq_loader.statistics.counters import StagingCounters

AUTO, REGISTER, BOUNCE, PAGEABLE = "auto", "register", "bounce", "pageable"
#: What `pin` may be; "auto" takes the first of the others that works.
PIN_MODES = (AUTO, REGISTER, BOUNCE, PAGEABLE)


class PinPolicy:
    """How `pin` is done on this device. The loader's, so that what failed in one pool is known to the next.

    Args:
        pin, limit: as the user wants it, and how many bytes may be locked; None: any number.
        statistics: the loader's; `pin` in it is the mode of blocks that are not registered.
    """

    def __init__(self, pin: str, limit: int | None, statistics: StagingCounters) -> None:
        self._pin = pin
        self._limit = limit
        self.statistics = statistics
        self._proven = False
        self._refused: dict[str, str] = {}  # mode → why the driver refused it
        self._warned: set[str] = set()

    def choose(self, stager: Stager, in_blocks: bool) -> None:
        """Choose the mode of a new pool. Before blocks are registered for the first time, find out whether
        copies from registered memory arrive.

        Args:
            in_blocks: its batches lie in blocks, which can be registered.

        Raises:
            PinFailed: they do not, and the user asked for them.
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
        """The driver refused a mode: fall back, in this pool and in later ones."""
        self._refused[mode] = str(error)
        self.fall_back(mode, str(error))

    def fall_back(self, mode: str, reason: str) -> None:
        """Go on with the next mode after `mode`; warn, once.

        Raises:
            PinFailed: the user asked for a mode by name.
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
        """Whether so many bytes may be page-locked on top of those that are; else fall back.

        Args:
            what: what they are, for the warning: "blocks" or "buffers".
        """
        limit = self._limit
        if limit is None or self.statistics.pinned_bytes + nbytes <= limit:
            return True
        self.fall_back(self.statistics.pin, f"pin_limit_bytes={limit} leaves no room for {what}")
        return False


class Source(NamedTuple):
    """Where a batch lies: `nbytes` from `start` bytes into the block (offset, size)."""

    offset: int
    size: int
    start: int
    nbytes: int


@dataclass(eq=False)
class Buffer:
    """Host memory that copies read from, one after the other.

    Attributes:
        memory: as the stager made it. `nbytes`: its length. `locked`: how many of them are page-locked.
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
        mapping: where batches lie; None: the caller packs them into buffers.
        policy: the loader's.
        buffers: how many there are, where batches are copied to buffers.
    """

    def __init__(
        self, stager: Stager, copies: Copies, mapping: Mapping | None, policy: PinPolicy, buffers: int
    ) -> None:
        self._stager = stager
        self._copies = copies
        self._mapping = mapping
        self._policy = policy
        self._statistics = policy.statistics
        self._registered: dict[int, int] = {}  # offset → size of the blocks that are page-locked
        # The one that waits longest first.
        self._buffers = deque(Buffer() for _ in range(buffers))

    # ---- where a copy reads from --------------------------------------------------------------

    def prepare(self, source: Source) -> Buffer:
        """Source of a batch's copy: its block, or a buffer; then the block is free again already."""
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
        """Whether a buffer would have to be waited for."""
        copy = self._buffers[0].copy
        return self._statistics.pin == BOUNCE and copy is not None and not copy.over

    def _address(self, offset: int) -> int:
        assert self._mapping is not None
        return self._mapping.base + offset

    def _register(self, source: Source) -> bool:
        assert self._mapping is not None
        offset, size, statistics, clock = source.offset, source.size, self._statistics, self._stager.clock
        if not self._policy.allows(size, "blocks"):
            return False
        began = clock()
        self._mapping.populate(offset, size)
        populated = clock()
        statistics.populate_seconds += populated - began
        # Entered first, so that after an interrupt `close` undoes it.
        self._registered[offset] = size
        statistics.pinned_bytes += size
        try:
            self._stager.register(self._address(offset), size)
        except PinFailed as error:
            statistics.pinned_bytes -= self._registered.pop(offset)
            self.close()  # memory of a pool that is half locked is locked for nothing
            self._policy.refuse(REGISTER, error)
            return False
        statistics.register_seconds += clock() - populated
        return True

    # ---- buffers ------------------------------------------------------------------------------

    def buffer(self, nbytes: int) -> Buffer | None:
        """A buffer of at least `nbytes` that no copy reads from; None: page-locked ones cannot be had, and
        batches lie in blocks, which are as good as other pageable memory."""
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
        nbytes = 1 << (nbytes - 1).bit_length()  # as torch's allocator of such memory rounds it
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
        """The pages of a block are about to go back to the system."""
        if offset in self._registered:
            self._stager.unregister(self._address(offset))
            self._statistics.pinned_bytes -= self._registered.pop(offset)

    def close(self) -> None:
        """Undo every registration and let the buffers go, after the copies that are under way."""
        self._copies.settle()
        for offset in list(self._registered):
            self.forget(offset)
        for at, buffer in enumerate(self._buffers):
            self._statistics.pinned_bytes -= buffer.locked
            self._buffers[at] = Buffer()
