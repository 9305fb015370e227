"""Seeds of the workers' generators: torch's to the bit, and how a worker sees that one was drawn from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace as Holder
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data._utils.worker import _generate_state

from fastq_loader.reading import seeding

BASE_SEEDS = st.integers(0, 2**63 - 1)
WORKERS = st.integers(0, 1000)


@pytest.fixture(autouse=True)
def _generators_as_they_were() -> Iterator[None]:
    with seeding.put_back():
        yield


def draw() -> tuple[Any, ...]:
    """Some numbers of each of the three generators."""
    return (
        random.getrandbits(64),
        random.random(),
        torch.rand(3).tolist(),
        int(torch.randint(2**62, ()).item()),
        np.random.rand(3).tolist(),
        int(np.random.randint(2**62)),
    )


@settings(deadline=None, max_examples=100)
@given(BASE_SEEDS, WORKERS)
@example(0, 0)
@example(2**63 - 1, 7)
@example(2**32, 0)
@example(2**32 - 1, 1)
def test_the_generators_are_seeded_as_torchs_worker_does(base_seed: int, worker: int) -> None:
    # torch/utils/data/_utils/worker.py, _worker_loop
    random.seed(base_seed + worker)
    torch.manual_seed(base_seed + worker)
    np.random.seed(_generate_state(base_seed, worker))
    expected = draw()
    assert seeding.seed_worker(base_seed, worker) == base_seed + worker
    assert draw() == expected


@pytest.mark.parametrize(
    ("built", "in_bad_fork", "expected"),
    [
        ((), False, []),
        (("cuda",), False, ["cuda"]),
        (("cuda",), True, []),
        (("mps",), False, ["all"]),
        (("xpu",), False, ["all"]),
        (("custom",), False, ["all"]),
        (("cuda", "xpu"), False, ["all"]),
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
    assert seeding.seed_worker(40, 2) == 42
    assert seeded == [(what, 42) for what in expected]
    assert torch.initial_seed() == 42 or expected == ["all"]


def test_putting_back_leaves_the_generators_as_they_were() -> None:
    before = seeding.states()
    with seeding.put_back():
        seeding.seed_batch(7, 3)
    assert seeding.states() == before


@given(BASE_SEEDS, st.lists(st.integers(0, 2**62), min_size=2, max_size=4, unique=True))
def test_batches_draw_different_numbers_and_the_same_whoever_loads_them(
    base_seed: int, batches: list[int]
) -> None:
    draws = []
    for batch in [*batches, *batches]:
        seeding.seed_batch(base_seed, batch)
        draws.append(draw())
    assert draws[: len(batches)] == draws[len(batches) :]
    for position in (0, 1, 3, 5):
        assert len({drawn[position] for drawn in draws}) == len(batches)


class Unpicklable(random.Random):
    def __reduce__(self) -> Any:
        raise TypeError("not today")


@pytest.mark.parametrize(
    ("generator", "advance"),
    [
        (torch.Generator().manual_seed(1), lambda g: torch.rand(1, generator=g)),
        (random.Random(1), lambda g: g.random()),
        (np.random.default_rng(1), lambda g: g.random()),
        (np.random.RandomState(1), lambda g: g.rand()),
        (None, lambda _: random.random()),
        (None, lambda _: torch.rand(1)),
        (None, lambda _: np.random.rand()),
    ],
)
@pytest.mark.parametrize(
    "put",
    [
        lambda g: Holder(generator=g),
        lambda g: Holder(dataset=Holder(transforms=[Holder(), {"crop": (Holder(rng=g),)}])),
        lambda g: [g],
    ],
    ids=["attribute", "deep inside", "in a list"],
)
def test_a_draw_from_a_global_generator_or_one_of_the_datasets_own_is_seen(
    generator: Any, advance: Any, put: Any
) -> None:
    dataset = put(generator)
    before = seeding.states(dataset, None)
    assert seeding.states(dataset, None) == before
    advance(generator)
    assert seeding.states(dataset, None) != before


def test_a_generator_made_later_is_seen_and_one_of_unknown_state_counts_as_drawn_from() -> None:
    dataset = Holder(rng=None)
    before = seeding.states(dataset)
    dataset.rng = random.Random(1)
    assert seeding.states(dataset) != before
    dataset.rng = Unpicklable(1)
    assert seeding.states(dataset) != seeding.states(dataset)


def test_looking_for_generators_ends_and_passes_over_data() -> None:
    ring: list[Any] = []
    ring.append(ring)
    deep: Any = random.Random(1)
    for _ in range(5000):
        deep = Holder(inner=deep)
    large = [random.Random(1)] * 1000
    quick = seeding.states(None)
    for dataset in (ring, deep, large, Holder(module=np, kind=dict, text="x" * 10**6, ring=ring)):
        assert seeding.states(dataset) == quick
