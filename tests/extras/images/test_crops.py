"""Random crops: torchvision's rule, inside of the image, and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fastq_loader.extras.images import crops

SIDES = st.integers(1, 3000)


@given(SIDES, SIDES, st.sampled_from([(3 / 4, 4 / 3), (0.1, 0.2), (6, 9)]), st.integers(0, 2**63 - 1))
@example(height=1, width=100, ratio=(0.1, 0.2), seed=0)
@example(height=100, width=1, ratio=(6, 9), seed=0)
def test_a_crop_lies_in_the_image(height: int, width: int, ratio: tuple[float, float], seed: int) -> None:
    top, left, down, across = crops.random_crop(height, width, (0.08, 1), ratio, crops.numbers(seed))
    assert 0 <= top <= top + down <= height
    assert 0 <= left <= left + across <= width
    assert down >= 1
    assert across >= 1


def test_numbers_are_splitmix64s() -> None:
    """The first outputs for the seed 1234567 as in the reference code (prng.di.unimi.it/splitmix64.c)."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert list(islice(crops.numbers(1234567), 3)) == [(value >> 11) / 2**53 for value in expected]


def test_areas_are_spread_evenly() -> None:
    of_sizes = [crops.random_crop(1000, 1000, (0.1, 1), (1, 1), crops.numbers(seed)) for seed in range(2000)]
    areas = sorted(crop.height * crop.width / 1e6 for crop in of_sizes)
    assert all(abs(areas[int(len(areas) * share)] - (0.1 + 0.9 * share)) < 0.05 for share in (0.1, 0.5, 0.9))


def test_a_crop_of_the_full_width_is_drawn() -> None:
    drawn = [crops.random_crop(200, 100, (0.5, 0.5), (1, 1), crops.numbers(seed)) for seed in range(20)]
    assert {(crop.height, crop.width) for crop in drawn} == {(100, 100)}
    assert len({crop.top for crop in drawn}) > 10, "and not the middle"


@pytest.mark.formats
def test_crops_are_torchvisions(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tests.support.formats")  # lets a torchvision for CUDA be imported
    transforms = pytest.importorskip("torchvision.transforms")
    rng = random.Random(0)
    drawn: Iterator[float] = iter(())

    def uniform(tensor: torch.Tensor, low: float = 0, high: float = 1) -> torch.Tensor:
        return tensor.fill_(low + (high - low) * next(drawn))

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform)
    monkeypatch.setattr(
        torch, "randint", lambda low, high, size: torch.tensor([low + int((high - low) * next(drawn))])
    )
    scale, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
    for _ in range(300):
        height, width, seed = rng.randrange(1, 900), rng.randrange(1, 900), rng.getrandbits(63)
        drawn = crops.numbers(seed)
        expected: Any = transforms.RandomResizedCrop.get_params(torch.zeros(3, height, width), scale, ratio)
        assert crops.random_crop(height, width, scale, ratio, crops.numbers(seed)) == expected
