"""Hosts on this machine, in place of those that a cluster would start on others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from fastq_loader.remote.backend import RemoteBackend
from fastq_loader.remote.control import Place
from fastq_loader.remote.host_process import Host
from fastq_loader.remote.link import Address, Tls
from fastq_loader.remote.places import Found, Placement
from fastq_loader.workers.backend import WorkerBackend
from fastq_loader.workers.config import Plan
from fastq_loader.workers.options import WorkerKind
from tests.conftest import descendants


class LocalHosts:
    """A placement that starts hosts beside the consumer, as "nodes" of room for `room` workers each.

    Attributes:
        hosts: those that were started, by the names of their nodes.
        released: places that were given back, with why.
        waiting: places that were not to be had yet.
    """

    made: list[LocalHosts] = []  # noqa: RUF012 - the tests ask for the newest one

    def __init__(self, nodes: int = 1, room: int = 4) -> None:
        self.nodes, self.room = nodes, room
        self.hosts: dict[str, Host] = {}
        self.addresses: dict[str, Address] = {}
        self.places: dict[int, Place] = {}
        self.released: list[tuple[int, str]] = []
        self.waiting: list[int] = []
        self.spec = b""
        LocalHosts.made.append(self)

    def start(self, spec: bytes, found: Found) -> None:
        self.spec, self.found = spec, found
        for _ in range(self.nodes):
            self.add_node()

    def add_node(self) -> None:
        """A machine joins; who waits gets its places."""
        self.hosts[f"node-{len(self.hosts)}"] = Host(self.spec, "127.0.0.1")
        waiting, self.waiting = self.waiting, []
        for number in waiting:
            self.acquire(number)

    def acquire(self, number: int) -> None:
        taken = [place.node for place in self.places.values()]
        for node in sorted(self.hosts, key=taken.count):
            if taken.count(node) < self.room and self.hosts[node].alive:
                with suppress(OSError):  # it is killed meanwhile
                    if node not in self.addresses:
                        self.addresses[node] = self.hosts[node].address()
                    self.places[number] = Place(number, self.addresses[node], node)
                    self.found(self.places[number])
                    return
        self.waiting.append(number)

    def release(self, number: int, why: str) -> None:
        self.released.append((number, why))
        self.places.pop(number, None)

    def death(self, number: int) -> str:
        return "its node was switched off"

    def kill_node(self, node: str) -> None:
        """A machine dies, and another one joins."""
        os.kill(self.hosts[node].pid, signal.SIGKILL)
        self.hosts[node].close()
        self.add_node()

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()


@dataclass(frozen=True)
class FarWorkers(WorkerKind):
    """Workers on hosts of this machine.

    Args:
        placement: makes what starts hosts and finds places, for one pool.
        max_restarts: see `Processes`.
        tls: encrypts the connections; without it, batches travel as they are.
    """

    here: ClassVar[bool] = False
    placement: Callable[[], Placement]
    max_restarts: int = 0
    tls: Tls | None = None

    def backend(self, plan: Plan) -> WorkerBackend:
        return RemoteBackend(plan, self.placement(), self.tls)


def far(nodes: int = 1, room: int = 4, **options: Any) -> FarWorkers:
    """Workers on hosts of this machine."""
    placement: Callable[[], LocalHosts] = lambda: LocalHosts(nodes, room)  # noqa: E731
    return FarWorkers(placement, **options)


def far_pids(hosts: LocalHosts) -> list[int]:
    """The far workers that run now."""
    return [pid for host in hosts.hosts.values() if host.alive for pid in descendants(host.pid)]
