"""What a worker process is to user code, without one: its number, and its share of the batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch.utils.data import Dataset
from torch.utils.data._utils import worker as torch_worker

from bench.workloads import Load, whole_batches


@contextmanager
def as_worker(worker: int, workers: int, dataset: Dataset[Any]) -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info()` say so; nothing changes with 0 workers."""
    before = torch_worker._worker_info
    if workers:
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker, num_workers=workers, seed=0, dataset=dataset
        )
    try:
        yield
    finally:
        torch_worker._worker_info = before


def share(load: Load, worker: int, workers: int) -> Iterator[Any]:
    """The batches of one epoch that are this worker's, as torch deals them out.

    For an iterable dataset this is to be called, and iterated, within `as_worker`.
    """
    if load.iterable:
        return map(load.collate, whole_batches(load.dataset, load.batch_size))  # type: ignore[arg-type]
    indices = islice(load.index_batches(), worker, None, max(1, workers))
    return (load.collate(load.fetch(batch)) for batch in indices)


def first_batch(load: Load, shards: int) -> Any:
    """The first batch that a loader gives with so many workers; 0 is none."""
    with as_worker(0, shards, load.dataset):
        return next(share(load, 0, shards))
