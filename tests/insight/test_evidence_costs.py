"""What batches cost, from the counters of an epoch."""

from __future__ import annotations

import pytest

from fastq_loader.insight.evidence import costs_of
from fastq_loader.ipc.messages import BATCH, Answer
from fastq_loader.statistics.counters import WorkerCounters
from fastq_loader.statistics.epoch import EpochCounters

MS = 1_000_000


def answer(seq: int, started: int, collated: int, finished: int, cpu: int = 0) -> Answer:
    times = [at * MS for at in (started, finished)]
    return Answer(1, seq, 0, BATCH, *times, (), (), None, collated=collated * MS, cpu=cpu * MS)


def epoch_of_two_batches() -> EpochCounters:
    """In milliseconds: 10 from call to call; the batches came as 1, 0."""
    epoch = EpochCounters(1, 0)
    epoch.started(0)
    ready = {0: answer(0, 0, 4, 6), 1: answer(1, 0, 2, 3)}
    for seq in (1, 0):
        epoch.answered(seq, ready[seq], True, WorkerCounters(0, 1))
    for seq, entered in ((0, 10 * MS), (1, 20 * MS)):
        epoch.entered(entered)
        epoch.drew(entered, entered + MS)
        epoch.used_device(entered + MS, entered + 3 * MS)
        epoch.left(entered + 4 * MS, ready[seq])
    return epoch


def test_of_workers_everything_is_measured() -> None:
    epoch = epoch_of_two_batches()
    epoch.used_cpu(20 * MS)
    workers = (WorkerCounters(0, 70), WorkerCounters(1, 71))
    found = costs_of(epoch, workers)
    assert found is not None
    assert found.loads == (0.004, 0.002), "in the order of batches"
    assert found.pack == pytest.approx(0.0015)
    assert (found.draw, found.device) == (0.001, 0.002)
    assert found.overhead == pytest.approx(0.001), "what is left of a call"
    assert found.step == pytest.approx(0.008), "16 ms before and between two batches"
    assert found.step_cpu == pytest.approx(0.010 - 0.004), "of 10 ms without what the loader did"


def test_batches_whose_costs_are_not_kept_count_in_the_mean() -> None:
    epoch = epoch_of_two_batches()
    for seq in range(3000):
        took = 10 if seq < 1000 else 2
        epoch.answered(0, answer(seq, 0, took, took), True, WorkerCounters(0, 1))
    found = costs_of(epoch, (WorkerCounters(0, 70), WorkerCounters(1, 71)))
    assert found is not None
    assert len(found.loads) == 1024
    assert found.load == pytest.approx((2 * 6 + 1000 * 10 + 2000 * 2) * 0.001 / 3002, rel=0.01)


def test_a_wait_is_no_overhead_though_it_counts_as_transport() -> None:
    epoch = EpochCounters(1, 0)
    epoch.started(0)
    epoch.answered(0, answer(0, 0, 1, 1), True, WorkerCounters(0, 1))
    came = answer(1, 1, 3, 9)
    epoch.entered(2 * MS)
    epoch.waited("workers", 2 * MS, 10 * MS)
    epoch.answered(0, came, True, WorkerCounters(0, 1))
    epoch.left(11 * MS, came)
    assert (epoch.spent["transport"], epoch.spent["workers"]) == (8 * MS, 1 * MS)
    found = costs_of(epoch, (WorkerCounters(0, 70),))
    assert found is not None
    assert found.overhead == pytest.approx(0.001)


def test_the_cpu_of_workers_counts_from_their_first_batch_on() -> None:
    started, worker = WorkerCounters(0, 70), WorkerCounters(1, 71)
    for at, cpu in ((1, 3000), (2, 3000 + 100), (3, 3000 + 250)):
        worker.answered(answer(0, 1000 * at, 1000 * at + 500, 1000 * at + 500, cpu))
    found = costs_of(epoch_of_two_batches(), (started, worker))
    assert found is not None
    assert found.load_cpu == pytest.approx(0.25), "of a second of work after the first batch"


@pytest.mark.parametrize("marks", [0, 1])
def test_where_the_cpu_of_workers_is_not_known_they_use_one(marks: int) -> None:
    worker = WorkerCounters(0, 70)
    for at in range(marks):
        worker.answered(answer(0, at, at + 1, at + 1, 1))
    found = costs_of(epoch_of_two_batches(), (worker,))
    assert found is not None
    assert found.load_cpu == 1.0


def test_a_successor_begins_anew() -> None:
    worker = WorkerCounters(0, 70)
    worker.answered(answer(0, 0, 1, 1, 1))
    worker.replaced(99)
    assert worker.cpu_marks == ()


def test_a_worker_that_waits_for_a_cpu_does_not_wait_for_a_disk() -> None:
    worker = WorkerCounters(0, 70)
    for seq, (cpu, cpu_wait) in enumerate([(100, 50), (103, 54)]):
        came = answer(seq, 10 * seq, 10 * seq + 10, 10 * seq + 10, cpu)
        worker.answered(came._replace(cpu_wait=cpu_wait * MS))
    found = costs_of(epoch_of_two_batches(), (worker,))
    assert found is not None
    assert found.load_cpu == pytest.approx(0.7), "3 ms of 10 with a CPU, and 4 waiting for one"
    assert worker.snapshot().cpu_seconds == pytest.approx(0.103)


def serial(cpu: int) -> EpochCounters:
    """Without workers: 4 ms of loading and 6 ms of a step."""
    epoch = EpochCounters(1, 0)
    epoch.started(0)
    epoch.entered(6 * MS)
    epoch.loaded(0, 6 * MS, 8 * MS, 10 * MS)
    epoch.left(10 * MS)
    epoch.used_cpu(cpu * MS)
    return epoch


@pytest.mark.parametrize(
    ("cpu", "load_cpu", "step_cpu"), [(0, 1.0, 0.0), (1, 0.25, 0.0), (4, 1.0, 0.0), (9, 1.0, 0.005)]
)
def test_without_workers_the_cpu_is_the_loadings_first(cpu: int, load_cpu: float, step_cpu: float) -> None:
    found = costs_of(serial(cpu), ())
    assert found is not None
    assert (found.loads, found.step) == ((0.004,), 0.006)
    assert found.load_cpu == pytest.approx(load_cpu)
    assert found.step_cpu == pytest.approx(step_cpu)
    assert found.pack > 0 < found.overhead, "workers would have both"


@pytest.mark.parametrize(("contention", "load_cpu"), [(0.0, 0.25), (0.8, 0.85), (1.0, 1.0)])
def test_on_a_busy_machine_loading_waits_for_a_cpu_and_not_for_a_disk(
    contention: float, load_cpu: float
) -> None:
    found = costs_of(serial(1), (), contention)
    assert found is not None
    assert found.load_cpu == pytest.approx(load_cpu)


def test_of_nothing_nothing_is_known() -> None:
    epoch = EpochCounters(1, 0)
    assert costs_of(epoch, ()) is None
    epoch.answered(0, answer(0, 0, 1, 2), True, WorkerCounters(0, 1))  # and not handed out
    assert costs_of(epoch, ()) is None
