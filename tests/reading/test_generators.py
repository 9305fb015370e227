"""Generators of all three libraries: found, put back, seeded as torch does it, and their states as text."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace as BlockOwner
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data._utils.worker import _generate_state

from fastq_loader.extras.resume import text as text_of
from fastq_loader.reading import generators
from tests.support.thorough import examples

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
    text = text_of.dump(state)
    drawn = draw(generator)
    assert not generators.same(state, generators.state_of(generator))
    loaded = text_of.load(json.loads(json.dumps(text)))
    assert generators.same(state, loaded)
    assert text_of.fits(generator, loaded) == ""
    generators.set_state(generator, loaded)
    assert draw(generator) == drawn
    assert len(text) < 7500


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("other", ["torch", "random", "numpy"])
def test_a_state_of_another_kind_is_told_before_it_is_set(kind: str, other: str) -> None:
    generator, state = MAKE[kind](), generators.state_of(MAKE[other]())
    before = generators.state_of(generator)
    if kind.split(",")[0] != other.split(",")[0]:
        assert text_of.fits(generator, state) != ""
    text_of.fits(generator, state)
    for text in ('{"dice": 6}', "[3]", '"state"', '{"torch": "AAAA"}'):
        assert text_of.fits(generator, text_of.load(text)) != ""
    assert generators.same(before, generators.state_of(generator))


def test_generators_are_put_back_and_set_for_a_while() -> None:
    mine, other = random.Random(1), np.random.default_rng(1)
    before = [generators.state_of(mine), generators.state_of(other)]
    wanted = random.Random(7)
    with generators.restored({"mine": mine, "other": other}, {"mine": wanted.getstate()}):
        assert mine.random() == wanted.random()
        other.random()
    assert generators.same(before[0], generators.state_of(mine))
    assert generators.same(before[1], generators.state_of(other))


def test_generators_are_found_by_the_way_to_them_and_each_once() -> None:
    generator, rng = torch.Generator(), random.Random(1)
    dataset = BlockOwner(rng=np.random.default_rng(1))
    sampler = BlockOwner(inner=BlockOwner(generator=generator), rngs=[rng], data=dataset)
    found = generators.find({"generator": generator, "sampler": sampler}, but=[dataset])
    assert found == ({"generator": generator, "sampler.rngs.0": rng}, True)


class OwnState(random.Random):
    """May have a state that `getstate` does not return."""


class OwnGetstate(random.Random):
    def getstate(self) -> Any:
        raise RuntimeError("user code")


def deep(levels: int) -> Any:
    held: Any = random.Random(1)
    for _ in range(levels):
        held = BlockOwner(held=held)
    return held


RNG = random.Random(1)


@pytest.mark.parametrize(
    ("root", "found", "all_seen"),
    [
        ([RNG, torch.Generator(), np.random.PCG64(1), np, random, dict, "x"], 3, True),
        ({"rng": RNG, "size": 3}, 1, True),
        ([*range(100_000), RNG], 0, True),
        ([RNG, *map(str, range(5000))], 1, False),
        ([BlockOwner(at=at) for at in range(2000)], 0, False),
        (deep(3), 1, True),
        (deep(4), 0, False),
        (functools.partial(max, RNG), 1, True),
        (RNG.random, 1, True),
        (random.random, 0, True),
        (len, 0, True),
        (draw, 0, True),
        (lambda at=RNG: at, 0, False),
        ([random.SystemRandom()], 0, False),
        ([OwnGetstate()], 0, False),
        ([OwnState(1)], 1, False),
        (np.array([RNG, None], object), 0, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_search_says_whether_it_saw_all(root: Any, found: int, all_seen: bool) -> None:
    own, seen = generators.find({"root": root})
    assert (len(own), seen) == (found, all_seen)


BASE_SEEDS = st.integers(0, 2**63 - 1)


@pytest.fixture(autouse=True)
def _generators_as_they_were() -> Iterator[None]:
    with generators.restored():
        yield


def draw_of_each() -> tuple[Any, ...]:
    """Some numbers of each of the three generators."""
    return (
        random.getrandbits(64),
        random.random(),
        torch.rand(3).tolist(),
        int(torch.randint(2**62, ()).item()),
        np.random.rand(3).tolist(),
        int(np.random.randint(2**62)),
    )


@examples(100)
@given(BASE_SEEDS, st.integers(0, 1000))
@example(0, 0)
@example(2**63 - 1, 7)
@example(2**32, 0)
@example(2**32 - 1, 1)
def test_the_generators_are_seeded_as_torchs_worker_does(base_seed: int, worker: int) -> None:
    # torch/utils/data/_utils/worker.py, _worker_loop
    random.seed(base_seed + worker)
    torch.manual_seed(base_seed + worker)
    np.random.seed(_generate_state(base_seed, worker))
    expected = draw_of_each()
    assert generators.seed_worker(base_seed, worker) == base_seed + worker
    assert draw_of_each() == expected


@pytest.mark.parametrize(
    ("built", "in_bad_fork", "expected"),
    [
        ((), False, []),
        (("cuda",), False, ["cuda"]),
        (("cuda",), True, []),
        *((built, False, ["all"]) for built in (("mps",), ("cuda", "xpu"), ("custom",))),
    ],
)
def test_the_devices_of_the_build_are_seeded(
    built: tuple[str, ...], in_bad_fork: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: "cuda" in built)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: "mps" in built)
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: "xpu" in built)
    name = "mine" if "custom" in built else "privateuseone"
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: in_bad_fork)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: seeded.append(("cuda", seed)))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeded.append(("all", seed)))
    assert generators.seed_worker(40, 2) == 42
    assert seeded == [(what, 42) for what in expected]
    assert torch.initial_seed() == 42 or expected == ["all"]


@examples(100)
@given(BASE_SEEDS, st.lists(st.integers(0, 2**62), min_size=2, max_size=4, unique=True))
def test_batches_draw_different_numbers_and_the_same_whoever_loads_them(
    base_seed: int, batches: list[int]
) -> None:
    draws = []
    for batch in [*batches, *batches]:
        generators.seed_batch(base_seed, batch)
        draws.append(draw_of_each())
    assert draws[: len(batches)] == draws[len(batches) :]
    for position in (0, 1, 3, 5):
        assert len({drawn[position] for drawn in draws}) == len(batches)
