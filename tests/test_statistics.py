"""Counters, and the snapshots that are taken of them."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, asdict, fields, replace

import pytest

from fastq_loader.statistics import (
    Counters,
    LateBatch,
    LoaderStatistics,
    StagingStatistics,
    WorkerCounters,
    WorkerStatistics,
)


def counted() -> Counters:
    counters = Counters()
    counters.batches += 3
    counters.workers = (WorkerCounters(0, 70), WorkerCounters(1, 71))
    return counters


def test_a_snapshot_is_not_changed_by_later_counting() -> None:
    counters = counted()
    before = counters.snapshot(blocks_free=4)
    as_it_was = asdict(before)
    counters.batches += 1
    counters.waited(5, 1, 1, 1)
    counters.workers[0].answered(1, 2)
    assert asdict(before) == as_it_was
    assert (before.batches, before.blocks_free, counters.snapshot().batches) == (3, 4, 4)


def test_a_snapshot_cannot_be_altered() -> None:
    snapshot = counted().snapshot()
    for part in (snapshot, snapshot.workers[0], LateBatch(1, 2, 3.0), StagingStatistics("cuda")):
        for field in fields(part):
            with pytest.raises(FrozenInstanceError):
                setattr(part, field.name, 1)
            with pytest.raises(FrozenInstanceError):
                delattr(part, field.name)


def test_a_snapshot_is_of_the_public_classes_and_travels() -> None:
    snapshot = counted().snapshot()
    assert type(snapshot) is LoaderStatistics
    assert [type(worker) for worker in snapshot.workers] == [WorkerStatistics] * 2
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot == replace(snapshot)
    assert "batches=3" in repr(snapshot)


def test_units_and_fields_stand_in_the_docstrings() -> None:
    for kind in (LoaderStatistics, WorkerStatistics, LateBatch, StagingStatistics):
        for field in fields(kind):
            assert field.name in str(kind.__doc__)


def test_a_workers_time_is_split_into_work_and_idleness() -> None:
    worker = WorkerCounters(0, 70)
    worker.answered(1_000_000_000, 1_500_000_000)
    assert (worker.batches, worker.work_seconds, worker.idle_seconds) == (1, 0.5, 0.0)
    worker.answered(3_500_000_000, 3_750_000_000)
    assert (worker.batches, worker.work_seconds, worker.idle_seconds) == (2, 0.75, 2.0)
    worker.replaced(99)
    worker.answered(9_000_000_000, 9_000_000_000)  # the new process was not idle before its first task
    assert (worker.pid, worker.restarts, worker.idle_seconds) == (99, 1, 2.0)


def test_restarts_are_those_of_all_workers() -> None:
    counters = counted()
    for pid, worker in enumerate((*counters.workers, counters.workers[0])):
        worker.replaced(pid)
    assert counters.snapshot().worker_restarts == 3


def test_waiting_counts_as_head_of_line_where_later_batches_were_ready() -> None:
    counters = Counters()
    counters.waited(1_000_000_000, 1, 7)
    counters.waited(2_000_000_000, 1, 8, behind=2)
    counters.waited(500_000_000, 1, 8, behind=3)
    snapshot = counters.snapshot()
    assert (snapshot.wait_seconds, snapshot.head_of_line_seconds) == (3.5, 2.5)
    assert snapshot.late_batches == (LateBatch(1, 8, 2.5),)


def test_the_ten_latest_batches_are_named_the_worst_first() -> None:
    counters = Counters()
    for batch in range(100):
        counters.waited(batch * 37 % 100 * 1_000_000_000, 2, batch, behind=1)
    found = counters.snapshot().late_batches
    assert [late.seconds for late in found] == list(range(99, 89, -1))
    assert all(late.batch * 37 % 100 == late.seconds and late.epoch == 2 for late in found)
