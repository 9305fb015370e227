"""Loaders whose workers are on other machines: ours, and what Ray has for it. For the axis `cluster` alone.

Ray is imported where it is used, and has to be joined before.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from bench.peers import LoaderSettings, Peer
from bench.peers.fastq import FastqLoader
from bench.peers.torch_loader import loader_arguments
from bench.workloads import Load
from fastq_loader import DataLoader

COLUMN = "batch"
EPOCH, RANGE = 1024, 8
"""Batches of an epoch of Ray Data's, and of one of its blocks."""


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

    def array(self, indices: list[int]) -> Any:
        return self.batch(indices).numpy()

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {COLUMN: self.array(rows["id"].tolist())}


class RayActors(Peer):
    """By hand: actors load in turn, and `ray.get` takes the batches in order. As many are asked for ahead as
    a loader prefetches."""

    distributions = ("ray",)

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
                yield self._get(asked.popleft())
            asked.append(self._ask(self._actors[number % len(self._actors)], indices))
        while asked:
            yield self._get(asked.popleft())

    def _ask(self, actor: Any, indices: list[int]) -> Any:
        return actor.batch.remote(indices)

    def _get(self, reference: Any) -> Any:
        return self._ray.get(reference)

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []


class RayArrays(RayActors):
    """The same with arrays, of which `ray.get` copies nothing: batches that nobody may write to."""

    def _ask(self, actor: Any, indices: list[int]) -> Any:
        return actor.array.remote(indices)

    def _get(self, reference: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of what may not be written to
            return torch.from_numpy(super()._get(reference))


class RayData(Peer):
    """`iter_torch_batches` over a pool of actors that make the same batches, in an order of Ray Data's."""

    distributions = ("ray",)
    own_order = True

    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        data: Any = importlib.import_module("ray.data")
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        data.DataContext.get_current().enable_progress_bars = False
        self._batch_size = load.batch_size
        self.prefetched = settings.num_workers * settings.prefetch_factor
        self.shards = settings.num_workers
        numbers = data.range(EPOCH * load.batch_size, override_num_blocks=EPOCH // RANGE, concurrency=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray 2.60's: the last argument is to go
            self._dataset = numbers.map_batches(
                Fetcher,
                fn_constructor_args=(load,),
                batch_size=load.batch_size,
                compute=data.ActorPoolStrategy(size=settings.num_workers),
                num_cpus=1,
                # Else Ray tells of every task that was left when an epoch is broken off.
                ray_remote_args_fn=lambda: {"max_restarts": 0, "max_task_retries": 0},
            )

    def epoch(self) -> Iterator[Any]:
        batches = self._dataset.iter_torch_batches(
            batch_size=self._batch_size, prefetch_batches=self.prefetched
        )
        for batch in batches:
            yield batch[COLUMN]

    def close(self) -> None:
        self._dataset = None
