"""A pool of processes, apart from what its workers do."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import pytest

from fastq_loader.memory.arena import Arena
from fastq_loader.system.calls import readable
from fastq_loader.workers import pool as pools
from fastq_loader.workers import stopping
from fastq_loader.workers.children import Child
from fastq_loader.workers.pool import WorkerPool
from tests.support.forking import end_of, fork
from tests.support.worker_setup import make_plan

pytestmark = pytest.mark.processes


def wait_for_the_end(setup: Any) -> None:
    """In place of a worker's loop: worker 1 leaves at once."""
    if setup.worker == 1:
        os._exit(4 + setup.generation)
    time.sleep(60)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    monkeypatch.setattr(pools, "main", wait_for_the_end)
    monkeypatch.setattr(stopping, "_INSTANT", 0.05)
    context = multiprocessing.get_context("fork")
    pool = WorkerPool(make_plan(range(3), workers=3, restarts=2, context=context))
    arena = Arena(3)
    pool.start(arena, "folder", bytes(16), 1, None)
    yield pool
    pool.stop(lambda worker: 0, pool)
    stopping.wait(pool)
    arena.retire([])


def test_all_forked_workers_are_started_at_once_and_watched(pool: WorkerPool) -> None:
    assert pool.forks
    assert not pool.start_next()
    assert [pool.pid(worker) for worker in range(3)] == [process.pid for process in pool.processes]
    assert pool.pid(3) == 0
    assert readable(pool.descriptors, 5) == [pool.descriptors[1]]
    assert pool.death(1)[0] == "exited with code 4"
    assert not pool.killed(1)
    pool.kill(0)
    assert pool.killed(0)


def test_a_dead_worker_is_replaced_under_its_number(pool: WorkerPool) -> None:
    for generation in (1, 2):
        readable([pool.descriptors[1]], 5)
        before = pool.pid(1)
        assert pool.replace(1, "another folder", ()) == generation
        assert pool.pid(1) not in (0, before)
        readable([pool.descriptors[1]], 5)
        assert pool.death(1)[0] == f"exited with code {4 + generation}"


def test_its_end_is_told_when_all_have_ended(pool: WorkerPool) -> None:
    told: list[str] = []
    assert not pool.stopped
    pool.stop(lambda worker: 0.1, pool, [lambda: told.append("over")])
    assert pool.stopped
    pool.stop(lambda worker: 0, pool, [lambda: told.append("again")])
    stopping.wait(pool)
    assert pool.ended
    assert told == ["over"]
    assert "gone" in pool.stacks(3)


def test_in_a_forked_copy_the_workers_are_nobodys_children(pool: WorkerPool) -> None:
    assert len(multiprocessing.active_children()) >= 2

    def check() -> None:
        assert multiprocessing.active_children() == []

    assert end_of(fork(check)) == 0


def test_one_that_was_never_started_can_be_stopped() -> None:
    child = Child(multiprocessing.Process())
    assert child.pid == 0
    child.release()
    pool = WorkerPool(make_plan(range(3)))
    assert (pool.processes, pool.descriptors, pool.pid(0)) == ([], [], 0)
    assert not pool.start_next()
    pool.stop(lambda worker: 0, pool)
    assert pool.ended


def test_what_cannot_be_pickled_is_named_by_its_path() -> None:
    class Holder:
        def __init__(self, held: Any) -> None:
            self.held = held

    error = TypeError("cannot pickle")
    assert "dataset" in str(pools._named(error, {"dataset": Holder(lambda: None), "collate_fn": max}))
    assert pools._named(error, {"dataset": range(3)}) is error


@pytest.mark.parametrize("chosen", [False, True])
def test_the_fork_server_imports_torch_unless_somebody_chose(
    chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Any = forkserver.ForkServer()
    if chosen:
        server.set_forkserver_preload(["json"])
    monkeypatch.setattr(forkserver, "_forkserver", server)
    monkeypatch.setattr(forkserver, "set_forkserver_preload", server.set_forkserver_preload)
    pools._preload(multiprocessing.get_context("forkserver"))
    assert server._preload_modules == (["json"] if chosen else ["__main__", "torch"])
