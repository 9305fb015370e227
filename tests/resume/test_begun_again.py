"""Samplers that are begun again come back exactly, or say that they cannot: never in another order."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler

from fastq_loader import DataLoader

N = 40


class Users(Sampler[int]):
    """A sampler as users write it."""

    def __len__(self) -> int:
        return N


class Counts(Users):
    """Counts its epochs by itself, and has no `set_epoch`."""

    def __init__(self) -> None:
        self.epoch, self.name, self.warm = 0, "counts", False

    def __iter__(self) -> Iterator[int]:
        self.epoch, self.warm = self.epoch + 1, True
        return iter(np.random.default_rng(self.epoch).permutation(N).tolist())


class CountsLater(Counts):
    """The same when its first index is drawn, and with every index after it, in what was not there before."""

    drawn = 0

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self.drawn += 1
            self.again = getattr(self, "again", 0) + 1
            index += self.again
            yield (index + self.drawn) % N


class InSlots(Users):
    """Has its generator, and a counter, where there is no `__dict__` for them."""

    __slots__ = ("__epoch", "rng")

    def __init__(self) -> None:
        self.rng, self.__epoch = random.Random(5), 0

    def __iter__(self) -> Iterator[int]:
        self.__epoch += 1
        return iter([(index * 3 + self.__epoch) % N for index in self.rng.sample(range(N), N)])


class Many(Users):
    """Has more generators than are looked for."""

    def __init__(self) -> None:
        self.rngs = [random.Random(seed) for seed in range(150)]

    def __iter__(self) -> Iterator[int]:
        return iter([self.rngs[index].randrange(N) for index in range(N)])


class Hidden(Users):
    """Draws from what nobody can save."""

    def __iter__(self) -> Iterator[int]:
        return (secrets.randbelow(N) for _ in range(N))


class HiddenTensors(Hidden):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.tensor(list(super().__iter__())))


class HiddenNames(Hidden):
    def __iter__(self) -> Iterator[Any]:
        return (("item", str(index)) for index in super().__iter__())


class Data:
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> int:
        return int(index[1] if isinstance(index, tuple) else index)


def loader(sampler: Any, batch_size: int | None = 4, **more: Any) -> DataLoader[Any]:
    return DataLoader(Data(), batch_size, sampler=sampler, **more)  # type: ignore[arg-type]


def items(batches: Any) -> list[int]:
    return [
        item for batch in batches for item in (batch.tolist() if isinstance(batch, torch.Tensor) else [batch])
    ]


WORKERS = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])


@WORKERS
@pytest.mark.parametrize("kind", [Counts, CountsLater, InSlots])
@pytest.mark.parametrize("batch_size", [None, 4, 30])
def test_what_a_sampler_holds_comes_back(
    kind: Callable[[], Any], batch_size: int | None, workers: int
) -> None:
    """Wherever it is stopped: in an epoch, before its first batch, and between two; and again after that."""

    def make() -> DataLoader[Any]:
        return loader(kind(), batch_size, num_workers=workers)

    first, epochs, states = make(), [], []
    for epoch in range(3):
        iterator, seen = iter(first), []
        states.append((epoch, 0, json.dumps(first.state_dict())))
        for batch in iterator:
            seen += items([batch])
            if len(seen) % 20 == 0:
                states.append((epoch, len(seen), json.dumps(first.state_dict())))
        epochs.append(seen)
        states.append((epoch + 1, 0, json.dumps(first.state_dict())))
    for epoch, at, state in states:
        second = make()
        second.load_state_dict(json.loads(state))
        if at == 20:  # a second stop
            next(iter(second))
            state = json.dumps(second.state_dict())
            second = second if kind is Counts else make()  # a loader may also be put back
            second.load_state_dict(json.loads(state))
            at += batch_size or 1
        for number in range(epoch, 3):
            rest = epochs[number][at if number == epoch else 0 :]
            assert items(second) == rest, f"from {epoch, at}: epoch {number}"


@WORKERS
@pytest.mark.parametrize("kind", [Many, Hidden, HiddenTensors, HiddenNames])
@pytest.mark.parametrize(("batch_size", "batches"), [(None, 3), (None, 39), (4, 1), (30, 1)])
def test_an_order_that_cannot_come_back_is_an_error(
    kind: Callable[[], Any], batch_size: int | None, batches: int, workers: int
) -> None:
    first, second = (loader(kind(), batch_size, num_workers=workers) for _ in range(2))
    iterator = iter(first)
    for _ in range(batches):
        next(iterator)
    if kind is Many:  # else what is drawn is what was drawn the first time
        for _ in iterator:
            pass
        iterator = iter(first)
        for _ in range(batches):
            next(iterator)
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    for _ in range(1 if kind is Many else 2):  # it is still to be resumed; Many has drawn then what it had to
        with pytest.raises(
            ValueError, match=rf"field 'order'.*{kind.__name__}.*PermutationSampler.*state_dict"
        ):
            iter(second)
    second.load_state_dict(state, ignore=("order",))
    assert len(items(second)) == N - batches * (batch_size or 1)


def test_a_sampler_that_has_become_shorter_is_an_error() -> None:
    first = loader(range(20), None)
    iterator = iter(first)
    for _ in range(12):
        next(iterator)
    second = loader(range(10), None)
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="field 'order'"):
        iter(second)


class OneList(Users):
    """Yields the same list again and again, with other indices."""

    def __iter__(self) -> Iterator[Any]:
        batch: list[int] = []
        for start in range(0, N, 4):
            batch[:] = range(start, start + 4)
            yield batch


class Consumes(Data):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [indices.pop(0) for _ in range(4)]


def test_lists_of_indices_may_be_written_again_by_others() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Consumes(), batch_sampler=OneList())  # type: ignore[arg-type]

    first = make()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    second = make()
    second.load_state_dict(first.state_dict())
    assert items(second) == list(range(12, N))


@pytest.mark.parametrize("draws", [3, 20])
def test_a_generator_that_two_loaders_share_gives_the_same_order_or_an_error(draws: int) -> None:
    """The other loader is read in mid-epoch. RandomSampler draws 32 indices at a time."""

    def make() -> tuple[DataLoader[Any], DataLoader[Any]]:
        g = torch.Generator().manual_seed(1)
        return tuple(  # type: ignore[return-value]
            loader(RandomSampler(range(N), replacement=True, generator=g), 2, generator=g)  # type: ignore[arg-type]
            for _ in range(2)
        )

    train, other = make()
    iterator = iter(train)
    for batch in range(draws):
        next(iterator)
        if batch == 1:
            items(other)
    state = json.loads(json.dumps(train.state_dict()))
    rest = items(iterator)
    again, _ = make()
    again.load_state_dict(state)
    if draws == 3:
        assert items(again) == rest
    else:
        with pytest.raises(ValueError, match="something else drew"):
            iter(again)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_shuffle_is_digested_by_its_permutations(drop_last: bool) -> None:
    """The other loader draws between iter() and the first batch, when the permutation is drawn."""
    g = torch.Generator().manual_seed(1)
    first = DataLoader(range(N), 7, shuffle=True, generator=g, drop_last=drop_last)  # type: ignore[arg-type]
    iterator = iter(first)
    torch.rand(1, generator=g)
    next(iterator)
    g2 = torch.Generator()
    second = DataLoader(range(N), 7, shuffle=True, generator=g2, drop_last=drop_last)  # type: ignore[arg-type]
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="field 'order'"):
        iter(second)


def test_what_a_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only attributes that an epoch has changed are set: not a rank, nor what torch's samplers have."""

    class Ranked(Counts):
        rank = 0

        def __iter__(self) -> Iterator[int]:
            return iter(list(super().__iter__())[self.rank :: 2])

    sampler = Ranked()
    sampler.rank = 1
    first = DataLoader(Data(), batch_sampler=BatchSampler(sampler, 4, False))  # type: ignore[arg-type]
    list(first)
    state = first.state_dict()
    assert state["order"]["attributes"] == {"1.epoch": [1, 0], "1.warm": [True, False]}
    other = Ranked()
    second = DataLoader(Data(), batch_sampler=BatchSampler(other, 4, False))  # type: ignore[arg-type]
    second.load_state_dict(state)
    assert (other.rank, other.epoch, other.warm, other.name) == (0, 1, True, "counts")
