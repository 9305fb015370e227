"""Copies to the device: which are under way, who waits for whom, and when memory may be written again.

Pure: streams, events and memory are opaque and belong to a `Stager` (`device` has the real one, the tests a
simulated one that runs copies late and in any order that streams allow). Used in the consumer, on the thread
that calls `next()`; nothing here runs on a thread of its own.

The rules, each with the wait that keeps it:

- a copy may write to device memory once all that was queued on the consumer's stream when the memory was
  taken has run: the side stream waits for a *fence*;
- a batch is read once it has arrived: the consumer's current stream waits for the copy's event, and for no
  later copy;
- host memory is written again once its copy has run: `reap` asks the event, `drain` waits for it;
- device memory that another stream than its own looks at is shared with that stream, so that it is not
  handed out again under its feet; where nothing can be shared, the batch moves to memory of that stream;
- a slab of the ring (`buffers="reuse"`) is written again after what the consumer had queued when it
  asked for the next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from fastq_loader.statistics import StagingCounters

Stream = Hashable
Event = Any
Memory = Any


class Stager(Protocol):
    """What a device can do. Every call returns at once, except `synchronize`.

    Attributes:
        side: the stream that all copies run on, one after the other.
    """

    side: Stream

    def current_stream(self) -> Stream:
        """The stream that the consumer queues its work on now."""

    def empty(self, nbytes: int) -> Memory:
        """Device memory, ready for whatever is queued on the current stream from here on."""

    def copy_async(self, memory: Memory, source: Memory, nbytes: int) -> None:
        """Queue a copy of the first `nbytes` on the side stream, from host memory or from the device's."""

    def record(self, stream: Stream, event: Event | None = None) -> Event:
        """An event (the one given, if nobody waits for it any more) that is over when all that is queued on
        `stream` has run."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what is queued on `stream` from here on run after the event."""

    def query(self, event: Event) -> bool:
        """Whether an event is over."""

    def synchronize(self, event: Event) -> None:
        """Wait here until an event is over."""

    def share(self, memory: Any, stream: Stream) -> None:
        """`memory`, or every part of a batch, is looked at on `stream` too: when its last owner lets go of
        it, it must not be handed out again before what is queued on `stream` by then has run."""

    def on_side(self, call: Callable[[], Any]) -> Any:
        """What `call` returns; the device work that it asks for is queued on the side stream."""

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
        """Host memory that is there already, as `copy_async` and `fill` take it."""

    def fill(self, memory: Memory, source: Memory, nbytes: int) -> None:
        """Copy `nbytes` between host memories, here and now."""


class Copy:
    """One batch on its way to the device, or there.

    Attributes:
        memory: where on the device. `nbytes`: how much was copied. `home`: the stream that the memory was
            allocated on.
        result: what ran on the side stream after the copy made of it.
        done: event: its bytes have arrived. `ready`: and `result` is there.
        host: host memory that may be written again once it was handed out and has arrived.
        over: its bytes are known to have arrived.
    """

    __slots__ = ("done", "home", "host", "memory", "nbytes", "over", "ready", "result", "slab")

    def __init__(self, memory: Memory, nbytes: int, home: Stream, host: Any, slab: _Slab | None) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.home = home
        self.host = host
        self.slab = slab
        self.result: Any = None
        self.done: Event = None
        self.ready: Event = None
        self.over = False


class _Slab:
    """Device memory that one batch after the other is copied to."""

    __slots__ = ("fences", "home", "memory", "nbytes", "shown_on")

    def __init__(self, memory: Memory, nbytes: int, home: Stream) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.home = home
        self.shown_on: Stream = None  # the stream that its batch was handed out on
        self.fences: list[Event] = []  # what was queued when the consumer was done with it


class Copies:
    """The copies of one pool of workers, in the order in which they were begun.

    Args:
        stager: the device.
        ahead: batches that are copied before they are asked for, at least 1.
        reuse: copy to a ring of `ahead + 1` slabs in turn; else to new memory for each batch.
        counters: the loader's.
        clock: seconds, for the waits that are counted.
        shares: the stager can share memory; without it no `then` may be given to `begin`.
    """

    def __init__(
        self,
        stager: Stager,
        ahead: int,
        reuse: bool,
        counters: StagingCounters,
        clock: Callable[[], float],
        shares: bool = True,
    ) -> None:
        self._stager = stager
        self._counters = counters
        self._clock = clock
        self._reuse = reuse
        self._shares = shares
        self._slabs = ahead + 1  # those that are on their way, and the one that is looked at
        # A consumer that never waits for its device would run ahead of it for ever, and hold as many blocks.
        self._most = 2 * ahead
        self._running: deque[Copy] = deque()  # not known to be over, in the order of the side stream
        self._staged: dict[int, Copy] = {}  # not handed out
        self._taken: list[Copy] = []  # handed out, and `reap` has not given their host memory back
        self._free: deque[_Slab] = deque()
        self._made = 0  # slabs of the ring
        self._shown: _Slab | None = None  # the slab of the batch that was handed out last
        self._events: list[Event] = []  # that nobody waits for

    def __contains__(self, key: int) -> bool:
        """Whether a batch was begun, and not handed out."""
        return key in self._staged

    def turn(self) -> None:
        """The consumer asks for the next batch. In a ring, the one that it had may be overwritten after what
        it has queued up to here, on the stream that it was given the batch on and on the one it uses now."""
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.fences = [
                self._record(stream) for stream in {shown.shown_on, self._stager.current_stream()}
            ]
            self._free.append(shown)

    def begin(
        self, key: int, source: Memory, nbytes: int, host: Any, then: Callable[[Memory], Any] | None = None
    ) -> Copy:
        """Begin to copy a batch.

        Args:
            key: names the batch.
            source: page-locked or pageable host memory.
            nbytes: how much of it.
            host: what `reap` gives back when the batch was handed out and has arrived.
            then: runs on the side stream after the copy; what it returns is the batch's `result`.
        """
        if self.full:
            began = self._clock()
            self.wait_for(self._running[0])
            self._counters.block_wait_seconds += self._clock() - began
        stager = self._stager
        copy = self._on_slab(nbytes, host) if self._reuse else self._on_new_memory(nbytes, host)
        stager.copy_async(copy.memory, source, nbytes)
        copy.done = copy.ready = self._record(stager.side)
        self._counters.copies += 1
        self._counters.copied_bytes += nbytes
        self._running.append(copy)
        self._staged[key] = copy
        if then is not None:
            try:
                copy.result = stager.on_side(lambda: then(copy.memory))
            except BaseException:  # an interrupt: nobody will ask for this batch
                self._forget(key)
                raise
            copy.ready = self._record(stager.side)
        return copy

    def _forget(self, key: int) -> None:
        copy = self._staged.pop(key)
        if copy.slab is not None:
            self._free.append(copy.slab)  # what is written to it next is queued behind what runs there now
        else:
            self._stager.share(copy.memory, self._stager.side)

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
        self._taken.append(copy)  # whatever happens here, its host memory comes back
        stager = self._stager
        stream = stager.current_stream()
        self._counters.late_copies += not (copy.over or stager.query(copy.done))
        stager.wait(stream, copy.ready)
        if stream != copy.home:
            self._show(copy, stream)
        if copy.result is not None:
            stager.share(copy.result, stream)
        if copy.slab is not None:
            copy.slab.shown_on = stream
            self._shown = copy.slab
        return copy

    def _show(self, copy: Copy, stream: Stream) -> None:
        """Let the current stream, which is not the one that a batch's memory belongs to, look at it."""
        stager = self._stager
        if self._shares:
            stager.share(copy.memory, stream)
            return
        if copy.slab is not None:  # what is written to it next is queued behind the move
            self._free.append(copy.slab)
            copy.slab = None
        memory = self._fenced(copy.nbytes, stream)
        stager.copy_async(memory, copy.memory, copy.nbytes)
        moved = self._record(stager.side)
        stager.wait(stream, moved)
        stager.wait(copy.home, moved)  # where the old memory is handed out again
        self._events.append(moved)
        copy.memory = memory

    def reap(self) -> list[Any]:
        """The `host` of batches that were handed out and have arrived since the last call."""
        running, query = self._running, self._stager.query
        while running and query(running[0].done):
            running.popleft().over = True
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
                self._running.popleft().over = True

    def drain(self) -> list[Any]:
        """Wait until everything that was begun has run, and forget what was not handed out.

        Returns:
            The `host` of batches that were handed out; of the others nobody looks at theirs any more.
        """
        # Not the copies' own events: an interrupt may have come between a copy and its entry here.
        self._stager.synchronize(self._record(self._stager.side))
        for copy in self._running:
            copy.over = True
        self._running.clear()
        self._free += [copy.slab for copy in self._staged.values() if copy.slab is not None]
        self._staged.clear()
        return self._leave()

    def _leave(self) -> list[Any]:
        left = [copy for copy in self._taken if copy.over]
        if left:
            self._taken = [copy for copy in self._taken if not copy.over]
            for copy in left:
                self._events.append(copy.done)
                if copy.ready is not copy.done:
                    self._events.append(copy.ready)
        return [copy.host for copy in left]

    def _record(self, stream: Stream) -> Event:
        return self._stager.record(stream, self._events.pop() if self._events else None)

    # ---- device memory ------------------------------------------------------------------------

    def _on_new_memory(self, nbytes: int, host: Any) -> Copy:
        home = self._stager.current_stream()
        return Copy(self._fenced(nbytes, home), nbytes, home, host, None)

    def _fenced(self, nbytes: int, home: Stream) -> Memory:
        """New memory, which the side stream does not write to before what used it last has run."""
        memory = self._stager.empty(nbytes)
        fence = self._record(home)
        self._stager.wait(self._stager.side, fence)
        self._events.append(fence)  # who waits for an event waits for what it was when the wait was queued
        return memory

    def _on_slab(self, nbytes: int, host: Any) -> Copy:
        slab = self._free.popleft() if self._made == self._slabs else None
        if slab is None or slab.nbytes < nbytes:
            self._made -= slab is not None
            home = self._stager.current_stream()
            slab = _Slab(self._fenced(nbytes, home), nbytes, home)
            self._made += 1
        for fence in slab.fences:
            self._stager.wait(self._stager.side, fence)
        self._events += slab.fences
        slab.fences = []
        return Copy(slab.memory, nbytes, slab.home, host, slab)
