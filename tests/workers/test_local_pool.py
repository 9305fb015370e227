"""What `workers=` may be, the user's objects on their way, and the server that workers are forked from."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from multiprocessing import popen_forkserver, popen_spawn_posix, reduction
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from pathlib import Path
from pickle import loads
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader import Processes
from fastq_loader.workers.config import Payload
from fastq_loader.workers.kinds import read_workers
from fastq_loader.workers.local_pool import LocalPool
from tests.conftest import open_descriptors
from tests.support.crimes import CountsPickling
from tests.support.worker_setup import make_plan


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


# ---- the user's objects: pickled once, with descriptors that each worker gets for itself ----------------


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
    """What a worker unpickles."""
    set_spawning_popen(Journey())  # type: ignore[arg-type]
    try:
        return loads(bytes(reduction.ForkingPickler.dumps(thing)))
    finally:
        set_spawning_popen(None)  # type: ignore[arg-type]


def test_inherited_objects_are_the_users_own() -> None:
    dataset = CountsPickling()
    parts = {"dataset": dataset, "collate_fn": max, "worker_init_fn": None, "errors": None}
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


def test_what_is_counted_elsewhere_is_pickled_for_each_worker() -> None:
    """Storages on devices. Then nobody may start late."""
    dataset = CountsPickling(4)
    sent = Payload([dataset, torch.zeros(3, device="meta")], None, None)
    before = len(open_descriptors())
    for length in (4, 5):
        dataset.length = length
        assert len(send(sent).open()["dataset"][0]) == length
        assert not sent.sealed
    assert len(open_descriptors()) <= before + 1  # torch's own, of the tensor


def test_what_cannot_be_pickled_leaves_nothing_open() -> None:
    sent = Payload([torch.zeros(3), threading.Lock()], None, None)
    plain = Payload([torch.zeros(3)], None, None)
    send(plain).open()
    plain.unseal()
    before = len(open_descriptors())
    with pytest.raises(TypeError, match="lock"):
        send(sent)
    assert not sent.sealed
    assert len(open_descriptors()) <= before + 1  # torch's own, of the tensor


def test_large_arrays_are_mapped_and_what_is_written_to_them_stays_where_it_is() -> None:
    before = len(open_descriptors())
    array = np.arange(100_000)
    frozen = np.arange(100_000)
    frozen.flags.writeable = False
    sent = Payload([array, array, frozen, np.arange(3), array[::2]], None, None)
    arrived = [send(sent) for _ in range(2)]
    one, other = (each.open()["dataset"] for each in arrived)
    assert all(np.array_equal(*each) for each in zip(one, sent.parts["dataset"], strict=True))
    assert one[0] is one[1]
    assert [each.flags.writeable for each in one] == [True, True, False, True, True]
    one[0][:] = 7
    assert other[0][1] == array[1] == 1
    assert not one[0].flags.owndata, "it lies in memory that both have mapped"
    sent.unseal()
    assert one[0][1] == 7
    del one, other, arrived
    assert len(open_descriptors()) == before


# ---- the server that workers are forked from -------------------------------------------------------------

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
