"""Every kind of sampler goes on from anywhere, in the order that it had; else it says that it cannot."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, RandomSampler

from fastq_loader import DataLoader
from fastq_loader.reading import generators
from tests.support.samplers import ASKED, ZOO, FailsAt3, OneList, ReadsAhead, Says, Users, arguments

N = 11


class Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> int:
        assert type(index) in (int, np.int64, tuple)
        return int(index[1] if isinstance(index, tuple) else index)


def loader(kind: str, seed: int, batch_size: int | None) -> DataLoader[Any]:
    given = arguments(kind, N, torch.Generator().manual_seed(seed), batch_size=batch_size)
    return DataLoader(Numbers(), collate_fn=np.array, **given)


def users() -> tuple[Any, ...]:
    """The states of the generators that the user saves."""
    return tuple(map(generators.state_of, generators.GLOBAL.values()))


def batches(iterator: Iterator[Any]) -> Iterator[Any]:
    """Batches, and errors in their places."""
    while True:
        try:
            yield np.array(next(iterator)).tolist()
        except (KeyError, RuntimeError):
            yield "error"
        except StopIteration:
            return


def state(of: DataLoader[Any]) -> str:
    return json.dumps(of.state_dict())


Stop = tuple[int, int, str, Any]


def run(make: Callable[[int], DataLoader[Any]]) -> tuple[list[list[Any]], list[Stop]]:
    """The batches of three epochs, and a stop before, after and between all of them."""
    for seed, draws in enumerate((torch.manual_seed, random.seed, np.random.seed)):
        draws(seed)
    first, whole = make(1), list[list[Any]]()
    stops = [(0, 0, state(first), users())]
    for epoch in range(3):
        whole.append([])
        for batch in batches(iter(first)):
            whole[epoch].append(batch)
            stops.append((epoch, len(whole[epoch]), state(first), users()))
        stops.append((epoch + 1, 0, state(first), users()))
    return whole, stops[:-1]


def assert_goes_on(make: Callable[[int], DataLoader[Any]], whole: list[list[Any]], stop: Stop) -> None:
    """With the order of the run without a stop, and with two more; what the user draws is what it was."""
    epoch, at, saved, states = stop
    rest: list[Any] = [[] for _ in range(epoch, 3)]
    for number in range(3):  # then right after that, and after the next batch
        second = make(2)
        second.load_state_dict(json.loads(saved))
        for each, of_user in zip(generators.GLOBAL.values(), states, strict=True):
            generators.set_state(each, of_user)
        iterator = batches(iter(second))
        if at or rest[0]:
            assert generators.same(states, users()), "what a resumed epoch draws was drawn before"
        if number == 1 and (batch := next(iterator, None)) is not None:
            rest[0].append(batch)
        if number == 0 or rest[0]:
            saved, states = state(second), users()
    rest[0] += iterator
    rest[1:] = [list(batches(iter(second))) for _ in rest[1:]]
    assert rest == [whole[epoch][at:], *whole[epoch + 1 :]], f"from {epoch, at}"


@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("batch_size", [3, None])
def test_a_sampler_goes_on_from_anywhere(kind: str, batch_size: int | None) -> None:
    def make(seed: int) -> DataLoader[Any]:
        return loader(kind, seed, batch_size)

    whole, stops = run(make)
    for stop in stops:
        assert_goes_on(make, whole, stop)


class SaysTuples(Says):
    def order(self) -> list[Any]:
        return [("item", index) for index in range(self.length)]


@pytest.mark.parametrize(
    "given",
    [
        lambda: {"sampler": FailsAt3(N), "batch_size": None},
        lambda: {"batch_sampler": OneList(N)},
        lambda: {"sampler": SaysTuples(N), "batch_size": None},
    ],
)
def test_so_do_errors_of_a_sampler_lists_that_it_writes_again_and_indices_of_other_kinds(given: Any) -> None:
    def make(seed: int) -> DataLoader[Any]:
        return DataLoader(Numbers(), collate_fn=np.array if "batch_sampler" in given() else int, **given())

    whole, stops = run(make)
    for stop in stops:
        assert_goes_on(make, whole, stop)


class CountsEpochs(Users):
    """By itself, without `set_epoch` and `state_dict`."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(self.length).tolist())


class Many(Users):
    """Has more generators than are looked for."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rngs = [random.Random(seed) for seed in range(150)]

    def __iter__(self) -> Iterator[int]:
        return iter([self.rngs[index].randrange(N) for index in range(N)])


class Hidden(Users):
    """Draws from what nobody can save."""

    def __iter__(self) -> Iterator[Any]:
        return (secrets.randbelow(10**6) % N for _ in range(N))


class HiddenTensors(Hidden):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.tensor(list(super().__iter__())).numpy())


class HiddenNames(Hidden):
    def __iter__(self) -> Iterator[Any]:
        return (("item", index) for index in super().__iter__())


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.processes)])
@pytest.mark.parametrize("kind", [CountsEpochs, Many, Hidden, HiddenTensors, HiddenNames])
@pytest.mark.parametrize(("batch_size", "given_out"), [(None, 10), (4, 2)])
def test_an_order_that_does_not_come_back_is_an_error(
    kind: Any, batch_size: int | None, given_out: int, workers: int
) -> None:
    first, second = (
        DataLoader(Numbers(), batch_size, sampler=kind(N), num_workers=workers) for _ in range(2)
    )
    for _ in range(2):  # what is drawn in the first epoch is what is drawn the first time
        iterator = iter(first)
        for _ in range(given_out):
            next(iterator)
    told = json.loads(state(first))
    second.load_state_dict(told)
    with pytest.raises(
        ValueError, match=rf"field 'order'.*{kind.__name__}.*Add state_dict\(\) and load_state_"
    ):
        iter(second)
    assert second.position == (1, given_out, 2 * given_out), "it is still to be resumed"
    second.load_state_dict(told, ignore=("order",))
    assert len(list(second)) == -(-N // (batch_size or 1)) - given_out


def test_a_sampler_that_has_become_shorter_is_an_error() -> None:
    first, second = (DataLoader(Numbers(), None, sampler=range(n)) for n in (10, 5))
    iterator = iter(first)
    for _ in range(7):
        next(iterator)
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="field 'order'"):
        iter(second)


@pytest.mark.parametrize("draws", [3, 20])
def test_a_generator_that_two_loaders_share_gives_the_same_order_or_an_error(draws: int) -> None:
    """The other loader is read in mid-epoch. RandomSampler draws 32 indices at a time."""

    def make() -> tuple[DataLoader[Any], DataLoader[Any]]:
        g = torch.Generator().manual_seed(1)
        return tuple(  # type: ignore[return-value]
            DataLoader(Numbers(), 2, sampler=RandomSampler(range(N), True, 40, g), generator=g)  # type: ignore[arg-type]
            for _ in range(2)
        )

    train, other = make()
    iterator = iter(train)
    torch.rand(1, generator=train.generator)  # as many as you like, before the first index
    for batch in range(draws):
        next(iterator)
        if batch == 1:
            list(other)
    told = json.loads(state(train))
    again, _ = make()
    again.load_state_dict(told)
    if draws == 3:
        assert list(map(repr, again)) == list(map(repr, iterator))
    else:
        with pytest.raises(ValueError, match="something else drew"):
            iter(again)


def test_a_shuffle_is_digested_by_its_permutations() -> None:
    """The other loader draws between two of them."""

    def make() -> DataLoader[Any]:
        g = torch.Generator().manual_seed(1)
        return DataLoader(Numbers(), 4, sampler=RandomSampler(range(N), False, 3 * N, g), generator=g)  # type: ignore[arg-type]

    first, second = make(), make()
    iterator = iter(first)
    next(iterator)
    torch.rand(1, generator=first.generator)
    for _ in range(4):
        next(iterator)
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="field 'order'"):
        iter(second)


class CannotSay(Says):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not yet")


def test_a_sampler_that_cannot_say_where_it_stands_is_iterated_all_the_same() -> None:
    one = DataLoader(Numbers(), sampler=CannotSay(N))
    iterator = iter(one)
    next(iterator)
    with pytest.raises(RuntimeError, match="not yet"):
        one.state_dict()
    assert len(list(iterator)) == N - 1
    around = DataLoader(Numbers(), batch_sampler=ReadsAhead(CannotSay(N)))
    next(iter(around))
    around.state_dict()  # of one that others read ahead of nobody asks


def test_a_sampler_is_asked_when_a_state_is_wanted_and_not_in_the_middle_of_a_draw() -> None:
    class CountsAsks(Says):
        asked = 0
        draws: Any = None

        def order(self) -> list[Any]:
            if self.draws is not None:
                self.draws()
            return super().order()

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return super().state_dict()

    sampler = CountsAsks(N)
    one = DataLoader(Numbers(), sampler=sampler)
    iterator = iter(one)
    before = sampler.asked
    assert len(list(iterator)) == N
    assert sampler.asked == before, "nobody wanted a state"
    errors = list[str]()

    def ask() -> None:
        with pytest.raises(RuntimeError, match="in the middle of a draw of the sampler") as raised:
            one.state_dict()
        errors.append(str(raised.value))

    sampler.draws = ask
    next(iter(one))
    assert len(errors) == 1


def test_a_loader_whose_sampler_says_nothing_refuses_what_another_has_said() -> None:
    first = DataLoader(Numbers(), sampler=Says(N))
    next(iter(first))
    SaysNothing = type("Says", (Users,), {"__iter__": lambda self: iter(range(N))})
    SaysNothing.__qualname__ = Says.__qualname__
    second = DataLoader(Numbers(), sampler=SaysNothing(N))
    with pytest.raises(
        ValueError, match="field '_index_sampler_state': the sampler said where it stands, and"
    ):
        second.load_state_dict(first.state_dict())


def test_every_kind_that_says_where_it_stands_is_asked() -> None:
    for kind in ASKED:
        one = loader(kind, 1, 3)
        next(iter(one))
        said = one.state_dict()
        assert said["_index_sampler_state"] or said["_sampler_iter_state"], kind
