"""Inspects a loader's chain of samplers: their generators and their epochs.

Runs in the consumer, on the thread that calls `iter()`.
"""

from __future__ import annotations

import itertools
from operator import attrgetter, is_
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from fastq_loader.reading import generators
from fastq_loader.reading.computed import is_computed
from fastq_loader.reading.sampling import is_shuffle
from fastq_loader.system.attributes import attribute

#: Samplers whose order does not depend on any generator that a process shares.
_DRAW_NOTHING = SequentialSampler, DistributedSampler, BatchSampler, _InfiniteConstantSampler
#: Samplers that draw from torch's global generator if they have none of their own.
TORCHS_OWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
#: Samplers inspected in a chain, at most.
_DEEPEST = 8


class SamplerInfo:
    """Facts about a loader's samplers that the order of an epoch needs before it begins.

    Args:
        index_sampler, generator, dataset: the loader's.

    Attributes:
        sampler: the loader's.
        own: see `own_generators`.
        shared: see `shared_generators`.
        all_known: whether all samplers are torch's or this package's. Iterating those changes nothing but
            the states of generators.
        by_permutation: see `reading.sampling.is_shuffle`.
        draws_seed_first: whether the shuffle begins with the draw of a seed from torch's global generator.
        iterable: whether the dataset is iterable, and has no sampler.
        epochs, wants_epochs: results of the functions of these names.
    """

    def __init__(self, index_sampler: Any, generator: torch.Generator | None, dataset: Any) -> None:
        self.sampler = index_sampler
        self.own = own_generators(index_sampler, generator, dataset)
        self.shared = shared_generators(index_sampler)
        self.all_known = len(self.shared) < len(generators.GLOBAL)
        self.by_permutation = is_shuffle(index_sampler)
        self.draws_seed_first = self.by_permutation and index_sampler.sampler.generator is None
        self.iterable = type(getattr(index_sampler, "sampler", index_sampler)) is _InfiniteConstantSampler
        self.epochs = epochs(index_sampler)
        self.wants_epochs = wants_epochs(index_sampler)
        self._parts = chain(index_sampler) if self.all_known else []
        self._seen = list[Any]()
        self.hold(index_sampler, generator, dataset)

    def hold(self, index_sampler: Any, generator: torch.Generator | None, dataset: Any) -> bool:
        """Whether the facts still hold for these parts of the loader: torch's samplers change only through
        their attributes. A new inspection would take a third of the time of `iter()`."""
        values = itertools.chain.from_iterable(map(dict.values, map(attrgetter("__dict__"), self._parts)))
        seen, self._seen = self._seen, [index_sampler, generator, dataset, *values]
        return self.all_known and len(seen) == len(self._seen) and all(map(is_, seen, self._seen))


def chain(index_sampler: Any) -> list[Any]:
    """A sampler and the ones nested in it: a batch sampler's `sampler`, a wrapper's `batch_sampler`."""
    found: list[Any] = []
    part = index_sampler
    while part is not None and len(found) < _DEEPEST and not any(part is other for other in found):
        found.append(part)
        inner = attribute(part, "batch_sampler")  # its truth value is its length, which it may lack
        part = attribute(part, "sampler") if inner is None else inner
    return found


def own_generators(index_sampler: Any, generator: torch.Generator | None, dataset: Any) -> dict[str, Any]:
    """The generators that belong to a loader, by name: its own, and its samplers'."""
    if type(index_sampler) is _InfiniteConstantSampler:
        return generators.find({"generator": generator})[0]
    roots = {"generator": generator, "sampler": index_sampler}
    return generators.find(roots, but=[dataset, attribute(index_sampler, "data_source", dataset)])[0]


def epochs(index_sampler: Any) -> dict[str, int]:
    """Epochs set by `set_epoch`: depth in the chain → epoch."""
    found = {str(depth): attribute(part, "epoch") for depth, part in enumerate(chain(index_sampler))}
    return {depth: epoch for depth, epoch in found.items() if type(epoch) is int}


def wants_epochs(index_sampler: Any) -> str | None:
    """Name of torch's DistributedSampler, or of one of this package's, if it repeats its shuffle unless its
    `set_epoch` is called; None if there is no such sampler."""
    parts = chain(index_sampler)
    for part in parts:
        if type(part) is DistributedSampler or is_computed(part):
            inner = parts[-1]
            shuffles = attribute(part, "shuffle", True) and (inner is part or type(inner) in TORCHS_OWN)
            return type(part).__name__ if shuffles else None
    return None


def shared_generators(index_sampler: Any) -> tuple[str, ...]:
    """Names of the process's generators that the order may be drawn from."""
    kinds = {type(part) for part in chain(index_sampler) if not is_computed(part)}
    if kinds.issubset(_DRAW_NOTHING):
        return ()
    return ("torch",) if kinds.issubset(_DRAW_NOTHING + TORCHS_OWN) else tuple(generators.GLOBAL)
