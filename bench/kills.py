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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from bench.costs import INDEX, TracedSamples
from bench.measure import Tick, reason, time_limit
from bench.proc import wait_until_quiet
from bench.results import KillsResult
from fastq_loader import DataLoader, Processes
from fastq_loader.errors import WorkerReplaced

LIMIT_S = 120.0  # for an epoch with kills, each of which may have spawned workers import torch
BATCH_S = 0.03
PER_WORKER = 100  # batches: 3 s
RESTARTS = 1000  # more than will be needed
KILLS = {1: 8, 4: 20}
"""Number of workers → kills in an epoch. One worker: nobody else goes on while it is started again."""


@dataclass(frozen=True)
class Setting:
    """Epochs of `workers * per_worker` batches that cost `batch_s` seconds each."""

    workers: int
    kills: int
    start_method: str
    batch_s: float = BATCH_S
    per_worker: int = PER_WORKER

    @property
    def batches(self) -> int:
        return self.workers * self.per_worker


def measure_kills(setting: Setting, rounds: int, tick: Tick) -> KillsResult:
    """An undisturbed epoch, one with kills and a fresh loader's start take turns; `tick` is called after
    each."""
    result = KillsResult(
        f"one sample a batch that sleeps {setting.batch_s:g} s, SIGKILL at random moments",
        setting.batches,
        setting.batch_s,
        setting.workers,
        setting.start_method,
    )
    chance = random.Random(0)
    try:
        with _loader(setting.workers, [setting.batch_s] * setting.batches, setting.start_method) as loader:
            _epoch(loader)  # starts the workers
            for _ in range(rounds):
                wait_until_quiet()
                result.undisturbed.append(_epoch(loader))
                tick("undisturbed")
                before = loader.statistics().worker_restarts
                with _killing(loader, _moments(chance, setting.kills, result.undisturbed[-1]), chance):
                    result.killed.append(_epoch(loader))
                result.kills.append(loader.statistics().worker_restarts - before)
                tick("killed")
                result.start.append(_start(setting.start_method))
                tick("start")
    except Exception as error:
        return KillsResult(
            result.description,
            result.batches,
            result.batch_seconds,
            result.num_workers,
            result.start_method,
            failure=reason(error),
        )
    return result


def _moments(chance: random.Random, kills: int, seconds: float) -> list[float]:
    """Ascending, in seconds: one in each of `kills` equal parts of the time."""
    return [seconds * (part + chance.random()) / kills for part in range(kills)]


@contextmanager
def _loader(workers: int, costs: list[float], start_method: str) -> Iterator[DataLoader[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkerReplaced)
        loader: DataLoader[Any] = DataLoader(
            TracedSamples(costs),
            num_workers=workers,
            persistent_workers=True,
            multiprocessing_context=start_method,
            schedule="dynamic",
            workers=Processes(max_restarts=RESTARTS),
        )
        with loader:
            yield loader


def _epoch(loader: DataLoader[Any]) -> float:
    """Seconds from `iter()` to the last batch.

    Raises:
        RuntimeError: batches were lost, came twice or out of order.
    """
    began = time.monotonic()
    indices, came = [], began
    with time_limit(LIMIT_S):
        for batch in loader:
            came = time.monotonic()
            indices.append(int(batch[0, INDEX]))
    if indices != list(range(len(loader))):
        raise RuntimeError("batches were lost, came twice or out of order")
    return came - began


def _start(start_method: str) -> float:
    """Seconds to the first batch of a fresh loader whose worker has nothing to wait for."""
    wait_until_quiet()
    with _loader(1, [0.0], start_method) as loader:
        return _epoch(loader)


@contextmanager
def _killing(loader: DataLoader[Any], moments: list[float], chance: random.Random) -> Iterator[None]:
    """While this lasts, kill a worker at each of these moments, in seconds from now."""
    over = threading.Event()
    began = time.monotonic()

    def run() -> None:
        for moment in moments:
            if over.wait(max(0, began + moment - time.monotonic())):
                return
            worker = chance.choice(loader.statistics().workers)
            with suppress(ProcessLookupError):  # it is dead and is_dead, and the next one not there yet
                os.kill(worker.pid, signal.SIGKILL)

    thread = threading.Thread(target=run, name="kills")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
