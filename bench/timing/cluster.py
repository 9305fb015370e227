"""Workers on other machines: ours, beside workers here, what Ray has for it, and TCP alone.

The other machines are nodes of a Ray cluster on this one, which share its CPUs and are on its loopback. Work
is sleep: the CPUs that it would take are other machines'.
"""

from __future__ import annotations

import importlib.metadata
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from bench.peers import LoaderSettings, Peer, Unsupported
from bench.peers.cluster import FastqElsewhere, RayActors
from bench.timing.bare_tcp import BareLane
from bench.timing.batches import nbytes
from bench.timing.processes import Owners
from bench.timing.ray_nodes import ray_nodes
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.timing.steady import PeerLane
from bench.timing.turns import turn
from bench.workloads import Workload, find_workload
from bench.workloads.slow import naps
from fastq_loader import RayWorkers

AXIS = "cluster"
LOOPBACK, LOOPBACK_2, TURN = "loopback", "loopback_2", "turn"
WORK = {"work_10": 10.0, "work_1": 1.0, "work_0.1": 0.1}
"""Case → milliseconds that a batch takes."""
JUDGED = "work_10"
"""The case of work that has Ray's own ways beside it."""

LOCAL, REMOTE, BARE = "local", "remote", "recv_into"
ACTORS = "actors"
LABELS = {
    LOCAL: "fastq_loader, workers here",
    REMOTE: "fastq_loader, RayWorkers",
    ACTORS: "actors, ray.get of tensors in order",
    BARE: "bare recv_into",
}

LOOPBACKS = {LOOPBACK: 1, LOOPBACK_2: 2}
"""Case → workers. One has a core for each end of its connection, where a machine has two; with more, making
the batches competes with moving them."""
WORKERS = 4
NODES = 2
CPUS = 3 * WORKERS
"""Of each node: the lanes that are alive at once do not compete for them, and each node could have all."""
EPOCH, TURNS = 32, 5
"""Batches of an epoch, and turns of a block."""

Make = Callable[[], Peer]
T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class TurnLane(Lane):
    """A loader with persistent workers, of which the turns between epochs are timed."""

    make: Make

    def start(self) -> None:
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
        for _ in islice(self._batches, EPOCH - 1):
            pass
        seconds, self._batches = turn(self._peer, self._batches, EPOCH)
        return seconds


@dataclass(eq=False, kw_only=True)
class MissingLane(Lane):
    """Stands for all of a case that cannot be measured here; `why`: what it needs."""

    why: str

    def start(self) -> None:
        raise Unsupported(f"needs {self.why}")


def cases(options: Namespace, folder: Path) -> Iterator[Case]:
    """All of the axis."""
    large = find_workload("large_u8")
    around = (LOCAL, BARE, REMOTE, ACTORS)
    for name, workers in LOOPBACKS.items():
        yield _of_ray(name, large, workers, options, folder, around)
    for name, milliseconds in WORK.items():
        names = (LOCAL, REMOTE, ACTORS) if name == JUDGED else (LOCAL, REMOTE)
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
        load, around = workload.load(folder), ExitStack()
        nodes = _once(partial(ray_nodes, NODES, CPUS), around)
        facts["batch_bytes"] = nbytes(next(load.share()))
        makers: dict[str, Make] = {
            LOCAL: partial(FastqElsewhere, load, settings, "processes"),
            REMOTE: partial(_after, nodes, FastqElsewhere, load, settings, RayWorkers()),
            ACTORS: partial(_after, nodes, RayActors, load, settings),
        }
        common: dict[str, Any] = {"workload": workload, "load": load, "burst": workers, "owners": Owners()}

        def lane(which: str) -> Lane:
            about = which, LABELS[which], options.seconds
            if which == BARE:
                return BareLane(*about, batch_bytes=facts["batch_bytes"], connections=workers)
            if name == TURN:
                return TurnLane(*about, make=makers[which])
            return PeerLane(*about, make=makers[which], **common)

        return Plan(facts, list(map(lane, names)), around=around)

    return Case(AXIS, name, *settings[:2], options.blocks, plan)


def _once(make: Callable[[], AbstractContextManager[T]], around: ExitStack) -> Callable[[], T]:
    """Something that several lanes need: made for the first one, and ended with `around`."""
    return cache(lambda: around.enter_context(make()))


def _after(nodes: Callable[[], Any], make: Callable[..., Peer], *arguments: Any) -> Peer:
    """A loader whose workers need these nodes."""
    nodes()
    return make(*arguments)


def _ray() -> str:
    return f"Ray {importlib.metadata.version('ray')}, {NODES} nodes on this machine"
