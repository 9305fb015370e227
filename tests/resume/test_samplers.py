"""A loader's samplers, and that each kind of them goes on from anywhere."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastq_loader import DataLoader, PermutationSampler
from fastq_loader.reading import generators
from fastq_loader.resume.samplers import (
    Traits,
    chain,
    compared,
    own_generators,
)

N = 11


class Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index


class Counts(Sampler[Any]):
    """Says how many indices it gave."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        while self.at < len(order):
            self.at += 1
            yield order[self.at - 1]
        self.at = 0

    def order(self) -> list[Any]:
        return list(range(N))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class CountsInAShuffle(Counts):
    """Draws its order when it begins, and does not say from what."""

    def order(self) -> list[Any]:
        return torch.randperm(N, generator=self.generator).tolist()


class BatchesOfAnySize(Counts):
    batch_size = 5  # at most

    def order(self) -> list[Any]:
        return [[0], [1, 2], [3, 4, 5], [6], [7, 8, 9, 10]]


class SetsItsGenerator(Counts):
    """Draws each index from a generator, of which it says the state."""

    generator: torch.Generator

    def __iter__(self) -> Iterator[int]:
        while self.at < N:
            self.at += 1
            yield int(torch.randint(N, (), generator=self.generator))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(state["generator"])


class IsItsIterator(Counts):
    """Begins anew with each iteration but the one after it was told where it stands."""

    told = False

    def __iter__(self) -> Iterator[int]:
        self.at = self.at if self.told else 0
        self.told = False
        return self

    def __next__(self) -> int:
        if self.at == N:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.told = state["at"], True


class BeginsAnew(Counts):
    """Stays at its end until the next iteration, as torchdata's StatefulDistributedSampler."""

    told: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.at, self.told = self.told or 0, None
        while self.at < N:
            self.at += 1
            yield self.at - 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told = state["at"]


class ReadsAhead(Sampler[Any]):
    """Sorts five indices at a time, and says nothing."""

    def __init__(self, sampler: Sampler[Any]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        for at in range(0, N, 5):
            for index in sorted(indices[at : at + 5], reverse=True):
                yield [index]


class Shared(Sampler[int]):
    """Draws from the generators that a process shares: when it is iterated, or for its first index."""

    def __init__(self, draw: Callable[[], int], at_once: bool) -> None:
        self.draw, self.at_once = draw, at_once

    def __iter__(self) -> Iterator[int]:
        return iter(self.order()) if self.at_once else self.later()

    def order(self) -> list[int]:
        first = self.draw()
        return [(first + index) % N for index in range(N)]

    def later(self) -> Iterator[int]:
        yield from self.order()


class Own(Sampler[int]):
    """Draws every index from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[int]:
        return (int(self.rng.integers(N)) for _ in range(N))


class FailsAt3(Sampler[int]):
    """Its fourth index is an error."""

    def __iter__(self) -> Any:
        return map({index: index for index in range(N) if index != 3}.__getitem__, range(N))


ITEMS: Any = range(N)
#: Without a state of their own: they are begun again.
BEGUN_AGAIN: dict[str, Callable[[torch.Generator], Any]] = {
    "shuffle": lambda g: RandomSampler(ITEMS, generator=g),
    "the user's shuffle": lambda g: RandomSampler(ITEMS),
    "replacement": lambda g: RandomSampler(ITEMS, replacement=True, num_samples=70, generator=g),
    "several permutations": lambda g: RandomSampler(ITEMS, num_samples=30, generator=g),
    "weighted": lambda g: WeightedRandomSampler([1.0] * N, 20, generator=g),
    "subset": lambda g: SubsetRandomSampler(ITEMS, generator=g),
    "distributed": lambda g: DistributedSampler(ITEMS, 2, 1),
    "computed": lambda g: PermutationSampler(N, 3),
    "random, later": lambda g: Shared(lambda: random.randrange(N), at_once=False),
    "random, at once": lambda g: Shared(lambda: random.randrange(N), at_once=True),
    "numpy, later": lambda g: Shared(lambda: int(np.random.randint(N)), at_once=False),
    "torch, at once": lambda g: Shared(lambda: int(torch.randint(N, ())), at_once=True),
    "own generator": lambda g: Own(g.initial_seed()),
}
KINDS: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    **{name: lambda g, of=of: {"sampler": of(g), "batch_size": 3} for name, of in BEGUN_AGAIN.items()},
    "fails": lambda g: {"sampler": FailsAt3(), "batch_size": None},
    "counts": lambda g: {"sampler": Counts(), "batch_size": 3},
    "counts, no short batch": lambda g: {"sampler": Counts(), "batch_size": 3, "drop_last": True},
    "counts in a shuffle": lambda g: {"sampler": CountsInAShuffle(g), "batch_size": 3},
    "counts in the user's shuffle": lambda g: {"sampler": CountsInAShuffle(), "batch_size": 3},
    "counts in the loader's shuffle": lambda g: {
        "sampler": CountsInAShuffle(g),
        "batch_size": 3,
        "generator": g,
    },
    "batches of any size": lambda g: {"batch_sampler": BatchesOfAnySize()},
    "sets its generator": lambda g: {"sampler": SetsItsGenerator(g), "batch_size": 3},
    "is its iterator": lambda g: {"sampler": IsItsIterator(), "batch_size": None},
    "begins anew": lambda g: {"sampler": BeginsAnew(), "batch_size": 3},
    "reads ahead": lambda g: {"batch_sampler": ReadsAhead(Counts())},
    "reads ahead in a shuffle": lambda g: {"batch_sampler": ReadsAhead(CountsInAShuffle(g))},
}


def loader(kind: str, seed: int) -> DataLoader[Any]:
    return DataLoader(Numbers(), collate_fn=np.array, **KINDS[kind](torch.Generator().manual_seed(seed)))


def users() -> tuple[Any, ...]:
    """The states of the generators that the user saves."""
    return tuple(map(generators.state_of, generators.GLOBAL.values()))


def batches(iterator: Iterator[Any]) -> Iterator[Any]:
    """Batches, and errors in their places."""
    while True:
        try:
            yield next(iterator).tolist()
        except KeyError:
            yield "error"
        except StopIteration:
            return


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_goes_on_from_anywhere(kind: str) -> None:
    """With the same order as without a stop; and what the user draws is what it was."""
    for seed, draws in enumerate((torch.manual_seed, random.seed, np.random.seed)):
        draws(seed)
    first = loader(kind, 1)
    whole: list[list[Any]] = []
    stops: list[Any] = [(0, 0, first.state_dict(), users())]
    for epoch in range(3):
        whole.append([])
        for batch in batches(iter(first)):
            whole[epoch].append(batch)
            stops.append((epoch, len(whole[epoch]), first.state_dict(), users()))
        stops.append((epoch + 1, 0, first.state_dict(), users()))
    for epoch, at, state, states in stops[:-1]:
        rest: list[Any] = [[] for _ in range(epoch, 3)]
        for again in range(2):  # the second time from after the next batch
            second = loader(kind, 2)
            second.load_state_dict(copy.deepcopy(state))
            for each, of_user in zip(generators.GLOBAL.values(), states, strict=True):
                generators.set_state(each, of_user)
            iterator = batches(iter(second))
            if at or (again and rest[0]):
                assert generators.same(states, users()), "what a resumed epoch draws was drawn before"
            if not again and (batch := next(iterator, None)) is not None:
                rest[0].append(batch)
                state, states = second.state_dict(), users()
        rest[0] += iterator
        rest[1:] = [list(batches(iter(second))) for _ in rest[1:]]
        assert rest == [whole[epoch][at:], *whole[epoch + 1 :]], f"from {epoch, at}"


class CannotSay(Counts):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not yet")


@pytest.mark.parametrize("around", [lambda s: {"sampler": s}, lambda s: {"batch_sampler": ReadsAhead(s)}])
def test_a_sampler_that_cannot_say_where_it_stands_is_iterated_all_the_same(around: Any) -> None:
    one = DataLoader(Numbers(), **around(CannotSay()))
    iterator = iter(one)
    next(iterator)
    with pytest.raises(RuntimeError, match="not yet"):
        one.state_dict()
    assert len(list(iterator)) == N - 1


class CountsEpochs(Sampler[int]):
    seed = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        order = list(range(N))
        random.Random(self.seed).shuffle(order)
        self.seed += 1
        yield from order


def test_a_seed_that_counts_is_compared_as_it_was_when_the_epoch_began() -> None:
    first = DataLoader(Numbers(), sampler=CountsEpochs())
    iterator = iter(first)
    next(iterator)
    second = DataLoader(Numbers(), sampler=CountsEpochs())
    second.load_state_dict(first.state_dict())
    assert list(second) == list(iterator)
    with pytest.raises(ValueError, match="field 'seed': 1 was saved, and the loader has 0"):
        DataLoader(Numbers(), sampler=CountsEpochs()).load_state_dict(first.state_dict())
    assert compared(first._index_sampler)["seed"] == 1


def test_samplers_of_unknown_length_are_not_asked_for_it() -> None:
    class Endless(Counts):
        def __len__(self) -> int:
            raise NotImplementedError("endless")

    inner = Endless()
    outer = ReadsAhead(inner)
    outer.batch_sampler = inner  # type: ignore[attr-defined]
    assert chain(outer) == [outer, inner]


def test_the_datasets_generators_are_the_users() -> None:
    generator = torch.Generator()

    class Holds:
        rng = None

        def __init__(self) -> None:
            self.rng = random.Random(1)

        def __len__(self) -> int:
            return 3

    dataset = Holds()
    sampler = BatchSampler(RandomSampler(dataset, generator=generator), 2, False)
    assert own_generators(sampler, generator, dataset) == {"generator": generator}


@pytest.mark.parametrize(
    "change",
    [
        lambda loader: setattr(loader.sampler, "generator", torch.Generator()),
        lambda loader: vars(loader).update(generator=torch.Generator()),
        lambda loader: setattr(loader.batch_sampler, "sampler", RandomSampler(range(9))),
        lambda loader: setattr(loader.batch_sampler, "sampler", Counts()),
        lambda loader: setattr(loader.sampler, "replacement", True),
    ],
)
def test_traits_hold_until_a_sampler_or_a_generator_is_another_one(change: Callable[[Any], None]) -> None:
    loader = DataLoader(range(N), 3, shuffle=True)  # type: ignore[arg-type]
    parts = lambda: (loader._index_sampler, loader.generator, loader.dataset)  # noqa: E731
    traits = Traits(*parts())
    assert traits.hold(*parts())
    change(loader)
    assert not traits.hold(*parts())
    mine = DataLoader(range(N), 3, sampler=Counts())  # type: ignore[arg-type]
    assert not Traits(mine._index_sampler, None, mine.dataset).hold(mine._index_sampler, None, mine)
