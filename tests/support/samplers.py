"""A zoo of samplers: torch's, ours, users' that are begun again, and users' that say where they stand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from fastq_loader import Distributed, PermutationSampler, WeightedSampler


class Users(Sampler[Any]):
    """A sampler as users write it."""

    def __init__(self, length: int, generator: torch.Generator | None = None) -> None:
        self.length = length
        self.generator = generator

    def __len__(self) -> int:
        return self.length


class Shuffles(Users):
    """Draws from a generator that a process shares, when it is iterated or for its first index."""

    def __init__(self, length: int, draw: Callable[[int], int], at_once: bool) -> None:
        super().__init__(length)
        self.draw, self.at_once = draw, at_once

    def __iter__(self) -> Iterator[int]:
        return iter(self.order()) if self.at_once else self.later()

    def order(self) -> list[int]:
        first = self.draw(self.length)
        return [(first + index) % self.length for index in range(self.length)]

    def later(self) -> Iterator[int]:
        yield from self.order()


class Own(Users):
    """Draws every index from a generator of its own, which may be Python's or numpy's."""

    def __init__(self, length: int, rng: Any, at_once: bool = False) -> None:
        super().__init__(length)
        self.rng, self.at_once = rng, at_once

    def __iter__(self) -> Iterator[int]:
        drawn = (self.draw() for _ in range(self.length))
        return iter(list(drawn)) if self.at_once else drawn

    def draw(self) -> int:
        if isinstance(self.rng, torch.Generator):
            return int(torch.randint(self.length, (), generator=self.rng))
        return int(self.rng.choice(range(self.length)))


class FailsAt3(Users):
    """Its fourth index is an error."""

    def __iter__(self) -> Any:
        return map(
            {index: index for index in range(self.length) if index != 3}.__getitem__, range(self.length)
        )


class OneList(Users):
    """Yields the same list again and again, with other indices."""

    def __iter__(self) -> Iterator[Any]:
        batch: list[int] = []
        for start in range(0, self.length, 4):
            batch[:] = range(start, min(start + 4, self.length))
            yield batch


class Says(Users):
    """Says how many indices it gave, and in how many epochs."""

    at = epoch_now = 0

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        while self.at < len(order):
            self.at += 1
            yield order[self.at - 1]
        self.at, self.epoch_now = 0, self.epoch_now + 1

    def order(self) -> list[Any]:
        order: list[Any] = np.random.default_rng(self.epoch_now).permutation(self.length).tolist()
        return order

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch_now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch_now = state["at"], state["epoch"]


class SaysInAShuffle(Says):
    """Draws its order when it begins, and does not say from what."""

    def order(self) -> list[Any]:
        return torch.randperm(self.length, generator=self.generator).tolist()


class BatchesOfAnySize(Says):
    batch_size = 5  # at most

    def order(self) -> list[Any]:
        return [
            list(range(at, min(at + size, self.length))) for at, size in ((0, 1), (1, 2), (3, 3), (6, 99))
        ]


class SetsItsGenerator(Says):
    """Draws each index from a generator, of which it says the state."""

    generator: torch.Generator

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.at += 1
            yield int(torch.randint(self.length, (), generator=self.generator))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


class IsItsIterator(Says):
    """Begins anew with each iteration but the one after it was told where it stands."""

    was_told = False

    def __iter__(self) -> Iterator[int]:
        self.at = self.at if self.was_told else 0
        self.was_told = False
        return self

    def __next__(self) -> int:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.was_told = state["at"], True


class StaysAtItsEnd(Says):
    """Until the next iteration, as torchdata's StatefulDistributedSampler."""

    told: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.at, self.told = self.told or 0, None
        while self.at < self.length:
            self.at += 1
            yield self.at - 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told = state["at"]


class SayingIterator:
    """The iterator of a sampler that says nothing itself."""

    def __init__(self, order: Sequence[Any]) -> None:
        self.order, self.at = order, 0

    def __iter__(self) -> SayingIterator:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.order):
            raise StopIteration
        self.at += 1
        return self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class ItsIteratorSays(Users):
    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.length, generator=self.generator).tolist()
        return SayingIterator([order[at : at + 3] for at in range(0, self.length, 3)])


class ReadsAhead(Sampler[Any]):
    """Sorts five indices at a time, and says nothing."""

    def __init__(self, sampler: Sampler[Any]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        for at in range(0, len(indices), 5):
            for index in sorted(indices[at : at + 5], reverse=True):
                yield [index]


def of_torch(draw: int) -> int:
    return int(torch.randint(draw, ()))


def of_numpy(draw: int) -> int:
    return int(np.random.randint(draw))


def items(n: int) -> Any:
    return range(n)


Zoo = dict[str, Callable[[int, Any], Any]]
#: Exact without more.
TORCHS: Zoo = {
    "sequential": lambda n, g: {},
    "shuffle": lambda n, g: {"shuffle": True},
    "the loader's shuffle": lambda n, g: {"shuffle": True, "generator": g},
    "shuffled batches": lambda n, g: {
        "batch_sampler": BatchSampler(RandomSampler(items(n), generator=g), 4, True)
    },
    "replacement": lambda n, g: {"sampler": RandomSampler(items(n), True, n + 37, g)},
    "weighted": lambda n, g: {"sampler": WeightedRandomSampler([1.0] * n, n, generator=g)},
    "distributed": lambda n, g: {"sampler": DistributedSampler(items(n), 2, 1)},
    "computed": lambda n, g: {"sampler": PermutationSampler(n, 3)},
    "computed by weights": lambda n, g: {"sampler": WeightedSampler(range(1, n + 1), n + 5, seed=3)},
    "dealt out": lambda n, g: {
        "sampler": Distributed(RandomSampler(items(n), generator=g), 3, num_replicas=2, rank=1)
    },
    "batches, dealt out": lambda n, g: {
        "batch_sampler": Distributed(BatchSampler(Own(n, random.Random(3)), 4, False), num_replicas=2, rank=0)
    },
}
#: Users', that draw from generators alone.
BEGUN_AGAIN: Zoo = {
    "random, at once": lambda n, g: {"sampler": Shuffles(n, random.randrange, at_once=True)},
    "in batches": lambda n, g: {"batch_sampler": BatchSampler(Shuffles(n, of_numpy, False), 3, False)},
    "own generator": lambda n, g: {"sampler": Own(n, np.random.default_rng(g.initial_seed()))},
    "reads ahead": lambda n, g: {"batch_sampler": ReadsAhead(IsItsIterator(n))},
}
#: Users', that say where they stand.
ASKED: Zoo = {
    "says": lambda n, g: {"sampler": Says(n)},
    "says, no short batch": lambda n, g: {"batch_sampler": BatchSampler(Says(n), 3, True)},
    "says, in the user's shuffle": lambda n, g: {"sampler": SaysInAShuffle(n)},
    "says, in the loader's shuffle": lambda n, g: {"sampler": SaysInAShuffle(n, g), "generator": g},
    "batches of any size": lambda n, g: {"batch_sampler": BatchesOfAnySize(n)},
    "sets its generator": lambda n, g: {"sampler": SetsItsGenerator(n, g)},
    "is its iterator": lambda n, g: {"sampler": IsItsIterator(n), "batch_size": None},
    "stays at its end": lambda n, g: {"sampler": StaysAtItsEnd(n)},
    "its iterator says": lambda n, g: {"batch_sampler": ItsIteratorSays(n, g)},
}
ZOO: Zoo = {**TORCHS, **BEGUN_AGAIN, **ASKED}


def arguments(kind: str, n: int, generator: torch.Generator | None, /, **given: Any) -> dict[str, Any]:
    """The arguments of a loader with such a sampler, over `n` items, beside those that are `given`. Without a
    generator torch's samplers draw from the process's, and users' from one of their own."""
    found = ZOO[kind](n, generator if kind in TORCHS else generator or torch.Generator().manual_seed(n))
    if "batch_sampler" in found:
        given = {name: value for name, value in given.items() if name not in ("batch_size", "drop_last")}
    elif found.get("batch_size", 0) is None:
        given.pop("drop_last", None)
    return {**given, **found}
