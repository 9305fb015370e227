"""What `workers=` may be, the user's objects on their way, and a pool of processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver, popen_forkserver, popen_spawn_posix, reduction
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from pickle import loads
from typing import Any

import pytest
import torch

from fastq_loader import Processes
from fastq_loader.memory.arena import Arena
from fastq_loader.statistics.counters import Counters
from fastq_loader.system.calls import readable
from fastq_loader.workers import config, stopping
from fastq_loader.workers import local_pool as module
from fastq_loader.workers.config import Payload
from fastq_loader.workers.kinds import read_workers
from fastq_loader.workers.local_pool import LocalPool
from tests.conftest import open_descriptors
from tests.support.crimes import CountsPickling
from tests.support.forking import end_of, fork
from tests.support.worker_setup import MAP_STYLE, STREAM, make_plan


def test_short_form_and_configuration_mean_the_same() -> None:
    assert read_workers("processes") == Processes() == Processes(max_restarts=0)
    workers = Processes(max_restarts=3)
    assert read_workers(workers) is workers
    assert isinstance(workers.make_pool(make_plan(range(3))), LocalPool)


@pytest.mark.parametrize(("restarts", "error"), [(-1, ValueError), ("1", TypeError), (True, TypeError)])
def test_a_wrong_number_of_restarts_is_named(restarts: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"Processes\\(max_restarts={restarts!r}\\): max_restarts must"):
        Processes(max_restarts=restarts)


@pytest.mark.parametrize(
    ("value", "error"), [("threads", ValueError), (4, TypeError), (None, TypeError), (Processes, TypeError)]
)
def test_what_is_no_kind_of_workers_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"workers=.* is unknown: .* how many there are is num_workers"):
        read_workers(value)


@pytest.mark.parametrize(
    ("dynamic", "rules", "shared"),
    [(True, MAP_STYLE, True), (True, STREAM, False), (False, MAP_STYLE, False)],
)
def test_tasks_of_a_stream_are_never_shared(dynamic: bool, rules: object, shared: bool) -> None:
    assert make_plan(range(3), dynamic=dynamic, rules=rules).shared_tasks is shared


class Journey:
    """Stands for a process that is being started: its descriptors arrive in this one."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.sent.append(descriptor)
        return descriptor

    class DupFd:
        def __init__(self, descriptor: int) -> None:
            self.descriptor = descriptor

        def detach(self) -> int:
            return os.dup(self.descriptor)


def send(thing: Any) -> Any:
    set_spawning_popen(Journey())  # type: ignore[arg-type]
    try:
        return loads(bytes(reduction.ForkingPickler.dumps(thing)))
    finally:
        set_spawning_popen(None)  # type: ignore[arg-type]


def test_inherited_objects_are_the_users_own() -> None:
    dataset = CountsPickling()
    parts = {"dataset": dataset, "collate_fn": max, "worker_init_fn": None}
    assert Payload(*parts.values()).open() == parts
    assert dataset.pickled == 0


def test_they_are_pickled_once_until_all_workers_were_started() -> None:
    dataset = CountsPickling(4)
    sent = Payload(dataset, max, None)
    assert not sent.sealed
    arrived = [send(sent)]
    assert sent.sealed
    dataset.length = 5  # who starts later sees it as it was
    arrived.append(send(sent))
    assert [len(one.open()["dataset"]) for one in arrived] == [4, 4]
    assert dataset.pickled == 1
    sent.unseal()
    assert not sent.sealed
    assert len(send(sent).open()["dataset"]) == 5
    sent.unseal()


def test_a_tensor_goes_to_every_worker_as_a_descriptor_though_its_owner_is_gone() -> None:
    before = len(open_descriptors())
    tensor = torch.arange(10.0).share_memory_()
    dataset = [tensor]
    sent = Payload(dataset, None, None)
    arrived = [send(sent) for _ in range(2)]
    (one,), (other,) = (each.open()["dataset"] for each in arrived)
    assert sent.sealed
    assert get_spawning_popen() is None
    one[0] = 7.0
    assert other.tolist() == tensor.tolist() == [7.0, *map(float, range(1, 10))]
    del one, other, tensor, dataset[:]
    (late,) = send(sent).open()["dataset"]
    assert late[0] == 7.0
    sent.unseal()
    del late, arrived, sent
    assert len(open_descriptors()) == before


def test_what_is_counted_elsewhere_is_pickled_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages in files. Then nobody may start late."""
    monkeypatch.setattr(config, "get_sharing_strategy", lambda: "file_system")
    dataset = CountsPickling(4)
    sent = Payload([dataset, torch.zeros(3)], None, None)
    before = len(open_descriptors())
    for length in (4, 5):
        dataset.length = length
        assert len(send(sent).open()["dataset"][0]) == length
        assert not sent.sealed
    assert len(open_descriptors()) <= before + 1  # torch's own, of the tensor


def test_what_cannot_be_pickled_leaves_nothing_open() -> None:
    sent = Payload([torch.zeros(3), threading.Lock()], None, None)
    send(Payload([torch.zeros(3)], None, None)).open()
    before = len(open_descriptors())
    with pytest.raises(TypeError, match="lock"):
        send(sent)
    assert not sent.sealed
    assert len(open_descriptors()) <= before + 1  # torch's own, of the tensor


def wait_for_the_end(setup: Any) -> None:
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


@pytest.mark.processes
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


@pytest.mark.processes
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
