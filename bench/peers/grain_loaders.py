"""Grain: its multi-process prefetch, and its reading threads, on datasets of batches.

Batches are made before `to_iter_dataset`. Grain stacks samples into numpy arrays; the pipelines here end in
`torch.from_numpy`, which copies nothing, because a training step of torch's needs tensors.

Threads fetch and collate in the consumer's own process, as many as others have workers, and only where each
sample is read from a file: Grain's documentation advises threads to hide the latency of reading ("Dataset
basics"), but none for data in memory (ReadOptions).

Of N processes, worker k takes every N-th batch from the k-th on, as torch's does. They have no such threads,
which keeps the number of samples in the making the same for all peers. Arrays travel in shared memory; those
below 64 KiB are pickled, as its documentation suggests for small ones (DatasetOptions.min_shm_size). Workers
are always spawned.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import grain
import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from bench.peers import LoaderSettings, Peer, Unsupported, without_stderr
from bench.timing.batches import is_array
from bench.workloads import Collate, Load

NO_THREADS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
MIN_SHM_SIZE = 64 << 10


class _Grain(Peer):
    """An epoch at a time of `_dataset`, whose elements are batches."""

    _dataset: Any

    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        if load.iterable:
            raise Unsupported("Grain's sources are random access; an IterableDataset is not one")
        if settings.num_workers == 0:
            raise Unsupported("needs workers")
        self.own_order = load.shuffle and not load.by_lists
        self._epoch: Any = None

    def epoch(self) -> Iterator[Any]:
        self.close()
        batches: Iterator[Any] = iter(self._dataset)
        self._epoch = batches
        return batches

    def close(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None


class GrainProcesses(_Grain):
    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        super().__init__(load, settings)
        # Each worker's buffer, the batch it is about to put there, and the one that the consumer reads ahead.
        self.prefetched = settings.num_workers * (settings.prefetch_factor + 2)
        options = grain.experimental.DatasetOptions(min_shm_size=MIN_SHM_SIZE)
        workers = grain.MultiprocessingOptions(settings.num_workers, settings.prefetch_factor)
        batches = _batches(load).to_iter_dataset(NO_THREADS).mp_prefetch(workers).map(_tensors)
        self._dataset = grain.experimental.WithOptionsIterDataset(batches, options)

    def epoch(self) -> Iterator[Any]:
        with without_stderr():  # its workers start with the first batch
            batches = super().epoch()
            first = next(batches)
        return chain((first,), batches)


class GrainThreads(_Grain):
    def __init__(self, load: Load, settings: LoaderSettings) -> None:
        super().__init__(load, settings)
        if not load.reads_files:
            raise Unsupported("for data in memory Grain's documentation advises against threads")
        self.prefetched = settings.num_workers * settings.prefetch_factor
        threads = grain.ReadOptions(settings.num_workers, self.prefetched)
        self._dataset = _batches(load).to_iter_dataset(threads).map(_tensors)


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
        self._indices: Any = np.array(list(sampler)) if load.shuffle else range(len(sampler))

    def __len__(self) -> int:
        return len(self._indices) // self._load.batch_size

    def __getitem__(self, batch: int) -> Any:
        size = self._load.batch_size
        indices = [int(index) for index in self._indices[batch * size : (batch + 1) * size]]
        return _arrays(self._load.collate, self._load.fetch(indices))
