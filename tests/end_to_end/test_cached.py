"""Epochs with a cache have the bits of those without, whoever loads them, and whoever dies of it."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader, Processes, Skip, StatefulDataLoader, cached
from tests.conftest import running_script
from tests.support import decoded
from tests.support.datasets import identity
from tests.support.decoded import Decoded, OfModule
from tests.support.loaders import distinct
from tests.support.thorough import seeds, thorough

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings(
        "ignore::fastq_loader.WorkerReplaced",
        "ignore::fastq_loader.BadSampleFound",
        "ignore:save_generators=True:fastq_loader.LoaderHint",  # a cache holds more than is searched
        "ignore:This DataLoader will create:UserWarning",
    ),
]

LENGTH = 30
OfModule(1)[0]  # what a process opens once


def epochs(dataset: Any, count: int = 3, **options: Any) -> list[Any]:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    loader: Any = StatefulDataLoader(dataset, 4, collate_fn=identity, **options)
    return [distinct(repr(batch) for batch in loader) for _ in range(count)]


@thorough(after=2)
@pytest.mark.parametrize(
    ("workers", "method", "schedule", "stay"),
    [
        (3, "fork", "dynamic", True),
        (0, None, "round_robin", False),
        (2, "fork", "round_robin", False),
        (2, "spawn", "dynamic", False),
        (2, "forkserver", "round_robin", True),
    ],
)
def test_epochs_have_the_same_bits_and_samples_are_decoded_once(
    workers: int, method: str | None, schedule: str, stay: bool
) -> None:
    options: dict[str, Any] = {"schedule": schedule, "persistent_workers": stay, "shuffle": True}
    options |= {"num_workers": workers, "multiprocessing_context": method}
    dataset = Decoded(LENGTH, {"limit": "1MB"})
    plain = {**options, "multiprocessing_context": "fork" if workers else None}
    assert epochs(dataset, **options) == epochs(Decoded(LENGTH, None), **plain)
    counts: Any = dataset.decode.statistics()  # type: ignore[attr-defined]
    # On a busy machine a writer may give up, and the value is stored in the next epoch.
    assert (counts.hits + counts.busy, counts.stored, counts.damaged) == (2 * LENGTH, LENGTH, 0)


@thorough(but={"method": "spawn"})
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_caches_of_a_module_and_of_a_class_are_one_for_all_workers(method: str) -> None:
    length = {"fork": 11, "spawn": 13, "forkserver": 17}[method]
    caches: list[Any] = [decoded.decode_of_module, decoded.another_of_module, decoded.decode_decorated]
    caches.append(OfModule.decode)
    before = [cache.statistics() for cache in caches]
    dataset = OfModule(length)
    plain = epochs(dataset, 1)
    loader_options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method}
    assert epochs(dataset, 3, **loader_options) == plain * 3
    counts = [
        (now.hits - then.hits)
        for now, then in zip([each.statistics() for each in caches], before, strict=True)
    ]
    assert min(counts) >= 3 * length, "what the consumer decoded is hit in every worker"
    assert OfModule.decode.statistics().values >= length


@seeds(1, 6)
def test_workers_that_die_and_samples_that_cannot_be_read_change_nothing(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    deadly, broken = tuple(rng.sample(range(LENGTH), 2)), tuple(rng.sample(range(LENGTH), 2))
    place: dict[str, Any] = rng.choice([{}, {"path": tmp_path / "values"}, {"name": f"{os.getpid()}.{seed}"}])
    limit = rng.choice(["1MB", 2000])
    options: dict[str, Any] = {
        "num_workers": rng.choice([1, 2, 3]),
        "schedule": "dynamic",
        "workers": Processes(max_restarts=5),
        "persistent_workers": rng.random() < 0.5,
        "errors": Skip(limit=1.0),
        "shuffle": True,
    }
    plain = Decoded(LENGTH, None, tmp_path / "without", deadly, broken)
    kept = Decoded(LENGTH, {"limit": limit, **place}, tmp_path / "with", deadly, broken)
    assert epochs(kept, **options) == epochs(plain, **options), f"seed {seed}, {place}, {limit}, {options}"


RANK = """
    import signal
    from tests.support.decoded import Decoded
    samples = Decoded(50, {"limit": "1MB", "name": NAME})
    [samples.decode(index) for index in range(50)]
    print("decoded", samples.decode.statistics().hits, flush=True)
    signal.pause()
"""


def test_ranks_have_one_cache_by_its_name() -> None:
    """Also when the first one was killed."""
    name = f"ranks of {os.getpid()}"
    ranks = []
    with running_script(RANK.replace("NAME", repr(name)), warm=True) as first:
        first.wait_for("decoded 0\n")
        for killed in (False, True):
            if killed:
                os.kill(first.pid, signal.SIGKILL)
                assert first.finish().stderr == ""
            ranks.append(Decoded(50, {"limit": "1MB", "name": name}))
            for index in range(50):
                ranks[-1].decode(index)
            # The counters are in the memory of this name, too.
            assert ranks[-1].decode.statistics().hits == 50 * len(ranks)  # type: ignore[attr-defined]


class Cropped(Dataset[torch.Tensor]):
    """Draws inside of its cache, from torch's global generator."""

    def __init__(self) -> None:
        self.read: Any = cached(self.draw, limit="1MB")

    def __len__(self) -> int:
        return 8

    def draw(self, index: int) -> torch.Tensor:
        return torch.rand(3) + index

    def __getitem__(self, index: int) -> torch.Tensor:
        made: torch.Tensor = self.read(index)
        return made


@pytest.mark.filterwarnings("ignore::fastq_loader.NotCached")
@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_are_noticed_wherever_they_are_drawn(workers: int) -> None:
    """A worker has a thread of this package, which draws nothing."""
    dataset = Cropped()
    with DataLoader(dataset, 4, num_workers=workers) as loader:
        for _ in range(2):
            list(loader)
    counts = dataset.read.statistics()
    assert (counts.random, counts.busy, counts.stored) == (16, 0, 0)
