"""The indices of an epoch: the sampler's own, drawn in whole batches where the result is the same.

Runs in the consumer, on the thread that calls `next()`. torch's BatchSampler over its RandomSampler passes
4096 integers through two generators one by one, which takes longer than a batch of a vectorised dataset.
Here the same permutation is cut into batches: the same draws from the same generator at the same moments.
Computed samplers also yield whole batches, from any position on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from fastq_loader.ipc.messages import Indices
from fastq_loader.reading.computed import is_computed

T = TypeVar("T")
_Array = np.ndarray[Any, np.dtype[np.int64]]

#: Indices computed at a time; larger chunks are not faster.
_CHUNK = 8192


def iterate_from(
    index_sampler: Any,
    skip: int,
    *,
    passed: int = 0,
    packed: bool = False,
    note: Callable[[torch.Tensor], Any] = id,
) -> tuple[Iterator[Any], int]:
    """`iter(index_sampler)` without the first `skip` indices, if they need not be drawn one by one. Faster
    for torch's own shuffle and for computed samplers.

    A subclass, or a class whose `__iter__` was replaced, may behave differently: it is iterated as it is,
    like every other sampler.

    Args:
        index_sampler: yields indices, or lists of them.
        skip: how many indices to skip.
        passed: how many samples to skip before these, only where `counts_samples`.
        packed: yield the batches of a shuffle or computed sampler as `Indices`, the form used in messages.
        note: called with each permutation of a shuffle.

    Returns:
        The indices, and how many of them still have to be skipped.
    """
    form = _packed if packed else np.ndarray.tolist
    if is_shuffle(index_sampler):
        return _shuffled(index_sampler, form, skip * index_sampler.batch_size + passed, note), 0
    if is_computed(index_sampler):
        return index_sampler.iterate_from(skip), 0
    if is_computed(cut := _cut(index_sampler)):
        size = index_sampler.batch_size
        chunks = cut.chunks(skip * size + passed, size * max(1, _CHUNK // size))
        if chunks is not None:
            return _batches(chunks, form, size, index_sampler.drop_last), 0
    if passed:
        index_sampler = BatchSampler(
            islice(iter(index_sampler.sampler), passed, None),
            index_sampler.batch_size,
            index_sampler.drop_last,
        )
    return iter(index_sampler), skip


def counts_samples(index_sampler: Any) -> bool:
    """Whether the order of the samples is computed, and is the same for any size of the batches."""
    cut = _cut(index_sampler)
    return (
        is_shuffle(index_sampler) or is_computed(cut) or type(cut) in (SequentialSampler, DistributedSampler)
    )


def _packed(indices: _Array) -> Indices:
    # The same as `Indices()`, but faster.
    return tuple.__new__(Indices, (indices.tobytes(),))


#: torch's own code, which something may replace or wrap.
_BATCHED, _RANDOM = BatchSampler.__iter__, RandomSampler.__iter__


def _cut(index_sampler: Any) -> Any:
    """The sampler whose indices torch's own BatchSampler cuts into batches; None for any other sampler."""
    is_torchs = type(index_sampler) is BatchSampler and BatchSampler.__iter__ is _BATCHED
    return index_sampler.sampler if is_torchs else None


def is_shuffle(index_sampler: Any) -> bool:
    """Whether it is torch's own BatchSampler over its own shuffle."""
    cut = _cut(index_sampler)
    return type(cut) is RandomSampler and not cut.replacement and RandomSampler.__iter__ is _RANDOM


def _batches(
    chunks: Iterator[torch.Tensor], form: Callable[[_Array], T], size: int, drop_last: bool
) -> Iterator[T]:
    for chunk in chunks:
        indices = chunk.numpy()
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            if len(batch) == size or not drop_last:
                yield form(batch)


def _shuffled(
    index_sampler: BatchSampler, form: Callable[[_Array], T], to_pass: int, note: Callable[..., Any]
) -> Iterator[T]:
    drop_last, size = index_sampler.drop_last, index_sampler.batch_size
    permutations = _permutations(index_sampler.sampler)  # type: ignore[arg-type]
    # Cut as an array: a slice of a tensor takes ten times as long.
    indices, start = np.empty(0, np.int64), 0
    while True:
        while start + size > len(indices):
            following = next(permutations, None)
            if following is None:
                if start < len(indices) and not drop_last:
                    yield form(indices[start:])
                return
            note(new := following.cpu().numpy())
            indices = (
                np.concatenate((indices[start:], new[to_pass:])) if start < len(indices) else new[to_pass:]
            )
            start, to_pass = 0, max(0, to_pass - len(new))
        yield form(indices[start : start + size])
        start += size
        if not drop_last:
            size = index_sampler.batch_size  # torch reads it again before every batch


def _permutations(sampler: RandomSampler) -> Iterator[torch.Tensor]:
    """Permutations drawn as by RandomSampler in torch 2.8 to 2.13."""
    count = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    for _ in range(sampler.num_samples // count):
        yield torch.randperm(count, generator=generator)
    yield torch.randperm(count, generator=generator)[: sampler.num_samples % count]
