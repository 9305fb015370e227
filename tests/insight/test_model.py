"""The model: what must hold of any costs, and closed forms where there are some."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.insight.model import Costs, Setting, seconds_per_batch

#: CPUs that never limit.
MANY = 1e9
TIMES = st.floats(0.001, 1.0)
LOADS = st.lists(TIMES, min_size=1, max_size=20).map(tuple)
COSTS = st.builds(
    Costs,
    LOADS,
    pack=TIMES,
    overhead=TIMES,
    device=TIMES,
    draw=TIMES,
    step=TIMES,
    load_cpu=st.floats(0, 1),
    step_cpu=TIMES,
)
WORKERS, PREFETCH = st.integers(1, 8), st.integers(1, 4)
#: A run ends somewhere in the middle of what repeats.
ENDS = 1.1


@given(COSTS, st.floats(0.5, 8))
def test_without_workers_everything_is_done_in_turn(costs: Costs, cpus: float) -> None:
    expected = costs.load + costs.draw + costs.device + costs.step
    assert seconds_per_batch(costs, Setting(0), cpus) == pytest.approx(expected)


@given(COSTS, TIMES, WORKERS, st.integers(2, 4), st.booleans())
def test_equal_batches_take_what_the_slower_side_takes(
    costs: Costs, load: float, workers: int, prefetch: int, dynamic: bool
) -> None:
    costs = replace(costs, loads=(load,))
    consumer = costs.draw + costs.overhead + costs.device + costs.step
    found = seconds_per_batch(costs, Setting(workers, prefetch, dynamic), MANY)
    assert found == pytest.approx(max(consumer, (load + costs.pack) / workers), rel=0.05)


@given(COSTS, TIMES, WORKERS)
def test_in_a_window_of_one_only_the_step_runs_beside_loading(
    costs: Costs, load: float, workers: int
) -> None:
    costs = replace(costs, loads=(load,))
    between = costs.draw + costs.overhead + costs.device
    found = seconds_per_batch(costs, Setting(workers, fixed_window=1), MANY)
    assert found == pytest.approx(max(costs.step, load + costs.pack) + between, rel=0.01)


@given(COSTS, WORKERS, PREFETCH, st.booleans(), st.floats(0.5, 8))
def test_nothing_is_faster_than_consumer_workers_and_cpus(
    costs: Costs, workers: int, prefetch: int, dynamic: bool, cpus: float
) -> None:
    found = seconds_per_batch(costs, Setting(workers, prefetch, dynamic), cpus)
    assert found >= 0.999 * (costs.draw + costs.overhead + costs.device + costs.step)
    assert found * ENDS >= (costs.load + costs.pack) / workers
    assert found >= costs.cpu / cpus


@given(COSTS, WORKERS, WORKERS)
def test_more_workers_are_never_slower_where_there_are_cpus(costs: Costs, some: int, more: int) -> None:
    few, many = (seconds_per_batch(costs, Setting(n, dynamic=True), MANY) for n in sorted((some, more)))
    assert many <= few * ENDS


@given(COSTS, WORKERS, PREFETCH)
def test_dynamic_is_never_slower_than_taking_turns(costs: Costs, workers: int, prefetch: int) -> None:
    turns, dynamic = (
        seconds_per_batch(costs, Setting(workers, prefetch, how), MANY) for how in (False, True)
    )
    assert dynamic <= turns * ENDS


@given(COSTS, WORKERS, st.floats(0.5, 8), st.floats(1.1, 8))
def test_times_are_in_proportion(costs: Costs, workers: int, cpus: float, factor: float) -> None:
    for setting in (Setting(0), Setting(workers)):
        found = seconds_per_batch(costs.times(factor), setting, cpus)
        assert found == pytest.approx(factor * seconds_per_batch(costs, setting, cpus))


def test_turns_wait_for_a_slow_batch_and_dynamic_goes_on() -> None:
    costs = Costs((0.01,) * 9 + (0.2,))
    assert seconds_per_batch(costs, Setting(2), MANY) == pytest.approx(0.023, rel=0.1)
    assert seconds_per_batch(costs, Setting(2, dynamic=True), MANY) == pytest.approx(0.29 / 20, rel=0.1)


def test_sleeping_needs_no_cpu() -> None:
    costs = Costs((0.1,), load_cpu=0.0)
    assert seconds_per_batch(costs, Setting(10), 1) == pytest.approx(0.01, rel=0.05)
    assert seconds_per_batch(replace(costs, load_cpu=1.0), Setting(10), 1) == pytest.approx(0.1)


def test_another_step_uses_no_cpu() -> None:
    costs = Costs((0.1,), step=1.0, step_cpu=1.0).with_step(0.5)
    assert (costs.step, costs.step_cpu, costs.cpu) == (0.5, 0.0, 0.1)
