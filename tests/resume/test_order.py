"""The order of an epoch is begun again: whatever the sampler draws from, and without disturbing it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastq_loader import PermutationSampler
from fastq_loader.ipc.messages import decode_index
from fastq_loader.reading import generators
from fastq_loader.resume.order import Order
from fastq_loader.resume.samplers import own_generators
from fastq_loader.scheduling.progress import Progress

N = 11


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

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return (int(self.rng.integers(N)) for _ in range(N))


class Stateful(Sampler[int]):
    """Says where it stands, and begins the next epoch at its end."""

    def __init__(self) -> None:
        self.epoch_now, self.at = 0, 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch_now).permutation(N).tolist()
        while self.at < N:
            self.at += 1
            yield order[self.at - 1]
        self.at, self.epoch_now = 0, self.epoch_now + 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch_now, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch_now, self.at = state["epoch"], state["at"]


Make = Callable[[torch.Generator | None], Any]
SAMPLERS: dict[str, Make] = {
    "sequential": lambda g: SequentialSampler(range(N)),
    "shuffle": lambda g: RandomSampler(range(N), generator=g),
    "replacement": lambda g: RandomSampler(range(N), replacement=True, num_samples=70, generator=g),
    "several permutations": lambda g: RandomSampler(range(N), num_samples=30, generator=g),
    "weighted": lambda g: WeightedRandomSampler([1.0] * N, 20, generator=g),
    "subset": lambda g: SubsetRandomSampler(range(N), generator=g),
    "distributed": lambda g: DistributedSampler(range(2 * N), 2, 1),  # type: ignore[arg-type]
    "computed": lambda g: PermutationSampler(N, 3),
    "random, later": lambda g: Shared(lambda: random.randrange(N), at_once=False),
    "random, at once": lambda g: Shared(lambda: random.randrange(N), at_once=True),
    "numpy, later": lambda g: Shared(lambda: int(np.random.randint(N)), at_once=False),
    "torch, at once": lambda g: Shared(lambda: int(torch.randint(N, ())), at_once=True),
    "own generator": lambda g: Own(),
    "stateful": lambda g: Stateful(),
}


def globals_now() -> list[Any]:
    return [generators.state_of(each) for each in generators.GLOBAL.values()]


def begun(order: Order, generator: torch.Generator | None, starts: int) -> Any:
    """The indices of a new epoch, with the draws of torch's loader."""
    for start in range(starts):
        source = order.begin(packed=start % 2 == 1)
        if start == 0:
            torch.empty((), dtype=torch.int64).random_(generator=generator)
            order.beginning.seeded = True
    return source


def batched(sampler: Any, size: int | None, drop_last: bool) -> Any:
    return sampler if size is None else BatchSampler(sampler, size, drop_last)


@given(
    kind=st.sampled_from(sorted(SAMPLERS)),
    size=st.none() | st.integers(1, 4),
    drop_last=st.booleans(),
    explicit=st.booleans(),
    starts=st.integers(1, 2),
    ahead=st.integers(0, 3),
    stop=st.integers(0, 30),
    data=st.data(),
)
def test_a_stopped_epoch_goes_on_with_what_was_not_handed_out(
    kind: str,
    size: int | None,
    drop_last: bool,
    explicit: bool,
    starts: int,
    ahead: int,
    stop: int,
    data: Any,
) -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    generator = torch.Generator().manual_seed(2) if explicit else None
    sampler = batched(SAMPLERS[kind](generator), size, drop_last)
    order = Order(sampler, generator, None)
    source = begun(order, generator, starts)
    drawn = [decode_index(index) for index in itertools.islice(source, stop + ahead)]
    stop = min(stop, len(drawn))
    ready = st.sets(st.sampled_from(range(stop + 1, len(drawn)))) if stop + 1 < len(drawn) else st.just(set())
    beyond = frozenset(data.draw(ready))
    if kind == "stateful":  # asked for where it stood before what was drawn ahead
        assert order.beginning.snapshots.keys() >= {stop}
    now = {name: generators.state_of(own) for name, own in order.own.items()}
    users = globals_now()
    rest = [decode_index(index) for index in source]
    wanted = [index for at, index in enumerate(drawn + rest) if at >= stop and at not in beyond]

    torch.manual_seed(8)
    random.seed(8)
    np.random.seed(8)
    if not drawn:  # nothing was drawn before, so it will be from what the user restores
        for each, state in zip(generators.GLOBAL.values(), users, strict=True):
            generators.set_state(each, state)
    generator = torch.Generator().manual_seed(9) if explicit else None
    sampler = batched(SAMPLERS[kind](generator), size, drop_last)
    own = own_generators(sampler, generator, None)
    for name, state in now.items():
        generators.set_state(own[name], state)
    before = globals_now()
    # At the moment of saving what is left of `rest` was not drawn.
    order.beginning.drawn, order.beginning.exhausted = len(drawn), False
    if kind == "stateful":
        order.beginning.exhausted = size is not None and bool(drawn) and len(drawn[-1]) < size
    progress = Progress(stop + len(beyond), beyond)
    again = Order(sampler, generator, None, progress, order.beginning)
    source = again.begin(packed=True)
    assert source is again.begin(packed=True), "it begins once"
    assert generators.same(tuple(before), tuple(globals_now())), "its draws were made before"
    for name, state in now.items():
        assert generators.same(state, generators.state_of(own[name])), name
    assert [decode_index(index) for index in source] == wanted


class Failing(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return FailsAt3()


class FailsAt3(Iterator[int]):
    at = -1

    def __next__(self) -> int:
        self.at += 1
        if self.at == 3:
            raise KeyError("no index 3")
        if self.at == 6:
            raise StopIteration
        return self.at


@pytest.mark.parametrize(("head", "wanted"), [(2, [2, "error", 4, 5]), (3, ["error", 4, 5]), (4, [4, 5])])
@pytest.mark.parametrize("drawn", [0, 5])
def test_an_error_of_the_sampler_keeps_its_position(head: int, wanted: list[Any], drawn: int) -> None:
    order = Order(Failing(), None, None)
    order.begin()
    order.beginning.drawn = drawn
    source = Order(Failing(), None, None, Progress(head), order.beginning).begin()
    seen: list[Any] = []
    while True:
        try:
            seen.append(next(source))
        except KeyError:
            seen.append("error")
        except StopIteration:
            break
    assert seen == wanted
