"""Workers killed at random moments, as long as one likes: `pytest -m chaos --chaos-seconds 600`.

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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader, Processes, RoundRobin
from fastq_loader.errors import PoisonousBatch, WorkerReplaced

SIZE = 160
BATCH = 4
#: More than could ever be needed; that a run ends at all is a part of what is tested.
PLENTY = 10_000

#: In the place of a batch that was hit three times.
GIVEN_UP: tuple[Any, ...] = ("given up",)

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


class Slowly(Dataset):
    """Samples of all sizes, with draws in them, after a moment."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.own = random.Random()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.own.random() * self.seconds)
        return {
            "index": index,
            "small": torch.rand(4),
            "large": torch.rand(9_000 * (1 + index % 3)),
            "numpy": np.random.rand(3),
            "text": f"{random.random():.6f}" * (1 + index % 5),
        }


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    width = max(len(sample["large"]) for sample in samples)
    large = torch.zeros(len(samples), width)
    for row, sample in zip(large, samples, strict=True):
        row[: len(sample["large"])] = sample["large"]
    return {
        "index": torch.tensor([sample["index"] for sample in samples]),
        "small": torch.stack([sample["small"] for sample in samples]),
        "large": large,
        "numpy": np.stack([sample["numpy"] for sample in samples]),
        "text": [sample["text"] for sample in samples],
    }


def digest(batch: dict[str, Any]) -> tuple[Any, ...]:
    return (
        batch["index"].tolist(),
        batch["small"].sum().item(),
        batch["large"].double().sum().item(),
        batch["numpy"].tobytes(),
        tuple(batch["text"]),
    )


@dataclass
class Run:
    """One configuration, its kills, and what happened."""

    seed: int
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.workers = draw.choice([1, 2, 3, 4])
        self.options: dict[str, Any] = {
            "prefetch_factor": draw.choice([1, 2, 4]),
            "persistent_workers": draw.random() < 0.5,
            "schedule": RoundRobin(window=draw.choice([None, None, 2, 12])),
        }
        self.sample_seconds = draw.choice([0.0005, 0.002])
        self.pause = draw.choice([0.03, 0.08, 0.2])  # between kills, seconds at most
        self.draw = draw
        self.kills = self.given_up = 0

    def note(self, text: str) -> None:
        self.log.append(f"{time.monotonic():.4f} {text}")

    def epochs(self, workers: int, epochs: int, **options: Any) -> list[tuple[Any, ...]]:
        """The digests of all batches; with `workers` they are killed meanwhile."""
        torch.manual_seed(self.seed)
        dataset = Slowly(self.sample_seconds if workers else 0.0)
        loader: DataLoader[Any] = DataLoader(
            dataset,
            BATCH,
            shuffle=True,
            num_workers=workers,
            collate_fn=collate,
            schedule="dynamic",
            **options,
        )
        found = []
        done = threading.Event()
        killer = threading.Thread(target=self._kill, args=(loader, done))
        if workers:
            killer.start()
        try:
            for epoch in range(epochs):
                for batch in self._batches(loader):
                    found.append(digest(batch) if batch is not None else GIVEN_UP)
                    self.note(f"epoch {epoch}: {found[-1][0]}")
        finally:
            if workers:
                loader.close()  # under fire
                done.set()
                killer.join()
        return found

    def _batches(self, loader: DataLoader[Any]) -> Iterator[dict[str, Any] | None]:
        """The batches of an epoch; None for one that three random kills have hit, which is its rule."""
        iterator = iter(loader)
        while True:
            try:
                yield next(iterator)
            except StopIteration:
                return
            except PoisonousBatch:
                self.given_up += 1
                yield None

    def _kill(self, loader: DataLoader[Any], done: threading.Event) -> None:
        while not done.wait(self.draw.random() * self.pause):
            alive = loader.statistics().workers
            if not alive:
                continue
            victim = self.draw.choice(alive)
            pid = victim.pid
            # It may have been reaped, and its number have been given to somebody else.
            if not pid or not _is_mine(pid):
                continue
            self.note(f"kill worker {victim.id} ({pid})")
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.kills += 1

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.workers} workers, {self.options}, {self.kills} kills"


def _is_mine(pid: int) -> bool:
    """Whether a process is a child of this one, or of a child of this one."""
    for _ in range(2):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return False
        if pid == os.getpid():
            return True
    return False


def test_every_batch_comes_once_in_order_with_the_same_bits(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = request.config.getoption("--chaos-seconds")
    seed = request.config.getoption("--chaos-seed")
    first = random.SystemRandom().randrange(1 << 30) if seed is None else seed
    deadline = time.monotonic() + seconds
    kills = runs = given_up = 0
    while runs == 0 or (seed is None and time.monotonic() < deadline):
        run = Run(first + runs)
        expected = run.epochs(0, 2)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", WorkerReplaced)
                found = run.epochs(run.workers, 2, workers=Processes(max_restarts=PLENTY), **run.options)
        except BaseException:
            print(run, *run.log, sep="\n")
            raise
        assert 3 * run.given_up <= run.kills, f"{run}: {run.given_up} batches were given up"
        if len(found) == len(expected):
            expected = [
                GIVEN_UP if got is GIVEN_UP else due for got, due in zip(found, expected, strict=True)
            ]
        if found != expected:
            print(run, *run.log, sep="\n")
        assert found == expected, f"{run}; repeat with --chaos-seed {run.seed}"
        runs += 1
        kills += run.kills
        given_up += run.given_up
    with capsys.disabled():
        print(f" {kills} kills in {runs} runs from seed {first}, {given_up} batches given up ", end="")
