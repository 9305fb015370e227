"""The interface of samplers whose order is computed: any part of it, and the epoch.

Runs in the consumer, on the thread that calls `next()`. `extras.samplers` has these samplers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler


class ComputedSampler(Sampler[Any]):
    """Base class of samplers whose order depends only on their attributes and the epoch. Nothing is drawn
    from the generators of the process.

    Attributes:
        epoch: set by `set_epoch`.
        population: the order consists of numbers from 0 to `population` - 1, any of which may come; None if
            it does not.
    """

    epoch = 0
    population: int | None = None

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""

    @abstractmethod
    def iterate_from(self, position: int) -> Iterator[Any]:
        """The indices of this epoch from a position on."""

    def chunks(self, position: int, size: int) -> Iterator[torch.Tensor] | None:
        """The same as int64 tensors of shape (`size`,), of which the last one may be shorter; None if they
        are not computed as such."""
        return None

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)


def is_computed(sampler: Any) -> bool:
    """Whether a sampler is one of this package's: a user's subclass may behave differently."""
    kind = type(sampler)
    return issubclass(kind, ComputedSampler) and kind.__module__.startswith("fastq_loader.")
