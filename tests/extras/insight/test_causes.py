"""Where the time of an epoch goes: all of it is counted once, on what it was spent."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.extras.insight.causes import Breakdown, breakdowns, snapshot, table
from fastq_loader.extras.insight.snapshots import CAUSES, LateBatch
from fastq_loader.statistics import counters as module
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.records import CLOSE, CUT, END, ITER
from tests.support.records import Played, counted, folded, gives, record
from tests.support.thorough import examples


def by_cause(epoch: Breakdown) -> dict[str, int]:
    found = {cause: round(epoch.epoch.spent_on(cause) * 1e9) for cause in CAUSES}
    return {cause: nanoseconds for cause, nanoseconds in found.items() if nanoseconds}


def waiting(before: int, times: tuple[int, ...], **waits: int) -> dict[str, int]:
    """What a call from 100 to 1000 is spent on, with a wait that ends with a batch loaded at these times;
    before: when its worker had finished the previous one, if any."""
    earlier = [gives(100, 100, (before - 10, before, before, before))] if before else []
    call = gives(100, 1000, times, wait_from=100, wait_until=900, **waits)
    return by_cause(folded(record(ITER, 100, 100), *earlier, call))


CALLS = {
    "the worker was loading": (
        waiting(50, (50, 60, 900, 900), workers=800),
        {"workers": 800, "transport": 100},
    ),
    "it was loading, and packed": (
        waiting(50, (50, 60, 700, 850), workers=800),
        {"workers": 600, "transport": 300},
    ),
    "it was busy with the batch before, as long as with this one": (
        waiting(500, (500, 500, 900, 900), workers=800),
        {"workers": 800, "transport": 100},
    ),
    "the batch before is like this one, half of which is packing": (
        waiting(300, (300, 300, 400, 500), workers=400),
        {"workers": 200, "transport": 700},
    ),
    "it had nothing to do, and its task was on the way": (
        waiting(100, (600, 600, 900, 900), workers=800),
        {"workers": 300, "transport": 600},
    ),
    "it was its first batch: it was not up before": (
        waiting(0, (600, 600, 900, 900), workers=800),
        {"start_up": 500, "workers": 300, "transport": 100},
    ),
    "others were quicker, but it was not up before": (
        waiting(0, (600, 600, 900, 900), head=800),
        {"start_up": 500, "head_of_line": 300, "transport": 100},
    ),
    "others had nothing to do, and it was up": (
        waiting(50, (600, 600, 900, 900), memory=800),
        {"memory": 800, "transport": 100},
    ),
    "a quarter of the batch's time went for new pages": (
        waiting(50, (100, 100, 900, 900), workers=800, new_memory=200),
        {"workers": 600, "memory": 200, "transport": 100},
    ),
    "nothing was waited for": (
        by_cause(folded(record(ITER, 100, 100), gives(100, 1000, (50, 60, 90, 90)))),
        {"transport": 900},
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wait_is_lost_to_what_the_worker_did(case: str) -> None:
    found, expected = CALLS[case]
    assert found == expected


def test_what_a_call_did_itself_is_counted_as_it_is_recorded() -> None:
    waits = {"wait_from": 150, "wait_until": 270, "head": 100, "memory": 20, "device": 30}
    found = [record(ITER, 1, 100, drew=20), gives(150, 310, **waits)]
    expected = {"sampler": 20, "start_up": 79, "consumer": 50, "head_of_line": 100}
    assert by_cause(folded(*found)) == expected | {"memory": 20, "device_copy": 30, "transport": 10}
    # An error without an answer, and an end.
    found += [gives(400, 460, workers=50), record(END, 500, 520), record(CLOSE, 520, 590)]
    epoch = folded(*found)
    assert (by_cause(epoch)["workers"], by_cause(epoch)["start_up"]) == (50, 79 + 20 + 70)
    assert (epoch.epoch.batches, round(epoch.seconds * 1e9)) == (2, 589)


def test_a_batch_that_is_loaded_by_the_call_is_the_workers_time() -> None:
    waits = {"drew": 4, "wait_from": 5, "wait_until": 85, "workers": 80, "worker": -1, "pid": 0}
    epoch = folded(gives(1, 90, (5, 60, 85, 85), **waits))
    assert by_cause(epoch) == {"sampler": 4, "workers": 80, "transport": 5}
    assert list(epoch.costs) == [(0, 80, 0)]


def test_a_call_that_was_cut_short_counts_as_the_loaders() -> None:
    epoch = folded(record(ITER, 1, 10), record(CUT, 20, 70, drew=30), gives(70, 75))
    assert by_cause(epoch) == {"start_up": 9, "consumer": 10, "sampler": 30, "transport": 20 + 5}


@examples(100)
@given(st.integers(0, 1 << 32))
def test_the_causes_add_up_to_the_time_whatever_happens(seed: int) -> None:
    played = Played(counters := Counters(), random.Random(seed))
    for _ in played.epochs(20):
        continue
    for epoch in breakdowns(counters):
        assert all(epoch.epoch.spent_on(cause) >= 0 for cause in CAUSES)
        began, ended = played.ended[epoch.epoch.epoch or 0]
        assert round(epoch.seconds * 1e9) == ended - began == round(epoch.epoch.seconds * 1e9)
    total = snapshot(counters).total
    assert abs(sum(map(total.spent_on, CAUSES)) - total.seconds) < 1e-6


def test_of_a_long_epoch_the_last_batches_are_broken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RECORDS", 3)
    times = [
        gives(at, at + 30, (at - 20, at, at, at), seq=at, wait_from=at, workers=10)
        for at in range(100, 900, 100)
    ]
    epoch = folded(record(ITER, 1, 60), *times)
    assert (epoch.epoch.batches, epoch.epoch.recorded_batches) == (8, 3)
    assert round(epoch.seconds * 1e9) == 2 * 100 + 30
    assert by_cause(epoch) == {"consumer": 2 * 70, "transport": 3 * 30}


def test_percentiles_are_those_of_the_calls() -> None:
    epoch = folded(*(gives(1000 * at, 1000 * at + at) for at in range(1, 101))).epoch
    assert (round(epoch.wait_p50 * 1e9), round(epoch.wait_p95 * 1e9)) == (50, 95)


def test_the_ten_latest_batches_are_named_the_worst_first() -> None:
    calls = [
        gives(100 * at, 100 * at + 99, (at, at, at + 5, at + 7), seq=at, head=at * 37 % 90)
        for at in range(90)
    ]
    found = snapshot(counted(*calls)).late_batches
    assert [round(late.seconds * 1e9) for late in found] == list(range(89, 79, -1))
    assert all(late.batch * 37 % 90 == round(late.seconds * 1e9) for late in found)
    assert found[0] == LateBatch(0, found[0].batch, 89e-9, 7e-9)


def test_a_workers_time_is_split() -> None:
    batches = [
        gives(0, 1, (100, 200, 250, 300), new_memory=20),
        gives(2, 3, (900, 900, 900, 1000), sent=700),  # its task came 400 later
        gives(4, 5, (1100, 1100, 1100, 1200), sent=600),  # its task was there
        gives(6, 7, (5000, 5000, 5000, 5000), pid=99),  # a new process was not idle before its first task
    ]
    worker, idle = snapshot(counted(*batches, workers=2)).workers
    parts = worker.fetch_seconds, worker.collate_seconds, worker.packing_seconds, worker.new_memory_seconds
    assert [round(part * 1e9) for part in parts] == [100, 50, 50 + 100 + 100, 20]
    assert (worker.batches, round(worker.work_seconds * 1e9)) == (4, 400)
    assert (round(worker.blocked_seconds * 1e9), round(worker.idle_seconds * 1e9)) == (400, 200 + 100)
    assert (idle.batches, idle.work_seconds) == (0, 0.0)


def test_a_loader_without_an_epoch_has_no_times() -> None:
    found = snapshot(Counters())
    assert (found.total.seconds, found.per_epoch, found.workers) == (0.0, (), ())
    assert len(table(Counters()).kind) == 0
