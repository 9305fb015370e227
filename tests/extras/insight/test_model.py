"""The model: what must hold of any costs, closed forms where there are some, and where costs come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader import DataLoader, Dynamic, options
from fastq_loader.epoch import resources
from fastq_loader.extras.insight import causes
from fastq_loader.extras.insight.facts import profile_of
from fastq_loader.extras.insight.model import (
    Costs,
    Setting,
    costs_of,
    seconds_per_batch,
)
from fastq_loader.statistics.records import ITER
from fastq_loader.system import pages
from tests.support.records import counted, folded, gives, record
from tests.support.thorough import examples

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


@examples(100)
@given(COSTS, st.floats(0.5, 8))
def test_without_workers_everything_is_done_in_turn(costs: Costs, cpus: float) -> None:
    expected = costs.load + costs.draw + costs.device + costs.step
    assert seconds_per_batch(costs, Setting(0), cpus) == pytest.approx(expected)


@examples(100)
@given(COSTS, TIMES, WORKERS, st.integers(2, 4), st.booleans())
def test_the_slower_side_wins(costs: Costs, load: float, workers: int, prefetch: int, dynamic: bool) -> None:
    costs = replace(costs, loads=(load,))
    consumer = costs.draw + costs.overhead + costs.device + costs.step
    found = seconds_per_batch(costs, Setting(workers, prefetch, dynamic), MANY)
    assert found == pytest.approx(max(consumer, (load + costs.pack) / workers), rel=0.05)


def test_turns_wait_for_a_slow_batch_and_dynamic_goes_on() -> None:
    costs = Costs((0.01,) * 9 + (0.2,))
    assert seconds_per_batch(costs, Setting(2), MANY) == pytest.approx(0.023, rel=0.1)
    assert seconds_per_batch(costs, Setting(2, dynamic=True), MANY) == pytest.approx(0.29 / 20, rel=0.1)


@pytest.mark.parametrize("schedule", ["round_robin", "dynamic", Dynamic(window=9)])
@pytest.mark.parametrize("batch_bytes", [0.0, 38.5e6, 1e12])
def test_the_window_is_as_wide_as_the_loaders_becomes(schedule: Any, batch_bytes: float) -> None:
    loader = DataLoader(range(8), num_workers=8, schedule=schedule)
    window = options.plan(loader).window
    while room := window.room(window.size, 0, batch_bytes):
        window.widen_to(window.size + room)
    counters = resources.of(loader).counters
    counters.epochs = 1
    setting = replace(profile_of(loader, None, False).setting, num_workers=8)
    assert setting.window(batch_bytes, pages.installed()) == window.size


def test_sleeping_needs_no_cpu() -> None:
    costs = Costs((0.1,), load_cpu=0.0)
    assert seconds_per_batch(costs, Setting(10), 1) == pytest.approx(0.01, rel=0.05)
    assert seconds_per_batch(replace(costs, load_cpu=1.0), Setting(10), 1) == pytest.approx(0.1)


MS = 10**6


def test_of_workers_everything_is_measured() -> None:
    """In milliseconds: 10 from call to call; the batches came as 1, 0."""
    times = {0: (0, 0, 4 * MS, 6 * MS), 1: (0, 0, 2 * MS, 3 * MS)}
    calls = (
        gives(at, at + 4 * MS, times[seq], seq=seq, worker=seq, drew=MS, device=2 * MS)
        for seq, at in ((1, 10 * MS), (0, 20 * MS))
    )
    counters = counted(record(ITER, 0, 0), *calls)
    counters.logs[0].used_cpu(20 * MS)
    found: Any = costs_of(causes.breakdowns(counters)[0], 1.0, 38e6)
    assert found.batch_bytes == 38e6
    assert found.loads == (0.004, 0.002), "in the order of batches"
    assert found.pack == pytest.approx(0.0015)
    assert (found.draw, found.device) == (0.001, 0.002)
    assert found.overhead == pytest.approx(0.001), "what is left of a call"
    assert found.step == pytest.approx(0.008), "16 ms before and between two batches"
    assert found.step_cpu == pytest.approx(0.010 - 0.004), "of 10 ms without what the loader did"


def test_a_wait_is_no_overhead_though_it_counts_as_transport() -> None:
    first = gives(0, 0, (0, 0, MS, MS))
    waits = {"wait_from": 2 * MS, "wait_until": 10 * MS, "workers": 8 * MS}
    epoch = folded(
        record(ITER, 0, 0), first, gives(2 * MS, 11 * MS, (MS, MS, 3 * MS, 9 * MS), seq=1, **waits)
    )
    assert (epoch.epoch.transport_seconds, epoch.epoch.workers_seconds) == (0.008, 0.001)
    found: Any = costs_of(epoch, 1.0)
    assert found.overhead == pytest.approx(0.0005)


def serial(cpu: int) -> causes.Breakdown:
    waits = {"wait_from": 6 * MS, "wait_until": 10 * MS, "workers": 4 * MS, "worker": -1, "pid": 0}
    counters = counted(
        record(ITER, 0, 0), gives(6 * MS, 10 * MS, (6 * MS, 8 * MS, 10 * MS, 10 * MS), **waits)
    )
    counters.logs[0].used_cpu(cpu * MS)
    return causes.breakdowns(counters)[0]


@pytest.mark.parametrize(
    ("cpu", "load_cpu", "step_cpu"), [(0, 1.0, 0.0), (1, 0.25, 0.0), (4, 1.0, 0.0), (9, 1.0, 0.005)]
)
def test_without_workers_the_cpu_is_the_loadings_first(cpu: int, load_cpu: float, step_cpu: float) -> None:
    found: Any = costs_of(serial(cpu), None)
    assert (found.loads, found.step) == ((0.004,), 0.006)
    assert found.load_cpu == pytest.approx(load_cpu)
    assert found.step_cpu == pytest.approx(step_cpu)
    assert found.pack > 0 < found.overhead, "workers would have both"


@pytest.mark.parametrize(("contention", "load_cpu"), [(0.0, 0.25), (0.8, 0.85), (1.0, 1.0)])
def test_on_a_busy_machine_loading_waits_for_a_cpu(contention: float, load_cpu: float) -> None:
    found: Any = costs_of(serial(1), None, 0.0, contention)
    assert found.load_cpu == pytest.approx(load_cpu)
