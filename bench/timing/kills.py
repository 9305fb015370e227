"""What the death of a worker costs: epochs in which workers are killed, beside ones in which they are not.

The kills come at random batches, which are the same in every run: one in each of as many equal parts of the
epoch. What is delivered is compared with what was asked for.
"""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.timing.rounds import Case, Lane, Plan, Row
from bench.workloads.slow import INDEX, TracedSamples
from fastq_loader import DataLoader, Processes
from fastq_loader.errors import WorkerReplaced

RESTARTS = 1000  # more than will be needed
KILLS = {1: 8, 4: 20}
"""Number of workers → kills in an epoch. One worker: nobody else goes on while it is started again."""
PARTS = UNDISTURBED, KILLED, START = ("undisturbed", "killed", "start")


@dataclass(eq=False, kw_only=True)
class KillsLane(Lane):
    """A round is an undisturbed epoch, one with kills, and the start of a fresh loader.

    Epochs are of `workers * per_worker` batches that cost `batch_s` seconds each.
    """

    workers: int
    kills: int
    start_method: str
    batch_s: float = 0.03
    per_worker: int = 100  # 3 s
    chance: random.Random = field(default_factory=partial(random.Random, 0))

    def start(self) -> None:
        costs = [self.batch_s] * self.workers * self.per_worker
        self._loader = self.closing.enter_context(self._make(self.workers, costs))
        _epoch(self._loader)  # starts the workers

    def block(self, part: str) -> list[Row]:
        if part == START:  # to the first batch of a fresh loader whose worker has nothing to wait for
            with self._make(1, [0.0]) as loader:
                return [{"seconds": _epoch(loader)}]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WorkerReplaced)
            if part == KILLED:
                return [self._killed()]
            return [{"seconds": _epoch(self._loader)}]

    def _killed(self) -> Row:
        loader, batches = self._loader, self.workers * self.per_worker
        before = loader.statistics().worker_restarts
        moments = {int(batches * (part + self.chance.random()) / self.kills) for part in range(self.kills)}

        def kill(batch: int) -> None:
            if batch in moments:
                worker = self.chance.choice(loader.statistics().workers)
                with suppress(ProcessLookupError):  # it is dead already, and the next one is not there yet
                    os.kill(worker.pid, signal.SIGKILL)

        seconds = _epoch(loader, kill)
        return {"seconds": seconds, "kills": loader.statistics().worker_restarts - before}

    def _make(self, workers: int, costs: list[float]) -> DataLoader[Any]:
        return DataLoader(
            TracedSamples(costs),
            num_workers=workers,
            persistent_workers=True,
            multiprocessing_context=self.start_method,
            schedule="dynamic",
            workers=Processes(max_restarts=RESTARTS),
        )


def case(workers: int, start_method: str, blocks: int, **setting: Any) -> Case:
    """`setting`: fields of the lane."""
    # Each of the kills may have a spawned worker import torch.
    fields = {"kills": KILLS.get(workers), "workers": workers, "start_method": start_method} | setting
    lane = KillsLane("fastq_loader", "fastq_loader", 60.0, **fields)
    description = f"one sample a batch that sleeps {lane.batch_s:g} s, SIGKILL at random moments"
    facts: Row = {"description": description, "batches": workers * lane.per_worker}
    facts["batch_seconds"] = lane.batch_s
    return Case("kills", "kills", workers, start_method, blocks, lambda: Plan(facts, [lane], PARTS))


def _epoch(loader: DataLoader[Any], step: Callable[[int], None] = lambda batch: None) -> float:
    """Seconds from `iter()` to the last batch; RuntimeError unless every batch comes once and in order."""
    began = came = time.monotonic()
    indices = []
    for batch in loader:
        came = time.monotonic()
        indices.append(int(batch[0, INDEX]))
        step(indices[-1])
    if indices != list(range(len(loader))):
        raise RuntimeError("batches were lost, came twice or out of order")
    return came - began
