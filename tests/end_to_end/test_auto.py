"""`num_workers="auto"`: the number changes between epochs, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastq_loader import StatefulDataLoader
from fastq_loader.extras.insight import auto
from fastq_loader.workers.kinds import Auto
from tests.support.datasets import MapDataset
from tests.support.loaders import PERSISTENT, distinct, seed_all
from tests.support.thorough import is_thorough, thorough

pytestmark = pytest.mark.processes


def drawn(length: int = 40) -> MapDataset:
    """Samples of an index and random numbers of all three generators."""
    return MapDataset("drawn", length)


def loader_of(num_workers: Any = "auto", dataset: Any = None, **arguments: Any) -> StatefulDataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    dataset = drawn() if dataset is None else dataset
    return StatefulDataLoader(
        *(dataset, 4, True), num_workers=num_workers, schedule="dynamic", generator=generator, **arguments
    )


def contents(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is decided from the second epoch on."""
    numbers = [0, 3, 1]
    monkeypatch.setattr(auto, "decide", lambda *_: numbers.pop(0))
    return numbers


@thorough(after=1)
@PERSISTENT
def test_the_batches_are_those_of_any_fixed_number(decisions: list[int], persistent: bool) -> None:
    seed_all(1)
    with loader_of(persistent_workers=persistent, prefetch_factor=3, timeout=60) as loader:
        numbers: list[Any] = []
        epochs = []
        for _ in range(4):
            epochs.append(distinct(contents(loader)))
            numbers.append(loader.num_workers)
    after = torch.rand(1)
    assert numbers[1:] == [0, 3, 3 if persistent else 1], "workers that stay are not judged by their start"
    assert {type(number) for number in numbers} == {Auto}
    for fixed in (0, 2) if is_thorough else (0,):
        seed_all(1)
        with loader_of(fixed, persistent_workers=persistent and fixed > 0) as other:
            assert [contents(other) for _ in range(4)] == epochs
        assert torch.rand(1) == after


def test_another_number_ends_the_workers_that_stayed(decisions: list[int]) -> None:
    decisions[:] = [2, 3, 0, 2]  # and none after the epoch in which the three were started
    pids: list[set[int]] = []
    with loader_of(persistent_workers=True, multiprocessing_context="fork") as loader:
        loader.num_workers = Auto(2)
        for _ in range(4):
            list(loader)
            pids.append({worker.pid for worker in loader.statistics().workers})
        assert pids[0] == pids[1]
        assert pids[2] == pids[3]
        assert not pids[1] & pids[2]
        assert [len(each) for each in pids] == [2, 2, 3, 3]
        assert len(list(loader)) == 10
        assert loader.num_workers == 0
        list(loader)
        assert loader.num_workers == 2


@thorough(after=1)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (3, 0), (0, 2)])
def test_an_epoch_goes_on_with_whatever_number(before: int, after: int) -> None:
    with loader_of(2) as fixed:
        whole = contents(fixed)
        second = contents(fixed)
    with loader_of() as loader:
        loader.num_workers = Auto(before)
        batches = iter(loader)
        head = contents([next(batches) for _ in range(4)])
        state = loader.state_dict()
    assert type(state["num_workers"]) is int
    with loader_of() as other:
        other.num_workers = Auto(after)
        other.load_state_dict(state)
        assert head + contents(other) == whole
        assert other.num_workers == after
        assert contents(other) == second
