"""`tune` on whole loaders."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fastq_loader import DataLoader, tune
from tests.support.datasets import Made

pytestmark = pytest.mark.processes


def wait(index: int) -> torch.Tensor:
    """As for a disk."""
    time.sleep(0.002)
    return torch.rand(3) + index


def contents(loader: DataLoader[Any], count: int) -> list[Any]:
    return [batch.tolist() for batch, _ in zip(loader, range(count), strict=False)]


@pytest.mark.usefixtures("forked_workers")
def test_it_measures_more_workers_for_a_dataset_that_waits() -> None:
    """Which ones it recommends is seen with a played machine: test_tuning.py. This one may be busy."""
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Made(wait, 10_000), 4, shuffle=True, num_workers=1, generator=generator)
    before = generator.get_state(), torch.get_rng_state()
    for seconds in (2, 20, 100):  # on a busy machine there is no time for more
        found = tune(loader, seconds=seconds, schedules=["round_robin"], max_workers=3, progress=False)
        measured = {row.settings["num_workers"] for row in found.rows if row.batches_per_second}
        if measured > {1}:
            break
    assert measured > {1}, str(found)
    assert all(map(torch.equal, before, (generator.get_state(), torch.get_rng_state())))
    assert loader.statistics().epochs == 0
    assert loader.num_workers == 1
    found.loader.num_workers = 1
    torch.manual_seed(7)
    theirs = contents(found.loader, 5)
    generator.set_state(before[0])
    torch.manual_seed(7)
    assert contents(loader, 5) == theirs
