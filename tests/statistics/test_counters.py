"""The counters of a loader: records that are folded once each, and the snapshots that are taken of them."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.ipc.messages import Answer
from fastq_loader.statistics.counters import Counters, StagingCounters
from fastq_loader.statistics.records import COPY, DEVICE, DREW, DROP, END, ITER, PART, Record
from fastq_loader.statistics.snapshots import (
    PER_OCTAVE,
    Histogram,
    LoaderStatistics,
    StagingStatistics,
)
from fastq_loader.statistics.workers import WorkerCounters
from tests.support import records
from tests.support.alarms import Alarm
from tests.support.thorough import examples

SECOND = 1_000_000_000


def answer(started: float, finished: float, **fields: Any) -> Answer:
    times = round(started * SECOND), fields.pop("collated", 0), round(finished * SECOND)
    return records.answer(0, *times, **fields)


def counted() -> Counters:
    counters = Counters()
    counters.batches += 3
    counters.workers = (WorkerCounters(0, 70), WorkerCounters(1, 71))
    return counters


def test_a_snapshot_is_not_changed_by_later_counting() -> None:
    counters = counted()
    log = counters.begin_epoch(1, 0)
    before = counters.snapshot(blocks_free=4)
    as_it_was = asdict(before)
    counters.batches += 1
    counters.workers[0].answered(answer(1, 2))
    log.leave(ITER, 7)
    assert asdict(before) == as_it_was
    assert (before.batches, before.blocks_free, counters.snapshot().batches) == (3, 4, 4)


def test_a_workers_time_is_split() -> None:
    worker = WorkerCounters(0, 70)
    worker.answered(answer(1, 1.5))
    found = worker.snapshot()
    assert (found.batches, found.work_seconds, found.idle_seconds) == (1, 0.5, 0.0)
    assert found.fetch_seconds == found.collate_seconds == found.packing_seconds == 0, "nothing was loaded"
    times = {"fetched": round(3.625 * SECOND), "collated": round(3.75 * SECOND), "cpu": SECOND // 4}
    worker.answered(answer(3.5, 4, new_memory=SECOND // 8, **times), sent=2 * SECOND)
    found = worker.snapshot()
    assert (found.batches, found.work_seconds) == (2, 1.0)
    assert (found.fetch_seconds, found.collate_seconds, found.packing_seconds) == (0.125, 0.125, 0.25)
    assert (found.new_memory_seconds, found.cpu_seconds) == (0.125, 0.25)
    assert (found.blocked_seconds, found.idle_seconds) == (0.5, 1.5), "its task came after 0.5 s"
    worker.answered(answer(5, 6), sent=3 * SECOND)
    found = worker.snapshot()
    assert (found.blocked_seconds, found.idle_seconds) == (0.5, 2.5), "the task was there before"
    assert found.cpu_seconds == 0.25, "it was not asked for"
    worker.answered(answer(8, 9), sent=10 * SECOND)
    found = worker.snapshot()
    assert (found.blocked_seconds, found.idle_seconds) == (2.5, 2.5), "no longer than it did nothing"
    worker.replaced(99)
    worker.answered(answer(19, 19), process=99)  # the new process was not idle before its first task
    found = worker.snapshot()
    assert (found.pid, found.restarts, found.idle_seconds) == (99, 1, 2.5)


class Pool:
    """A pool of workers on other machines: process 70 is the proxy of 812 there."""

    def __init__(self, counters: Counters, wire_bytes: int) -> None:
        self.counters, self.said = counters, wire_bytes
        counters.sources.add(self)

    def count(self) -> int:
        worker = self.counters.workers[0]
        worker.far, worker.wire_bytes = (812, "10.0.0.2"), self.said
        return self.said

    def far_worker(self, pid: int) -> tuple[int, str] | None:
        return (812, "10.0.0.2") if pid == 70 else None


# ---- records --------------------------------------------------------------------------------------


def test_a_call_leaves_one_record_with_its_steps() -> None:
    found: list[Record] = []
    counters = Counters()
    counters.follow(found.append, identify=lambda: 51)
    drew, device, given = (DREW, 6, 7, (4,)), (DEVICE, 8, 9), records.answer(4)
    log = counters.begin_epoch(5, 0)
    log.steps += (drew,)
    log.leave(ITER, 10)
    log.enter(20)
    log.steps += (device, records.came(given))
    log.give(30, given, 4, None)
    log.steps += (records.came(given),)
    log.leave(PART, 35)
    log.enter(40)
    log.enter(50)  # an interrupt cut the call before short
    log.leave(END, 60, 8)
    log.leave("close", 70)
    log.leave(DROP, 80)
    assert [(record[0], *record[2:5], len(record[5]), *record[6:]) for record in found] == [
        ("iter", 5, 10, 51, 1),
        ("next", 20, 30, 51, 2, given, 4, None),
        ("part", 0, 35, 51, 1),
        ("cut", 40, 50, 51, 0),
        ("end", 50, 60, 51, 0, 8),
        ("close", 60, 70, 51, 0),
        ("drop", 0, 80, 51, 0),
    ]
    assert {record[1] for record in found} == {0}


def test_copies_to_a_device_leave_records_where_there_is_a_loader() -> None:
    found: list[Record] = []
    counters, staging = Counters(), StagingCounters("cuda")
    staging.copied(1, 2.0, 3.0)
    counters.follow(found.append)
    counters.stage(staging)
    staging.copied(64, 3.0, 5.0)
    assert counters.snapshot().staging == StagingStatistics("cuda")
    assert found == [(COPY, None, 3 * SECOND, 5 * SECOND, 0, (), 64)]


def test_records_are_folded_every_10_ms_and_with_each_error_at_once() -> None:
    counters = Counters()
    log, kept = counters.begin_epoch(1, 0), []
    for now, error in ((10**8, None), (10**8 + 1, None), (10**8 + 2, KeyError()), (10**8 + 10**7 + 1, None)):
        log.enter(now)
        log.give(now, None, None, error)
        kept.append(len(counters.records))
    assert kept == [0, 1, 0, 1], "the error's frames would be kept, with all that they refer to"
    log.enter(now := now + 10**7)
    log.give(now, None, None, None)
    assert not counters.records
    for traced in (False, True):  # begin and end of an epoch are folded with batches, unless somebody watches
        counters.follow(*[kept.append] * traced)
        log = counters.begin_epoch(now, 0)
        for number, (kind, *cpu) in enumerate(((ITER,), (END, 0)), 1):
            log.leave(kind, now + number, *cpu)
            assert len(counters.records) == number * (not traced)
    counters.follow()
    log.leave(END, now := now + 2 * 10**7, 0)
    log.leave(END, now + 10, 0)
    assert len(counters.records) == 1, "it is time at the first one, and not again at the second"


def test_an_interrupt_loses_no_record() -> None:
    counters, seen = Counters(), list[int]()

    def interrupted(record: Record) -> None:
        seen.append(record[3])
        if record[3] == 1:
            raise Alarm

    counters.follow(interrupted)
    counters.records += [records.call(PART, 0, number, epoch=0) for number in range(4)]
    with pytest.raises(Alarm):
        counters.fold()
    counters.fold()
    assert seen == [0, 1, 2, 3]


# ---- snapshots ------------------------------------------------------------------------------------


def snapshot() -> LoaderStatistics:
    counters = counted()
    counters.begin_epoch(5, 0).leave(ITER, 9)
    return counters.snapshot()


DURATIONS = st.lists(st.integers(10, 10**13), min_size=1, max_size=50)


def histogram_of(durations: list[int]) -> Histogram:
    histogram = Histogram()
    for duration in durations:
        histogram[int(PER_OCTAVE * math.log2(duration))] += 1
    return histogram


@examples(100)
@given(DURATIONS, st.floats(1, 100))
def test_a_percentile_is_within_three_percent(durations: list[int], percent: float) -> None:
    exact = sorted(durations)[math.ceil(percent / 100 * len(durations) - 1e-9) - 1] / 1e9
    assert abs(histogram_of(durations).percentile(percent) / exact - 1) < 0.03
