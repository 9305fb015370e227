"""The indices of an epoch: the sampler's own, drawn in whole batches where that gives the same.

Runs in the consumer, on the thread that calls `next()`. torch's BatchSampler over its RandomSampler hands
4096 integers through two generators one by one, which takes longer than a batch of a vectorised dataset.
Here the same permutation is cut into batches: the same draws from the same generator at the same moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, RandomSampler

from fastq_loader.ipc.messages import Indices

T = TypeVar("T")


class IndexSource(Iterator[Any]):
    """The indices of an epoch with workers, as the event loop draws them.

    Args:
        drawn: yields an index, or `Indices` in place of a list of int. May be replaced in the middle of an
            epoch, as an iterator's `_sampler_iter` may.
    """

    def __init__(self, drawn: Iterator[Any]) -> None:
        self.drawn = drawn

    def __next__(self) -> Any:
        return next(self.drawn)


def iterate(index_sampler: Any) -> Iterator[Any]:
    """`iter(index_sampler)`, faster where the sampler is torch's own shuffle.

    A subclass may mean something else, and so may a class whose `__iter__` was replaced: those, and every
    other sampler, are iterated as they are.
    """
    return _iterate(index_sampler, torch.Tensor.tolist)


def iterate_packed(index_sampler: Any) -> IndexSource:
    """The same for indices that go into messages: a batch of a shuffle is never made a list here."""
    return IndexSource(_iterate(index_sampler, _packed))


def _iterate(index_sampler: Any, form: Callable[[torch.Tensor], Any]) -> Iterator[Any]:
    return _shuffled(index_sampler, form) if _is_shuffle(index_sampler) else iter(index_sampler)


def _packed(indices: torch.Tensor) -> Indices:
    return Indices(indices.cpu().numpy().tobytes())


def _is_shuffle(index_sampler: Any) -> bool:
    return (
        type(index_sampler) is BatchSampler
        and type(index_sampler.sampler) is RandomSampler
        and not index_sampler.sampler.replacement
        and BatchSampler.__iter__.__module__ == BatchSampler.__module__
        and RandomSampler.__iter__.__module__ == RandomSampler.__module__
    )


def _shuffled(index_sampler: BatchSampler, form: Callable[[torch.Tensor], T]) -> Iterator[T]:
    drop_last, size = index_sampler.drop_last, index_sampler.batch_size
    permutations = _permutations(index_sampler.sampler)  # type: ignore[arg-type]
    pieces: list[torch.Tensor] = []
    drawn = 0
    while True:
        while drawn < size:
            following = next(permutations, None)
            if following is None:
                if drawn and not drop_last:
                    yield form(torch.cat(pieces))
                return
            pieces.append(following)
            drawn += len(following)
        indices = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        yield form(indices[:size])
        pieces = [indices[size:]]
        drawn -= size
        if not drop_last:
            size = index_sampler.batch_size  # torch asks for it again before every batch


def _permutations(sampler: RandomSampler) -> Iterator[torch.Tensor]:
    """What RandomSampler yields from; torch 2.6 to 2.13 draw like this."""
    count = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    for _ in range(sampler.num_samples // count):
        yield torch.randperm(count, generator=generator)
    yield torch.randperm(count, generator=generator)[: sampler.num_samples % count]
