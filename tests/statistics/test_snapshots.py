"""What users see of the counters."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.snapshots import (
    CAUSES,
    EpochStatistics,
    LateBatch,
    LoaderStatistics,
    StagingStatistics,
    WorkerStatistics,
)
from fastq_loader.statistics.workers import WorkerCounters


def snapshot() -> LoaderStatistics:
    counters = Counters()
    counters.batches += 3
    counters.workers = (WorkerCounters(0, 70), WorkerCounters(1, 71))
    counters.begin_epoch(5, 0).counted().started(9)
    return counters.snapshot()


def test_a_snapshot_cannot_be_altered() -> None:
    found = snapshot()
    for part in (found, found.total, found.workers[0], LateBatch(1, 2, 3.0), StagingStatistics("cuda")):
        for field in fields(part):
            with pytest.raises(FrozenInstanceError):
                setattr(part, field.name, 1)
            with pytest.raises(FrozenInstanceError):
                delattr(part, field.name)


def test_a_snapshot_is_of_the_public_classes_and_travels() -> None:
    found = snapshot()
    assert type(found) is LoaderStatistics
    assert [type(worker) for worker in found.workers] == [WorkerStatistics] * 2
    assert [type(epoch) for epoch in found.per_epoch] == [EpochStatistics]
    assert pickle.loads(pickle.dumps(found)) == found == replace(found)
    assert "batches=3" in repr(found)


def test_every_cause_has_its_seconds() -> None:
    epoch = EpochStatistics(**{f"{cause}_seconds": at for at, cause in enumerate(CAUSES)})
    assert [epoch.spent_on(cause) for cause in CAUSES] == list(range(8))
    assert LoaderStatistics(total=epoch).head_of_line_seconds == epoch.head_of_line_seconds
