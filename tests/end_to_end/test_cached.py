"""Epochs with a cache have the bits of those without, whoever loads them, and whoever dies of it."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader import DataLoader, Processes, Skip
from tests.conftest import ROOT, running_script, wait_until
from tests.support.datasets import identity
from tests.support.decoded import Decoded, DecodedStream

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings(
        "ignore::fastq_loader.WorkerReplaced",
        "ignore::fastq_loader.BadSampleFound",
        "ignore:This DataLoader will create:UserWarning",
    ),
]

LENGTH = 30


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """A cached method refers to its object, and goes with a garbage collection."""
    yield
    gc.collect()


def epochs(dataset: Any, count: int = 3, **options: Any) -> list[Any]:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    loader: Any = DataLoader(dataset, 4, collate_fn=identity, **options)
    return [[repr(batch) for batch in loader] for _ in range(count)]


CONFIGURATIONS = [
    {
        "num_workers": workers,
        "multiprocessing_context": method,
        "schedule": schedule,
        "persistent_workers": stay,
    }
    for workers, method, schedule, stay in (
        (0, None, "round_robin", False),
        (2, "fork", "round_robin", False),
        (3, "fork", "dynamic", True),
        (2, "spawn", "dynamic", False),
        (2, "forkserver", "round_robin", True),
    )
]


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_epochs_have_the_same_bits_and_samples_are_decoded_once(options: dict[str, Any]) -> None:
    dataset = Decoded(LENGTH, {"limit": "1MB"})
    assert epochs(dataset, shuffle=True, **options) == epochs(Decoded(LENGTH, None), shuffle=True, **options)
    counts: Any = dataset.decode.statistics()  # type: ignore[attr-defined]
    assert (counts.hits, counts.stored, counts.damaged) == (2 * LENGTH, LENGTH, 0)


def test_a_stream_has_a_cache_like_everybody() -> None:
    dataset = DecodedStream(LENGTH, {"limit": "1MB"})
    assert epochs(dataset, num_workers=2) == epochs(DecodedStream(LENGTH, None), num_workers=2)
    assert dataset.samples.decode.statistics().hits == 2 * LENGTH  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(6))
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


def test_a_resumed_epoch_goes_on_with_the_cache() -> None:
    def run(dataset: Any) -> list[str]:
        torch.manual_seed(3)
        options: dict[str, Any] = {"num_workers": 2, "schedule": "dynamic", "shuffle": True}
        loader: Any = DataLoader(dataset, 4, collate_fn=identity, **options)
        iterator = iter(loader)
        begun = [repr(next(iterator)) for _ in range(3)]
        other: Any = DataLoader(dataset, 4, collate_fn=identity, **options)
        other.load_state_dict(loader.state_dict())
        return begun + [repr(batch) for batch in other]

    assert run(Decoded(LENGTH, {"limit": "1MB"})) == run(Decoded(LENGTH, None))


FILLS = """
    from tests.support.datasets import identity
    from tests.support.decoded import Decoded
    from fastq_loader import DataLoader
    dataset = Decoded(400, {"limit": "5MB", "path": PATH})
    loader = DataLoader(dataset, 4, num_workers=2, collate_fn=identity)
    print("begun", flush=True)
    for epoch in range(EPOCHS):
        for batch in loader:
            pass
    print(dataset.decode.statistics(), flush=True)
"""


@pytest.mark.parametrize("moment", [3, 40, 150])
def test_two_jobs_fill_one_file_and_one_is_killed(moment: int, tmp_path: Path) -> None:
    """With its workers, when the file has so many values. The next one finds all that is whole."""
    path = tmp_path / "values"
    source = FILLS.replace("PATH", repr(str(path)))
    with (
        running_script(source.replace("EPOCHS", "1000"), env={"TMPDIR": str(tmp_path)}) as killed,
        running_script(source.replace("EPOCHS", "2")) as other,
    ):
        assert wait_until(lambda: path.exists() and path.stat().st_size > 90_000 + 300 * moment, 60)
        for entry in killed.processes():
            os.kill(entry.pid, signal.SIGKILL)
        assert other.finish(60).returncode == 0
    kept = Decoded(400, {"limit": "5MB", "path": path})
    assert epochs(kept, 1, num_workers=2) == epochs(Decoded(400, None), 1, num_workers=2)
    counts: Any = kept.decode.statistics()  # type: ignore[attr-defined]
    assert counts.hits > 350
    assert counts.damaged == 0


def test_ranks_have_one_cache_by_its_name(tmp_path: Path) -> None:
    script = (
        "from tests.support.decoded import Decoded\n"
        f"samples = Decoded(50, {{'limit': '1MB', 'name': 'ranks of {os.getpid()}'}})\n"
        "[samples.decode(index) for index in range(50)]\n"
        "print(samples.decode.statistics().hits, flush=True)\n"
        "input()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = []
    for expected in (0, 50, 50):
        command = [sys.executable, "-c", script]
        rank = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        ranks.append(rank)
        assert rank.stdout is not None
        assert int(rank.stdout.readline()) == expected
    for rank in ranks:
        rank.communicate("\n")
