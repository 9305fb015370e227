"""Records of an epoch, and the base classes of loaders.

Pure. The names of the fields of `EpochStart`, and their order, are part of the format of `state_dict()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Position(NamedTuple):
    """Progress of a loader.

    Attributes:
        epoch: number of epochs that are over.
        batch: number of batches delivered in the current epoch, including errors.
        batches: number of batches delivered in all epochs.

    >>> loader = DataLoader(range(8), 2)
    >>> batches = list(loader)
    >>> loader.position
    Position(epoch=1, batch=0, batches=4)
    """

    epoch: int = 0
    batch: int = 0
    batches: int = 0


@dataclass
class EpochStart:
    """The part of an epoch that stays the same after its first index was drawn, and is not compared with the
    loader.

    Attributes:
        epoch, batches: number of epochs that are over, and of batches delivered in them.
        resumes: whether a state with it continues in the middle of the epoch.
        base_seed, shared_seed: see `generators` and `datapipes`.
        lives_on: whether its workers serve the next epoch, for which torch then draws no base seed.
        states: states of the generators that the sampler may draw from, right before it was iterated.
        first: states right before the first index was drawn, where they differ from `states`.
        epochs: see `samplers.epochs`.
        passed: number of samples before its first batch: the rest of an epoch may be read with another batch
            size.
    """

    epoch: int = 0
    batches: int = 0
    resumes: bool = False
    base_seed: int = 0
    shared_seed: int | None = None
    lives_on: bool = False
    states: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    passed: int = 0


class Owner:
    """Base class of our `DataLoader`: loaders that have resources."""

    __slots__ = ()


class Resumable(Owner):
    """Base class of `StatefulDataLoader`: loaders whose epochs can be saved."""

    __slots__ = ()
