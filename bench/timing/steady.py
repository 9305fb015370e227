"""The steady state: batches per second once a loader runs, with what they cost."""

from __future__ import annotations

from argparse import Namespace
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil

from bench.peers import PEERS, LoaderSettings, Peer, make_peer
from bench.timing.batches import compare, nbytes
from bench.timing.ceiling import CEILING, WARM_UP, CeilingLane, first_batch
from bench.timing.processes import USAGE, Owners, named, usage
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.workloads import Load, Workload, find_workload

WARM_ROUNDS = 2  # of the batches under way: in the first the buffers are made, in the second used again
MOST_NOTED = 2  # of the places in which a batch differs
SIZED_BATCHES = 4  # over which the bytes of a batch are averaged: ragged ones differ
BATCHES_ALIVE = 16  # of one peer: what is prefetched, what is looked at, and copies on their way
_END = object()


@dataclass(eq=False, kw_only=True)
class PeerLane(Lane):
    """A peer's running loader, and the loop that consumes it.

    Attributes:
        make: makes the loader, as late as the lane starts.
        burst: batches between two looks at the clock. Workers in step deliver in bursts of one batch each: a
            block that ended inside a burst would be charged for work that it does not count.
    """

    make: Callable[[], Peer]
    workload: Workload
    load: Load
    burst: int
    owners: Owners

    def start(self) -> None:
        self.closing.callback(self.owners.forget, self.peer)
        self._peer = self.make()
        self._step = self.workload.new_step()
        self.closing.callback(self._peer.close)
        self._batches = self._peer.epoch()
        # A batch lives until the next one is bound, as in any `for` loop over a loader.
        self._batch = next(self._batches, _END)
        if self._batch is _END:
            raise RuntimeError("it gave no batch")
        self._check()
        expected = WARM_ROUNDS * (self._peer.prefetched + 1)
        if self._discard(expected) < expected:
            self._restart()
        self._waits = array("d")
        self._timed(self.seconds * WARM_UP)
        del self._waits[:]

    def block(self, part: str) -> list[Row]:
        return [self._timed(self.seconds)]

    def finish(self) -> Row:
        return latency(self._waits)

    def close(self) -> None:
        self._batch, self._batches = None, iter(())
        super().close()

    def _timed(self, length: float) -> Row:
        """Iterate for about that long.

        What was prefetched is consumed off the clock, and an epoch that ends is restarted off the clock.
        """
        self._discard(self._peer.prefetched)
        batches, seconds, used = 0, 0.0, np.zeros(len(USAGE))
        while seconds < length:
            pids = self.owners.of(self.peer)
            before, started, ended = usage(pids), perf_counter(), False
            while not ended and seconds + perf_counter() - started < length:
                taken = self._take()
                batches += taken
                ended = taken < self.burst
            # Some end their workers before they raise StopIteration.
            seconds += (self._asked if ended else perf_counter()) - started
            used += usage(pids) - before
            if ended:
                self._restart()
        return {"batches": batches, "seconds": seconds, **named(used)}

    def _take(self) -> int:
        """Consume a burst; fewer batches than that are the end of the epoch."""
        for taken in range(self.burst):
            self._asked = perf_counter()  # also of the call that ends the epoch
            batch = next(self._batches, _END)
            if batch is _END:
                return taken
            self._waits.append(perf_counter() - self._asked)
            self._batch = batch
            self._step(batch)
        return self.burst

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

    def _check(self) -> None:
        """Compare the first batch with torch's."""
        values = not (self.workload.random or self._peer.own_order)
        wrong, types = compare(self._batch, first_batch(self.load, self._peer.shards), values=values)
        if wrong:
            raise RuntimeError(f"wrong batches: {_listed(wrong)}")
        if types:
            self.notes.append(_listed(types))
        if self._peer.own_order:
            self.notes.append("an order of its own: values not compared")


def latency(waits: Sequence[float]) -> Row:
    """Percentiles of these waits in seconds, at least one: each is one that occurred (nearest rank)."""
    found = np.percentile(waits, (50, 95, 99, 100), method="inverted_cdf").tolist()
    return {"calls": len(waits), **dict(zip(("p50", "p95", "p99", "longest"), found, strict=True))}


def cases(options: Namespace, folder: Path) -> Iterator[Case]:
    """Each of these workloads with each of these numbers of workers."""
    for name in options.workloads:
        for workers in options.workers:
            yield case(name, workers, options, folder)


def case(name: str, workers: int, options: Namespace, folder: Path) -> Case:
    """One workload with one number of workers, and the peers whose batches fit into half of the memory."""
    workload, peers = find_workload(name), options.peers
    settings = LoaderSettings(workers, options.start_method)

    def plan() -> Plan:
        load = workload.load(folder)
        sizes = [nbytes(batch) for batch in islice(load.share(), SIZED_BATCHES)]
        facts: Row = {
            "description": workload.description,
            "batch_size": load.batch_size,
            "batch_bytes": sum(sizes) / len(sizes),
        }
        fitting = int(psutil.virtual_memory().total / 2 / max(1, max(sizes) * BATCHES_ALIVE))
        if left := [PEERS[peer].label for peer in peers[fitting:]]:
            facts["notes"] = [f"not measured, for want of memory for all at once: {'; '.join(left)}"]
        common: dict[str, Any] = {"load": load, "owners": Owners(), "seconds": options.seconds}
        lanes = [
            PeerLane(
                *(peer, PEERS[peer].label),
                make=partial(make_peer, peer, load, settings),
                workload=workload,
                burst=max(1, workers),
                **common,
            )
            for peer in peers[:fitting]
        ]
        # The ceiling comes first, so that it is forked from a process without threads.
        return Plan(facts, [CeilingLane(CEILING, "the ceiling", workers=workers, **common), *lanes])

    return Case("steady", name, workers, options.start_method, options.blocks, plan)


def _listed(texts: list[str]) -> str:
    more = len(texts) - MOST_NOTED
    return "; ".join(texts[:MOST_NOTED]) + (f"; and {more} more" if more > 0 else "")
