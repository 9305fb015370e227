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
from torch.utils.data import Dataset

from fastq_loader import StatefulDataLoader
from fastq_loader.reading import generators
from tests.end_to_end.test_resume import Stop, go_on, stop_at
from tests.support.loaders import seed_all
from tests.support.samplers import (
    ASKED,
    ZOO,
    FailsAt3,
    OneList,
    ReadsAhead,
    Says,
    Users,
    arguments,
)
from tests.support.thorough import thorough

N = 11


class Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> int:
        assert type(index) in (int, np.int64, tuple)
        return int(index[1] if isinstance(index, tuple) else index)


def loader(kind: str, seed: int, batch_size: int | None, **more: Any) -> StatefulDataLoader[Any]:
    given = arguments(kind, N, torch.Generator().manual_seed(seed), batch_size=batch_size, **more)
    return StatefulDataLoader(Numbers(), collate_fn=np.array, **given)


def batches(iterator: Iterator[Any]) -> Iterator[Any]:
    """Batches, and errors in their places."""
    while True:
        try:
            yield np.array(next(iterator)).tolist()
        except (KeyError, RuntimeError):
            yield "error"
        except StopIteration:
            return


def state(of: StatefulDataLoader[Any]) -> str:
    return json.dumps(of.state_dict())


def run(make: Callable[[int], StatefulDataLoader[Any]]) -> tuple[list[list[Any]], list[Stop]]:
    """The batches of three epochs, and a stop before, after and between all of them."""
    seed_all(0, 1, 2)
    first, whole = make(1), list[list[Any]]()
    stops = [stop_at(first)]
    for _ in range(3):
        whole.append([])
        for batch in batches(iter(first)):
            whole[-1].append(batch)
            stops.append(stop_at(first))
        stops.append(stop_at(first))
    return whole, stops[:-1]


def assert_goes_on(
    make: Callable[[int], StatefulDataLoader[Any]], whole: list[list[Any]], stop: Stop
) -> None:
    """With the order of the run without a stop, and with two more; what the user draws is what it was."""
    epoch, at, _ = stop.position
    rest: list[Any] = [[] for _ in range(epoch, 3)]
    for number in range(3):  # then right after that, and after the next batch
        second = go_on(make(2), stop)
        iterator = batches(iter(second))
        if at or rest[0]:
            users = [generators.state_of(each) for each in generators.GLOBAL.values()]
            assert generators.same(stop.users, users), "what a resumed epoch draws was drawn before"
        if number == 1 and (batch := next(iterator, None)) is not None:
            rest[0].append(batch)
        if number == 0 or rest[0]:
            stop = stop_at(second)
    rest[0] += iterator
    rest[1:] = [list(batches(iter(second))) for _ in rest[1:]]
    assert rest == [whole[epoch][at:], *whole[epoch + 1 :]], f"from {epoch, at}"


#: What others of the zoo show as well.
ALIKE = [
    *("computed by weights", "batches, dealt out", "reads ahead", "weighted"),
    *("says, no short batch", "says, in the user's shuffle", "says, in the loader's shuffle"),
]


@thorough(but={"kind": [kind for kind in ZOO if kind not in ALIKE], "batch_size": 3})
@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("batch_size", [3, None])
def test_a_sampler_goes_on_from_anywhere(kind: str, batch_size: int | None) -> None:
    def make(seed: int) -> StatefulDataLoader[Any]:
        return loader(kind, seed, batch_size)

    whole, stops = run(make)
    for stop in stops:
        assert_goes_on(make, whole, stop)


@pytest.mark.processes
@thorough(after=1)
@pytest.mark.parametrize("kind", ASKED)
def test_a_sampler_that_says_where_it_stands_may_be_read_ahead_by_workers(kind: str) -> None:
    def make(seed: int) -> StatefulDataLoader[Any]:
        return loader(kind, seed, 3, schedule="dynamic", num_workers=2, persistent_workers=True)

    whole, stops = run(make)
    for stop in (stops[1], stops[len(whole[0])]):  # the second is after the last batch
        assert_goes_on(make, whole, stop)


class SaysTuples(Says):
    def order(self) -> list[Any]:
        return [("item", index) for index in range(self.length)]


@thorough(after=1)
@pytest.mark.parametrize(
    "given",
    [
        lambda: {"sampler": FailsAt3(N), "batch_size": None},
        lambda: {"batch_sampler": OneList(N)},
        lambda: {"sampler": SaysTuples(N), "batch_size": None},
    ],
)
def test_so_do_errors_of_a_sampler_lists_that_it_writes_again_and_indices_of_other_kinds(given: Any) -> None:
    def make(seed: int) -> StatefulDataLoader[Any]:
        return StatefulDataLoader(
            Numbers(), collate_fn=np.array if "batch_sampler" in given() else int, **given()
        )

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
        self.rngs = [random.Random(seed) for seed in range(1500)]

    def __iter__(self) -> Iterator[int]:
        return iter([self.rngs[-index].randrange(N) for index in range(N)])


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


WITH_WORKERS = [pytest.mark.processes, thorough(but={"kind": Hidden, "given_out": 2})]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=WITH_WORKERS)])
@pytest.mark.parametrize("kind", [CountsEpochs, Many, Hidden, HiddenTensors, HiddenNames])
@pytest.mark.parametrize(("batch_size", "given_out"), [(None, 10), (4, 2)])
def test_an_order_that_does_not_come_back_is_an_error(
    kind: Any, batch_size: int | None, given_out: int, workers: int
) -> None:
    first, second = (
        StatefulDataLoader(Numbers(), batch_size, sampler=kind(N), num_workers=workers) for _ in range(2)
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


class CannotSay(Says):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not yet")


def test_a_sampler_that_cannot_say_where_it_stands_is_iterated_all_the_same() -> None:
    one = StatefulDataLoader(Numbers(), sampler=CannotSay(N))
    iterator = iter(one)
    next(iterator)
    with pytest.raises(RuntimeError, match="not yet"):
        one.state_dict()
    assert len(list(iterator)) == N - 1
    around = StatefulDataLoader(Numbers(), batch_sampler=ReadsAhead(CannotSay(N)))
    next(iter(around))
    around.state_dict()  # of one that others read ahead of nobody asks
