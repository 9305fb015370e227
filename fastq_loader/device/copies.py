"""Tracks copies to the device: which are under way, which stream waits, and when memory may be reused.

Pure: streams, events and memory are opaque and belong to a `DeviceBackend` (`accelerator` has the real one,
the tests a simulated one that runs copies late and in any order that streams allow). Used in the consumer, on
the thread that calls `next()`; nothing here runs on a thread of its own.

The rules, and the wait that enforces each:

- device memory is written only after all work that was queued on the consumer's stream when the memory was
  allocated: the side stream waits for a *fence*;
- a batch is read only after it has arrived: the consumer's current stream waits for the event of that copy,
  and for no later copy;
- host memory is written again only after its copy has run: `reap` queries the event, `drain` waits for it;
- a batch without bytes for the device takes its turn like the others, so transforms are called in order;
- device memory that is read on another stream than its own is shared with that stream, so that it is not
  allocated again before the read has run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fastq_loader.statistics.counters import StagingCounters

Stream = Hashable
Event = Any
Memory = Any
#: Makes a batch from device memory.
Build = Callable[[Memory], Any]


class DeviceBackend(Protocol):
    """Interface of a device. Every call returns at once, except `synchronize`.

    Attributes:
        side: the stream that all copies run on, one after the other.
    """

    side: Stream

    def clock(self) -> float:
        """Time of the host's clock, in seconds."""

    def current_stream(self) -> Stream:
        """The stream on which the consumer queues its work now."""

    def empty(self, nbytes: int) -> Memory:
        """Allocate device memory that work queued on the current stream from here on may use."""

    def copy_async(self, memory: Memory, source: Memory, nbytes: int) -> None:
        """Queue a copy of the first `nbytes` from host memory, on the side stream."""

    def record(self, stream: Stream) -> Event:
        """Return an event that is over when all work queued on `stream` so far has run."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make all work that is queued on `stream` from here on wait for the event."""

    def query(self, event: Event) -> bool:
        """Whether an event is over."""

    def synchronize(self, event: Event) -> None:
        """Block until an event is over."""

    def share(self, memory: Any, stream: Stream) -> None:
        """Note that `memory`, or every part of a batch, is read on `stream` too: when its last owner releases
        it, it is not allocated again before the work queued on `stream` by then has run."""

    def on_side(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`; its device work is queued on the side stream."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory in place.

        Raises:
            PinFailed: the device's driver refused; nothing is left behind.
        """

    def unregister(self, address: int) -> None:
        """Undo `register`."""

    def prove(self) -> None:
        """Send data there and back through registered memory.

        Raises:
            PinFailed: the memory cannot be registered, or the data come back changed.
        """

    def pinned(self, nbytes: int) -> Memory:
        """Allocate page-locked host memory.

        Raises:
            PinFailed: the device's driver refused.
        """

    def pageable(self, nbytes: int) -> Memory:
        """Allocate ordinary host memory."""

    def view(self, address: int, nbytes: int) -> Memory:
        """Wrap existing host memory for `copy_async`."""

    def fill(self, memory: Memory, start: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` from an address to host memory, from `start` on, synchronously."""


@dataclass(eq=False, slots=True)
class Copy:
    """One batch on its way to the device, or there: of workers, of a loader without them, or of `Prefetcher`.

    Attributes:
        memory: device memory, allocated on the stream `home`. `nbytes`: number of bytes copied.
        build: makes the batch from the memory. Both are None once the batch was delivered.
        blocks: host memory that may be written again once the batch was delivered and has arrived.
        began: start, in seconds of the stager's clock.
        done: event: the bytes have arrived. `ready`: event: the batch is there.
        built: a `CapturedCall` of `build` on the side stream, after the copy; None: the call follows at
            delivery.
        over: whether the bytes were seen to have arrived. `delivered`: whether the batch was.
    """

    memory: Memory
    home: Stream
    nbytes: int
    build: Build | None
    blocks: tuple[int, ...]
    began: float
    done: Event = None
    ready: Event = None
    built: Any = None
    over: bool = False
    delivered: bool = False


class Copies:
    """The copies of one pool of workers, or of one loader without them, in the order of their start.

    Args:
        stager: the device.
        prefetch: number of batches copied ahead of `next()`.
        statistics: the loader's.

    Attributes:
        free: blocks that `reap` will return.
    """

    def __init__(self, stager: DeviceBackend, prefetch: int, statistics: StagingCounters) -> None:
        self._stager = stager
        self._statistics = statistics
        # Else a consumer that never waits for its device would run ahead of it without limit, and use as
        # many blocks.
        self._most = 2 * prefetch
        self._running: deque[Copy] = deque()  # not yet seen to be over, in the order of the side stream
        self.free: list[int] = []

    def begin(
        self, source: Memory, nbytes: int, build: Build, blocks: tuple[int, ...] = (), beside: Any = None
    ) -> Copy:
        """Begin to copy a batch.

        Args:
            source: page-locked or pageable host memory; not used for a batch without bytes for the device.
            nbytes: number of bytes to copy.
            build: makes the batch from device memory.
            blocks: returned by `reap` once the batch was delivered and has arrived.
            beside: `CapturedCall`, to call `build` now, on the side stream; None: it is called at delivery.
        """
        stager, statistics = self._stager, self._statistics
        if self.full:
            began = stager.clock()
            self.wait_for(self._running[0])
            statistics.block_wait_seconds += stager.clock() - began
        memory, home = stager.empty(nbytes), stager.current_stream()
        copy = Copy(memory, home, nbytes, build, blocks, stager.clock(), over=not nbytes)
        stager.wait(stager.side, stager.record(home))
        if nbytes:
            stager.copy_async(memory, source, nbytes)
        copy.done = copy.ready = stager.record(stager.side)
        if nbytes:
            self._running.append(copy)
            statistics.copies += 1
            statistics.copied_bytes += nbytes
        if beside is not None:
            copy.built = stager.on_side(lambda: beside(build, memory))
            copy.ready = stager.record(stager.side)
        return copy

    @property
    def full(self) -> bool:
        """Whether `begin` would wait."""
        return len(self._running) >= self._most

    def take(self, copy: Copy) -> Any:
        """Return the batch of a copy: work that the consumer queues on its current stream from here on sees
        it.

        Raises:
            Exception: any error of `build`.
        """
        copy.delivered = True  # its blocks are returned even if an error follows
        if copy.over:
            self.free += copy.blocks
        stager = self._stager
        stream = stager.current_stream()
        self._statistics.late_copies += not (copy.over or stager.query(copy.done))
        stager.wait(stream, copy.ready)
        if stream != copy.home:
            stager.share(copy.memory, stream)
        # They are the batch's now: its memory is free once the user has dropped it.
        memory, build, copy.memory, copy.build = copy.memory, copy.build, None, None
        if copy.built is not None:
            stager.share(copy.built.result, stream)
            return copy.built.take()
        assert build is not None, "a batch is delivered once"
        return build(memory)

    def reap(self) -> list[int]:
        """Return the blocks of batches that were delivered and have arrived since the last call."""
        while self._running and self._stager.query(self._running[0].done):
            self._arrived(self._running.popleft())
        free, self.free = self.free, []
        return free

    def wait_for(self, copy: Copy) -> None:
        """Wait until a copy, and so all earlier ones, have run."""
        self._stager.synchronize(copy.done)
        while not copy.over:
            self._arrived(self._running.popleft())

    def _arrived(self, copy: Copy) -> None:
        """Note that a copy is over."""
        copy.over = True
        if copy.delivered:
            self.free += copy.blocks
        self._statistics.copied(copy.nbytes, copy.began, self._stager.clock())

    def settle(self) -> None:
        """Wait until every copy that was begun has run."""
        # Not for the copies' own events: an interrupt may have come between a copy and its entry here.
        self._stager.synchronize(self._stager.record(self._stager.side))

    def drain(self) -> list[int]:
        """Wait until every copy that was begun has run. Undelivered batches are dropped.

        Returns:
            The blocks of delivered batches; the other blocks may be written again as well.
        """
        self.settle()
        return self.reap()
