"""A loader's samplers, and that each kind of them goes on from anywhere."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler, Sampler

from fastq_loader import DataLoader
from fastq_loader.resume.samplers import (
    asked_sampler,
    chain,
    compared,
    epochs,
    own_generators,
    set_epochs,
    stateful_sampler,
    told_epochs,
    torchs_generators,
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


KINDS: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_goes_on_from_anywhere(kind: str) -> None:
    torch.manual_seed(1)
    first = loader(kind, 1)
    whole: list[list[Any]] = []
    stops: list[Any] = [(0, 0, first.state_dict(), torch.get_rng_state())]
    for epoch in range(3):
        whole.append([])
        for batch in first:
            whole[epoch].append(batch.tolist())
            stops.append((epoch, len(whole[epoch]), first.state_dict(), torch.get_rng_state()))
        stops.append((epoch + 1, 0, first.state_dict(), torch.get_rng_state()))
    for epoch, at, state, users in stops[:-1]:
        rest: list[Any] = [[] for _ in range(epoch, 3)]
        for again in range(2):  # the second time from after the next batch
            second = loader(kind, 2)
            second.load_state_dict(copy.deepcopy(state))
            torch.set_rng_state(users)
            iterator = iter(second)
            if not again and (batch := next(iterator, None)) is not None:
                rest[0].append(batch.tolist())
                state, users = second.state_dict(), torch.get_rng_state()
        rest[0] += [batch.tolist() for batch in iterator]
        rest[1:] = [[batch.tolist() for batch in second] for _ in rest[1:]]
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


def test_only_torchs_batches_lie_around_a_sampler_that_is_asked() -> None:
    sampler = Counts()
    assert asked_sampler(BatchSampler(sampler, 2, False)) is sampler
    assert asked_sampler(ReadsAhead(sampler)) is None
    assert stateful_sampler(ReadsAhead(sampler)) is sampler


def test_samplers_of_unknown_length_are_not_asked_for_it() -> None:
    class Endless(Counts):
        def __len__(self) -> int:
            raise NotImplementedError("endless")

    inner = Endless()
    outer = ReadsAhead(inner)
    outer.batch_sampler = inner  # type: ignore[attr-defined]
    assert chain(outer) == [outer, inner]


def test_generators_that_torch_draws_an_order_from_are_named() -> None:
    generator = torch.Generator()
    shuffle = BatchSampler(RandomSampler(range(N), generator=generator), 2, False)
    assert torchs_generators(shuffle, generator, None) == ["generator"]
    assert torchs_generators(shuffle, None, None) == ["sampler.sampler.generator"]
    assert torchs_generators(Counts(generator), None, None) == []


def test_samplers_in_samplers_and_their_epochs() -> None:
    inner = DistributedSampler(range(4), 2, 0)  # type: ignore[arg-type]
    outer = BatchSampler(inner, 2, False)
    assert chain(outer) == [outer, inner]
    inner.set_epoch(3)
    assert epochs(outer) == {"1": 3}
    set_epochs(outer, {"0": 9, "1": 5, "7": 1})
    assert inner.epoch == 5


def test_a_sampler_that_shuffles_and_has_to_be_told_the_epoch_is_found() -> None:
    plain, shuffled = (DistributedSampler(range(9), 2, 0, shuffle=shuffle) for shuffle in (False, True))
    assert told_epochs(BatchSampler(shuffled, 2, False)) == told_epochs(shuffled) == "DistributedSampler"
    for other in (plain, BatchSampler(plain, 2, False), RandomSampler(range(9)), range(9), None):
        assert told_epochs(other) is None


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
