"""A loader's samplers: what they are compared by, and which of them are told the epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from fastq_loader import PermutationSampler, StatefulDataLoader
from fastq_loader.extras.resume.samplers import compared
from tests.support.samplers import Users

N = 11
NUMBERS: Any = range(N)


class CountsEpochs(Users):
    seed = 0

    def __iter__(self) -> Iterator[int]:
        order = list(range(N))
        random.Random(self.seed).shuffle(order)
        self.seed += 1
        yield from order


def test_a_seed_that_counts_is_compared_as_it_was_when_the_epoch_began() -> None:
    first = StatefulDataLoader(NUMBERS, sampler=CountsEpochs(N))
    iterator = iter(first)
    next(iterator)
    second = StatefulDataLoader(NUMBERS, sampler=CountsEpochs(N))
    second.load_state_dict(first.state_dict())
    assert list(second) == list(iterator)
    with pytest.raises(ValueError, match="field 'seed': 1 was saved, and the loader has 0"):
        StatefulDataLoader(NUMBERS, sampler=CountsEpochs(N)).load_state_dict(first.state_dict())
    assert compared(first._index_sampler)["seed"] == 1


class Epochs(Users):
    """Of the user's own, with `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % N for index in range(N)])


@pytest.mark.parametrize("kind", [lambda: DistributedSampler(NUMBERS, 1, 0), lambda: PermutationSampler(N)])
def test_epochs_are_set_again_where_it_is_known_what_that_means(kind: Callable[[], Any]) -> None:
    for make, found in ((kind, 4), (lambda: Epochs(N), 0)):
        one, other = (StatefulDataLoader(NUMBERS, sampler=make()) for _ in range(2))
        one.sampler.set_epoch(4)  # type: ignore[attr-defined]
        iterator = iter(one)
        next(iterator)
        other.load_state_dict(one.state_dict())
        assert other.sampler.epoch == found  # type: ignore[attr-defined]
        if found:
            assert list(other) == list(iterator)
        else:
            with pytest.raises(ValueError, match="field 'order'"):
                iter(other)
            other.sampler.set_epoch(4)  # type: ignore[attr-defined]
            assert list(other) == list(iterator)


def test_the_epoch_set_between_two_epochs_is_in_the_state_of_the_second() -> None:
    one, other = (StatefulDataLoader(NUMBERS, sampler=DistributedSampler(NUMBERS, 1, 0)) for _ in range(2))
    for epoch in (1, 4):
        one.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        iterator = iter(one)
        next(iterator)
        other.load_state_dict(one.state_dict())
        assert list(other) == list(iterator)
        assert other.sampler.epoch == epoch  # type: ignore[attr-defined]


class SeedableRandomSampler(RandomSampler):
    """Accelerate's: seeded by torch's global generator when it is made, and by the epoch."""

    def __init__(self) -> None:
        super().__init__(NUMBERS, generator=torch.Generator())
        self.initial_seed, self.epoch = torch.initial_seed(), 0

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_seed_from_the_global_generator_is_set_to_that_which_was_saved() -> None:
    """`prepare()` makes such a sampler, and a program may call `set_seed()` after that."""
    loaders = []
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        loaders.append(StatefulDataLoader(NUMBERS, sampler=SeedableRandomSampler()))
    first, second, third = loaders
    list(first)
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    second.load_state_dict(state)
    assert [list(second), list(second)] == [list(iterator), list(first)]
    third.load_state_dict(state, ignore=("initial_seed",))
    with pytest.raises(ValueError, match="does not yield the same indices"):
        iter(third)


def test_an_epoch_that_was_set_before_a_state_is_loaded_counts_unless_it_is_an_earlier_one() -> None:
    first = StatefulDataLoader(NUMBERS, sampler=PermutationSampler(N))
    first.sampler.set_epoch(2)  # type: ignore[union-attr]
    list(first)
    state = first.state_dict()
    for epoch, expected in ((3, 3), (1, 2)):
        second = StatefulDataLoader(NUMBERS, sampler=PermutationSampler(N))
        second.sampler.set_epoch(epoch)  # type: ignore[union-attr]
        second.load_state_dict(state)
        assert second.sampler.epoch == expected  # type: ignore[union-attr]


def test_a_resumed_epoch_gets_no_hint_that_it_repeats_its_order() -> None:
    loader = StatefulDataLoader(range(80), sampler=PermutationSampler(80))
    batches = iter(loader)
    left = [next(batches) for _ in range(40)] and loader.state_dict()
    loader.load_state_dict(left)
    assert len(list(loader)) == 40
