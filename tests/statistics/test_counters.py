"""The counters of a loader: what is counted exactly, and the ring of records."""

from __future__ import annotations

import os

import pytest

from fastq_loader import DataLoader
from fastq_loader.epoch.resources import of as resources_of
from fastq_loader.ipc.messages import Indices
from fastq_loader.statistics import counters as module
from fastq_loader.statistics.counters import Counters, StagingCounters, WorkerCounters
from fastq_loader.statistics.records import CLOSE, ITER, NEXT, PACKED, Record
from fastq_loader.statistics.snapshots import StagingStatistics
from fastq_loader.system import pages
from tests.support.crimes import Rows

SECOND = 10**9


def test_each_call_leaves_one_record_and_adds_to_the_counts() -> None:
    counters = Counters()
    log = counters.begin_epoch(5 * SECOND, 1 * SECOND)
    log.drew, log.drew_until = 3, 9 * SECOND
    log.record(ITER, 10 * SECOND)
    log.asked = 20 * SECOND
    log.waited_for(21 * SECOND, 22 * SECOND, 0, True, 4)
    log.waited_for(23 * SECOND, 25 * SECOND, 1, True, 4)
    log.nbytes += 64
    log.record(NEXT, 30 * SECOND, (7, 1, 70, 1, 2, 3, 4, 5, 6), Indices(bytes(24)))
    log.asked = 40 * SECOND
    log.record(NEXT, 41 * SECOND, error=KeyError())
    log.end(43 * SECOND, 4 * SECOND)
    log.record(CLOSE, 44 * SECOND)
    log.used_cpu(99 * SECOND)  # it is over
    first, second, *_ = (Record(*PACKED.unpack(each)) for each in counters.records)
    assert first[:6] == (ITER, 0, 5 * SECOND, 10 * SECOND, 3, 9 * SECOND)
    assert second[8:] == (*(second.wait_from, 25 * SECOND, 0, 2 * SECOND, SECOND), 7, 1, 70, 1, 2, 3, 4, 5, 6)
    assert (second.wait_from, second.drew, len(counters.records)) == (21 * SECOND, 0, 5)
    assert log.totals() == (2, 39.0, 3.0, 3, 0, 10 + 1 + 2 + 1, 3.0, 1, 64)


@pytest.mark.parametrize(
    ("behind", "blocked", "cause"),
    [
        (0, False, "workers"),
        (1, False, "workers"),
        (4, False, "head"),
        (1, True, "head"),
        (0, True, "memory"),
    ],
)
def test_a_wait_counts_by_what_seems_to_be_its_cause(behind: int, blocked: bool, cause: str) -> None:
    log = Counters().begin_epoch(0, 0)
    log.waited_for(10, 15, behind, blocked, 4)
    assert {name: getattr(log, name) for name in ("workers", "head", "memory")}[cause] == 5
    assert log.workers + log.head + log.memory == 5


@pytest.mark.parametrize(
    ("arguments", "samples"),
    [({"batch_size": 4}, 10), ({"batch_size": None}, 10), ({"batch_sampler": [(1, 2), [3]]}, 3)],
)
def test_samples_are_counted_as_the_sampler_asked_for_them(
    arguments: dict[str, object], samples: int
) -> None:
    loader = DataLoader(Rows(10), **arguments)  # type: ignore[arg-type]
    list(loader)
    assert loader.statistics().per_epoch[0].samples == samples


def test_the_last_hundred_epochs_and_sums_of_the_older_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(range(2))
    for _ in range(103):
        list(loader)
    found = loader.statistics()
    assert [epoch.epoch for epoch in found.per_epoch] == list(range(3, 103))
    assert (found.epochs, found.total.batches, found.total.samples) == (103, 206, 206)
    assert found.total.seconds > sum(epoch.seconds for epoch in found.per_epoch)


def test_the_ring_forgets_records_and_counts_nothing_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RECORDS", 8)
    loader = DataLoader(range(20))
    list(loader)
    found = loader.statistics().per_epoch[0]
    assert (found.batches, found.recorded_batches) == (20, 7)
    assert 0 < found.consumer_seconds + found.workers_seconds < found.seconds


def test_a_new_process_of_a_worker_begins_with_no_cpu_time() -> None:
    worker = WorkerCounters(0, 1)
    worker.busy = 10 * SECOND
    worker.look_at_cpu()
    assert worker.cpu_busy in (0, 10 * SECOND)
    worker.replaced(99)
    assert (worker.pid, worker.restarts, worker.cpu, worker.cpu_busy) == (99, 1, 0, 0)
    worker.far = 812, "10.0.0.2"
    worker.pid = 1
    worker.look_at_cpu()  # of another machine
    assert not worker.cpu


def test_the_cpu_time_of_workers_that_have_ended_is_known() -> None:
    loader = DataLoader(Rows(40), num_workers=1)
    list(loader)
    (worker,) = resources_of(loader).counters.workers
    assert worker.cpu > 0 < worker.cpu_busy or not pages.cpu(os.getpid())


def test_a_snapshot_of_copies_is_not_changed_by_later_counting() -> None:
    staging = StagingCounters("cuda")
    before = staging.snapshot()
    staging.copies += 1
    staging.copied(64, 1.0, 2.0)  # nobody traces it
    assert (before, staging.snapshot().copies) == (StagingStatistics("cuda"), 1)
