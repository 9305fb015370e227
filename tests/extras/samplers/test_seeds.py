"""Seeds of the generators that a sampler holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader.extras.samplers import seeds


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
def test_own_generators_are_seeded_by_their_places_and_batches(make: Any, draw: Any) -> None:
    def drawn(base_seed: int, batch: int, at: int, before: int) -> float:
        own = make()
        for _ in range(before):
            draw(own)
        seeded = getattr(own, "seeded", 0)
        seeds.seed([*(random.Random() for _ in range(at)), own], base_seed, batch)
        assert getattr(own, "seeded", 0) == seeded, "no code of the user's ran"
        number: float = draw(own)
        return number

    assert drawn(5, 7, 0, 0) == drawn(5, 7, 0, 3)
    assert len({drawn(5, 7, 0, 0), drawn(5, 8, 0, 0), drawn(6, 7, 0, 0), drawn(5, 7, 1, 0)}) == 4


@pytest.mark.parametrize("make", [np.random.Generator, np.random.RandomState])
def test_a_generator_of_other_bits_than_numpys_is_left_alone(make: Any) -> None:
    class Bits(np.random.PCG64):
        made = 0

        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            Bits.made += 1

    own, same = (make(Bits(3)) for _ in range(2))
    seeds.seed([own], 1, 2)
    assert own.bytes(8) == same.bytes(8)
    assert Bits.made == 2, "no code of the user's ran"
