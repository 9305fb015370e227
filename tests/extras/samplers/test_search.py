"""The deep search for generators: whether it saw all, and the seeds of those that it found."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader.extras.samplers import search
from tests.support.graphs import many_objects, much_data


class Counts(random.Random):
    """Seeded by code of the user's."""

    seeded = 0

    def seed(self, *args: Any) -> None:
        self.seeded += 1
        super().seed(*args)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(1, generator=g).item()),
        (lambda: Counts(1), lambda g: g.random()),
        (lambda: np.random.default_rng(1), lambda g: g.random()),
        (lambda: np.random.RandomState(1), lambda g: g.standard_normal()),  # which it draws in pairs
    ],
)
def test_own_generators_are_seeded_by_their_names_and_batches(make: Any, draw: Any) -> None:
    def drawn(base_seed: int, batch: int, name: str, before: int) -> float:
        own = make()
        for _ in range(before):
            draw(own)
        seeded = getattr(own, "seeded", 0)
        search.seed({name: own}, base_seed, batch)
        assert getattr(own, "seeded", 0) == seeded, "no code of the user's ran"
        number: float = draw(own)
        return number

    assert drawn(5, 7, "dataset.rng", 0) == drawn(5, 7, "dataset.rng", 3)
    others = {drawn(5, 8, "dataset.rng", 0), drawn(6, 7, "dataset.rng", 0), drawn(5, 7, "dataset.other", 0)}
    assert len(others | {drawn(5, 7, "dataset.rng", 0)}) == 4


@pytest.mark.parametrize("make", [np.random.Generator, np.random.RandomState])
def test_a_generator_of_other_bits_than_numpys_is_left_alone(make: Any) -> None:
    class Bits(np.random.PCG64):
        made = 0

        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            Bits.made += 1

    own, same = (make(Bits(3)) for _ in range(2))
    search.seed({"dataset.rng": own}, 1, 2)
    assert own.bytes(8) == same.bytes(8)
    assert Bits.made == 2, "no code of the user's ran"


class OwnState(random.Random):
    """May have a state that `getstate` does not return."""


class OwnGetstate(random.Random):
    def getstate(self) -> Any:
        raise RuntimeError("user code")


@pytest.mark.parametrize(
    ("root", "found", "complete", "certain"),
    [
        ([random.Random(1), np.random.PCG64(1)], 2, True, True),
        ([random.Random(1), much_data(2000)], 1, True, False),
        ([random.Random(1), many_objects(2000)], 1, False, False),
        ([random.SystemRandom()], 0, False, False),
        ([OwnGetstate()], 0, False, False),
        ([OwnState(1)], 1, False, False),
        ([random.random, functools.partial(random.uniform, 0, 1)], 0, True, True),
    ],
)
def test_what_is_found_says_whether_it_is_all(root: Any, found: int, complete: bool, certain: bool) -> None:
    own = search.find({"root": root})
    assert (len(own), own.complete, own.certain) == (found, complete, certain)
