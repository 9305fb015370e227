"""Hosts on this machine, in place of those that a cluster would start on others."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ClassVar
from unittest.mock import patch

from fastq_loader.remote import host, host_process
from fastq_loader.remote.connection import Address, Tls
from fastq_loader.remote.proxy import Place
from fastq_loader.remote.proxy_pool import _FORK, Placement, ProxyPool
from fastq_loader.system import calls
from fastq_loader.workers.config import Plan
from fastq_loader.workers.kinds import WorkerKind
from fastq_loader.workers.worker_pool import WorkerPool
from fastq_loader.workers.zygote import copy_of_consumer, fork_copy
from tests.conftest import descendants, wait_until


class LocalHosts:
    """A placement that starts hosts beside the consumer, as "nodes" of room for `room` workers each.

    Attributes:
        hosts: those that were started last, by the names of their nodes.
        lost: places that were lost.
    """

    made: list[LocalHosts] = []  # noqa: RUF012 - the tests ask for the newest one
    lock = threading.RLock()
    pause: float | None = None

    def __init__(self, nodes: int = 1, room: int = 4) -> None:
        self.nodes = [f"node-{at}" for at in range(nodes)]
        self.room = room
        self.hosts: dict[str, Any] = {}  # processes, as Popen has them
        self.places: dict[Place, socket.socket] = {}
        self.lost: list[Place] = []
        self.missing = 0  # places that were asked for, and are not there yet
        self.ready: list[Place] = []
        LocalHosts.made.append(self)

    def start(self, spec: bytes, places: int) -> None:
        self.spec, self.missing = spec, places

    def add_node(self) -> None:
        """A machine joins; returns when those that waited have its places."""
        node = f"node-{len(self.hosts)}"
        self.nodes.append(node)
        wait_until(lambda: not self.missing or self._taken().count(node) == self.room, 20)

    def find(self, lost: Sequence[Place], wanted: int) -> list[Place]:
        self.lost += lost
        given_up = [self.places.pop(place) for place in lost]
        self.missing += len(lost)
        while self.missing and (place := self._look()):
            self.missing -= 1
            self.ready.append(place)
        for held in given_up:  # not before: a host ends with its last place
            held.close()
        found, self.ready = self.ready[:wanted], self.ready[wanted:]
        self.pause = 0.05 if self.missing else None
        return found

    def _taken(self) -> list[str]:
        return [place.node for place in list(self.places)]

    def _look(self) -> Place | None:
        taken = self._taken()
        for node in sorted(self.nodes, key=taken.count):
            if taken.count(node) < self.room:
                with (
                    suppress(OSError),
                    LocalHosts.lock,
                ):  # it is killed meanwhile; two loaders start hosts at once
                    held, port, number = self._attach(node)
                    place = Place(Address("127.0.0.1", port), number, node)
                    self.places[place] = held
                    return place
        return None

    def _attach(self, node: str) -> tuple[socket.socket, int, int]:
        host_process.hosts.clear()
        try:
            return host_process.attach(self.spec, "127.0.0.1", [0], node, {})
        finally:
            if host_process.hosts:  # the one before has ended
                if node in self.hosts:
                    self.hosts[node].wait()
                (self.hosts[node],) = host_process.hosts

    def death(self, place: Place) -> str:
        return "its node was switched off"

    def kill_node(self, node: str) -> None:
        """A machine dies, and another one joins."""
        self.nodes.remove(node)
        self.hosts[node].kill()
        self.add_node()

    def close(self) -> None:
        for held in self.places.values():
            held.close()
        for each in self.hosts.values():
            each.wait()
        self.hosts.clear()  # with the descriptors of their ends
        host_process.hosts.clear()


def _forget_places() -> None:
    """In a forked process: places are actors' to hold, on other machines, and not the consumer's."""
    for placement in LocalHosts.made:
        for held in placement.places.values():
            held.close()
    LocalHosts.lock.release()


os.register_at_fork(
    before=LocalHosts.lock.acquire, after_in_parent=LocalHosts.lock.release, after_in_child=_forget_places
)


# ---- hosts by a fork: a new interpreter takes seconds to import torch ------------------------------------


@contextmanager
def warm_hosts() -> Iterator[int]:
    """Hosts are started so, from what this process has imported; the id of the process that forks them."""
    zygote = copy_of_consumer(_FORK, lambda inherited, *passed: _warm_host(*inherited, *passed), "")

    def start(spec: bytes, listener: int, address: str, ports: Sequence[int]) -> None:
        host_process.hosts[:] = [each for each in host_process.hosts if each.poll() is None]
        with open(calls.memfd_create("fastq_loader host"), "w+b") as told:
            told.write(spec)
            told.seek(0)
            inherited = [address, *map(str, ports)], sys.path, dict(os.environ)
            started: Any = fork_copy(zygote, _FORK.Process(), inherited, passed=[told.fileno(), listener])
            host_process.hosts.append(started)

    try:
        with patch.object(host_process, "_start", start):
            yield zygote._child.pid
    finally:
        zygote.close()


def _warm_host(arguments: list[str], path: list[str], environment: dict[str, str], *passed: int) -> Any:
    ends: Any = map(Connection, passed)  # they close with the process object
    return _FORK.Process(target=_become_host, args=(arguments, path, environment, *ends))


def _become_host(
    arguments: list[str], path: list[str], environment: dict[str, str], told: Connection, listener: Connection
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(told.fileno(), 0)
    sys.stdin = os.fdopen(0)
    sys.argv = ["-c", str(os.dup(listener.fileno())), *arguments]
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    host.main()


@dataclass(frozen=True)
class FarWorkers(WorkerKind):
    """Workers on hosts of this machine; `placement` makes what starts them, for one pool."""

    is_remote: ClassVar[bool] = True
    placement: Callable[[], Placement]
    max_restarts: int = 0
    tls: Tls | None = None

    def make_pool(self, plan: Plan) -> WorkerPool:
        return ProxyPool(plan, self.placement(), self.tls)


def far(nodes: int = 1, room: int = 4, **options: Any) -> FarWorkers:
    """Workers on hosts of this machine."""
    placement: Callable[[], LocalHosts] = lambda: LocalHosts(nodes, room)  # noqa: E731
    return FarWorkers(placement, **options)


def far_pids(hosts: LocalHosts) -> list[int]:
    """The far workers that run now."""
    return [pid for host in hosts.hosts.values() if host.poll() is None for pid in descendants(host.pid)]
