"""Far workers on this machine, in place of those that a cluster would start on others.

They are started as actors of Ray start them, in processes that are forked from what this one has imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from fastq_loader.extras.remote.connection import Address
from fastq_loader.extras.remote.far_worker import FarWorker
from fastq_loader.extras.remote.proxy import NoPlace, Place
from fastq_loader.extras.remote.proxy_pool import _FORK, Placement, ProxyPool
from fastq_loader.workers.children import Child
from fastq_loader.workers.config import Plan
from fastq_loader.workers.kinds import WorkerKind
from fastq_loader.workers.worker_pool import WorkerPool
from fastq_loader.workers.zygote import Zygote, copy_of_consumer, fork_copy
from tests.conftest import wait_until

#: Seconds that a far worker has to end in after its connection, and to open its dataset in.
ENDS, OPENS = 30, 60


class Far:
    """A process with a far worker. `started` returns its port, or raises what it has raised."""

    def __init__(self, zygote: Zygote, setup: bytes) -> None:
        self._pipe, its = Pipe()
        given = setup, list(sys.path), dict(os.environ)
        process = _FORK.Process()
        with its:
            launch: Any = partial(fork_copy, zygote, own=given, passed=[its.fileno()])
            self.child = Child(process, launch=launch)
            self.child.start()
        self.child.disown()  # its parent is the zygote

    def started(self) -> int:
        with self._pipe:
            assert self._pipe.poll(OPENS)
            said: int | Exception = self._pipe.recv()
        if isinstance(said, Exception):
            self.close()
            raise said
        return said

    def close(self) -> None:
        self._pipe.close()
        self.child.kill()
        self.child.release()


def far_zygote() -> Zygote:
    """Forks far workers, which have imported what this process has imported now."""
    return copy_of_consumer(_FORK, lambda given, its: _FORK.Process(target=_become, args=(*given, its)))


def _become(setup: bytes, path: list[str], environment: dict[str, str], its: int) -> None:
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    pipe: Connection[Any, Any] = Connection(its)
    with pipe:
        try:
            worker = FarWorker(setup, "127.0.0.1", [0])
        except Exception as error:
            pipe.send(error)
            return
        pipe.send(worker.port)
    worker.run()


#: Forks them for all pools of a module of tests (see `warm_far_workers`); without it, each pool has its own.
warm: list[Zygote] = []


@contextmanager
def warm_far_workers() -> Iterator[int]:
    """Far workers are forked from what this process has imported now; the id of what forks them."""
    warm.append(far_zygote())
    try:
        yield warm[0]._child.pid
    finally:
        warm.pop().close()


class LocalPlacement(Placement):
    """A placement that starts far workers beside the consumer, on "nodes" with room for `room` each.

    Attributes:
        lost: places that were lost.
    """

    made: list[LocalPlacement] = []  # noqa: RUF012 - the tests ask for the newest one
    pause: float | None = None

    def __init__(self, nodes: int = 1, room: int = 4) -> None:
        self.nodes = [f"node-{at}" for at in range(nodes)]
        self.room = room
        self.running: dict[Place, Far] = {}
        self.lost: list[Place] = []
        self.off: set[str] = set()  # nodes that were switched off
        self._deaths: dict[Place, str] = {}
        self._missing = 0  # places that were asked for, and are not there yet
        self._ready: list[Place] = []
        self._zygote: Zygote | None = None
        LocalPlacement.made.append(self)

    def start(self, setup: bytes, places: int) -> None:
        self._setup, self._missing = setup, places
        self._zygote = warm[0] if warm else far_zygote()

    def add_node(self) -> None:
        """A machine joins; returns when those that waited have its places."""
        node = f"node-{len(self.nodes) + len(self.off)}"
        self.nodes.append(node)
        assert wait_until(lambda: not self._missing or self._taken().count(node) == self.room, OPENS)

    def kill_node(self, node: str) -> None:
        """A machine dies, and another one joins."""
        self.nodes.remove(node)
        self.off.add(node)
        for place, far in list(self.running.items()):
            if place.node == node:
                far.child.process.kill()
        self.add_node()

    def find(self, lost: Sequence[Place], wanted: int) -> list[Place | NoPlace]:
        self.lost += lost
        for place in lost:
            self._end(place)
        self._missing += len(lost)
        self._start_missing()
        self.pause = 0.05 if self._missing else None
        found, self._ready = self._ready[:wanted], self._ready[wanted:]
        return [*found]

    def _taken(self) -> list[str]:
        return [place.node for place in list(self.running)]

    def _start_missing(self) -> None:
        """As many as have room, all at once."""
        assert self._zygote is not None
        starting: list[tuple[str, Far]] = []
        while self._missing:
            taken = [*self._taken(), *(node for node, _ in starting)]
            node = min(self.nodes, key=taken.count, default="")
            if not node or taken.count(node) == self.room:
                break
            starting.append((node, Far(self._zygote, self._setup)))
            self._missing -= 1
        for node, far in starting:
            place = Place(Address("127.0.0.1", far.started()), far.child.pid, node)
            self.running[place] = far
            self._ready.append(place)

    def death(self, place: Place) -> str:
        if place.node in self.off:
            return "its node was switched off"
        far = self.running.get(place)
        ended = far is not None and wait_until(lambda: bool(far.child.process.exitcode is not None), ENDS)
        if far is None or not ended or place in self._deaths:  # then `_end` may have killed it
            return self._deaths.get(place, "")
        return f"it {far.child.death()[0]}"

    def _end(self, place: Place) -> None:
        """It has a moment to end by itself, as with Ray."""
        self._deaths[place] = self.death(place)
        self.running.pop(place).close()

    def close(self) -> None:
        for far in self.running.values():
            far.close()
        self.running.clear()
        if self._zygote is not None and self._zygote not in warm:
            self._zygote.close()


@dataclass(frozen=True)
class FarWorkers(WorkerKind):
    """Far workers on this machine; `placement` makes what starts them, for one pool."""

    is_remote: ClassVar[bool] = True
    placement: Callable[[], Placement]
    max_restarts: int = 0

    def make_pool(self, plan: Plan) -> WorkerPool:
        return ProxyPool(plan, self.placement())


def far(nodes: int = 1, room: int = 4, **options: Any) -> FarWorkers:
    """Workers on "nodes" of this machine."""
    placement: Callable[[], LocalPlacement] = lambda: LocalPlacement(nodes, room)  # noqa: E731
    return FarWorkers(placement, **options)


def far_pids(placement: LocalPlacement) -> list[int]:
    """The far workers that run now."""
    return [place.pid for place, far in list(placement.running.items()) if far.child.process.is_alive()]
