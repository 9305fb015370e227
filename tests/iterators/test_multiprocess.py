"""The iterator over a pool of workers: its owner, its base seeds, and what it has of torch's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from fastq_loader import DataLoader
from fastq_loader.errors import WorkerDied
from fastq_loader.statistics.epoch import EpochCounters
from tests.conftest import descendants, wait_until
from tests.support.crimes import CrimeAt, exit_with_7

pytestmark = pytest.mark.processes


def persistent(**arguments: Any) -> DataLoader[int]:
    return DataLoader(range(4), 2, num_workers=1, persistent_workers=True, **arguments)


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_a_pool_ends_with_the_last_iterator_that_refers_to_it() -> None:
    loader = persistent()
    iterator = iter(loader)
    iterator.__del__()  # as torch_geometric's wrapper calls it
    assert numbers(iterator) == [[0, 1], [2, 3]]
    vars(loader)["_iterator"] = None
    assert len(descendants()) == 1
    del iterator
    assert wait_until(lambda: not descendants(), 3)


def test_the_call_that_ends_the_workers_counts_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    monkeypatch.setattr(EpochCounters, "closed", lambda *_: running.append(len(descendants())))
    iterator = iter(DataLoader(range(4), 2, num_workers=1))
    assert len(numbers(iterator)) == 2
    assert running == [0]
    assert next(iterator, None) is None
    assert running == [0], "what comes after the epoch is no part of it"
    with pytest.raises(WorkerDied):
        list(DataLoader(CrimeAt(exit_with_7, 2), 2, num_workers=1))
    assert running == [0, 0]
    with persistent() as loader:
        list(loader)
    assert running == [0, 0], "these workers stay"


def test_a_pool_that_has_ended_is_replaced_in_the_next_epoch() -> None:
    with persistent() as loader:
        assert numbers(loader) == [[0, 1], [2, 3]]
        loader._iterator._shutdown_workers()
        assert loader._iterator._shutdown
        assert numbers(loader) == [[0, 1], [2, 3]]
        assert not loader._iterator._shutdown


@pytest.mark.parametrize(("schedule", "seeds"), [("round_robin", 1), ("dynamic", 2)])
def test_base_seeds_of_persistent_workers(schedule: str, seeds: int) -> None:
    with persistent(schedule=schedule) as loader:
        assert len({iter(loader)._base_seed for _ in range(2)}) == seeds


@pytest.mark.parametrize("workers", [0, 1])
def test_no_method_of_torchs_iterators_runs_in_ours(workers: int) -> None:
    iterator = iter(DataLoader(range(2), num_workers=workers))
    ours, theirs = type(iterator), _MultiProcessingDataLoaderIter if workers else _SingleProcessDataLoaderIter
    methods = {name for name, _ in inspect.getmembers(theirs, inspect.isfunction)}
    inherited = {name for name in methods if getattr(ours, name) is getattr(theirs, name)}
    # For torch's own iterators that keep workers, at the exit; the second is that of older versions.
    assert inherited <= {"_clean_up_persistent_workers_atexit", "_clean_up_worker"}
    for name in methods & {"_try_put_index", "_get_data", "_try_get_data", "_process_data"}:
        with pytest.raises(NotImplementedError, match="nothing of torch's iterators runs"):
            getattr(iterator, name)()
    with pytest.raises(AttributeError, match="has no attribute '_data_queue'"):
        _ = iterator._data_queue
