"""Each workload of the bench: what its samples are, that they are the same every time, also when spawned.

Sizes are made small, and nothing sleeps: what is tested is the data and not the speed.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("PIL", reason="comes with the bench's extra")
pytest.importorskip("sklearn", reason="comes with the bench's extra")

from bench.peers import LoaderSettings
from bench.peers.torch_loader import loader_arguments
from bench.timing.ceiling import as_worker
from bench.workloads import Load, all_workloads, files, find_workload, jpeg, ready_made, slow, tables
from tests.support.datasets import assert_same

NAMES = [*all_workloads(), "bytes_1024"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "FILES", 4)
    monkeypatch.setattr(ready_made, "IMAGES", 2)
    monkeypatch.setattr(ready_made, "LARGEST_SET", 1 << 20)
    monkeypatch.setattr(files, "FILES", 6)
    monkeypatch.setattr(tables, "ALL_ROWS", 3 * tables.BATCH + 1)
    monkeypatch.setattr(slow, "time", SimpleNamespace(sleep=lambda seconds: None))


def built(name: str, folder: Path) -> Load:
    return find_workload(name).load(folder)


def batches(load: Load) -> Iterator[Any]:
    """As torch's loader gives them, on this thread."""
    torch.manual_seed(0)
    return iter(DataLoader(**loader_arguments(load, LoaderSettings(0, "fork"))))


@pytest.mark.parametrize("name", NAMES)
def test_batches_are_the_same_again_and_from_a_spawned_worker(name: str, tmp_path: Path) -> None:
    load = built(name, tmp_path)
    first = list(islice(batches(load), 2))
    assert len(first) == 2
    assert_same(list(islice(batches(load), 2)), first)
    assert_same(list(islice(batches(pickle.loads(pickle.dumps(load))), 2)), first)


@pytest.mark.parametrize("workers", [1, 2, 3, 16])
def test_a_worker_streams_its_records(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PASSES", 1)
    dataset: Any = built("stream", tmp_path).dataset
    everything = list(dataset)
    assert len(everything) == files.RECORDS
    for worker in range(workers):
        with as_worker(worker, workers, dataset):
            assert_same(list(dataset), everything[worker::workers])
