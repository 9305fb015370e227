"""Moments between and around epochs, for loaders that take torch's arguments.

Every repetition makes a new loader, so that its first epoch writes to memory that nobody has touched before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from bench.peers import PEERS, LoaderSettings, Peer, Unsupported, make_peer, peer_class
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.workloads import Load, find_workload

EPOCH = 64  # batches
DEEP_PREFETCH = 8
STEP_S = 0.05  # of a training step, in which workers that are not needed any more can end

FIRST_BATCH = "first batch"
FIRST_EPOCH = "first epoch, from its first batch to its last"
TURN_PERSISTENT = "epoch turn, persistent workers"
TURN_NEW_WORKERS = "epoch turn, new workers"
TURN_AFTER_STEP = f"epoch turn, new workers, after a step of {STEP_S * 1e3:.0f} ms"
RESTART = f"break at batch 1, prefetch {DEEP_PREFETCH}: first batch of the next epoch"


@dataclass(eq=False, kw_only=True)
class TurnsLane(Lane):
    """A peer, of which every scene makes loaders of its own."""

    load: Load
    settings: LoaderSettings

    def start(self) -> None:
        if self.load.iterable:
            raise Unsupported("the epochs of a stream have a length of their own")
        peer_class(self.peer)

    def block(self, part: str) -> list[Row]:
        return [{"part": moment, "seconds": seconds} for moment, seconds in SCENES[part](self).items()]

    def persistent(self) -> dict[str, float]:
        with self._loader() as peer:
            started = perf_counter()
            batches = peer.epoch()
            held = next(batches)
            first = perf_counter()
            for _ in range(EPOCH - 1):
                held = next(batches)
            last = perf_counter()
            seconds, _ = turn(peer, batches, EPOCH)
            del held, batches
        return {FIRST_BATCH: first - started, FIRST_EPOCH: last - first, TURN_PERSISTENT: seconds}

    def new_workers(self) -> dict[str, float]:
        turns = {}
        for moment, step in ((TURN_NEW_WORKERS, 0.0), (TURN_AFTER_STEP, STEP_S)):
            with self._loader(persistent=False) as peer:
                batches = peer.epoch()
                for _ in range(EPOCH):
                    next(batches)
                sleep(step)
                turns[moment], _ = turn(peer, batches, EPOCH)
                del batches
        return turns

    def broken(self) -> dict[str, float]:
        with self._loader(prefetch_factor=DEEP_PREFETCH) as peer:
            batches = peer.epoch()
            next(batches)
            started = perf_counter()
            batches = peer.epoch()
            next(batches)
            ended = perf_counter()
            del batches
        return {RESTART: ended - started}

    @contextmanager
    def _loader(self, **settings: Any) -> Iterator[Peer]:
        peer = make_peer(self.peer, self.load, self.settings._replace(**settings))
        try:
            yield peer
        finally:
            peer.close()


SCENES = {
    "persistent": TurnsLane.persistent,
    "new workers": TurnsLane.new_workers,
    "break": TurnsLane.broken,
}


def case(name: str, peers: Sequence[str], settings: LoaderSettings, blocks: int, folder: Path) -> Case:
    """The moments of one workload; the peers are drop-ins for torch's loader, which end an epoch
    themselves."""
    workload = find_workload(name)

    def plan() -> Plan:
        load = replace(workload.load(folder), batches=EPOCH)
        lanes = [TurnsLane(peer, PEERS[peer].label, 60.0, load=load, settings=settings) for peer in peers]
        return Plan({"description": workload.description}, lanes, tuple(SCENES))

    return Case("turns", name, settings.num_workers, settings.start_method, blocks, plan)


def turn(peer: Peer, batches: Iterator[Any], length: int) -> tuple[float, Iterator[Any]]:
    """Seconds from asking for what comes after the last of `length` batches to the first batch of the next
    epoch, and the rest of that."""
    started = perf_counter()
    if next(batches, None) is not None:
        raise RuntimeError(f"an epoch of {length} batches went on")
    following = peer.epoch()
    next(following)
    return perf_counter() - started, following
