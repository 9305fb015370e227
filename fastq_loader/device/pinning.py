"""Where copies to the device read from: blocks that are page-locked in place, bounce buffers, or neither.

Pure: what locks pages is a `Stager` (see `copies`). Used in the consumer, on the thread that calls `next()`.

A copy from page-locked memory runs at the speed of the link and by itself; from pageable memory the driver
copies in steps, with the caller's help. Blocks are locked in place ("register"), each the first time that a
batch arrives in it: from then on it costs nothing, since blocks are reused. A block is one registration, so
that no copy straddles two. Where that fails, or there is a limit, a batch is copied into one of a few
page-locked buffers first ("bounce"), at the speed of the CPU; where that fails, it goes as it is
("pageable").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from fastq_loader.device.copies import Copies, Copy, Memory, Stager
from fastq_loader.errors import PinFailed
from fastq_loader.statistics import StagingCounters

REGISTER, BOUNCE, PAGEABLE = "register", "bounce", "pageable"
#: What `pin=` may be; "auto" takes the first of the others that works.
PIN_MODES = ("auto", REGISTER, BOUNCE, PAGEABLE)


class Place(NamedTuple):
    """Where a batch lies: `nbytes` from `start` bytes into the block (offset, size)."""

    offset: int
    size: int
    start: int
    nbytes: int


class Blocks(NamedTuple):
    """The blocks' memory.

    Attributes:
        base: address of the byte at offset 0.
        populate: takes offset and size, and makes this process see the pages there.
    """

    base: int
    populate: Callable[[int, int], None]


class Buffer:
    """Host memory that one batch after the other leaves from.

    Attributes:
        memory: as the stager made it. `nbytes`: its length. `locked`: how many of them are page-locked.
        copy: the last copy from it.
    """

    __slots__ = ("copy", "locked", "memory", "nbytes")

    def __init__(self) -> None:
        self.memory: Memory = None
        self.nbytes = self.locked = 0
        self.copy: Copy | None = None


class Pinner:
    """The host side of one pool's copies.

    Args:
        stager: the device.
        copies: of the pool.
        blocks: where batches lie; None: they are packed into buffers, by whoever asks for one.
        wish: one of `PIN_MODES`.
        limit: bytes that may be page-locked; None: any number.
        buffers: number of buffers.
        refused: modes that the driver refused, with the reason; the loader's, so that its next pool knows.
        counters: the loader's; `pin` in it is what is done with blocks that are not registered.
        say: called with a text when "auto" falls back.
        clock: seconds.
    """

    def __init__(
        self,
        stager: Stager,
        copies: Copies,
        blocks: Blocks | None,
        wish: str,
        limit: int | None,
        buffers: int,
        refused: dict[str, str],
        counters: StagingCounters,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._stager = stager
        self._copies = copies
        self._at = blocks
        self._wish = wish
        self._limit = limit
        self._refused = refused
        self._counters = counters
        self._say = say
        self._clock = clock
        self._registered: dict[int, int] = {}  # offset → size of the blocks that are page-locked
        self._buffers = deque(Buffer() for _ in range(buffers))  # the one that waits longest first
        counters.pin, counters.pin_reason = self._choose()

    def _choose(self) -> tuple[str, str]:
        wish = self._wish
        if wish == "auto":
            modes = [mode for mode in (REGISTER, BOUNCE, PAGEABLE) if mode not in self._refused]
            wish, reason = modes[0], "; ".join(self._refused.values()) or "it is the fastest here"
        else:
            reason = f"pin={wish!r} was asked for"
        if wish != REGISTER or self._at is not None:
            return wish, reason
        if self._wish == "auto" and BOUNCE in self._refused:
            return PAGEABLE, reason
        return BOUNCE, "without workers, batches are packed into page-locked buffers"

    def prove(self) -> None:
        """Find out whether copies from registered memory arrive, if that is what is to be done.

        Raises:
            PinFailed: they do not, and the user asked for them.
        """
        if self._counters.pin == REGISTER:
            try:
                self._stager.prove()
            except PinFailed as error:
                self._refuse(REGISTER, BOUNCE, error)

    def _refuse(self, mode: str, instead: str, error: PinFailed) -> None:
        self._refused[mode] = str(error)
        self.fall_back(instead, str(error))

    def fall_back(self, mode: str, reason: str) -> None:
        """Go on with another mode.

        Raises:
            PinFailed: the user asked for the mode that does not work.
        """
        if self._wish != "auto":
            raise PinFailed(
                f"pin={self._wish!r} cannot be kept: {reason}; pin='auto' would fall back to another mode"
            )
        self._counters.pin, self._counters.pin_reason = mode, reason
        self._say(f"batches go to the device with pin={mode!r} from here on: {reason}")

    # ---- where a copy reads from --------------------------------------------------------------

    def source(self, place: Place) -> tuple[Memory, Buffer | None]:
        """What to copy a batch from. With a buffer, the block is free again already, and `sent` wants to
        know the copy."""
        view = self._view(place)
        if place.offset in self._registered or (self._counters.pin == REGISTER and self._register(place)):
            return view, None
        buffer = self.buffer(place.nbytes) if self._counters.pin == BOUNCE else None
        if buffer is None:
            return view, None
        self._stager.fill(buffer.memory, view, place.nbytes)
        return buffer.memory, buffer

    @property
    def busy(self) -> bool:
        """Whether a buffer would have to be waited for."""
        copy = self._buffers[0].copy
        return self._counters.pin == BOUNCE and copy is not None and not copy.over

    def sent(self, buffer: Buffer, copy: Copy) -> None:
        """A copy from `buffer` was begun."""
        buffer.copy = copy

    def _view(self, place: Place) -> Memory:
        assert self._at is not None
        return self._stager.view(self._at.base + place.offset + place.start, place.nbytes)

    def _register(self, place: Place) -> bool:
        assert self._at is not None
        offset, size = place.offset, place.size
        if self._limit is not None and self._counters.pinned_bytes + size > self._limit:
            self.fall_back(BOUNCE, f"pin_limit_bytes={self._limit} leaves no room for more blocks")
            return False
        began = self._clock()
        self._at.populate(offset, size)
        populated = self._clock()
        self._counters.populate_seconds += populated - began
        # Entered first: an interrupt must not leave a registration that nobody knows of.
        self._registered[offset] = size
        self._counters.pinned_bytes += size
        try:
            self._stager.register(self._at.base + offset, size)
        except PinFailed as error:
            del self._registered[offset]
            self._counters.pinned_bytes -= size
            self.close()  # half a pool that is locked is memory that nobody gets anything for
            self._refuse(REGISTER, BOUNCE, error)
            return False
        self._counters.register_seconds += self._clock() - populated
        return True

    # ---- buffers ------------------------------------------------------------------------------

    def buffer(self, nbytes: int) -> Buffer | None:
        """A buffer of at least `nbytes` that no copy reads from; None: page-locked ones cannot be had, and
        only blocks are to be copied."""
        buffer = self._buffers[0]
        if buffer.copy is not None and not buffer.copy.over:
            began = self._clock()
            self._copies.wait_for(buffer.copy)
            self._counters.copy_wait_seconds += self._clock() - began
        if buffer.nbytes < nbytes and not self._enlarge(buffer, nbytes):
            return None
        self._buffers.rotate(-1)
        return buffer

    def _enlarge(self, buffer: Buffer, nbytes: int) -> bool:
        if self._counters.pin == BOUNCE:
            self._lock(buffer, nbytes)
        if self._counters.pin == PAGEABLE:
            if self._at is not None:
                return False
            self._counters.pinned_bytes -= buffer.locked
            buffer.memory, buffer.nbytes, buffer.locked = self._stager.pageable(nbytes), nbytes, 0
        return True

    def _lock(self, buffer: Buffer, nbytes: int) -> None:
        nbytes = 1 << (nbytes - 1).bit_length()  # as torch's allocator of such memory rounds it
        pinned_bytes = self._counters.pinned_bytes - buffer.locked + nbytes
        if self._limit is not None and pinned_bytes > self._limit:
            self.fall_back(PAGEABLE, f"pin_limit_bytes={self._limit} leaves no room for buffers")
            return
        began = self._clock()
        try:
            buffer.memory = self._stager.pinned(nbytes)
        except PinFailed as error:
            self._refuse(BOUNCE, PAGEABLE, error)
        else:
            buffer.nbytes = buffer.locked = nbytes
            self._counters.pinned_bytes = pinned_bytes
        self._counters.register_seconds += self._clock() - began

    # ---- the end ------------------------------------------------------------------------------

    def forget(self, offset: int) -> None:
        """The pages of a block are about to go back to the system."""
        if offset in self._registered:
            assert self._at is not None
            self._stager.unregister(self._at.base + offset)
            self._counters.pinned_bytes -= self._registered.pop(offset)

    def close(self) -> None:
        """Undo every registration and let the buffers go, after the copies that are under way."""
        self._copies.settle()
        for offset in list(self._registered):
            self.forget(offset)
        for at, buffer in enumerate(self._buffers):
            self._counters.pinned_bytes -= buffer.locked
            self._buffers[at] = Buffer()
