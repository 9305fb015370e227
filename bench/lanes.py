"""One peer under measurement: its running loader, the loop that consumes it, and the clocks over both."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import islice
from time import perf_counter
from typing import Any

from bench.peers import Peer
from bench.proc import Usage, usage
from bench.results import Block
from bench.workloads import Step

# Of the batches that a loader has under way: in the first the buffers are made, in the second used again.
WARM_ROUNDS = 2
_END = object()


class Meter:
    """Wall clock, CPU and context switches; what runs between `stop` and `start` is not counted."""

    def __init__(self, workers: Callable[[], list[int]]) -> None:
        """`workers` gives the ids of the worker processes at this moment."""
        self._workers = workers
        self._pids: list[int] = []
        self._used_before = Usage(0.0, 0.0, 0)
        self._started = 0.0
        self._seconds = 0.0
        self._used = Usage(0.0, 0.0, 0)

    def start(self) -> None:
        self._pids = self._workers()
        self._used_before = usage(self._pids)
        self._started = perf_counter()

    def seconds(self) -> float:
        """Counted so far, while it runs."""
        return self._seconds + perf_counter() - self._started

    def stop(self, at: float | None = None) -> None:
        """Stop now, or have stopped at that reading of `perf_counter`."""
        self._seconds += (perf_counter() if at is None else at) - self._started
        self._used += usage(self._pids) - self._used_before

    def block(self, batches: int) -> Block:
        used = self._used
        return Block(batches, self._seconds, used.consumer_cpu, used.worker_cpu, used.switches)


class PeerLane:
    """A peer's running loader, and the loop that consumes it."""

    def __init__(self, peer: Peer, step: Step, burst: int, workers: Callable[[], list[int]]) -> None:
        """Start the first epoch. `burst` is the number of batches between two looks at the clock."""
        self.waits = array("d")
        """Seconds that each `next()` of the timed blocks took."""
        self._peer = peer
        self._step = step
        self._burst = burst
        self._workers = workers
        self._batches = peer.epoch()
        self._asked = 0.0  # when the last `next()` began
        # A batch lives until the next one is bound, as in any `for` loop over a loader.
        self._batch: Any = None

    def first(self) -> Any:
        """The first batch; to be asked for before any block."""
        self._batch = next(self._batches, _END)
        if self._batch is _END:
            raise RuntimeError("it gave no batch")
        return self._batch

    def warm_up(self) -> None:
        """Take so many batches that every buffer has been used, however large and slow they are."""
        expected = WARM_ROUNDS * (self._peer.prefetched + 1)
        if self._discard(expected) < expected:
            self._restart()

    def block(self, seconds: float) -> Block:
        """Iterate for about `seconds` and count.

        What was prefetched before the clock starts is consumed first, and an epoch that ends is restarted off
        the clock.
        """
        self._discard(self._peer.prefetched)
        batches = 0
        meter = Meter(self._workers)
        meter.start()
        while meter.seconds() < seconds:
            taken = self._take()
            batches += taken
            if taken < self._burst:
                meter.stop(self._asked)  # some end their workers before they raise StopIteration
                self._restart()
                meter.start()
        meter.stop()
        return meter.block(batches)

    def stop(self) -> None:
        """Drop the iterator, so that the peer can be closed."""
        self._batch = None
        self._batches = iter(())

    def _take(self) -> int:
        """Consume a burst; fewer batches than that are the end of the epoch."""
        for taken in range(self._burst):
            self._asked = perf_counter()
            batch = next(self._batches, _END)
            if batch is _END:
                return taken
            self.waits.append(perf_counter() - self._asked)
            self._batch = batch
            self._step(batch)
        return self._burst

    def _restart(self) -> None:
        self._batches = self._peer.epoch()
        expected = max(1, self._peer.prefetched)
        if (taken := self._discard(expected)) < expected:
            raise RuntimeError(f"an epoch ended after {taken} batches")

    def _discard(self, batches: int) -> int:
        """Consume so many batches off the clock, or what is left of the epoch; the number consumed."""
        taken = 0
        for batch in islice(self._batches, batches):
            self._batch = batch
            self._step(batch)
            taken += 1
        return taken
