"""Workers killed at random moments, with every seed another configuration; more than the default seeds:

    python -m pytest --thorough tests/end_to_end/test_chaos.py --seeds 0:200

A worker is hit at whatever it does: starting, fetching, writing, answering, idling, or being taken down.
Every batch must come once, in order, with the bits of an undisturbed run, and nothing may be left behind.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader, Dynamic, Processes
from fastq_loader.errors import PoisonBatch
from tests.conftest import descendants
from tests.support.datasets import Sized, describe, identity
from tests.support.loaders import MANY_WORKERS
from tests.support.thorough import seeds

#: More than could ever be needed; that a run ends at all is a part of what is tested.
PLENTY = 10_000


class Slowly(Sized, Dataset[Any]):
    """Samples of all sizes, with draws in them, after a moment."""

    length = 160

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(random.Random().random() * self.seconds)  # which no seed decides
        large = torch.rand(9_000 * (1 + index % 3))
        return {"index": index, "large": large, "numpy": np.random.rand(3), "text": f"{random.random():.6f}"}


def epochs(seed: int, loader: DataLoader[Any]) -> Iterator[Any]:
    """Two of them; None stands for a batch that three kills have hit."""
    torch.manual_seed(seed)
    for _ in range(2):
        iterator = iter(loader)
        while True:
            try:
                yield describe(next(iterator))
            except StopIteration:
                break
            except PoisonBatch:
                yield None


@seeds(0, 6)
@pytest.mark.processes
@MANY_WORKERS
@pytest.mark.filterwarnings("ignore::fastq_loader.WorkerReplaced")
def test_every_batch_comes_once_in_order_with_the_same_bits(seed: int) -> None:
    draw, done, kills = random.Random(seed), threading.Event(), list[int]()
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "collate_fn": identity}
    expected = list(epochs(seed, DataLoader(Slowly(0), schedule="dynamic", **options)))
    options |= {
        "num_workers": draw.choice([1, 2, 3, 4]),
        "prefetch_factor": draw.choice([1, 2, 4]),
        "persistent_workers": draw.random() < 0.5,
        "schedule": draw.choice([Dynamic(), Dynamic(window=2), Dynamic(window=12)]),
    }
    seconds, pause = draw.choice([0.0005, 0.002]), draw.choice([0.03, 0.08, 0.2])

    def kill() -> None:
        while not done.wait(draw.random() * pause):
            if victims := [each.pid for each in loader.statistics().workers if each.pid in descendants()]:
                with suppress(ProcessLookupError):
                    os.kill(victim := draw.choice(victims), signal.SIGKILL)
                    kills.append(victim)

    loader = DataLoader(Slowly(seconds), workers=Processes(max_restarts=PLENTY), **options)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = list(epochs(seed, loader))
    finally:
        loader.close()
        done.set()
        killer.join()
    assert len(found) == len(expected)
    assert found == [got and one for got, one in zip(found, expected, strict=True)], (options, kills)
    assert 3 * found.count(None) <= len(kills)
