"""Processes(max_restarts=n): dead and hung workers are replaced, and what they lost is loaded again."""

from __future__ import annotations

import os
import random
import signal
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader, IteratorInvalid, Processes
from fastq_loader.errors import PoisonBatch, WorkerDied, WorkerReplaced
from fastq_loader.system import locks
from fastq_loader.workers import children, main
from tests.conftest import descendants, of_kind
from tests.support.crimes import Crime, dawdle, exit_with_7, kill_itself, segfault
from tests.support.datasets import Sized
from tests.support.gates import Gates, at_rest, end_timeout_when
from tests.support.loaders import MANY_WORKERS, collector_off
from tests.support.thorough import thorough

SIZE = 24
PAIRS = [[at, at + 1] for at in range(0, SIZE, 2)]

pytestmark = [pytest.mark.processes, MANY_WORKERS]


def stop(_: int = 0) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(eq=False)
class Doomed(Sized, Dataset):
    """Sample `at` does something terrible, as long as fewer than `times` workers have come to it."""

    length = SIZE
    folder: Path
    at: int
    what: Crime = kill_itself
    times: int = 1
    value: int = 0  # may be changed in the consumer, or by an init function

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float]:
        self.perhaps_die(index)
        return index, torch.rand(30_000), random.random()

    def perhaps_die(self, index: int) -> None:
        if index == self.at and len(list(self.folder.iterdir())) < self.times:
            Gates(self.folder).arrive(index)
            self.what(index)

    def hangs(self) -> bool:
        """Whether the last worker that has come to the sample does."""
        return any(map(at_rest, Gates(self.folder).arrived(self.at)[-1:]))


def replacing(dataset: Any, restarts: int = 1, **options: Any) -> Any:
    """A loader of batches of two, of which a dead worker may be replaced."""
    arguments = {"num_workers": 2, "schedule": "dynamic", "workers": Processes(max_restarts=restarts)}
    return DataLoader(dataset, **{"batch_size": 2, **arguments, **options})


def run(dataset: Any, **options: Any) -> list[tuple[list[int], float, list[float]]]:
    """One epoch from a known seed, each batch in short."""
    torch.manual_seed(21)
    with replacing(dataset, 5, shuffle=True, **options) as loader:
        return [(index.tolist(), drawn.sum().item(), own.tolist()) for index, drawn, own in loader]


@pytest.fixture
def undisturbed(tmp_path: Path) -> list[tuple[list[int], float, list[float]]]:
    return run(Doomed(tmp_path, -1), num_workers=0)


def indices_of(loader: Any, found: list[Any]) -> list[Any]:
    """The indices of every batch that comes, also when an error follows."""
    for index, *_ in loader:
        found.append(index.tolist())
    return found


@thorough(after=1)
@pytest.mark.parametrize(
    ("method", "what"),
    [("fork", kill_itself), ("fork", segfault), ("fork", exit_with_7), ("forkserver", exit_with_7)],
)
def test_the_batches_of_a_dead_worker_come_with_the_same_bits(
    method: str, what: Crime, tmp_path: Path, undisturbed: list[Any], capfd: Any
) -> None:
    with pytest.warns(WorkerReplaced, match="another one was started in its place") as caught:
        assert run(Doomed(tmp_path, 7, what), multiprocessing_context=method) == undisturbed
    assert len(of_kind(caught, WorkerReplaced)) == 1


def test_a_warning_and_the_statistics_say_who_was_replaced(tmp_path: Path) -> None:
    died = r"worker \d was killed by SIGKILL .* before it answered batch 3 \(indices \[6, 7\]\)"
    with replacing(Doomed(tmp_path, 7), persistent_workers=True) as loader:
        with pytest.warns(WorkerReplaced, match=died) as caught:
            kept = [(index.tolist(), drawn, drawn.sum().item()) for index, drawn, _ in loader]
        assert of_kind(caught, WorkerReplaced)[0].filename == __file__, "it points at the user's loop"
        statistics = loader.statistics()
        assert statistics.worker_restarts == 1
        assert [worker.pid in descendants() for worker in statistics.workers if worker.restarts] == [True]
        loader.close()
        assert len(list(loader)) == len(PAIRS)
        assert loader.statistics().worker_restarts == 1, "of all epochs, with whichever workers"
    assert [index for index, _, _ in kept] == PAIRS
    assert all(drawn.sum().item() == total for _, drawn, total in kept), "batches outlive who wrote them"


def test_a_death_too_many_is_torchs_error_at_its_place(tmp_path: Path) -> None:
    loader = replacing(Doomed(tmp_path, 7, times=2), restarts=1)
    found: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkerReplaced)
        with pytest.raises(WorkerDied, match=r"exited unexpectedly.*batch 3 \(indices \[6, 7\]\)"):
            indices_of(loader, found)
    assert found == PAIRS[:3]


@thorough(after=1)
@pytest.mark.parametrize(
    ("what", "options"),
    [(kill_itself, {"schedule": "round_robin"}), (dawdle, {"timeout": 1000})],
    ids=["dies", "hangs"],
)
def test_a_batch_that_ends_three_workers_is_given_up_at_its_place(
    what: Crime, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Doomed(tmp_path, 7, what, times=9)
    end_timeout_when(dataset.hangs, monkeypatch)
    iterator = iter(replacing(dataset, 9, **options))
    before: list[Any] = []
    match = r"batch 3 \(indices \[6, 7\]\) .*3 workers died"
    with pytest.warns(WorkerReplaced) as caught, pytest.raises(PoisonBatch, match=match):
        indices_of(iterator, before)
    assert before == PAIRS[:3]
    assert indices_of(iterator, []) == PAIRS[4:]
    assert len(of_kind(caught, WorkerReplaced)) == 3


def test_a_successor_that_dies_at_its_start_does_not_count_against_the_batch(tmp_path: Path) -> None:
    def init(_: int) -> None:
        if 0 < len(list(tmp_path.iterdir())) < 3:
            Gates(tmp_path).arrive("start")
            kill_itself(0)

    loader = replacing(Doomed(tmp_path, 7), 3, num_workers=1, schedule="round_robin", worker_init_fn=init)
    with pytest.warns(WorkerReplaced) as caught:
        assert indices_of(loader, []) == PAIRS
    assert ["batch 3 " in str(each.message) for each in of_kind(caught, WorkerReplaced)] == [
        True,
        False,
        False,
    ]


@thorough(after=1)
@pytest.mark.parametrize(
    ("schedule", "what", "shown"),
    [
        ("dynamic", dawdle, "in dawdle"),
        ("round_robin", dawdle, "in dawdle"),
        ("dynamic", stop, "did not write"),
    ],
)
def test_a_worker_that_hangs_is_replaced_and_its_stack_shown(
    schedule: str, what: Crime, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Doomed(tmp_path, 7, what)
    end_timeout_when(dataset.hangs, monkeypatch)
    loader = replacing(dataset, 2, schedule=schedule, timeout=1000)
    hung = r"did not answer within 1000 seconds, before it answered batch 3 \(indices \[6, 7\]\)"
    with pytest.warns(WorkerReplaced, match=rf"(?s){hung}.*{shown}") as caught:
        assert indices_of(loader, []) == PAIRS
    assert len(of_kind(caught, WorkerReplaced)) == 1


def stopping_once(call: Callable[..., Any], gates: Gates) -> Callable[..., Any]:
    """The same call, after which the first worker that comes to it is stopped."""
    consumer = os.getpid()

    def call_and_stop(*args: Any) -> Any:
        result = call(*args)
        if os.getpid() != consumer and not gates.arrived("stopped"):
            gates.arrive("stopped")
            stop()
        return result

    return call_and_stop


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("module", "name", "schedule", "doing"),
    [
        pytest.param(children, "write_stacks", "round_robin", "before it was up", marks=thorough()),
        (children, "write_stacks", "dynamic", "before it was up"),
        # On a busy machine their word that they are up has not been read yet.
        (locks, "try_lock", "dynamic", ""),
        (main, "WorkerLoop", "dynamic", ""),
    ],
    ids=["starting, its batch", "starting, anybody's batch", "claiming", "idle"],
)
def test_a_worker_that_is_stopped_with_no_batch_in_hand_is_replaced(
    module: Any, name: str, schedule: str, doing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = Gates(tmp_path)
    monkeypatch.setattr(module, name, stopping_once(getattr(module, name), gates))
    monkeypatch.setattr(children, "_FIRST_LINE", 0.02)  # nobody writes
    end_timeout_when(lambda: any(map(at_rest, gates.arrived("stopped"))), monkeypatch)
    loader = replacing(range(8), num_workers=1, schedule=schedule, timeout=1000)
    with pytest.warns(WorkerReplaced, match=f"did not answer within 1000 seconds, {doing}"):
        assert [batch.tolist() for batch in loader] == PAIRS[:4]


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_cannot_be_replaced_ends_the_epoch_with_both_reasons(tmp_path: Path) -> None:
    loader = replacing(Doomed(tmp_path, 15), 5)
    iterator = iter(loader)
    next(iterator)
    workers = {worker.pid for worker in loader.statistics().workers}
    (zygote,) = set(descendants()) - workers
    os.kill(zygote, signal.SIGKILL)
    loop = weakref.ref(iterator.pool._loop)
    with collector_off():
        with pytest.raises(
            WorkerDied, match=r"exit code is unknown.*no other one could be started.*was killed by SIGKILL"
        ) as caught:
            list(iterator)
        del caught
        assert loop() is None, "the error keeps the loop by the frames that it came through"
        for _ in range(2):
            with pytest.raises(IteratorInvalid, match=r"cannot go on: .*no other one could"):
                next(iterator)
