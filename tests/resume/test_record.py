"""The epoch that a loader is in."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from fastq_loader import DataLoader, Position
from fastq_loader.resume.record import EpochRecord, Saved, begin
from fastq_loader.scheduling.progress import Progress, WorkerProgress
from tests.support.datasets import MapDataset, Stream


def saved(**fields: Any) -> Saved:
    given = {"state": {}, "position": Position(2, 3, 23), "base_seed": 7, "generators": {}, "lives_on": False}
    return Saved(**{**given, **fields})


def begun(of: DataLoader[Any], newest: EpochRecord | None, told: Saved | None) -> EpochRecord:
    return begin(of, of._index_sampler, newest, told)


def loader(**keywords: Any) -> DataLoader[Any]:
    return DataLoader(MapDataset("tensors", 20), 2, **keywords)


def test_positions_count_epochs_and_batches() -> None:
    record = begun(loader(), None, None)
    assert record.position == Position(0, 0, 0)
    record.order.progress = Progress(10)
    assert record.position == Position(0, 10, 10)
    record.end({})
    assert record.position == Position(1, 0, 10)
    broken_off = begun(loader(), record, None)
    assert broken_off.position == Position(1, 0, 10)
    broken_off.order.progress = Progress(4)
    assert begun(loader(), broken_off, None).position == Position(2, 0, 14)
    resumed = begun(loader(), broken_off, saved(resumes=True, progress=Progress(3)))
    assert resumed.position == Position(2, 3, 23)
    assert begun(loader(), broken_off, saved(position=Position(5, 0, 50))).position == Position(5, 0, 50)


def worker(delivered: int, **state: Any) -> WorkerProgress:
    return WorkerProgress(delivered, pickle.dumps(state) if state else b"")


@pytest.mark.parametrize(
    ("iterable", "workers", "replayed", "same_seed"),
    [
        (False, (), 0, False),
        (False, (worker(2, generators={}),), 0, True),
        (True, (worker(3),), 3, True),
        (True, (worker(2), worker(1)), 3, True),
        (True, (worker(3, position={"dataset": 1}),), 0, True),
        (True, (worker(2, position={"dataset": 1}), worker(0)), 0, True),
    ],
)
def test_workers_draw_the_same_again_only_where_they_go_through_the_same(
    iterable: bool, workers: tuple[WorkerProgress, ...], replayed: int, same_seed: bool
) -> None:
    of = DataLoader(Stream("tensors", (9,)), 2) if iterable else loader()
    record = begun(
        of, None, saved(resumes=True, iterable=iterable, progress=Progress(3, frozenset(), workers))
    )
    assert record.replayed == replayed
    assert (record.pool_seed == 7) is same_seed
    assert [count for count, _ in record.resume] == [one.delivered for one in workers]
    own = ["seed" in (state or {}) for _, state in record.resume]
    assert own == [bool(one.state) and b"position" in one.state for one in workers]
    at_start = begun(of, None, saved(resumes=True, iterable=iterable, progress=Progress(0)))
    assert at_start.pool_seed == 7
