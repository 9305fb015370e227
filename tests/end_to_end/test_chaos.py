"""Workers killed at random moments, as long as one likes: `pytest --thorough -m chaos --chaos-seconds 600`.

A run draws its configuration and its kills from a seed, and says both when it fails. It aims at whatever a
worker is doing: starting, fetching, writing, answering, idling, or being taken down. Every batch must come
once, in order, with the bits of an undisturbed run, and nothing may be left behind.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader, Dynamic, Processes
from fastq_loader.errors import PoisonBatch, WorkerReplaced
from tests.conftest import descendants
from tests.support.datasets import Sized, describe, identity
from tests.support.loaders import MANY_WORKERS
from tests.support.thorough import thorough

BATCH = 4
#: More than could ever be needed; that a run ends at all is a part of what is tested.
PLENTY = 10_000

#: In the place of a batch that was hit three times.
GIVEN_UP: tuple[Any, ...] = ("given up",)

pytestmark = [pytest.mark.chaos, pytest.mark.processes, MANY_WORKERS, thorough()]


class Slowly(Sized, Dataset):
    """Samples of all sizes, with draws in them, after a moment."""

    length = 160

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(random.Random().random() * self.seconds)  # which no seed decides
        return {
            "index": index,
            "large": torch.rand(9_000 * (1 + index % 3)),
            "numpy": np.random.rand(3),
            "text": f"{random.random():.6f}" * (1 + index % 5),
        }


@dataclass
class Run:
    """One configuration, its kills, and what happened."""

    seed: int
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(self.seed)
        self.workers = draw.choice([1, 2, 3, 4])
        self.options: dict[str, Any] = {
            "prefetch_factor": draw.choice([1, 2, 4]),
            "persistent_workers": draw.random() < 0.5,
            "schedule": draw.choice([Dynamic(), Dynamic(window=2), Dynamic(window=12)]),
            "workers": Processes(max_restarts=PLENTY),
        }
        self.sample_seconds = draw.choice([0.0005, 0.002])
        self.pause = draw.choice([0.03, 0.08, 0.2])  # between kills, seconds at most
        self.kills = self.given_up = 0

    def undisturbed(self) -> list[tuple[Any, ...]]:
        return list(self._epochs(self._loader(0.0, 0, schedule="dynamic")))

    def under_fire(self) -> list[tuple[Any, ...]]:
        """The same while workers are killed, also when the loader is closed."""
        loader = self._loader(self.sample_seconds, self.workers, **self.options)
        done = threading.Event()
        killer = threading.Thread(target=self._kill, args=(loader, done))
        killer.start()
        try:
            return list(self._epochs(loader))
        finally:
            loader.close()
            done.set()
            killer.join()

    def _loader(self, seconds: float, num_workers: int, **options: Any) -> DataLoader[Any]:
        torch.manual_seed(self.seed)
        return DataLoader(
            Slowly(seconds), BATCH, shuffle=True, num_workers=num_workers, collate_fn=identity, **options
        )

    def _epochs(self, loader: DataLoader[Any]) -> Iterator[tuple[Any, ...]]:
        """The descriptions of all batches, and GIVEN_UP for one that three random kills have hit."""
        for epoch in range(2):
            iterator = iter(loader)
            while True:
                try:
                    batch = next(iterator)
                    found, said = describe(batch), str([sample["index"] for sample in batch])
                except StopIteration:
                    break
                except PoisonBatch:
                    self.given_up += 1
                    found, said = GIVEN_UP, "given up"
                self.log.append(f"epoch {epoch}: {said}")
                yield found

    def _kill(self, loader: DataLoader[Any], done: threading.Event) -> None:
        while not done.wait(self.draw.random() * self.pause):
            victims = [worker.pid for worker in loader.statistics().workers if worker.pid in descendants()]
            if victims:
                victim = self.draw.choice(victims)
                self.log.append(f"kill {victim}")
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    self.kills += 1

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.workers} workers, {self.options}, {self.kills} kills"


def test_every_batch_comes_once_in_order_with_the_same_bits(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = request.config.getoption("--chaos-seed")
    first = random.SystemRandom().randrange(1 << 30) if seed is None else seed
    deadline = time.monotonic() + request.config.getoption("--chaos-seconds")
    runs: list[Run] = []
    while not runs or (seed is None and time.monotonic() < deadline):
        run = Run(first + len(runs))
        runs.append(run)
        expected = run.undisturbed()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", WorkerReplaced)
                found = run.under_fire()
            assert 3 * run.given_up <= run.kills, f"{run}: {run.given_up} batches were given up"
            due = [GIVEN_UP if got is GIVEN_UP else one for got, one in zip(found, expected, strict=False)]
            assert len(found) == len(expected)
            assert found == due, f"{run}; repeat with --chaos-seed {run.seed}"
        except BaseException:
            print(run, *run.log, sep="\n")
            raise
    kills, given_up = sum(run.kills for run in runs), sum(run.given_up for run in runs)
    with capsys.disabled():
        print(f" {kills} kills in {len(runs)} runs from seed {first}, {given_up} batches given up ", end="")
