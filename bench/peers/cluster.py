"""Loaders whose workers are on other machines: ours, and what Ray has for it. For the axis `cluster` alone.

Ray is imported where it is used, and has to be joined before.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from bench.peers import LoaderSettings, Peer
from bench.peers.fastq import FastqLoader
from bench.peers.torch_loader import loader_arguments
from bench.workloads import Load
from fastq_loader import DataLoader


class FastqElsewhere(FastqLoader):
    """fastq_loader with workers of any kind, also here; all of them are at work when it is made."""

    def __init__(self, load: Load, settings: LoaderSettings, workers: Any) -> None:
        self.shards = settings.num_workers
        self._ahead = settings.num_workers * settings.prefetch_factor
        arguments = loader_arguments(load, settings)
        self.loader = DataLoader(**arguments, schedule="dynamic", workers=workers)
        # One that finds its place late is missed by nobody.
        for _ in self.loader:
            if sum(worker.batches > 0 for worker in self.loader.statistics().workers) == self.shards:
                return

    @property
    def prefetched(self) -> int:  # type: ignore[override]
        """The window, which grows while workers would idle, and what is on its way besides."""
        return int(self.loader.statistics().window) + self._ahead


class Fetcher:
    """What an actor runs: it has the dataset."""

    def __init__(self, load: Load) -> None:
        torch.set_num_threads(1)
        self._load = load

    def batch(self, indices: list[int]) -> Any:
        return self._load.collate(self._load.fetch(indices))


class RayActors(Peer):
    """By hand: actors load in turn, and `ray.get` takes the batches in order. As many are asked for ahead as
    a loader prefetches."""

    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._load = load
        self._ahead = settings.num_workers * settings.prefetch_factor
        self.prefetched = 2 * self._ahead  # as of ours
        self.shards = settings.num_workers
        actor = self._ray.remote(Fetcher).options(num_cpus=1, scheduling_strategy="SPREAD")
        given = self._ray.put(load)
        self._actors = [actor.remote(given) for _ in range(settings.num_workers)]

    def epoch(self) -> Iterator[Any]:
        asked: deque[Any] = deque()
        for number, indices in enumerate(self._load.index_batches()):
            if len(asked) == self._ahead:
                yield self._ray.get(asked.popleft())
            asked.append(self._actors[number % len(self._actors)].batch.remote(indices))
        while asked:
            yield self._ray.get(asked.popleft())

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
