"""Inspects a loader's chain of samplers for a state: which are stateful, and what identifies the others.

Runs in the consumer, on the thread that calls `iter()` or `state_dict()`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from fastq_loader.epoch.samplers import TORCHS_OWN, chain, own_generators
from fastq_loader.reading import sampling
from fastq_loader.reading.computed import ComputedSampler
from fastq_loader.reading.position import Stateful, is_stateful
from fastq_loader.system.attributes import attribute

#: Samplers whose order depends on the epoch set by `set_epoch`.
_WITH_EPOCHS = (DistributedSampler, ComputedSampler)
#: Attributes that samplers are compared by, where present.
COMPARED = ("seed", "initial_seed", "num_replicas", "replacement", "weights_checksum")
#: The one that is set to its saved value: Accelerate's `SeedableRandomSampler` takes it from torch's global
#: generator in `prepare()`, which a program may seed afterwards.
INITIAL_SEED = "initial_seed"


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


def set_epochs(index_sampler: Any, saved: dict[str, int]) -> None:
    """Set these epochs again, on samplers of a known kind."""
    for depth, part in enumerate(chain(index_sampler)):
        known = isinstance(part, _WITH_EPOCHS) or type(attribute(part, INITIAL_SEED)) is int
        if str(depth) in saved and known and callable(attribute(part, "set_epoch")):
            part.set_epoch(saved[str(depth)])


def batch_size(index_sampler: Any) -> int | None:
    """The samples of a batch; also of a `batch_sampler=`, which frameworks pass in place of a size."""
    size = attribute(index_sampler, "batch_size")
    return size if type(size) is int else None


def counts_samples(index_sampler: Any) -> bool:
    """See `sampling.counts_samples`; Accelerate's `SeedableRandomSampler` has such an order, too."""
    is_seeded = (
        type(index_sampler) is BatchSampler and type(attribute(index_sampler.sampler, INITIAL_SEED)) is int
    )
    return is_seeded or sampling.counts_samples(index_sampler)


def set_initial_seed(index_sampler: Any, seed: int) -> None:
    """Set the seed of the sampler in the chain that has this attribute."""
    for part in chain(index_sampler):
        if type(attribute(part, INITIAL_SEED)) is int:
            setattr(part, INITIAL_SEED, seed)
            return


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


def torchs_generators(index_sampler: Any, generator: torch.Generator | None, dataset: Any) -> list[str]:
    """Names of the `own_generators` that are arguments of the loader or of torch's samplers."""
    given = [generator, *(part.generator for part in chain(index_sampler) if type(part) in TORCHS_OWN)]
    own = own_generators(index_sampler, generator, dataset)
    return [name for name, each in own.items() if any(each is one for one in given)]
