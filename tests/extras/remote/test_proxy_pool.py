"""Who gets which place, and what is said of far workers. Placements and proxies are played."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader.extras.remote import proxy_pool as module
from fastq_loader.extras.remote.connection import Address
from fastq_loader.extras.remote.proxy import NoPlace, Place, Status
from fastq_loader.extras.remote.proxy_pool import ProxyPool
from fastq_loader.memory.arena import AVAILABLE, Arena
from fastq_loader.statistics.counters import Counters
from tests.conftest import wait_until
from tests.support.forking import end_of, fork
from tests.support.worker_setup import make_plan

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("warm_far_workers"),
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
]

SECONDS = 20  # against hanging


# ---- places -------------------------------------------------------------------------------------------


class Played:
    """A placement that gives what stands in `ready`."""

    pause: float | None = 0.01

    def __init__(self) -> None:
        self.ready: list[Place | NoPlace] = []
        self.lost: list[Place] = []
        self.fails = self.closed = False
        self.asked = 0

    def start(self, setup: bytes, places: int) -> None:
        self.started = places

    def find(self, lost: Sequence[Place], wanted: int) -> Sequence[Place | NoPlace]:
        self.lost += lost
        self.asked += 1
        if self.fails:
            raise OSError("no machine is left")
        found, self.ready = self.ready[:wanted], self.ready[wanted:]
        return found

    def death(self, place: Place) -> str:
        return "it burned down" if place.pid == 4 else ""

    def close(self) -> None:
        self.closed = True


def place(pid: int) -> Place:
    return Place(Address("10.0.0.2", 80), pid, f"node-{pid}")


class PlayedZygote:
    """Its proxies are played by the test, which has their ends of the pipes."""

    def __init__(self, *_: Any) -> None:
        self.pipes: list[Connection[Any, Any]] = []

    def fork(self, process: Any, own: Any, folder: str, passed: list[int]) -> Any:
        self.pipes.append(Connection(os.dup(passed[0])))
        return SimpleNamespace(pid=1)

    def close(self) -> None:
        pass


class Pool:
    """A pool with its thread and no processes, and its placement."""

    def __init__(self) -> None:
        self.played = Played()
        self.pool = ProxyPool(make_plan(range(3), workers=4), self.played)
        self.arena = Arena(4)
        self.pool.start(self.arena, "/nowhere", bytes(16), 1, None)
        self.zygote: Any = self.pool._zygote
        self.counters = Counters()
        self.pool.count_in(self.counters)

    def proxy(self, worker: int = 0) -> Connection[Any, Any]:
        """The proxy's end of its pipe, when it waits."""
        process: Any = SimpleNamespace()
        self.pool._launch(self.pool._setup_for(worker=worker))(process)
        its: Connection[Any, Any] = self.zygote.pipes[-1]
        its.send(Status(waits=True))
        return its

    def placed(self, pid: int = 1, worker: int = 0) -> Connection[Any, Any]:
        """The same when it has a place, and a far worker there."""
        its = self.proxy(worker)
        self.played.ready.append(place(pid))
        assert received(its) == place(pid)
        its.send(Status(pid=pid))
        return its

    def shown(self) -> list[tuple[int, str | None, int]]:
        return [(w.pid, w.node, w.wire_bytes) for w in self.counters.snapshot().workers]

    def close(self) -> None:
        for its in self.zygote.pipes:
            its.close()
        self.pool.stop(lambda worker: 0, self)
        assert self.pool.ended
        assert self.played.closed
        self.arena.retire([])


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setattr(module, "copy_of_consumer", PlayedZygote)
    monkeypatch.setattr(module, "fork_copy", PlayedZygote.fork)
    monkeypatch.setattr(ProxyPool, "launch", lambda *_: None)
    pool = Pool()
    yield pool
    pool.close()


def received(pipe: Connection[Any, Any]) -> Any:
    assert pipe.poll(SECONDS)
    return pipe.recv()


def test_the_place_of_a_proxy_that_dies_is_given_back_once(pool: Pool) -> None:
    its = pool.placed(1)
    its.send(Status(waits=True))
    its.send(Status(why="of it"))
    its.close()
    assert wait_until(lambda: pool.played.lost == [place(1)], SECONDS)
    successor = pool.proxy()
    pool.played.ready.append(NoPlace("none is left"))
    assert received(successor) == NoPlace("none is left")
    successor.close()
    assert wait_until(lambda: not pool.pool._open, SECONDS)
    asked = pool.played.asked
    assert wait_until(lambda: pool.played.asked > asked + 1, SECONDS)
    assert pool.played.lost == [place(1)]


def test_what_a_placement_raises_is_told_to_those_that_wait(pool: Pool) -> None:
    pool.played.fails = True
    assert received(pool.proxy()) == NoPlace("OSError: no machine is left")


# ---- what is said of far workers ------------------------------------------------------------------------


def test_one_that_found_no_place_says_why(pool: Pool) -> None:
    worker = pool.pool.workers[0]
    worker.child = SimpleNamespace(pid=0, death=lambda: ("exited", ""))  # type: ignore[assignment]
    pool.proxy().send(Status(why="torch 1 here and 2 there"))
    assert pool.pool.death(worker)[0] == "found no place on another machine: torch 1 here and 2 there;"
    worker.child = None


def test_a_forked_copy_does_not_wait_for_a_thread_that_it_lacks(pool: Pool) -> None:
    its = pool.placed()
    assert wait_until(lambda: pool.shown()[0][0] == 1, SECONDS)
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with pool.pool._lock:
            held.set()
            let_go.wait(SECONDS)

    threading.Thread(target=hold).start()
    assert held.wait(SECONDS)
    its.send(Status(pid=2))
    copy = fork(lambda: signal.alarm(SECONDS) or pool.shown())
    assert end_of(copy) == 0
    let_go.set()
