"""Inspects a loader's chain of samplers: their generators, their epochs, and which of them are stateful.

Runs in the consumer, on the thread that calls `iter()`, `next()` and `state_dict()`.
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
from fastq_loader.reading.computed import ComputedSampler, is_computed
from fastq_loader.reading.position import Stateful, is_stateful
from fastq_loader.reading.sampling import is_shuffle
from fastq_loader.system.attributes import attribute

#: Samplers whose order does not depend on any generator that a process shares.
_DEAF = SequentialSampler, DistributedSampler, BatchSampler, _InfiniteConstantSampler
#: Samplers whose order depends on the epoch set by `set_epoch`.
_WITH_EPOCHS = (DistributedSampler, ComputedSampler)
#: Samplers that draw from torch's global generator if they have none of their own.
_TORCHS_OWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
#: Attributes that samplers are compared by, where present.
COMPARED = ("seed", "initial_seed", "num_replicas", "replacement", "weights_checksum")
#: Samplers inspected in a chain, at most.
_DEEPEST = 8


class SamplerInfo:
    """Facts about a loader's samplers that the order of an epoch needs before it begins.

    Args:
        index_sampler, generator, dataset: the loader's.

    Attributes:
        sampler: the loader's.
        own: see `own_generators`.
        asked: see `asked_sampler`.
        shared: see `shared_generators`.
        torchs_only: all samplers are torch's or this package's.
        still: and none is stateful: iterating them changes nothing but the states of generators.
        by_permutation: see `reading.sampling.is_shuffle`.
        seeded: and the shuffle begins with the draw of a seed from torch's global generator.
        compared, epochs, wants_epochs: results of the functions of these names.
    """

    def __init__(self, index_sampler: Any, generator: torch.Generator | None, dataset: Any) -> None:
        self.sampler = index_sampler
        self.own = own_generators(index_sampler, generator, dataset)
        self.asked = asked_sampler(index_sampler)
        self.shared = shared_generators(index_sampler)
        self.torchs_only = len(self.shared) < len(generators.GLOBAL)
        self.still = self.asked is None and self.torchs_only
        self.by_permutation = is_shuffle(index_sampler)
        self.seeded = self.by_permutation and index_sampler.sampler.generator is None
        self.compared = compared(index_sampler)
        self.epochs = epochs(index_sampler)
        self.wants_epochs = wants_epochs(index_sampler)
        self._parts = chain(index_sampler) if self.still else []
        self._seen = _seen(self._parts, index_sampler, generator, dataset)

    def hold(self, index_sampler: Any, generator: torch.Generator | None, dataset: Any) -> bool:
        """Whether the facts still hold for these parts of the loader: torch's samplers change only through
        their attributes. A new inspection would take a third of the time of `iter()`."""
        now = _seen(self._parts, index_sampler, generator, dataset)
        return self.still and len(now) == len(self._seen) and all(map(is_, now, self._seen))


def _seen(parts: list[Any], *more: Any) -> list[Any]:
    return [*more, *itertools.chain.from_iterable(map(dict.values, map(attrgetter("__dict__"), parts)))]


def chain(index_sampler: Any) -> list[Any]:
    """A sampler and the ones nested in it: a batch sampler's `sampler`, a wrapper's `batch_sampler`."""
    found: list[Any] = []
    part = index_sampler
    while part is not None and len(found) < _DEEPEST and not any(part is other for other in found):
        found.append(part)
        inner = attribute(part, "batch_sampler")  # its truth value is its length, which it may lack
        part = attribute(part, "sampler") if inner is None else inner
    return found


def stateful_sampler(index_sampler: Any) -> Stateful | None:
    """The outermost stateful sampler of the chain."""
    return next(filter(is_stateful, chain(index_sampler)), None)


def asked_sampler(index_sampler: Any) -> Stateful | None:
    """The same, if its state determines the loader's position: it is wrapped in nothing but torch's own
    `BatchSampler`, which takes no index before it needs it."""
    for part in chain(index_sampler):
        if is_stateful(part):
            return part
        if not issubclass(type(part), BatchSampler) or type(part).__iter__ is not BatchSampler.__iter__:
            return None
    return None


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


def set_epochs(index_sampler: Any, saved: dict[str, int]) -> None:
    """Set these epochs again, on samplers of a known kind."""
    for depth, part in enumerate(chain(index_sampler)):
        if str(depth) in saved and isinstance(part, _WITH_EPOCHS):
            part.set_epoch(saved[str(depth)])


def wants_epochs(index_sampler: Any) -> str | None:
    """Name of torch's DistributedSampler, or of one of this package's, if it repeats its shuffle unless its
    `set_epoch` is called; None if there is no such sampler."""
    parts = chain(index_sampler)
    for part in parts:
        if type(part) is DistributedSampler or is_computed(part):
            inner = parts[-1]
            shuffles = attribute(part, "shuffle", True) and (inner is part or type(inner) in _TORCHS_OWN)
            return type(part).__name__ if shuffles else None
    return None


def compared(index_sampler: Any) -> dict[str, Any]:
    """Fields of the samplers by which two loaders are compared."""
    parts = chain(index_sampler)
    fields: dict[str, Any] = {"sampler": "/".join(type(part).__qualname__ for part in parts)}
    for name in COMPARED:
        values = [attribute(part, name) for part in parts]
        fields[name] = next((value for value in values if type(value) in (int, bool)), None)
    return fields


def part_of_data(index_sampler: Any) -> str:
    """The rank's part of the data, from sampler attributes: frameworks load one rank's state on all ranks."""
    return " ".join(
        f"{depth}.{name}={value}"
        for depth, part in enumerate(chain(index_sampler))
        for name in ("rank", "process_index")
        if type(value := attribute(part, name)) in (int, str)
    )


def cannot_begin_again(index_sampler: Any) -> str:
    """Error text for a sampler that does not repeat the saved order."""
    names = "/".join(type(part).__name__ for part in chain(index_sampler))
    return (
        f"field 'order': the sampler ({names}), started again, does not yield the same indices as before the "
        "state was saved. Its order depends on more than its generators, or something else drew from these "
        "in the middle of the epoch. Add state_dict() and load_state_dict(state) to the sampler, or use "
        "PermutationSampler(n, seed), or accept the new order with load_state_dict(state, ignore=('order',))"
    )


def draw_once(index_sampler: Any) -> bool:
    """Whether the samplers use generators only before the first index and after the last."""
    return all(
        not part.replacement and part.num_samples <= len(part.data_source)
        if type(part) is RandomSampler
        else type(part) in _DEAF + _TORCHS_OWN or is_computed(part)
        for part in chain(index_sampler)
    )


def torchs_generators(index_sampler: Any, generator: torch.Generator | None, dataset: Any) -> list[str]:
    """Names of the `own_generators` that are arguments of the loader or of torch's samplers."""
    given = [generator, *(part.generator for part in chain(index_sampler) if type(part) in _TORCHS_OWN)]
    own = own_generators(index_sampler, generator, dataset)
    return [name for name, each in own.items() if any(each is one for one in given)]


def shared_generators(index_sampler: Any) -> tuple[str, ...]:
    """Names of the process's generators that the order may be drawn from."""
    kinds = {type(part) for part in chain(index_sampler) if not is_computed(part)}
    if kinds.issubset(_DEAF):
        return ()
    return ("torch",) if kinds.issubset(_DEAF + _TORCHS_OWN) else tuple(generators.GLOBAL)
