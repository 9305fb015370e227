"""Workers on other machines: ours, beside workers here, what Ray has for it, and TCP alone.

The other machines are nodes of a Ray cluster on this one, which share its CPUs. They are on its loopback, or
each is in a network namespace of its own, at the end of a link of a known rate. Work is sleep: the CPUs that
it would take are other machines'.
"""

from __future__ import annotations

import importlib.metadata
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from bench.peers import LoaderSettings, Peer, Unsupported
from bench.peers.cluster import FastqElsewhere, RayActors, RayArrays, RayData
from bench.timing import links
from bench.timing.bare_tcp import HERE, BareLane, Spot
from bench.timing.batches import nbytes
from bench.timing.processes import Owners
from bench.timing.ray_nodes import linked_nodes, ray_nodes
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.timing.shared import Shared
from bench.timing.steady import PeerLane
from bench.workloads import Workload, find_workload
from bench.workloads.slow import naps
from fastq_loader import RayWorkers

AXIS = "cluster"
LOOPBACK, LOOPBACK_2, TURN = "loopback", "loopback_2", "turn"
LINKED = {"links_large": "large_u8", "links_small": "bytes_524288"}
WORK = {"work_10": 10.0, "work_1": 1.0, "work_0.1": 0.1}
"""Case → milliseconds that a batch takes."""
JUDGED = "work_10"
"""The case of work that has Ray's own ways beside it."""

LOCAL, REMOTE, BARE = "local", "remote", "recv_into"
ACTORS, ARRAYS, DATA = "actors", "arrays", "ray_data"
LABELS = {
    LOCAL: "fastq_loader, workers here",
    REMOTE: "fastq_loader, RayWorkers",
    ACTORS: "actors, ray.get of tensors in order",
    ARRAYS: "actors, ray.get of arrays in order",
    DATA: "Ray Data, iter_torch_batches",
    BARE: "bare recv_into",
}

LOOPBACKS = {LOOPBACK: 1, LOOPBACK_2: 2}
"""Case → workers. One has a core for each end of its connection, where a machine has two; with more, making
the batches competes with moving them."""
WORKERS = 4
NODES = LINKS = 2
CPUS = 3 * WORKERS
"""Of each node: the lanes that are alive at once do not compete for them, and each node could have all."""
LINKED_SECONDS = 8
"""Blocks over links are so many times as long: a large batch takes 40 ms there, some are on their way when a
block begins, and others when it ends."""
EPOCH, TURNS = 32, 5
"""Batches of an epoch, and turns of a block."""

Make = Callable[[], Peer]
Surroundings = Callable[[], AbstractContextManager[Any]]


@dataclass(eq=False, kw_only=True)
class ElsewhereLane(PeerLane):
    """A peer's running loader, and what its workers need around them."""

    surroundings: Surroundings = nullcontext

    def start(self) -> None:
        self.closing.enter_context(self.surroundings())
        super().start()


@dataclass(eq=False, kw_only=True)
class AnewLane(ElsewhereLane):
    """Begins an epoch for every block. Ray Data reads far ahead while nobody asks, and a block would not be
    charged for that."""

    def start(self) -> None:
        """There is nothing to do before the first block."""

    def block(self, part: str) -> list[Row]:
        try:
            super().start()
            return super().block(part)
        finally:
            self.close()
            self.notes[:] = dict.fromkeys(self.notes)


@dataclass(eq=False, kw_only=True)
class TurnLane(Lane):
    """A loader with persistent workers, of which the turns between epochs are timed."""

    make: Make
    surroundings: Surroundings = nullcontext

    def start(self) -> None:
        self.closing.enter_context(self.surroundings())
        self._peer = self.make()
        self.closing.callback(self._peer.close)
        self._batches = self._peer.epoch()
        next(self._batches)
        self._turn()

    def block(self, part: str) -> list[Row]:
        return [{"seconds": median(self._turn() for _ in range(TURNS))}]

    def close(self) -> None:
        self._batches = iter(())
        super().close()

    def _turn(self) -> float:
        """Seconds from asking for what comes after the last batch to the first batch of the next epoch."""
        for _ in islice(self._batches, EPOCH - 1):
            pass
        started = perf_counter()
        if next(self._batches, None) is not None:
            raise RuntimeError(f"an epoch of {EPOCH} batches went on")
        self._batches = self._peer.epoch()
        next(self._batches)
        return perf_counter() - started


@dataclass(eq=False, kw_only=True)
class MissingLane(Lane):
    """Stands for all of a case that cannot be measured here; `why`: what it needs."""

    why: str

    def start(self) -> None:
        raise Unsupported(f"needs {self.why}")


def cases(options: Namespace, folder: Path) -> Iterator[Case]:
    """All of the axis."""
    large = find_workload("large_u8")
    around = (LOCAL, BARE, REMOTE, ACTORS, ARRAYS, DATA)
    for name, workers in LOOPBACKS.items():
        yield _of_ray(name, large, workers, options, folder, around)
    for name, batches in LINKED.items():
        yield _over_links(name, find_workload(batches), options, folder)
    for name, milliseconds in WORK.items():
        names = (LOCAL, REMOTE, ACTORS, ARRAYS, DATA) if name == JUDGED else (LOCAL, REMOTE)
        yield _of_ray(name, naps(milliseconds), WORKERS, options, folder, names)
    yield _of_ray(TURN, naps(1.0, EPOCH), WORKERS, options, folder, (LOCAL, REMOTE))


def _of_ray(
    name: str, workload: Workload, workers: int, options: Namespace, folder: Path, names: Sequence[str]
) -> Case:
    """A case on the nodes of a cluster, with these lanes. Workers here come first: they are forked while Ray
    has no threads yet."""
    settings = LoaderSettings(workers, options.start_method)

    def plan() -> Plan:
        facts: Row = {"description": workload.description}
        if why := RayWorkers().missing():
            return Plan(facts, [MissingLane(REMOTE, LABELS[REMOTE], why=why)])
        facts["notes"] = [_ray()]
        load, owners, nodes = workload.load(folder), Owners(), Shared(partial(ray_nodes, NODES, CPUS))
        facts["batch_bytes"] = nbytes(next(load.share()))
        makers: dict[str, Make] = {
            LOCAL: partial(FastqElsewhere, load, settings, "processes"),
            REMOTE: partial(FastqElsewhere, load, settings, RayWorkers()),
            ACTORS: partial(RayActors, load, settings),
            ARRAYS: partial(RayArrays, load, settings),
            DATA: partial(RayData, load, settings),
        }
        common: dict[str, Any] = {"workload": workload, "load": load, "burst": workers, "owners": owners}

        def lane(which: str) -> Lane:
            if which == BARE:
                spots = [HERE] * workers
                size = facts["batch_bytes"]
                return BareLane(BARE, LABELS[BARE], options.seconds, batch_bytes=size, spots=lambda: spots)
            of: dict[str, Any] = {"make": makers[which]}
            if which != LOCAL:
                of["surroundings"] = nodes.used
            if name == TURN:
                return TurnLane(which, LABELS[which], options.seconds, **of)
            kind = AnewLane if which == DATA else ElsewhereLane
            return kind(which, LABELS[which], options.seconds, **common, **of)

        return Plan(facts, list(map(lane, names)))

    return Case(AXIS, name, *settings[:2], options.blocks, plan)


def _over_links(name: str, workload: Workload, options: Namespace, folder: Path) -> Case:
    """A case on nodes at the end of links of a known rate."""
    settings = LoaderSettings(WORKERS, options.start_method)
    seconds = LINKED_SECONDS * options.seconds

    def plan() -> Plan:
        facts: Row = {"description": workload.description, "links": LINKS, "link_payload": links.PAYLOAD}
        if why := RayWorkers().missing() or links.missing():
            return Plan(facts, [MissingLane(REMOTE, LABELS[REMOTE], why=why)])
        facts["notes"] = [f"{_ray()}, each in a network namespace of its own"]
        load, nodes = workload.load(folder), Shared(partial(linked_nodes, LINKS, CPUS))
        facts["batch_bytes"] = nbytes(next(load.share()))

        def spots() -> list[Spot]:
            ends = (nodes.value[number % LINKS] for number in range(WORKERS))
            return [Spot(link.there, link.inside) for link in ends]

        remote = ElsewhereLane(
            REMOTE,
            LABELS[REMOTE],
            seconds,
            make=partial(FastqElsewhere, load, settings, RayWorkers()),
            workload=workload,
            load=load,
            burst=1,
            owners=Owners(),
            surroundings=nodes.used,
        )
        size = facts["batch_bytes"]
        bare = BareLane(BARE, LABELS[BARE], seconds, batch_bytes=size, surroundings=nodes.used, spots=spots)
        return Plan(facts, [remote, bare])

    return Case(AXIS, name, *settings[:2], options.blocks, plan)


def _ray() -> str:
    return f"Ray {importlib.metadata.version('ray')}, {NODES} nodes on this machine"
