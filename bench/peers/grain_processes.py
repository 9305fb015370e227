"""Grain's multi-process prefetch, on datasets of batches (`MapDataset.batch` before `to_iter_dataset`).

Worker k of N takes every N-th batch from the k-th on, as torch's does. Grain stacks samples into numpy arrays
that travel in shared memory; the pipeline here ends in `torch.from_numpy`, which copies nothing, because a
training step of torch's needs tensors. Reading threads are off: that is Grain's own advice for data in memory
(ReadOptions), and keeps the number of samples in the making the same for all peers. Arrays below 64 KiB are
pickled, as its documentation suggests for small ones (DatasetOptions.min_shm_size). Its workers are always
spawned.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import grain
import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from bench.peers import LoaderSettings, Peer, Unsupported
from bench.timing.batches import is_array
from bench.workloads import Collate, Load

READING = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
MIN_SHM_SIZE = 64 << 10


class GrainProcesses(Peer):
    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        if load.iterable:
            raise Unsupported("Grain's sources are random access; an IterableDataset is not one")
        if settings.num_workers == 0:
            raise Unsupported("needs worker processes")
        self.own_order = load.shuffle and not load.by_lists
        # Each worker's buffer, the batch it is about to put there, and the one that the consumer reads ahead.
        self.prefetched = settings.num_workers * (settings.prefetch_factor + 2)
        self._epoch: Any = None
        options = grain.experimental.DatasetOptions(min_shm_size=MIN_SHM_SIZE)
        workers = grain.MultiprocessingOptions(settings.num_workers, settings.prefetch_factor)
        batches = _batches(load).to_iter_dataset(READING).mp_prefetch(workers).map(_tensors)
        self._dataset = grain.experimental.WithOptionsIterDataset(batches, options)

    def epoch(self) -> Iterator[Any]:
        self.close()
        with _without_stderr():  # its workers start with the first batch
            self._epoch = iter(self._dataset)
            first = next(self._epoch)
        return chain((first,), self._epoch)

    def close(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Start processes that write no errors: Grain's import logs in each that jax is missing.

    What is raised in its workers comes through Grain to the consumer.
    """
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _batches(load: Load) -> Any:
    """A MapDataset whose k-th element is the k-th batch."""
    if load.by_lists:  # which Grain's public sources do not offer
        return grain.MapDataset.source(_BatchSource(load))
    samples = grain.MapDataset.source(load.dataset)
    if load.batches is not None:
        length = load.batches * load.batch_size
        # All passes in one shuffle: below 65,536 elements Grain's permutation takes longer for each index,
        # 80 µs in a table of 442 rows.
        samples = samples.repeat(-(-length // len(samples)))[:length]
    if load.shuffle:
        samples = samples.shuffle(seed=0)
    return samples.batch(load.batch_size, drop_remainder=True, batch_fn=_batch_function(load))


def _batch_function(load: Load) -> Collate | None:
    """None is Grain's own, which stacks numbers and arrays; anything else in a sample needs torch's rules."""
    leaves = tree_leaves(load.fetch([0])[0])
    stackable = all(is_array(leaf) or isinstance(leaf, (int, float)) for leaf in leaves)
    return None if load.collate_fn is None and stackable else partial(_arrays, load.collate)


def _arrays(collate: Collate, samples: Any) -> Any:
    """A batch whose tensors are arrays, which is what Grain puts into shared memory."""
    return tree_map(lambda leaf: leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf, collate(samples))


def _tensors(batch: Any) -> Any:
    return tree_map(lambda leaf: torch.from_numpy(leaf) if is_array(leaf) else leaf, batch)


class _BatchSource:
    """Element k is batch k of an epoch, made by one call of `__getitems__`."""

    def __init__(self, load: Load) -> None:
        self._load = load
        sampler = load.sampler()
        assert sampler is not None, "an iterable dataset has no indices"
        # An order is known as a whole before the workers start, and each of them gets it.
        self._indices: Any = np.array(list(sampler)) if load.shuffle else sampler

    def __len__(self) -> int:
        return len(self._indices) // self._load.batch_size

    def __getitem__(self, batch: int) -> Any:
        size = self._load.batch_size
        indices = [int(index) for index in self._indices[batch * size : (batch + 1) * size]]
        return _arrays(self._load.collate, self._load.fetch(indices))
