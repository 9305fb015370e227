"""Seeds of the workers' generators: torch's to the bit, and what an abandoned epoch leaves behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data._utils.worker import _generate_state

from fastq_loader import seeding

BASE_SEEDS = st.integers(0, 2**63 - 1)
WORKERS = st.integers(0, 1000)


@pytest.fixture(autouse=True)
def _generators_as_they_were() -> Iterator[None]:
    state = seeding.capture()
    yield
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    np.random.set_state(state[2])


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
    ids=str,
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


@settings(deadline=None, max_examples=30)
@given(BASE_SEEDS, st.lists(WORKERS, min_size=2, max_size=4, unique=True))
def test_workers_draw_different_numbers(base_seed: int, workers: list[int]) -> None:
    draws = []
    for worker in workers:
        seeding.seed_worker(base_seed, worker)
        draws.append(draw())
    for position in (0, 1, 3, 5):
        assert len({drawn[position] for drawn in draws}) == len(draws)


def test_capturing_changes_nothing() -> None:
    seeding.seed_worker(5, 1)
    expected = draw()
    seeding.seed_worker(5, 1)
    seeding.capture()
    assert draw() == expected


@settings(deadline=None, max_examples=30)
@given(BASE_SEEDS, st.integers(0, 5), st.integers(0, 5))
def test_after_an_abandoned_epoch_it_does_not_matter_how_far_it_came(
    base_seed: int, first: int, second: int
) -> None:
    after = []
    for count in (first, second):
        seeding.seed_worker(base_seed, 0)
        state = seeding.capture()
        for _ in range(count):
            draw()
        state = seeding.rewind(state)
        after.append(draw())
        seeding.rewind(state)  # a second epoch abandoned in a row
        after.append(draw())
    assert after[:2] == after[2:]
    assert after[0] != after[1]


def test_the_next_epoch_repeats_no_number_of_the_abandoned_one() -> None:
    seeding.seed_worker(3, 0)
    state = seeding.capture()
    abandoned = [draw() for _ in range(50)]
    seeding.rewind(state)
    following = [draw() for _ in range(50)]
    for position in (0, 1, 3, 5):
        assert not {drawn[position] for drawn in abandoned} & {drawn[position] for drawn in following}


def test_what_rewind_returns_is_the_state_that_it_set() -> None:
    seeding.seed_worker(3, 0)
    python, torch_state, numpy_state = seeding.rewind(seeding.capture())
    expected = draw()
    random.setstate(python)
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    assert draw() == expected
