"""What the death of a worker costs: epochs in which workers are killed, beside ones in which they are not.

The kills come from a thread, at random moments that are the same in every run: one in each of as many equal
parts of the time that an undisturbed epoch took, so that they are neither all at once nor in step with the
batches. What is delivered is compared with what was asked for.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from bench.timing.processes import wait_until_quiet
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.workloads.slow import INDEX, TracedSamples
from fastq_loader import DataLoader, Processes
from fastq_loader.errors import WorkerReplaced

RESTARTS = 1000  # more than will be needed
KILLS = {1: 8, 4: 20}
"""Number of workers → kills in an epoch. One worker: nobody else goes on while it is started again."""

UNDISTURBED, KILLED, START = "undisturbed", "killed", "start"
PARTS = (UNDISTURBED, KILLED, START)


@dataclass(frozen=True)
class Setting:
    """Epochs of `workers * per_worker` batches that cost `batch_s` seconds each."""

    workers: int
    kills: int
    start_method: str
    batch_s: float = 0.03
    per_worker: int = 100  # 3 s

    @property
    def batches(self) -> int:
        return self.workers * self.per_worker


class KillsLane(Lane):
    """A round is an undisturbed epoch, one with kills, and the start of a fresh loader."""

    seconds = 60.0  # each of the kills may have a spawned worker import torch

    def __init__(self, setting: Setting) -> None:
        super().__init__("fastq_loader", "fastq_loader")
        self._setting = setting
        self._chance = random.Random(0)
        self._loader: DataLoader[Any] | None = None
        self._undisturbed = 0.0

    def start(self) -> None:
        self._loader = self._make(self._setting.workers, [self._setting.batch_s] * self._setting.batches)
        _epoch(self._loader)  # starts the workers

    def block(self, part: str) -> list[Row]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WorkerReplaced)
            return [self._timed(part)]

    def _timed(self, part: str) -> Row:
        assert self._loader is not None
        if part == UNDISTURBED:
            self._undisturbed = _epoch(self._loader)
            return {"seconds": self._undisturbed}
        if part == START:
            return {"seconds": self._start()}
        before = self._loader.statistics().worker_restarts
        times = moments(self._chance, self._setting.kills, self._undisturbed)
        with _killing(self._loader, times, self._chance):
            seconds = _epoch(self._loader)
        return {"seconds": seconds, "kills": self._loader.statistics().worker_restarts - before}

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def _start(self) -> float:
        """Seconds to the first batch of a fresh loader whose worker has nothing to wait for."""
        wait_until_quiet()
        with self._make(1, [0.0]) as loader:
            return _epoch(loader)

    def _make(self, workers: int, costs: list[float]) -> DataLoader[Any]:
        return DataLoader(
            TracedSamples(costs),
            num_workers=workers,
            persistent_workers=True,
            multiprocessing_context=self._setting.start_method,
            schedule="dynamic",
            workers=Processes(max_restarts=RESTARTS),
        )


def case(setting: Setting, blocks: int) -> Case:
    facts: Row = {
        "description": f"one sample a batch that sleeps {setting.batch_s:g} s, SIGKILL at random moments",
        "batches": setting.batches,
        "batch_seconds": setting.batch_s,
    }

    def plan() -> Plan:
        return Plan(facts, [KillsLane(setting)], PARTS)

    return Case("kills", "kills", setting.workers, setting.start_method, blocks, plan)


def moments(chance: random.Random, kills: int, seconds: float) -> list[float]:
    """Ascending, in seconds: one in each of `kills` equal parts of the time."""
    return [seconds * (part + chance.random()) / kills for part in range(kills)]


def _epoch(loader: DataLoader[Any]) -> float:
    """Seconds from `iter()` to the last batch.

    Raises:
        RuntimeError: batches were lost, came twice or out of order.
    """
    began = time.monotonic()
    indices, came = [], began
    for batch in loader:
        came = time.monotonic()
        indices.append(int(batch[0, INDEX]))
    if indices != list(range(len(loader))):
        raise RuntimeError("batches were lost, came twice or out of order")
    return came - began


@contextmanager
def _killing(loader: DataLoader[Any], times: Sequence[float], chance: random.Random) -> Iterator[None]:
    """While this lasts, kill a worker at each of these times, in seconds from now."""
    over = threading.Event()
    began = time.monotonic()

    def run() -> None:
        for moment in times:
            if over.wait(max(0, began + moment - time.monotonic())):
                return
            worker = chance.choice(loader.statistics().workers)
            with suppress(ProcessLookupError):  # it is dead already, and the next one is not there yet
                os.kill(worker.pid, signal.SIGKILL)

    thread = threading.Thread(target=run, name="kills")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
