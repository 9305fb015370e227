"""Batches that are hard on what describes them: torch's loader bears them, and so does ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader import DataLoader
from fastq_loader.memory.arena import AVAILABLE
from tests.conftest import run_script
from tests.support.datasets import assert_same

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
]

GROWTH = """
import os, random, sys, numpy, torch, fastq_loader
from pathlib import Path

class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, seq):
        count = random.Random(seq).randint(2000, 5000)
        return {make}

def as_it_is(batch):
    return batch

def memory():
    children = Path(f"/proc/self/task/{{os.getpid()}}/children").read_text().split()
    rollups = [Path(f"/proc/{{pid}}/smaps_rollup").read_text() for pid in ("self", *children)]
    return sum(int(rollup.partition("Pss:")[2].split()[0]) for rollup in rollups)

used = []
for kind in (torch.utils.data.DataLoader, fastq_loader.DataLoader):
    loader = kind(Batches(), batch_size=None, num_workers=2, collate_fn=as_it_is)
    used += [memory() for seq, batch in enumerate(loader) if seq == 58]
assert used[1] <= 1.5 * used[0], used
"""


@pytest.mark.parametrize(
    "make",
    [
        "[(number, 'word') for number in range(count)]",
        "{f'{seq}_{number}': number for number in range(count)}",
        "[(numpy.zeros(4), number) for number in range(count)]",
    ],
)
def test_structures_that_change_with_every_batch_take_no_more_memory_than_torchs(make: str) -> None:
    result = run_script(GROWTH.format(make=make), timeout=60, warm=True)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


def many_dimensions() -> list[torch.Tensor]:
    tensor = torch.arange(6.0).view([1] * 63 + [2, 3])
    return [tensor, tensor.transpose(-1, 0), tensor.expand([2] + [1] * 62 + [2, 3])]


VALUES: dict[str, Callable[[], Any]] = {
    "arrays of texts without length": lambda: [np.ndarray(3, kind) for kind in ("S0", "U0")],
    "more dimensions than numpy has": many_dimensions,
    "hundreds of dimensions": lambda: torch.arange(60_000).view([1] * 500 + [200, 300]),
    "long texts": lambda: {"text": "ä" * 100_000, "bytes": [b"x" * 100_000, b"y"], "n": 1},
    "annotations": lambda: [{"box": torch.rand(4), "area": random.random()} for _ in range(500)],
}


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES.keys())
def test_values_arrive_as_with_torch(make: Callable[[], Any]) -> None:
    batches = [make(), make()]
    expected, actual = (
        list(kind(batches, batch_size=None, num_workers=1, collate_fn=as_it_is))  # type: ignore[arg-type]
        for kind in (torch.utils.data.DataLoader, DataLoader)
    )
    assert_same(batches, actual)
    assert_same(expected, actual)
