"""A loader's samplers: which there are, what they draw from, and what can be asked of them.

Runs in the consumer, on the thread that calls `iter()`, `next()` and `state_dict()`.
"""

from __future__ import annotations

from operator import is_
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
from fastq_loader.reading.computed import ComputedSampler, Distributed, PermutationSampler, WeightedSampler
from fastq_loader.reading.position import Stateful, is_stateful
from fastq_loader.reading.sampling import is_shuffle
from fastq_loader.system.attributes import attribute

#: Samplers whose order does not depend on any of the generators that a process shares.
_DEAF = (
    *(SequentialSampler, DistributedSampler, PermutationSampler, WeightedSampler, Distributed),
    *(BatchSampler, _InfiniteConstantSampler),
)
#: And those whose order follows from what `set_epoch` has set.
_WITH_EPOCHS = (DistributedSampler, ComputedSampler, Distributed)
#: And those that draw from torch's, if they have none of their own.
_TORCHS_OWN = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
#: What samplers are compared by, where they have it.
COMPARED = ("seed", "initial_seed", "num_replicas", "replacement", "weights_checksum")
#: Samplers around samplers that are looked into.
_DEEPEST = 8


class Traits:
    """Facts about a loader's samplers that the order of an epoch needs before it begins.

    Args:
        index_sampler, generator, dataset: the loader's.

    Attributes:
        own: see `own_generators`.
        asked: see `asked_sampler`.
        shared: see `shared_generators`.
        torchs_only: they are torch's, or this package's.
        still: they are torch's: to begin with them changes nothing but the states of generators.
        by_permutation: see `sampling.is_shuffle`.
        compared, wants_epochs: see the functions of these names.
    """

    def __init__(self, index_sampler: Any, generator: torch.Generator | None, dataset: Any) -> None:
        self.own = own_generators(index_sampler, generator, dataset)
        self.asked = asked_sampler(index_sampler)
        self.shared = shared_generators(index_sampler)
        self.torchs_only = len(self.shared) < len(generators.GLOBAL)
        self.still = self.asked is None and self.torchs_only
        self.by_permutation = is_shuffle(index_sampler)
        self.compared = compared(index_sampler)
        self.wants_epochs = wants_epochs(index_sampler)
        self._of = _parts(index_sampler, generator, dataset) if self.still else []

    def hold(self, index_sampler: Any, generator: torch.Generator | None, dataset: Any) -> bool:
        """Whether they still do: torch's samplers change nothing but by their attributes. To find them all
        again takes a third of the time of `iter()`."""
        parts = _parts(index_sampler, generator, dataset) if self.still else None
        return parts is not None and len(parts) == len(self._of) and all(map(is_, parts, self._of))


def _parts(index_sampler: Any, *more: Any) -> list[Any]:
    return [*more, *(each for part in chain(index_sampler) for each in (part, *vars(part).values()))]


def chain(index_sampler: Any) -> list[Any]:
    """A sampler and those that it draws from: a batch sampler's `sampler`, a wrapper's `batch_sampler`."""
    found: list[Any] = []
    part = index_sampler
    while part is not None and len(found) < _DEEPEST and not any(part is other for other in found):
        found.append(part)
        inner = attribute(part, "batch_sampler")  # its truth is its length, which it may not have
        part = attribute(part, "sampler") if inner is None else inner
    return found


def stateful_sampler(index_sampler: Any) -> Stateful | None:
    """The outermost of its samplers that can say where it stands."""
    return next(filter(is_stateful, chain(index_sampler)), None)


def asked_sampler(index_sampler: Any) -> Stateful | None:
    """The same, if where it stands says where the loader does: only torch's own batches lie around it, which
    take no index before they need it."""
    for part in chain(index_sampler):
        if is_stateful(part):
            return part
        if not issubclass(type(part), BatchSampler) or type(part).__iter__ is not BatchSampler.__iter__:
            return None
    return None


def own_generators(index_sampler: Any, generator: torch.Generator | None, dataset: Any) -> dict[str, Any]:
    """The generators that belong to a loader: its own, and its samplers'."""
    if type(index_sampler) is _InfiniteConstantSampler:
        return generators.find({"generator": generator})
    roots = {"generator": generator, "sampler": index_sampler}
    return generators.find(roots, but=[dataset, attribute(index_sampler, "data_source", dataset)])


def epochs(index_sampler: Any) -> dict[str, int]:
    """Epochs that `set_epoch` has set: how deep → the epoch."""
    found = {str(depth): attribute(part, "epoch") for depth, part in enumerate(chain(index_sampler))}
    return {depth: epoch for depth, epoch in found.items() if type(epoch) is int}


def set_epochs(index_sampler: Any, saved: dict[str, int]) -> None:
    """Set the same again, where it is known what that means."""
    for depth, part in enumerate(chain(index_sampler)):
        if str(depth) in saved and isinstance(part, _WITH_EPOCHS):
            part.set_epoch(saved[str(depth)])


def wants_epochs(index_sampler: Any) -> str | None:
    """The name of the sampler whose `set_epoch` has to be called, or it gives the same shuffle again; None:
    there is none."""
    found = [part for part in chain(index_sampler) if callable(attribute(part, "set_epoch"))]
    shuffles = found and all(attribute(part, "shuffle", True) is not False for part in found)
    return type(found[0]).__name__ if shuffles else None


def compared(index_sampler: Any) -> dict[str, Any]:
    """The fields of samplers that two loaders are compared by."""
    parts = chain(index_sampler)
    fields: dict[str, Any] = {"sampler": "/".join(type(part).__qualname__ for part in parts)}
    for name in COMPARED:
        values = [attribute(part, name) for part in parts]
        fields[name] = next((value for value in values if type(value) in (int, bool)), None)
    return fields


def part_of_data(index_sampler: Any) -> str:
    """Which part of the data samplers give, by their attributes: frameworks load one rank's state on all."""
    return " ".join(
        f"{depth}.{name}={value}"
        for depth, part in enumerate(chain(index_sampler))
        for name in ("rank", "process_index")
        if type(value := attribute(part, name)) in (int, str)
    )


def cannot_begin_again(index_sampler: Any) -> str:
    """That the order of a sampler is not the one that was saved."""
    names = "/".join(type(part).__name__ for part in chain(index_sampler))
    return (
        f"field 'order': the sampler ({names}), started again, does not yield what it gave before the state "
        "was saved. Its order depends on more than its generators, or something else drew from these in "
        "mid-epoch. Add state_dict() and load_state_dict(state) to the sampler, which say and set where it "
        "stands, or use PermutationSampler(n, seed), or say load_state_dict(state, ignore=('order',)) where "
        "the new order will do"
    )


def draw_once(index_sampler: Any) -> bool:
    """Whether its samplers draw only before the first index and after the last."""
    return all(
        not part.replacement and part.num_samples <= len(part.data_source)
        if type(part) is RandomSampler
        else type(part) in _DEAF + _TORCHS_OWN
        for part in chain(index_sampler)
    )


def torchs_generators(index_sampler: Any, generator: torch.Generator | None, dataset: Any) -> list[str]:
    """Those of `own_generators` that the loader and torch's samplers were given."""
    given = [generator, *(part.generator for part in chain(index_sampler) if type(part) in _TORCHS_OWN)]
    own = own_generators(index_sampler, generator, dataset)
    return [name for name, each in own.items() if any(each is one for one in given)]


def shared_generators(index_sampler: Any) -> tuple[str, ...]:
    """The names of the generators of the process that the order may be drawn from."""
    kinds = {type(part) for part in chain(index_sampler)}
    if kinds.issubset(_DEAF):
        return ()
    return ("torch",) if kinds.issubset(_DEAF + _TORCHS_OWN) else tuple(generators.GLOBAL)
