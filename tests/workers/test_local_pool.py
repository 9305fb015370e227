"""Values of `workers=`, the user's objects on their way, and the interpreter that workers are forked from."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from pathlib import Path
from pickle import loads
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader import DataLoader, Processes
from fastq_loader.workers.kinds import read_workers
from fastq_loader.workers.local_pool import LocalPool
from fastq_loader.workers.payload import Payload
from fastq_loader.workers.zygote import Zygote
from tests.conftest import open_descriptors, run_script
from tests.support.thorough import is_thorough, thorough
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
    with pytest.raises(error, match=r"workers=.* is unknown: .* the number of workers is num_workers"):
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


def test_a_tensor_goes_to_every_worker_as_a_descriptor_though_its_owner_is_gone() -> None:
    before = len(open_descriptors())
    tensor = torch.arange(10.0).share_memory_()
    dataset = [tensor]
    sent = Payload(dataset, None, None)
    arrived = [send(sent) for _ in range(2)]
    (one,), (other,) = (each.open()["dataset"] for each in arrived)
    assert get_spawning_popen() is None
    one[0] = 7.0
    assert other.tolist() == tensor.tolist() == [7.0, *map(float, range(1, 10))]
    del one, other, tensor, dataset[:]
    (late,) = send(sent).open()["dataset"]
    assert late[0] == 7.0
    sent.unseal()
    del late, arrived, sent
    assert len(open_descriptors()) <= before


def test_large_arrays_are_mapped_and_what_is_written_to_them_stays_where_it_is() -> None:
    before = len(open_descriptors())
    array = np.arange(100_000)
    sent = Payload([array, array, np.arange(3), array[::2]], None, None)
    arrived = [send(sent) for _ in range(2)]
    one, other = (each.open()["dataset"] for each in arrived)
    assert all(np.array_equal(*each) for each in zip(one, sent.parts["dataset"], strict=True))
    assert one[0] is one[1]
    one[0][:] = 7
    assert other[0][1] == array[1] == 1
    assert not one[0].flags.owndata, "it lies in memory that both have mapped"
    sent.unseal()
    assert one[0][1] == 7
    del one, other, arrived
    assert len(open_descriptors()) <= before


# ---- the interpreter that workers are forked from ---------------------------------------------------------


def test_all_signals_wait_while_a_worker_is_forked_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raised there left descriptors of the memory."""

    def start(*_: object) -> None:
        assert signal.SIGALRM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        raise OSError("no further")

    monkeypatch.setattr(Zygote, "wait", lambda self: None)
    monkeypatch.setattr(LocalPool, "_start", start)
    with pytest.raises(OSError, match="no further"):
        iter(DataLoader(range(2), num_workers=1, multiprocessing_context="spawn"))


PROGRAM = """
import gc, multiprocessing, os, sys
from fastq_loader import DataLoader

class Forked:
    def __len__(self):
        return 2
    def __getitem__(self, at):
        warm = os.getppid() != multiprocessing.parent_process().pid and gc.get_freeze_count() > 100_000
        chosen = "chosen" in sys.modules and sys.modules["chosen"].BY == os.getppid()
        own = sys.modules["other"].BY == os.getpid()
        number = multiprocessing.current_process()._identity[0]
        return warm, chosen == (sys.argv[1] == "forkserver"), own, number, os.getppid()

if __name__ == "__main__":
    import other
    multiprocessing.set_forkserver_preload(["chosen"])
    if sys.argv[2:]:
        process = multiprocessing.get_context("forkserver").Process(target=print)
        process.start()
        process.join()
    options = dict(num_workers=2, multiprocessing_context=sys.argv[1], collate_fn=other.same)
    found, numbers, parents = [], [multiprocessing.Process()._identity[0]], set()
    loaders = [DataLoader(Forked(), **options) for _ in range(2)]
    for loader in loaders:
        for _ in range(2):
            for (*as_it_should, number, parent), in loader:
                found += as_it_should
                numbers.append(number)
                parents.add(parent)
    assert len(found) == 24 and all(found), found
    assert numbers == list(range(numbers[0], numbers[0] + 9)), "as torch's: the interpreter has none"
    [parent] = parents  # for both loaders
    for loader in loaders:
        assert os.path.exists(f"/proc/{parent}")
        loader.close()
    assert not os.path.exists(f"/proc/{parent}"), "it ends with the last loader that uses it"
"""
MODULE = """
import os
BY = os.getpid()
def same(batch):
    return batch
"""


@thorough()
@pytest.mark.processes
def test_workers_are_forked_from_an_interpreter_that_has_none_of_the_users_modules_but_those_chosen(
    tmp_path: Path,
) -> None:
    """Also where Python's own server is up before; and where TMPDIR is too long for a socket's name."""
    for name, text in (("program", PROGRAM), ("chosen", MODULE), ("other", MODULE)):
        (tmp_path / f"{name}.py").write_text(text)
    long = tmp_path / ("long" * 30)
    long.mkdir()
    folders = {"spawn": long, "forkserver": long, "others": tmp_path}
    arguments = [["forkserver"], *([["spawn"], ["forkserver", "others"]] if is_thorough else [])]
    runs = [(str(tmp_path), each, {"TMPDIR": str(folders[each[-1]])}) for each in arguments]
    result = run_script(f"from tests.support.programs import at_once; exec(at_once(*{runs}))", warm=True)
    assert (result.returncode, result.stderr, result.left) == (0, "", ()), result
    assert not os.listdir(long)


@pytest.mark.processes
@pytest.mark.parametrize("restarts", [0, 1])
def test_forked_workers_have_the_numbers_of_torchs(restarts: int) -> None:
    first = multiprocessing.Process()._identity[0]  # type: ignore[attr-defined]
    with DataLoader(range(2), num_workers=2, workers=Processes(max_restarts=restarts)) as loader:
        workers: Any = iter(loader)._workers  # type: ignore[attr-defined]
        assert [worker._identity for worker in workers] == [(first + 1,), (first + 2,)]
