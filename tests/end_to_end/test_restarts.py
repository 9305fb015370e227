"""Processes(max_restarts=n): dead and hung workers are replaced, and what they lost is loaded again."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from fastq_loader import DataLoader, Dynamic, Processes
from fastq_loader.errors import LoaderTimeout, PoisonousBatch, WorkerDied, WorkerReplaced
from tests.conftest import descendants, of_kind, wait_until

SIZE = 24

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    faulthandler.disable()  # a stack on stderr is no news here
    os.abort()


def leave() -> None:
    os._exit(3)


def hang() -> None:
    time.sleep(60)


class Doomed(Dataset):
    """Sample `at` does something terrible, as long as fewer than `times` workers have come to it."""

    def __init__(self, folder: Path, at: int, what: Callable[[], None], times: int = 1) -> None:
        self.folder = folder
        self.at = at
        self.what = what
        self.times = times

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float]:
        if index == self.at and self.count() < self.times:
            (self.folder / f"{time.monotonic_ns()}").touch()
            time.sleep(0.05)  # the answers before this one leave in zmq's own thread; a SIGKILL would end it
            self.what()
        return index, torch.rand(30_000), random.random()

    def count(self) -> int:
        return len(list(self.folder.iterdir()))


def run(dataset: Any, **options: Any) -> list[tuple[list[int], float, list[float]]]:
    """One epoch from a known seed, each batch in short."""
    torch.manual_seed(21)
    options = {"num_workers": 2, "schedule": "dynamic", "workers": Processes(max_restarts=5), **options}
    with DataLoader(dataset, batch_size=2, shuffle=True, **options) as loader:
        return [(index.tolist(), drawn.sum().item(), own.tolist()) for index, drawn, own in loader]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def undisturbed(folder: Path) -> list[tuple[list[int], float, list[float]]]:
    return run(Doomed(folder, -1, die), num_workers=0)


def indices_of(loader: Any, found: list[Any]) -> list[Any]:
    """The indices of every batch that comes, also when an error follows."""
    for index, *_ in loader:
        found.append(index.tolist())
    return found


# ---- one death ----------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("what", [die, crash, leave])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_batches_of_a_dead_worker_come_with_the_same_bits(
    method: str, what: Callable[[], None], folder: Path, undisturbed: list[Any], capfd: Any
) -> None:
    with pytest.warns(WorkerReplaced, match="another one was started in its place") as caught:
        assert run(Doomed(folder, 7, what), multiprocessing_context=method) == undisturbed
    assert len(of_kind(caught, WorkerReplaced)) == 1


@pytest.mark.processes
def test_the_warning_says_who_died_how_and_of_what(folder: Path) -> None:
    dataset = Doomed(folder, 7, die)
    loader = DataLoader(dataset, 2, num_workers=2, schedule="dynamic", workers=Processes(max_restarts=1))
    with pytest.warns(WorkerReplaced) as caught:
        list(loader)
    said = of_kind(caught, WorkerReplaced)[0]
    text = str(said.message)
    assert re.search(
        r"worker \d was killed by SIGKILL .* before it answered batch 3 \(indices \[6, 7\]\)", text
    )
    assert said.filename == __file__, "the warning points at the user's loop"


@pytest.mark.processes
def test_statistics_count_replacements(folder: Path) -> None:
    with DataLoader(
        Doomed(folder, 7, die),
        2,
        num_workers=2,
        schedule="dynamic",
        workers=Processes(max_restarts=1),
        persistent_workers=True,
    ) as loader:
        with pytest.warns(WorkerReplaced):
            assert len(list(loader)) == SIZE // 2
        statistics = loader.statistics()
        assert statistics.worker_restarts == 1
        (replaced,) = [worker for worker in statistics.workers if worker.restarts]
        assert replaced.pid in descendants()


@pytest.mark.processes
@pytest.mark.parametrize("in_order", [True, False])
def test_every_batch_comes_once_without_order_too(in_order: bool, folder: Path) -> None:
    with pytest.warns(WorkerReplaced):
        rows = run(Doomed(folder, 7, die), in_order=in_order, num_workers=3)
    assert sorted(index for indices, _, _ in rows for index in indices) == list(range(SIZE))


@pytest.mark.processes
def test_in_turn_order_and_exactly_once_hold(folder: Path) -> None:
    """round_robin: what is not kept is the new worker's stream of random numbers."""
    loader = DataLoader(
        Doomed(folder, 7, die), 2, num_workers=2, workers=Processes(max_restarts=1), prefetch_factor=3
    )
    with pytest.warns(WorkerReplaced):
        found = [index.tolist() for index, _, _ in loader]
    assert found == [[at, at + 1] for at in range(0, SIZE, 2)]


@pytest.mark.processes
def test_a_warning_that_is_an_error_does_not_cost_a_batch(folder: Path) -> None:
    loader = DataLoader(
        Doomed(folder, 7, die), 2, num_workers=2, schedule="dynamic", workers=Processes(max_restarts=1)
    )
    found: list[Any] = []
    iterator = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error", WorkerReplaced)
        with pytest.raises(WorkerReplaced):
            found += [index.tolist() for index, _, _ in iterator]  # loses what it had: asked anew below
        rest = [index.tolist() for index, _, _ in iterator]
    assert rest == [[at, at + 1] for at in range(SIZE - 2 * len(rest), SIZE, 2)]
    assert len(rest) >= SIZE // 2 - 4


@pytest.mark.processes
def test_a_worker_that_dies_with_nothing_to_do_is_replaced(folder: Path) -> None:
    with DataLoader(
        Doomed(folder, -1, die),
        2,
        num_workers=2,
        schedule="dynamic",
        workers=Processes(max_restarts=2),
        persistent_workers=True,
    ) as loader:
        assert len(list(loader)) == SIZE // 2
        victim = loader.statistics().workers[0].pid
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: victim not in descendants() or descendants()[victim].zombie, 5)
        with pytest.warns(WorkerReplaced, match="between batches"):
            assert [len(list(loader)) for _ in range(2)] == [SIZE // 2] * 2
        assert loader.statistics().worker_restarts == 1


# ---- how often ----------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_death_too_many_is_torchs_error(folder: Path) -> None:
    dataset = Doomed(folder, 7, die, times=2)
    loader = DataLoader(dataset, 2, num_workers=2, schedule="dynamic", workers=Processes(max_restarts=1))
    found: list[Any] = []
    with pytest.warns(WorkerReplaced), pytest.raises(WorkerDied, match=r"batch 3 \(indices \[6, 7\]\)"):
        indices_of(loader, found)
    assert found == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.processes
def test_without_restarts_a_death_is_torchs_error_at_its_place(folder: Path) -> None:
    loader = DataLoader(Doomed(folder, 7, die), 2, num_workers=3, schedule="dynamic")
    found: list[Any] = []
    with pytest.raises(WorkerDied, match=r"exited unexpectedly.*batch 3 \(indices \[6, 7\]\)"):
        indices_of(loader, found)
    assert found == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.processes
def test_the_count_begins_anew_with_every_epoch(folder: Path) -> None:
    with DataLoader(
        Doomed(folder, 7, die, times=2),
        2,
        num_workers=2,
        schedule="dynamic",
        workers=Processes(max_restarts=2),
        persistent_workers=True,
    ) as loader:
        with pytest.warns(WorkerReplaced) as caught:
            assert len(list(loader)) == SIZE // 2
        assert len(of_kind(caught, WorkerReplaced)) == 2
        loader.dataset.times = 4  # the workers have the dataset of the beginning
        assert len(list(loader)) == SIZE // 2


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["dynamic", "round_robin"])
def test_a_batch_that_kills_three_workers_is_given_up_at_its_place(schedule: str, folder: Path) -> None:
    loader = DataLoader(
        Doomed(folder, 7, die, times=9),
        2,
        num_workers=2,
        schedule=schedule,
        workers=Processes(max_restarts=9),
    )
    iterator = iter(loader)
    before: list[Any] = []
    with pytest.warns(WorkerReplaced) as caught, pytest.raises(PoisonousBatch) as poison:
        indices_of(iterator, before)
    assert re.search(r"batch 3 \(indices \[6, 7\]\) .*3 workers died.*SIGKILL", str(poison.value))
    assert before == [[0, 1], [2, 3], [4, 5]]
    assert indices_of(iterator, []) == [[at, at + 1] for at in range(8, SIZE, 2)]
    assert len(of_kind(caught, WorkerReplaced)) == 3


@pytest.mark.processes
def test_a_worker_that_never_gets_up_is_not_replaced_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastq_loader.workers import main

    class Refusing:
        def __init__(self, *args: Any) -> None:
            os._exit(5)

    monkeypatch.setattr(main, "WorkerSocket", Refusing)
    loader = DataLoader(
        list(range(8)), num_workers=1, schedule="dynamic", workers=Processes(max_restarts=1000)
    )  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkerReplaced)
        with pytest.raises(WorkerDied, match=r"code 5.*3 processes in a row ended before they were up"):
            next(iter(loader))


# ---- workers that hang --------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["dynamic", "round_robin"])
def test_a_worker_that_hangs_is_replaced_and_its_stack_shown(schedule: str, folder: Path) -> None:
    loader = DataLoader(
        Doomed(folder, 7, hang),
        2,
        num_workers=2,
        schedule=schedule,
        workers=Processes(max_restarts=2),
        timeout=0.5,
    )
    with pytest.warns(WorkerReplaced) as caught:
        assert [index.tolist() for index, _, _ in loader] == [[at, at + 1] for at in range(0, SIZE, 2)]
    said = of_kind(caught, WorkerReplaced)[0]
    text = str(said.message)
    assert re.search(
        r"did not answer within 0.5 seconds, before it answered batch 3 \(indices \[6, 7\]\)", text
    )
    assert "in hang" in text, "the stack shows where it hung"
    assert len(of_kind(caught, WorkerReplaced)) == 1


@pytest.mark.processes
def test_a_worker_that_hangs_does_not_hide_behind_the_answers_of_others(folder: Path) -> None:
    """The others go on for longer than the timeout, with an answer every few milliseconds."""

    class Busy(Doomed):
        def __len__(self) -> int:
            return 120

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return super().__getitem__(index)

    loader = DataLoader(
        Busy(folder, 1, hang),
        num_workers=2,
        schedule=Dynamic(window=120),
        workers=Processes(max_restarts=1),
        timeout=0.3,
    )
    began = time.monotonic()
    iterator = iter(loader)
    next(iterator)
    with pytest.warns(WorkerReplaced):
        assert next(iterator)[0].item() == 1
    assert time.monotonic() - began < 1.0
    assert len(list(iterator)) == 118


@pytest.mark.processes
def test_without_restarts_a_hang_is_a_timeout_with_stack_and_indices(folder: Path) -> None:
    loader = DataLoader(Doomed(folder, 1, hang), 2, num_workers=2, schedule="dynamic", timeout=0.4)
    with pytest.raises(LoaderTimeout, match=r"(?s)timed out after 0.4 seconds.*batch 0 .*0, 1.*in hang"):
        next(iter(loader))


@pytest.mark.processes
def test_a_stopped_worker_is_replaced(folder: Path, undisturbed: list[Any]) -> None:
    """SIGSTOP: it cannot even write its stacks."""

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.warns(WorkerReplaced, match="did not write"):
        assert run(Doomed(folder, 7, stop), timeout=0.4) == undisturbed


@pytest.mark.processes
def test_a_batch_that_hangs_three_times_is_given_up(folder: Path) -> None:
    loader = DataLoader(
        Doomed(folder, 1, hang, times=9),
        2,
        num_workers=2,
        schedule="dynamic",
        workers=Processes(max_restarts=9),
        timeout=0.2,
    )
    iterator = iter(loader)
    with pytest.warns(WorkerReplaced), pytest.raises(PoisonousBatch, match="batch 0"):
        next(iterator)
    assert [index.tolist() for index, _, _ in iterator] == [[at, at + 1] for at in range(2, SIZE, 2)]


# ---- what the new worker is -----------------------------------------------------------------------------


class Changing(Doomed):
    """What its samples are can be changed from outside."""

    value = 0

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return self.value


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_new_worker_has_the_dataset_of_the_beginning(method: str, folder: Path) -> None:
    dataset = Changing(folder, 15, die)
    loader = DataLoader(
        dataset,
        2,
        num_workers=1,
        schedule="dynamic",
        workers=Processes(max_restarts=1),
        multiprocessing_context=method,
    )
    iterator = iter(loader)
    next(iterator)
    dataset.value = 1  # the workers that run already do not see it
    with pytest.warns(WorkerReplaced):
        assert all(batch.tolist() == [0, 0] for batch in iterator)


class Who(Doomed):
    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        info = get_worker_info()
        assert info is not None
        return info.id, info.num_workers, self.ready


def get_ready(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.ready = worker + 100


@pytest.mark.processes
def test_a_new_worker_has_the_number_and_the_init_function_of_the_old_one(folder: Path) -> None:
    loader = DataLoader(
        Who(folder, 7, die),
        None,
        num_workers=2,
        schedule="dynamic",
        workers=Processes(max_restarts=1),
        worker_init_fn=get_ready,
    )
    with pytest.warns(WorkerReplaced):
        rows = list(loader)
    assert {(worker, workers) for worker, workers, _ in rows} <= {(0, 2), (1, 2)}
    assert all(ready == worker + 100 for worker, _, ready in rows)


@pytest.mark.processes
def test_memory_of_dead_workers_is_used_again(folder: Path) -> None:
    """Twenty deaths in the middle of a batch of large leaves leave no more blocks than none."""

    class Large(Doomed):
        def __getitem__(self, index: int) -> Any:
            if index % 4 == 3 and not (self.folder / str(index)).exists():
                (self.folder / str(index)).touch()
                self.what()
            return torch.full((100_000,), float(index))

        def __len__(self) -> int:
            return 80

    with DataLoader(
        Large(folder, -1, die),
        4,
        num_workers=2,
        schedule=Dynamic(window=4),
        workers=Processes(max_restarts=100),
        persistent_workers=True,
    ) as loader:
        with pytest.warns(WorkerReplaced) as caught:
            firsts = [batch[:, 0].tolist() for batch in loader]
        assert firsts == [[4 * at, 4 * at + 1, 4 * at + 2, 4 * at + 3] for at in range(20)]
        assert len(of_kind(caught, WorkerReplaced)) == 20
        assert sum(1 for _ in loader) == 20  # keeps none
        gc.collect()
        statistics = loader.statistics()
        assert statistics.arena_bytes <= 10 * 4 * 400_000 * 1.25
        assert statistics.blocks_in_use == 0


@pytest.mark.processes
def test_batches_that_are_kept_outlive_the_worker_that_wrote_them(folder: Path) -> None:
    loader = DataLoader(
        Doomed(folder, 7, die), 2, num_workers=2, schedule="dynamic", workers=Processes(max_restarts=1)
    )
    with pytest.warns(WorkerReplaced):
        kept = [(index, drawn, drawn.sum().item()) for index, drawn, _ in loader]
    assert [index.tolist() for index, _, _ in kept] == [[at, at + 1] for at in range(0, SIZE, 2)]
    assert all(drawn.sum().item() == total for _, drawn, total in kept)


# ---- when it cannot be done -----------------------------------------------------------------------------


@pytest.mark.processes
def test_a_worker_that_cannot_be_replaced_ends_the_epoch_with_both_reasons(folder: Path) -> None:
    loader = DataLoader(
        Doomed(folder, 15, die), 2, num_workers=2, schedule="dynamic", workers=Processes(max_restarts=5)
    )
    iterator = iter(loader)
    next(iterator)
    workers = {worker.pid for worker in loader.statistics().workers}
    (zygote,) = set(descendants()) - workers
    os.kill(zygote, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"SIGKILL.*no other one could be started.*has ended"):
        list(iterator)


@pytest.mark.processes
def test_deaths_while_the_loader_is_closed_leave_nothing(folder: Path) -> None:
    for delay in (0.0, 0.002, 0.01):
        loader = DataLoader(
            Doomed(folder, -1, die), 2, num_workers=3, schedule="dynamic", workers=Processes(max_restarts=9)
        )
        iterator = iter(loader)
        next(iterator)
        for worker in loader.statistics().workers[:2]:
            os.kill(worker.pid, signal.SIGKILL)
        time.sleep(delay)
        loader.close()
