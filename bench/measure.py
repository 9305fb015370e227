"""Batches per second: all peers alive in this process, taking turns block by block.

Turns, because the speed of a machine drifts over minutes by more than loaders differ. While one peer is timed
the others are not consumed: their workers rest once their prefetch is full, and a block waits until they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from time import perf_counter

from bench.peers import LoaderSettings, Peer, peer_class
from bench.proc import wait_until_quiet
from bench.results import Block
from bench.workloads import Load, Step

# Of a block's length. Enough for worker processes to start and for buffers to reach their size.
WARM_UP = 0.5


class Lane:
    """One peer's running loader, and the loop that consumes it."""

    def __init__(self, name: str, peer: Peer, step: Step, burst: int) -> None:
        """Start the workers. `burst` is the number of batches between two looks at the clock."""
        self._name = name
        self._peer = peer
        self._step = step
        self._burst = burst
        self._batches = peer.epoch()

    def block(self, seconds: float) -> Block:
        """Iterate for about `seconds` and count.

        What was prefetched before the clock starts is consumed first, and an epoch that ends is restarted off
        the clock. A batch lives until the next one is bound, as in any `for` loop over a loader.
        """
        self._discard(self._peer.prefetched)
        batches, timed = 0, 0.0
        started = perf_counter()
        while timed < seconds:
            taken = 0
            for batch in islice(self._batches, self._burst):
                self._step(batch)
                taken += 1
            now = perf_counter()
            timed += now - started
            batches += taken
            if taken < self._burst:
                self._restart()
                now = perf_counter()
            started = now
        return Block(batches, timed)

    def stop(self) -> None:
        """Drop the iterator, so that the peer can be closed."""
        self._batches = iter(())

    def _restart(self) -> None:
        self._batches = self._peer.epoch()
        expected = max(1, self._peer.prefetched)
        if (taken := self._discard(expected)) < expected:
            raise RuntimeError(f"peer {self._name!r}: an epoch ended after {taken} batches")

    def _discard(self, batches: int) -> int:
        """Consume so many batches off the clock, or what is left of the epoch; the number consumed."""
        taken = 0
        for batch in islice(self._batches, batches):
            self._step(batch)
            taken += 1
        return taken


def measure_rates(
    names: Sequence[str],
    load: Load,
    new_step: Callable[[], Step],
    settings: LoaderSettings,
    blocks: int,
    seconds: float,
    tick: Callable[[str], None],
) -> dict[str, list[Block]]:
    """Time the peers in turn; `tick` is called after every block, off the clock, with the peer's name."""
    measured: dict[str, list[Block]] = {name: [] for name in names}
    with ExitStack() as stack:
        lanes: dict[str, Lane] = {}
        for name in names:
            peer = peer_class(name)(load, settings)
            stack.callback(peer.close)
            # Workers in step deliver in bursts of one batch each: a block that ended inside a burst would be
            # charged for work that it does not count.
            lanes[name] = Lane(name, peer, new_step(), burst=settings.num_workers)
            stack.callback(lanes[name].stop)
        for name in names:
            wait_until_quiet()
            lanes[name].block(seconds * WARM_UP)
            tick(name)
        for number in range(blocks):
            # To and fro, so that no peer always runs after the same other one.
            for name in names if number % 2 == 0 else reversed(names):
                wait_until_quiet()
                measured[name].append(lanes[name].block(seconds))
                tick(name)
    return measured
