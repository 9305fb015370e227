"""Generators of all three libraries: found, and their states as text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader.reading import generators

MAKE: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "torch, global": lambda: torch.default_generator,
    "random": lambda: random.Random(3),
    "random, global": lambda: random,
    "numpy": lambda: np.random.default_rng(3),
    "numpy, global": lambda: np.random,
    "numpy, legacy": lambda: np.random.RandomState(3),
    "numpy, legacy on PCG64": lambda: np.random.RandomState(np.random.PCG64(3)),
    "numpy, Philox": lambda: np.random.Generator(np.random.Philox(3)),
    "numpy, SFC64": lambda: np.random.Generator(np.random.SFC64(3)),
    "numpy, twister": lambda: np.random.Generator(np.random.MT19937(3)),
}


def draw(generator: Any) -> list[Any]:
    """Of every kind that keeps something back for the next draw."""
    if isinstance(generator, torch.Generator):
        return [*torch.rand(3, generator=generator).tolist(), torch.randn(3, generator=generator).tolist()]
    if isinstance(generator, np.random.Generator):
        return [*generator.random(3), generator.integers(9, dtype=np.int32)]
    if hasattr(generator, "randn"):
        return [*generator.rand(3), *generator.randn(3)]
    return [generator.random(), generator.gauss(0, 1)]


@pytest.mark.parametrize("kind", MAKE)
def test_a_state_goes_through_text_and_back(kind: str) -> None:
    generator = MAKE[kind]()
    draw(generator)
    state = generators.state_of(generator)
    text = generators.dump(state)
    drawn = draw(generator)
    assert not generators.same(state, generators.state_of(generator))
    loaded = generators.load(json.loads(json.dumps(text)))
    assert generators.same(state, loaded)
    assert generators.fits(generator, loaded) == ""
    generators.set_state(generator, loaded)
    assert draw(generator) == drawn
    assert len(text) < 7500


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("other", ["torch", "random", "numpy", "numpy, legacy"])
def test_a_state_of_another_kind_is_told_before_it_is_set(kind: str, other: str) -> None:
    generator, state = MAKE[kind](), generators.state_of(MAKE[other]())
    before = generators.state_of(generator)
    if kind.split(",")[0] != other.split(",")[0]:
        assert generators.fits(generator, state) != ""
    generators.fits(generator, state)
    assert generators.same(before, generators.state_of(generator))


@pytest.mark.parametrize(
    "text",
    ["", "zzz", "[]", "6", '{"dtype": "|u1", "zlib": "=="}', '{"dtype": "|u1", "zlib": "AAAA"}', 7, None],
)
def test_what_is_no_state_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="is not the state of a generator"):
        generators.load(text)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("text", ['{"dice": 6}', "[3]", '"state"', '{"torch": "AAAA"}'])
def test_what_is_no_state_of_any_generator_does_not_fit(kind: str, text: str) -> None:
    assert generators.fits(MAKE[kind](), generators.load(text)) != ""


def test_generators_are_put_back_and_set_for_a_while() -> None:
    mine, other = random.Random(1), np.random.default_rng(1)
    before = [generators.state_of(mine), generators.state_of(other)]
    wanted = random.Random(7)
    with generators.restored([mine, other], [(mine, wanted.getstate())]):
        assert mine.random() == wanted.random()
        other.random()
    assert generators.same(before[0], generators.state_of(mine))
    assert generators.same(before[1], generators.state_of(other))


def test_generators_are_found_by_the_way_to_them_and_each_once() -> None:
    generator, rng = torch.Generator(), random.Random(1)
    dataset = SimpleNamespace(rng=np.random.default_rng(1))
    sampler = SimpleNamespace(inner=SimpleNamespace(generator=generator), rngs=[rng], data=dataset)
    found = generators.find({"generator": generator, "sampler": sampler}, but=[dataset])
    assert found == {"generator": generator, "sampler.rngs.0": rng}
