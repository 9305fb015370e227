"""A program of torchdata's resumes with our class of that name. torchdata's own tests are not run here."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from fastq_loader import DataLoader, Dynamic, RoundRobin, StatefulDataLoader
from tests.support.datasets import Sized

EVERY: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "snapshot_every_n_steps": 3}


class Augmented(Sized, Dataset[Any]):
    length = 16

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(1).item(), random.random()


def test_the_arguments_are_torchdatas() -> None:
    loader = StatefulDataLoader(range(4), 2, snapshot_every_n_steps=3)
    assert (loader.snapshot_every_n_steps, loader.batch_size) == (3, 2)
    assert loader.schedule == RoundRobin(save_generators=True)
    assert copy.copy(loader).snapshot_every_n_steps == 3
    assert StatefulDataLoader(range(4), schedule=Dynamic()).schedule == Dynamic()
    with pytest.raises(TypeError, match="snapshot_every"):
        StatefulDataLoader(range(4), snapshot_every=3)


@pytest.mark.processes
def test_a_resumed_run_draws_the_same_random_numbers() -> None:
    first, second = (StatefulDataLoader(Augmented(), **EVERY) for _ in range(2))
    with first, second:
        batches = iter(first)
        for _ in range(3):
            next(batches)
        second.load_state_dict(first.state_dict())
        again = iter(second)
        expected, found = ([next(each) for _ in range(5)] for each in (batches, again))
    assert [[field.tolist() for field in batch] for batch in found] == [
        [field.tolist() for field in batch] for batch in expected
    ]


class NotAsked(IterableDataset[int]):
    """Its state is nobody's business."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))

    def state_dict(self) -> Any:
        raise AssertionError("asked for a state")

    load_state_dict = state_dict


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::fastq_loader.DuplicateData")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_has_no_state_and_asks_nobody_for_one(workers: int) -> None:
    loader = DataLoader(NotAsked(), 2, num_workers=workers, persistent_workers=workers > 0)
    for name in ("state_dict", "load_state_dict"):
        assert not hasattr(loader, name)
    for _ in range(2):
        assert len(list(loader)) == 3 * max(1, workers)
    loader.close()
