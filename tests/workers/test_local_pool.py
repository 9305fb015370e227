"""A pool of processes of this machine, apart from what its workers do."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import popen_forkserver, popen_spawn_posix
from pathlib import Path
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


def test_what_cannot_be_pickled_is_named_by_its_path() -> None:
    class Holder:
        def __init__(self, held: Any) -> None:
            self.held = held

    error = TypeError("cannot pickle")
    assert "dataset" in str(module._named(error, {"dataset": Holder(lambda: None), "collate_fn": max}))
    assert module._named(error, {"dataset": range(3)}) is error


WARM = """
import gc, multiprocessing, os
from fastq_loader import DataLoader

if {refuses} and __name__ == "__mp_main__" and multiprocessing.current_process().name == "MainProcess":
    raise SystemError("not in a server")

class Forked:
    def __len__(self):
        return 2
    def __getitem__(self, at):
        with open(f"/proc/{{os.getppid()}}/cmdline") as file:
            return "fastq_loader.workers.warm" in file.read() and gc.get_freeze_count() > 100_000

if __name__ == "__main__":
    if {others}:
        process = multiprocessing.get_context("forkserver").Process(target=print)
        process.start()
        process.join()
    for _ in range(2):
        with DataLoader(Forked(), num_workers=2, multiprocessing_context="forkserver") as loader:
            print([bool(batch) for batch in loader])
"""


@pytest.mark.processes
@pytest.mark.parametrize(("refuses", "others"), [(False, False), (False, True), (True, False)])
def test_workers_are_forked_from_a_warm_server(refuses: bool, others: bool, tmp_path: Path) -> None:
    """Also where Python's own server is up before, and where the server cannot import what the user has."""
    script = tmp_path / "script.py"  # which the server imports
    script.write_text(WARM.format(refuses=refuses, others=others))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[-3:] == [*["[True, True]"] * 2, ""], done


def test_the_code_of_multiprocessing_is_as_it_is_known() -> None:
    """It reads the surroundings through these names, and nothing else."""
    for popen, names in (
        (popen_forkserver.Popen, {"spawn", "get_preparation_data"}),
        (popen_spawn_posix.Popen, {"spawn", "get_preparation_data", "util", "spawnv_passfds"}),
    ):
        assert names <= set(popen._launch.__code__.co_names)  # type: ignore[attr-defined]
