"""Who gets which place, what is said of far workers, and what starts proxies. Placements are played."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fastq_loader
from fastq_loader.memory.arena import AVAILABLE, Arena
from fastq_loader.remote import proxy_pool as module
from fastq_loader.remote.connection import Address, Lost
from fastq_loader.remote.proxy import NoPlace, Place, Status
from fastq_loader.remote.proxy_pool import Launcher, ProxyPool
from fastq_loader.statistics.counters import Counters
from fastq_loader.system import calls
from fastq_loader.workers.children import Child, LaunchedProcess
from fastq_loader.workers.worker_pool import cores
from tests.conftest import descendants, process_table, wait_until
from tests.remote.test_proxy import SETUP
from tests.support.forking import end_of, fork
from tests.support.worker_setup import make_plan

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
]

SECONDS = 20  # against hanging


class Played:
    """A placement that gives what stands in `ready`."""

    pause: float | None = 0.01

    def __init__(self) -> None:
        self.ready: list[Place | NoPlace] = []
        self.lost: list[Place] = []
        self.fails = self.closed = False

    def start(self, spec: bytes, places: int) -> None:
        self.started = places

    def find(self, lost: Sequence[Place], wanted: int) -> Sequence[Place | NoPlace]:
        self.lost += lost
        if self.fails:
            raise OSError("no machine is left")
        found, self.ready = self.ready[:wanted], self.ready[wanted:]
        return found

    def death(self, place: Place) -> str:
        return f"place {place.number} burned down" if place.number == 4 else ""

    def close(self) -> None:
        self.closed = True


def place(number: int) -> Place:
    return Place(Address("10.0.0.2", 80), number, f"node-{number}")


class PlayedLauncher:
    """Its proxies are played by the test, which has their ends of the pipes."""

    def __init__(self, shared: Any, folder: str) -> None:
        self.pipes: list[Connection[Any, Any]] = []
        self.at_once = 0

    def open(self) -> None:
        pass

    def start(self) -> Any:
        mine, its = Pipe()
        self.pipes.append(its)
        return SimpleNamespace(pid=1), mine

    close = forget = open


class Pool:
    """A pool with its thread, and a placement that is played; its processes are none."""

    def __init__(self) -> None:
        self.played = Played()
        self.pool = ProxyPool(make_plan(range(3), workers=4), self.played)
        self.arena = Arena(4)
        self.pool.start(self.arena, "/nowhere", bytes(16), 1, None)
        self.launcher: Any = self.pool._launcher
        self.counters = Counters()
        self.pool.count_in(self.counters)

    def proxy(self, worker: int = 0) -> Connection[Any, Any]:
        told = SETUP._replace(worker=worker)
        self.pool._launch(told)
        its: Connection[Any, Any] = self.launcher.pipes[-1]
        assert its.recv() == told
        its.send(Status(waits=True))
        return its

    def placed(self, number: int = 1, worker: int = 0) -> Connection[Any, Any]:
        its = self.proxy(worker)
        self.played.ready.append(place(number))
        assert received(its) == place(number)
        its.send(Status(pid=812))
        return its

    def shown(self) -> list[tuple[int, str | None, int]]:
        return [(w.pid, w.node, w.wire_bytes) for w in self.counters.snapshot().workers]

    def close(self) -> None:
        for its in self.launcher.pipes:
            its.close()
        self.pool.stop(lambda worker: 0, self)
        assert self.pool.ended
        assert self.played.closed
        self.arena.retire([])


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setattr(module, "Launcher", PlayedLauncher)
    monkeypatch.setattr(module, "ask", lambda *_: (9, False, "exited with code 7"))
    pool = Pool()
    yield pool
    pool.close()


def received(pipe: Connection[Any, Any]) -> Any:
    assert pipe.poll(SECONDS)
    return pipe.recv()


def test_the_first_place_goes_to_the_first_proxy_that_waits(pool: Pool) -> None:
    assert pool.played.started == 4
    first = pool.placed(1, 0)
    second = pool.proxy(1)
    assert wait_until(lambda: pool.shown()[0] == (812, "node-1", 0), SECONDS)
    pool.played.ready.append(place(2))
    assert received(second) == place(2)
    assert not first.poll(0.05)


def test_the_place_of_a_proxy_that_dies_is_given_back_once(pool: Pool) -> None:
    its = pool.placed(1)
    its.send(Status(why="of it"))
    its.close()
    assert wait_until(lambda: pool.played.lost == [place(1)], SECONDS)
    successor = pool.proxy()
    pool.played.ready.append(NoPlace("none is left"))
    assert received(successor) == NoPlace("none is left")
    successor.close()
    assert not wait_until(lambda: len(pool.played.lost) > 1, 0.1)


def test_what_a_placement_raises_is_told_to_those_that_wait(pool: Pool) -> None:
    pool.played.fails = True
    assert received(pool.proxy()) == NoPlace("OSError: no machine is left")


def test_its_thread_takes_no_signals(pool: Pool) -> None:
    status = Path(f"/proc/self/task/{pool.pool._thread.native_id}/status").read_text()
    blocked = int(re.findall(r"SigBlk:\s+(\w+)", status)[0], 16)
    assert blocked >> (signal.SIGINT - 1) & 1


def test_one_that_was_never_started_can_be_stopped() -> None:
    played = Played()
    pool = ProxyPool(make_plan(range(3)), played)
    pool.stop(lambda worker: 0, pool)
    assert pool.ended
    assert played.closed


@pytest.mark.parametrize(
    ("says", "number", "how"),
    [
        ((9, False, "was killed by SIGKILL"), 4, "it was killed by SIGKILL"),
        ((9, True, "stacks"), 4, "its connection broke"),
        ((0, False, ""), 4, "place 4 burned down"),
        (None, 4, "place 4 burned down"),
        (None, 5, "its host does not answer"),
    ],
)
def test_how_a_far_worker_was_lost_is_said_with_its_machine(
    says: Any, number: int, how: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: Any) -> Any:
        if says is None:
            raise Lost("silence")
        return says

    monkeypatch.setattr(module, "ask", ask)
    pool.pool._children = [SimpleNamespace(death=lambda: ("exited", "torch's"))]  # type: ignore[list-item]
    its = pool.placed(number)
    its.send(Status(why="reset by peer"))
    expected = f"was lost with its process on node-{number} (pid 812; reset by peer): {how},"
    for _ in range(2):
        assert pool.pool.death(0) == (expected, "torch's")
    pool.pool._children = []


def test_one_that_found_no_place_says_why(pool: Pool) -> None:
    pool.pool._children = [SimpleNamespace(death=lambda: ("exited", ""))]  # type: ignore[list-item]
    pool.proxy().send(Status(why="torch 1 here and 2 there"))
    assert pool.pool.death(0)[0] == "found no place on another machine: torch 1 here and 2 there;"
    pool.pool._children = []


def test_stacks_come_with_the_process_and_its_machine(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it has found no room on another machine yet" in pool.pool.stacks(0)
    pool.placed(2)
    assert pool.pool.stacks(0) == "  (pid 9 on node-2)\nexited with code 7"
    monkeypatch.setattr(module, "ask", lambda *_: (0, False, ""))
    assert pool.pool.stacks(0) == "  (its host does not answer)"


def test_a_forked_copy_counts_nothing_of_it(pool: Pool) -> None:
    pool.pool.forget()
    pool.pool.forget()
    assert not pool.counters.sources


class StandAlone:
    """A proxy that was started, and this end of the pipe to it."""

    pipe: Connection[Any, Any]

    def __init__(self, launcher: Launcher) -> None:
        self.child = Child(LaunchedProcess(lambda: self._launch(launcher)))
        self.child.start()

    def _launch(self, launcher: Launcher) -> Any:
        process, self.pipe = launcher.start()
        return process

    def waits(self, arena: Arena, folder: str) -> bool:
        """Tell it what it is; whether it says then that it waits for a place."""
        mapping = arena.mapping
        told = {"folder": folder, "consumer": os.getpid(), "arena": arena.fd, "arena_whole": mapping.whole}
        self.pipe.send(SETUP._replace(arena_length=mapping.length, traffic=arena.fd, **told))
        return self.pipe.poll(SECONDS) and self.pipe.recv() == Status(waits=True)

    def end(self) -> None:
        """Let it go; a real one ends with the loader, and not when its pipe is closed."""
        self.pipe.close()
        self.child.kill()
        self.child.release()

    @property
    def parent(self) -> int:
        return next(entry.parent for entry in process_table() if entry.pid == self.child.pid)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(2)
    yield arena
    arena.retire([])


@contextmanager
def opened(arena: Arena) -> Iterator[Launcher]:
    launcher = Launcher([arena.fd], "/nowhere")
    try:
        launcher.open()
        yield launcher
    finally:
        launcher.close()


@pytest.fixture
def launcher(arena: Arena) -> Iterator[Launcher]:
    with opened(arena) as launcher:
        yield launcher


def test_one_program_forks_all_proxies(launcher: Launcher, arena: Arena, tmp_path_factory: Any) -> None:
    (program,) = descendants()
    assert launcher.at_once == 16
    folder = tmp_path_factory.mktemp("s")
    proxies = [StandAlone(launcher) for _ in range(3)]
    assert [one.parent for one in proxies] == [program] * 3
    for number, one in enumerate(proxies):
        (folder / str(number)).mkdir()
        assert one.waits(arena, str(folder / str(number)))
    for one in proxies:
        one.end()
    assert list(descendants()) == [program]


def test_without_pidfd_each_is_new(arena: Arena, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "has_pidfd", lambda: False)
    with opened(arena) as launcher:
        assert not descendants()
        assert launcher.at_once == cores()
        one = StandAlone(launcher)
        assert one.parent == os.getpid()
        assert one.waits(arena, str(tmp_path))
        one.end()


def test_in_a_forked_copy_of_the_consumer_it_is_left_alone(launcher: Launcher) -> None:
    def leave() -> None:
        launcher.forget()
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]

    assert end_of(fork(leave)) == 0
    StandAlone(launcher).end()


def test_what_is_forked_has_neither_torch_nor_ray_and_no_second_thread() -> None:
    code = f"{module._CODE}print(*os.listdir('/proc/self/task'), *sys.modules)"
    command = [sys.executable, "-c", code, fastq_loader.__path__[0], *sys.path]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"fastq_loader.remote.proxy", "zmq", "numpy"} < set(output)
    assert not {"torch", "ray", "pandas"} & set(output)
    assert len([word for word in output if word.isdigit()]) == 1
