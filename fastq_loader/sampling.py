"""The indices of an epoch: the sampler's own, drawn in whole batches where that gives the same.

Runs in the consumer, on the thread that calls `next()`. torch's BatchSampler over its RandomSampler hands
4096 integers through two generators one by one, which takes longer than a batch of a vectorised dataset.
Here the same permutation is cut into lists: the same draws from the same generator at the same moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler


def iterate(index_sampler: Any) -> Iterator[Any]:
    """`iter(index_sampler)`, faster where the sampler is torch's own shuffle.

    A subclass may mean something else, and so may a class whose `__iter__` was replaced: those, and every
    other sampler, are iterated as they are.
    """
    if type(index_sampler) is BatchSampler and type(index_sampler.sampler) is RandomSampler:
        kinds = (BatchSampler.__iter__, RandomSampler.__iter__)
        if kinds == _TORCHS and not index_sampler.sampler.replacement:
            return _shuffled(index_sampler)
    return iter(index_sampler)


_TORCHS = (BatchSampler.__iter__, RandomSampler.__iter__)


def _shuffled(index_sampler: BatchSampler) -> Iterator[list[int]]:
    size = index_sampler.batch_size
    permutations = _permutations(index_sampler.sampler)  # type: ignore[arg-type]
    indices: list[int] = []
    at = 0
    while True:
        batch = indices[at : at + size]
        at += size
        while len(batch) < size:
            following = next(permutations, None)
            if following is None:
                if batch and not index_sampler.drop_last:
                    yield batch
                return
            indices, at = following, size - len(batch)
            batch += indices[:at]
        yield batch


def _permutations(sampler: RandomSampler) -> Iterator[list[int]]:
    """What RandomSampler yields from; torch 2.6 to 2.13 draw like this."""
    count = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    for _ in range(sampler.num_samples // count):
        yield torch.randperm(count, generator=generator).tolist()
    yield torch.randperm(count, generator=generator).tolist()[: sampler.num_samples % count]
