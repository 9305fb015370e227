"""The model: what must hold of any costs, closed forms where there are some, and where costs come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader import DataLoader, Dynamic, options
from fastq_loader.epoch import resources
from fastq_loader.extras.insight.facts import profile_of
from fastq_loader.extras.insight.model import (
    Costs,
    Setting,
    costs_of,
    seconds_per_batch,
)
from fastq_loader.ipc.messages import Answer
from fastq_loader.statistics.epoch import EpochCounters
from fastq_loader.statistics.records import DEVICE, DREW, LOADED, PART, WAITED, Step
from fastq_loader.statistics.snapshots import EpochStatistics
from fastq_loader.statistics.workers import WorkerCounters
from fastq_loader.system import pages
from tests.support import records
from tests.support.loaders import MANY_WORKERS
from tests.support.records import call, came, gives
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


@examples(100)
@given(COSTS, TIMES, WORKERS)
def test_in_a_window_of_one_only_the_step_runs_beside_loads(costs: Costs, load: float, workers: int) -> None:
    costs = replace(costs, loads=(load,))
    between = costs.draw + costs.overhead + costs.device
    found = seconds_per_batch(costs, Setting(workers, fixed_window=1), MANY)
    assert found == pytest.approx(max(costs.step, load + costs.pack) + between, rel=0.01)


@examples(100)
@given(COSTS, WORKERS, PREFETCH, st.booleans(), st.floats(0.5, 8))
def test_the_limits_are_kept(costs: Costs, workers: int, prefetch: int, dynamic: bool, cpus: float) -> None:
    found = seconds_per_batch(costs, Setting(workers, prefetch, dynamic), cpus)
    assert found >= 0.999 * (costs.draw + costs.overhead + costs.device + costs.step)
    assert found * ENDS >= (costs.load + costs.pack) / workers
    assert found >= costs.cpu / cpus


@examples(100)
@given(COSTS, WORKERS, WORKERS)
def test_more_workers_are_never_slower_where_there_are_cpus(costs: Costs, some: int, more: int) -> None:
    few, many = (seconds_per_batch(costs, Setting(n, dynamic=True), MANY) for n in sorted((some, more)))
    assert many <= few * ENDS


@examples(100)
@given(COSTS, WORKERS, PREFETCH)
def test_dynamic_is_never_slower_than_taking_turns(costs: Costs, workers: int, prefetch: int) -> None:
    turns, dynamic = (
        seconds_per_batch(costs, Setting(workers, prefetch, how), MANY) for how in (False, True)
    )
    assert dynamic <= turns * ENDS


def test_turns_wait_for_a_slow_batch_and_dynamic_goes_on() -> None:
    costs = Costs((0.01,) * 9 + (0.2,))
    assert seconds_per_batch(costs, Setting(2), MANY) == pytest.approx(0.023, rel=0.1)
    assert seconds_per_batch(costs, Setting(2, dynamic=True), MANY) == pytest.approx(0.29 / 20, rel=0.1)


@MANY_WORKERS
@pytest.mark.parametrize("schedule", ["round_robin", "dynamic", Dynamic(window=9)])
@pytest.mark.parametrize("batch_bytes", [0.0, 38.5e6, 1e12])
def test_the_window_is_as_wide_as_the_loaders_becomes(schedule: Any, batch_bytes: float) -> None:
    loader = DataLoader(range(8), num_workers=8, schedule=schedule)
    window = options.plan(loader).window
    while room := window.room(window.size, 0, batch_bytes):
        window.widen_to(window.size + room)
    counters = resources.of(loader).counters
    counters.epochs = 1
    setting = replace(profile_of(loader, counters.snapshot(), counters, None).setting, num_workers=8)
    assert setting.window(batch_bytes, pages.installed()) == window.size


def test_large_batches_have_a_narrower_window() -> None:
    setting = Setting(8, dynamic=True)
    assert [setting.window(each, 1 << 40) for each in (0.0, 4e6, 38.5e6, 1e9)] == [256, 256, 27, 24]
    assert setting.window(38.5e6, 4 << 30) == 24, "a sixteenth of the memory"
    costs = Costs((0.01,) * 99 + (2.0,))
    narrow, wide = (seconds_per_batch(replace(costs, batch_bytes=each), setting, MANY) for each in (38e6, 0))
    assert narrow > 1.5 * wide


def test_sleeping_needs_no_cpu() -> None:
    costs = Costs((0.1,), load_cpu=0.0)
    assert seconds_per_batch(costs, Setting(10), 1) == pytest.approx(0.01, rel=0.05)
    assert seconds_per_batch(replace(costs, load_cpu=1.0), Setting(10), 1) == pytest.approx(0.1)


EPOCH = EpochStatistics(1, batches=100, seconds=10.0, consumer_seconds=4.0, workers_seconds=6.0)


MS = 1_000_000


def answer(seq: int, started: int, collated: int, finished: int, cpu: int = 0) -> Answer:
    return records.answer(seq, started * MS, collated * MS, finished * MS, cpu=cpu * MS)


def epoch_of_two_batches(*more: Step) -> EpochCounters:
    """In milliseconds: 10 from call to call; the batches came as 1, 0."""
    ready = {0: answer(0, 0, 4, 6), 1: answer(1, 0, 2, 3)}
    epoch = EpochCounters(1, 0)
    epoch.fold(call(PART, 0, 0, came(ready[1]), came(ready[0]), *more))
    for seq, entered in ((0, 10 * MS), (1, 20 * MS)):
        drew, device = (DREW, entered, entered + MS, ()), (DEVICE, entered + MS, entered + 3 * MS)
        epoch.fold(gives(ready[seq], entered, entered + 4 * MS, drew, device))
    return epoch


def test_of_workers_everything_is_measured() -> None:
    epoch = epoch_of_two_batches()
    epoch.used_cpu(20 * MS)
    workers = (WorkerCounters(0, 70), WorkerCounters(1, 71))
    found: Any = costs_of(epoch, workers, 38e6)
    assert found.batch_bytes == 38e6
    assert found.loads == (0.004, 0.002), "in the order of batches"
    assert found.pack == pytest.approx(0.0015)
    assert (found.draw, found.device) == (0.001, 0.002)
    assert found.overhead == pytest.approx(0.001), "what is left of a call"
    assert found.step == pytest.approx(0.008), "16 ms before and between two batches"
    assert found.step_cpu == pytest.approx(0.010 - 0.004), "of 10 ms without what the loader did"


def test_a_wait_is_no_overhead_though_it_counts_as_transport() -> None:
    epoch, second = EpochCounters(1, 0), answer(1, 1, 3, 9)
    epoch.fold(call(PART, 0, 0, came(answer(0, 0, 1, 1))))
    waited = WAITED, 2 * MS, 10 * MS, "workers", 1, None
    epoch.fold(gives(second, 2 * MS, 11 * MS, waited, came(second)))
    assert (epoch.by_cause["transport"], epoch.by_cause["workers"]) == (8 * MS, 1 * MS)
    found: Any = costs_of(epoch, (WorkerCounters(0, 70),))
    assert found.overhead == pytest.approx(0.001)


def test_the_cpu_of_workers_counts_from_their_first_batch_on() -> None:
    started, worker = WorkerCounters(0, 70), WorkerCounters(1, 71)
    for at, cpu in ((1, 3000), (2, 3000 + 100), (3, 3000 + 250)):
        worker.answered(answer(0, 1000 * at, 1000 * at + 500, 1000 * at + 500, cpu))
    found: Any = costs_of(epoch_of_two_batches(), (started, worker))
    assert found.load_cpu == pytest.approx(0.25), "of a second of work after the first batch"


def test_a_worker_that_waits_for_a_cpu_does_not_wait_for_a_disk() -> None:
    worker = WorkerCounters(0, 70)
    for seq, (cpu, cpu_wait) in enumerate([(100, 50), (103, 54)]):
        came = answer(seq, 10 * seq, 10 * seq + 10, 10 * seq + 10, cpu)
        worker.answered(came._replace(cpu_wait=cpu_wait * MS))
    found: Any = costs_of(epoch_of_two_batches(), (worker,))
    assert found.load_cpu == pytest.approx(0.7), "3 ms of 10 with a CPU, and 4 waiting for one"
    assert worker.snapshot().cpu_seconds == pytest.approx(0.103)


def serial(cpu: int) -> EpochCounters:
    epoch = EpochCounters(1, 0)
    epoch.fold(gives(0, 6 * MS, 10 * MS, (LOADED, 6 * MS, 10 * MS, 0, 8 * MS)))
    epoch.used_cpu(cpu * MS)
    return epoch


@pytest.mark.parametrize(
    ("cpu", "load_cpu", "step_cpu"), [(0, 1.0, 0.0), (1, 0.25, 0.0), (4, 1.0, 0.0), (9, 1.0, 0.005)]
)
def test_without_workers_the_cpu_is_the_loadings_first(cpu: int, load_cpu: float, step_cpu: float) -> None:
    found: Any = costs_of(serial(cpu), ())
    assert (found.loads, found.step) == ((0.004,), 0.006)
    assert found.load_cpu == pytest.approx(load_cpu)
    assert found.step_cpu == pytest.approx(step_cpu)
    assert found.pack > 0 < found.overhead, "workers would have both"


@pytest.mark.parametrize(("contention", "load_cpu"), [(0.0, 0.25), (0.8, 0.85), (1.0, 1.0)])
def test_on_a_busy_machine_loading_waits_for_a_cpu(contention: float, load_cpu: float) -> None:
    found: Any = costs_of(serial(1), (), 0.0, contention)
    assert found.load_cpu == pytest.approx(load_cpu)
