"""Tracks copies to the device: which are under way, which stream waits, and when memory may be reused.

Pure: streams, events and memory are opaque and belong to a backend: a `TorchBackend`, or in tests a simulated
one that runs copies late and in any order that streams allow. Used in the consumer, on the thread that calls
`next()`; nothing here runs on a thread of its own.

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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastq_loader.device.accelerator import TorchBackend
    from fastq_loader.statistics.counters import StagingCounters

Stream = Hashable
Event = Any
Memory = Any
#: Makes a batch from device memory.
Build = Callable[[Memory], Any]


@dataclass(eq=False, slots=True)
class Copy:
    """One batch on its way to the device, or there.

    Attributes:
        memory: device memory, allocated on the stream `home`. `nbytes`: number of bytes copied.
        build: makes the batch from the memory. Both are None once the batch was delivered.
        blocks: host memory that may be written again once the batch was delivered and has arrived.
        began: start, in seconds of the backend's clock.
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
        backend: the device.
        prefetch: number of batches copied ahead of `next()`.
        statistics: the loader's.

    Attributes:
        free: blocks that `reap` will return.
    """

    def __init__(self, backend: TorchBackend, prefetch: int, statistics: StagingCounters) -> None:
        self._backend = backend
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
        backend, statistics = self._backend, self._statistics
        if self.full:
            began = backend.clock()
            self.wait_for(self._running[0])
            statistics.block_wait_seconds += backend.clock() - began
        memory, home = backend.empty(nbytes), backend.current_stream()
        copy = Copy(memory, home, nbytes, build, blocks, backend.clock(), over=not nbytes)
        backend.wait(backend.side, backend.record(home))
        if nbytes:
            backend.copy_async(memory, source, nbytes)
        copy.done = copy.ready = backend.record(backend.side)
        if nbytes:
            self._running.append(copy)
            statistics.copies += 1
            statistics.copied_bytes += nbytes
        if beside is not None:
            copy.built = backend.on_side(lambda: beside(build, memory))
            copy.ready = backend.record(backend.side)
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
        backend = self._backend
        stream = backend.current_stream()
        self._statistics.late_copies += not (copy.over or backend.query(copy.done))
        backend.wait(stream, copy.ready)
        if stream != copy.home:
            backend.share(copy.memory, stream)
        # They are the batch's now: its memory is free once the user has dropped it.
        memory, build, copy.memory, copy.build = copy.memory, copy.build, None, None
        if copy.built is not None:
            backend.share(copy.built.result, stream)
            return copy.built.take()
        assert build is not None, "a batch is delivered once"
        return build(memory)

    def reap(self) -> list[int]:
        """Return the blocks of batches that were delivered and have arrived since the last call."""
        while self._running and self._backend.query(self._running[0].done):
            self._arrived(self._running.popleft())
        free, self.free = self.free, []
        return free

    def wait_for(self, copy: Copy) -> None:
        """Wait until a copy, and so all earlier ones, have run."""
        self._backend.synchronize(copy.done)
        while not copy.over:
            self._arrived(self._running.popleft())

    def _arrived(self, copy: Copy) -> None:
        """Note that a copy is over."""
        copy.over = True
        if copy.delivered:
            self.free += copy.blocks
        self._statistics.copied(copy.nbytes, copy.began, self._backend.clock())

    def settle(self) -> None:
        """Wait until every copy that was begun has run."""
        # Not for the copies' own events: an interrupt may have come between a copy and its entry here.
        self._backend.synchronize(self._backend.record(self._backend.side))

    def drain(self) -> list[int]:
        """Wait until every copy that was begun has run. Undelivered batches are dropped.

        Returns:
            The blocks of delivered batches; the other blocks may be written again as well.
        """
        self.settle()
        return self.reap()
