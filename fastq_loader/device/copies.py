"""Copies to the device: which are under way, who waits for whom, and when memory may be written again.

Pure: streams, events and memory are opaque and belong to a `Stager` (`accelerator` has the real one, the
tests a simulated one that runs copies late and in any order that streams allow). Used in the consumer, on the
thread that calls `next()`; nothing here runs on a thread of its own.

The rules, each with the wait that keeps it:

- device memory is written once everything has run that was queued on the consumer's stream when the memory
  was allocated: the side stream waits for a *fence*;
- a batch is read once it has arrived: the consumer's current stream waits for the copy's event, and for no
  later copy;
- host memory is written again once its copy has run: `reap` queries the event, `drain` waits for it;
- device memory that is read on another stream than its own is shared with that stream, so that it is not
  allocated again before the read has run; where memory cannot be shared, the batch moves to memory of that
  stream.
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


class Stager(Protocol):
    """Interface of a device. Every call returns at once, except `synchronize`.

    Attributes:
        side: the stream that all copies run on, one after the other.
        shares: whether `share` works.
    """

    side: Stream
    shares: bool

    def clock(self) -> float:
        """Seconds of the host's clock."""

    def current_stream(self) -> Stream:
        """The stream that the consumer queues its work on now."""

    def empty(self, nbytes: int) -> Memory:
        """Device memory, ready for whatever is queued on the current stream from here on."""

    def copy_async(self, memory: Memory, source: Memory, nbytes: int) -> None:
        """Queue a copy of the first `nbytes` on the side stream, from host memory or from the device's."""

    def record(self, stream: Stream) -> Event:
        """An event that is over when everything that is queued on `stream` has run."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let `stream` wait for the event with all that is queued from here on."""

    def query(self, event: Event) -> bool:
        """Whether an event is over."""

    def synchronize(self, event: Event) -> None:
        """Wait here until an event is over."""

    def share(self, memory: Any, stream: Stream) -> None:
        """`memory`, or every part of a batch, is read on `stream` too: when its last owner is gone, it is not
        allocated again before what is queued on `stream` by then has run."""

    def on_side(self, call: Callable[[], Any]) -> Any:
        """Return what `call` does; the device work in it is queued on the side stream."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory where it lies.

        Raises:
            PinFailed: the device's driver refused; nothing is left behind.
        """

    def unregister(self, address: int) -> None:
        """Undo `register`."""

    def prove(self) -> None:
        """Send something there and back through registered memory.

        Raises:
            PinFailed: it cannot be registered, or something else comes back.
        """

    def pinned(self, nbytes: int) -> Memory:
        """New page-locked host memory.

        Raises:
            PinFailed: the device's driver refused.
        """

    def pageable(self, nbytes: int) -> Memory:
        """New host memory like any other."""

    def view(self, address: int, nbytes: int) -> Memory:
        """Host memory that exists already, as `copy_async` and `fill` take it."""

    def fill(self, memory: Memory, source: Memory, nbytes: int) -> None:
        """Copy `nbytes` between host memories, here and now."""


@dataclass(eq=False, slots=True)
class Copy:
    """One batch on its way to the device, or there.

    Attributes:
        memory: where on the device, allocated on the stream `home`. `nbytes`: how much was copied.
        blocks: host memory that may be written again once the batch was handed out and has arrived.
        done: event: the bytes have arrived.
        result: what was made of it on the side stream, after the copy. `ready`: event: it is there.
        began: seconds of the stager's clock.
        over: the bytes are known to have arrived.
    """

    memory: Memory
    home: Stream
    nbytes: int
    blocks: tuple[int, ...]
    done: Event
    ready: Event
    result: Any = None
    began: float = 0.0
    over: bool = False


class Copies:
    """The copies of one pool of workers, in the order in which they were begun.

    Args:
        stager: the device.
        prefetch: batches that are copied before they are asked for.
        statistics: the loader's.
    """

    def __init__(self, stager: Stager, prefetch: int, statistics: StagingCounters) -> None:
        self._stager = stager
        self._statistics = statistics
        # A consumer that never waits for its device would run ahead of it for ever, and hold as many blocks.
        self._most = 2 * prefetch
        self._running: deque[Copy] = deque()  # not known to be over, in the order of the side stream
        self._staged: dict[int, Copy] = {}  # not handed out
        self._taken: list[Copy] = []  # handed out, and `reap` has not given their blocks back

    def __contains__(self, key: int) -> bool:
        """Whether a batch was begun, and not handed out."""
        return key in self._staged

    def begin(
        self,
        key: int,
        source: Memory,
        nbytes: int,
        blocks: tuple[int, ...],
        then: Callable[[Memory], Any] | None = None,
    ) -> Copy:
        """Begin to copy a batch.

        Args:
            key: names the batch.
            source: page-locked or pageable host memory.
            nbytes: how much of it.
            blocks: what `reap` gives back when the batch was handed out and has arrived.
            then: runs on the side stream after the copy; what it returns is the batch's `result`.
        """
        stager, statistics = self._stager, self._statistics
        if self.full:
            began = stager.clock()
            self.wait_for(self._running[0])
            statistics.block_wait_seconds += stager.clock() - began
        memory, home = stager.empty(nbytes), stager.current_stream()
        started = stager.clock()
        done = self._queue(memory, home, source, nbytes)
        copy = self._staged[key] = Copy(memory, home, nbytes, blocks, done, ready=done, began=started)
        self._running.append(copy)
        statistics.copies += 1
        statistics.copied_bytes += nbytes
        if then is not None:
            copy.result = stager.on_side(lambda: then(memory))
            copy.ready = stager.record(stager.side)
        return copy

    @property
    def full(self) -> bool:
        """Whether `begin` would wait."""
        return len(self._running) >= self._most

    def take(self, key: int) -> Copy:
        """Hand a batch out: what the consumer queues on its current stream from here on finds it there.

        Raises:
            RuntimeError: the memory that the batch has to be moved to cannot be had.
        """
        copy = self._staged.pop(key)
        self._taken.append(copy)  # whatever happens here, its blocks come back
        stager = self._stager
        stream = stager.current_stream()
        self._statistics.late_copies += not (copy.over or stager.query(copy.done))
        stager.wait(stream, copy.ready)
        if stream != copy.home:
            if stager.shares:
                stager.share(copy.memory, stream)
            else:
                self._move(copy, stream)
        if copy.result is not None:
            stager.share(copy.result, stream)
        return copy

    def _move(self, copy: Copy, stream: Stream) -> None:
        """Copy a batch to memory of `stream`, the current one."""
        memory = self._stager.empty(copy.nbytes)
        moved = self._queue(memory, stream, copy.memory, copy.nbytes)
        self._stager.wait(stream, moved)
        self._stager.wait(copy.home, moved)  # where the old memory is allocated again
        copy.memory, copy.home = memory, stream

    def reap(self) -> list[int]:
        """The blocks of batches that were handed out and have arrived since the last call."""
        running, query = self._running, self._stager.query
        while running and query(running[0].done):
            self._arrived(self._running.popleft())
        return self._leave()

    def settle(self) -> None:
        """Wait until every copy that was begun has run."""
        if self._running:
            self.wait_for(self._running[-1])

    def wait_for(self, copy: Copy) -> None:
        """Wait until a copy, and so those before it, have run."""
        if not copy.over:
            self._stager.synchronize(copy.done)
            while not copy.over:
                self._arrived(self._running.popleft())

    def _arrived(self, copy: Copy) -> None:
        """A copy is known to be over."""
        copy.over = True
        self._statistics.copied(copy.nbytes, copy.began, self._stager.clock())

    def drain(self) -> list[int]:
        """Wait until everything that was begun has run, and forget what was not handed out.

        Returns:
            The blocks of batches that were handed out; the others' may be written again as well.
        """
        # Not the copies' own events: an interrupt may have come between a copy and its entry here.
        self._stager.synchronize(self._stager.record(self._stager.side))
        while self._running:
            self._arrived(self._running.popleft())
        self._staged.clear()
        return self._leave()

    def _leave(self) -> list[int]:
        left = [copy for copy in self._taken if copy.over]
        if left:
            self._taken = [copy for copy in self._taken if not copy.over]
        return [offset for copy in left for offset in copy.blocks]

    def _queue(self, memory: Memory, home: Stream, source: Memory, nbytes: int) -> Event:
        """Queue a copy to memory that was allocated on `home` just now. Returns the copy's event."""
        stager = self._stager
        stager.wait(stager.side, stager.record(home))
        stager.copy_async(memory, source, nbytes)
        return stager.record(stager.side)
