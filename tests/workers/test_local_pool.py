"""A pool of processes of this machine, apart from what its workers do."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing import forkserver, popen_forkserver, popen_spawn_posix
from typing import Any

import pytest

from fastq_loader.memory.arena import Arena
from fastq_loader.statistics.counters import Counters
from fastq_loader.system.calls import readable
from fastq_loader.workers import local_pool as module
from fastq_loader.workers import stopping
from fastq_loader.workers.local_pool import LocalPool
from tests.support.forking import end_of, fork
from tests.support.worker_setup import make_plan

pytestmark = pytest.mark.processes


def wait_for_the_end(setup: Any) -> None:
    """In place of a worker's loop: worker 1 leaves at once."""
    if setup.worker == 1:
        os._exit(4 + setup.generation)
    time.sleep(60)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPool]:
    monkeypatch.setattr(module, "main", wait_for_the_end)
    monkeypatch.setattr(stopping, "_INSTANT", 0.05)
    context = multiprocessing.get_context("fork")
    pool = LocalPool(make_plan(range(3), workers=3, restarts=2, context=context))
    arena = Arena(3)
    pool.start(arena, "folder", bytes(16), 1, None)
    yield pool
    pool.stop(lambda worker: 0, pool)
    stopping.wait(pool)
    arena.retire([])


def test_all_forked_workers_are_started_at_once_and_watched(pool: LocalPool) -> None:
    assert pool.forks
    assert not pool.start_next()
    assert [pool.pid(worker) for worker in range(3)] == [process.pid for process in pool.processes]
    assert pool.pid(3) == 0
    pool.count_in(counters := Counters())
    assert [(worker.id, worker.pid) for worker in counters.workers] == [
        (worker, pool.pid(worker)) for worker in range(3)
    ]
    assert readable(pool.descriptors, 5) == [pool.descriptors[1]]
    assert pool.death(1)[0] == "exited with code 4"
    assert not pool.killed(1)
    pool.kill(0)
    assert pool.killed(0)


def test_in_a_forked_copy_the_workers_are_nobodys_children(pool: LocalPool) -> None:
    assert len(multiprocessing.active_children()) >= 2

    def check() -> None:
        assert multiprocessing.active_children() == []

    assert end_of(fork(check)) == 0


@pytest.mark.parametrize("chosen", [False, True])
def test_the_fork_server_imports_torch_or_as_chosen(chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = forkserver.ForkServer()
    if chosen:
        server.set_forkserver_preload(["json"])
    monkeypatch.setattr(forkserver, "_forkserver", server)
    monkeypatch.setattr(forkserver, "set_forkserver_preload", server.set_forkserver_preload)
    module._preload(multiprocessing.get_context("forkserver"))
    assert server._preload_modules == (["json"] if chosen else ["__main__", "torch"])


def test_the_code_of_multiprocessing_is_as_it_is_known() -> None:
    """It reads the surroundings through these names, and nothing else."""
    for popen, names in (
        (popen_forkserver.Popen, {"spawn", "get_preparation_data"}),
        (popen_spawn_posix.Popen, {"spawn", "get_preparation_data", "util", "spawnv_passfds"}),
    ):
        assert names <= set(popen._launch.__code__.co_names)  # type: ignore[attr-defined]
