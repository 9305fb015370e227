"""Where the time of an epoch goes: all of it is counted once, on what it was spent, by whoever asks first."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.statistics import records
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.epoch import EpochCounters, summed
from fastq_loader.statistics.records import CLOSE, CUT, DEVICE, DREW, DROP, END, ITER, LOADED, WAITED
from fastq_loader.statistics.snapshots import CAUSES, LateBatch
from fastq_loader.statistics.workers import WorkerCounters
from tests.support.records import Played, answer, call, came, folded, gives
from tests.support.thorough import examples

TIMES = st.integers(0, 10**10)
SEEDS = st.integers(0, 1 << 32)


def by_cause(epoch: EpochCounters) -> dict[str, int]:
    return {cause: nanoseconds for cause, nanoseconds in epoch.by_cause.items() if nanoseconds}


def waiting(previous: int, *waits: tuple[int, int], cause: str = "workers", **times: int) -> dict[str, int]:
    """What a call from 100 to 1000 is spent on, in which these waits end with an answer of these times."""
    before = [came(answer(8, previous - 10, previous, previous))] if previous else []
    waited = [(WAITED, *wait, cause, 9, None) for wait in waits]
    found = answer(9, **times)
    begun = call(ITER, 100, 100, *before)
    return by_cause(folded(begun, gives(found, 100, 1000, *waited, came(found)), began=100))


CALLS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "the worker was loading": (
        waiting(50, (100, 900), started=50, collated=900, finished=900),
        {"workers": 800, "transport": 100},
    ),
    "it was loading, and packed": (
        waiting(50, (100, 900), started=50, collated=700, finished=850),
        {"workers": 600, "transport": 300},
    ),
    "it was busy with the batch before, as long as with this one": (
        waiting(500, (100, 900), started=500, collated=900, finished=900),
        {"workers": 800, "transport": 100},
    ),
    "the batch before is like this one, half of which is packing": (
        waiting(300, (100, 500), started=300, collated=400, finished=500),
        {"workers": 200, "transport": 700},
    ),
    "it had nothing to do, and its task was on the way": (
        waiting(100, (100, 900), started=600, collated=900, finished=900),
        {"workers": 300, "transport": 600},
    ),
    "it was its first batch: it was not up before": (
        waiting(0, (100, 900), started=600, collated=900, finished=900),
        {"start_up": 500, "workers": 300, "transport": 100},
    ),
    "others were quicker, but it was not up before": (
        waiting(0, (100, 900), cause="head_of_line", started=600, collated=900, finished=900),
        {"start_up": 500, "head_of_line": 300, "transport": 100},
    ),
    "others had nothing to do, and it was up": (
        waiting(50, (100, 900), cause="memory", started=600, collated=900, finished=900),
        {"memory": 800, "transport": 100},
    ),
    "a quarter of the batch's time went for new pages": (
        waiting(50, (100, 900), started=100, collated=900, finished=900, new_memory=200),
        {"workers": 600, "memory": 200, "transport": 100},
    ),
    "two waits": (
        waiting(50, (100, 400), (500, 900), started=50, collated=900, finished=900),
        {"workers": 700, "transport": 200},
    ),
    "nothing was waited for": (
        waiting(50, started=50, collated=90, finished=90),
        {"transport": 900},
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wait_is_lost_to_what_the_worker_did(case: str) -> None:
    found, expected = CALLS[case]
    assert found == expected


@pytest.mark.parametrize(
    ("behind", "blocked", "cause"),
    [
        (0, False, "workers"),
        (0, True, "memory"),
        (1, False, "workers"),  # the workers are only out of step
        (1, True, "head_of_line"),
        (3, False, "workers"),
        (4, False, "head_of_line"),  # the window has widened: they are far ahead
        (4, True, "head_of_line"),
    ],
)
def test_what_a_wait_seems_to_be_lost_to(behind: int, blocked: bool, cause: str) -> None:
    assert records.cause_of_wait(behind, blocked, 4) == cause


def test_what_a_call_did_itself_is_counted_as_it_is_recorded() -> None:
    found = [
        call(ITER, 1, 100, (DREW, 10, 30, ())),
        gives(
            *(None, 150, 310),
            *((WAITED, 150, 250, "head_of_line", 0, None), (WAITED, 250, 270, "memory", 0, None)),
            (DEVICE, 270, 300),
        ),
    ]
    assert by_cause(folded(*found)) == {
        "sampler": 20,
        "start_up": 79,
        "consumer": 50,
        "head_of_line": 100,
        "memory": 20,
        "device_copy": 30,
        "transport": 10,
    }
    # For a batch that was an error without an answer.
    found.append(gives(None, 400, 460, (WAITED, 400, 450, "workers", 0, None)))
    epoch = folded(*found)
    assert (by_cause(epoch)["workers"], epoch.waited) == (50, 170)
    epoch = folded(*found, call(END, 500, 520, more=(0,)), call(CLOSE, 520, 590))
    assert by_cause(epoch)["start_up"] == 79 + 20 + 70
    assert (epoch.over, epoch.batches, epoch.nanoseconds) == (True, 2, 589)


def test_a_batch_that_is_loaded_by_the_call_is_the_workers_time() -> None:
    epoch = folded(gives(0, 1, 90, (DREW, 1, 5, ()), (LOADED, 5, 85, 0, 60)))
    assert by_cause(epoch) == {"sampler": 4, "workers": 80, "transport": 5}
    assert [tuple(cost) for cost in epoch.costs.last] == [(0, 80, 0)]
    assert epoch.waited == 80


def counted(counters: Counters) -> list[Any]:
    """All that can be known of a loader's epochs."""
    kept = [(epoch.costs.last, epoch.in_transit, epoch.by_cause) for epoch in counters.history]
    return [counters.snapshot(), [worker.cpu_marks for worker in counters.workers], *kept]


@examples(100)
@given(SEEDS)
def test_folding_in_any_split_gives_the_same_as_in_one(seed: int) -> None:
    both, split = [], random.Random(seed)
    for at_once in (True, False):
        played = Played(counters := Counters(), random.Random(seed))
        fold, counters.fold = counters.fold, lambda: None  # type: ignore[method-assign]
        counters.workers = played.workers
        for _ in played.epochs(20):
            if not at_once and split.random() < 0.5:
                fold()
        counters.fold = fold  # type: ignore[method-assign]
        both.append(counted(counters))
    assert both[0] == both[1]
    assert not counters.records


@examples(100)
@given(SEEDS)
def test_the_causes_add_up_to_the_time_whatever_happens(seed: int) -> None:
    played = Played(counters := Counters(), random.Random(seed))
    for _ in played.epochs(20):
        continue
    for epoch in counters.history:
        assert all(nanoseconds >= 0 for nanoseconds in epoch.by_cause.values())
        if epoch.epoch in played.ended:
            began, ended = played.ended[epoch.epoch]
            assert epoch.nanoseconds == ended - began
        found = epoch.snapshot()
        assert abs(sum(map(found.spent_on, CAUSES)) - found.seconds) < 1e-6


def test_a_call_that_was_cut_short_counts_as_far_as_it_is_known() -> None:
    begun, drew = call(ITER, 1, 10), (DREW, 20, 50, ())
    dropped = folded(begun, call(DROP, 20, 400, drew))
    assert (by_cause(dropped)["sampler"], dropped.nanoseconds) == (30, 49)
    cut = folded(begun, call(CUT, 20, 70, drew), gives(None, 70, 75))
    assert (by_cause(cut)["transport"], cut.nanoseconds, cut.batches) == (20 + 5, 74, 1)


@examples(100)
@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=30))
def test_ready_batches_are_averaged_over_parts_of_the_epoch(batches: list[tuple[int, int]]) -> None:
    epoch, now, ready = EpochCounters(1, 1), 1, 0
    for seq, (finished, pause) in enumerate(batches):
        now += pause
        given = answer(seq, finished=min(finished + 1, now))
        epoch.fold(gives(given, now, now))
        ready += now - given.finished
    found = epoch.snapshot()
    assert 1 <= len(found.ready) <= 64
    parts, now = len(found.ready), now - 1
    width = 1 << 24
    while now >= 64 * width:
        width *= 2
    widths = [width] * (parts - 1) + [max(1, now - width * (parts - 1))]
    total = sum(each * size for each, size in zip(found.ready, widths, strict=True))
    assert abs(total - ready) <= 0.006 * sum(widths) + 1


# ---- batches that held up others ------------------------------------------------------------------

SLOW = answer(7, 10, 40, 50)


def held_up(batch: int, took: int, index: Any = None) -> records.Step:
    return WAITED, 100, 100 + took, "head_of_line", batch, index


def test_a_late_batch_is_named() -> None:
    first = gives(None, 100, 400, held_up(7, 100, [40, 41]), held_up(7, 50, [40, 41]))
    assert folded(first).worst() == [LateBatch(1, 7, 150e-9)], "it has not come"
    assert folded(first, gives(SLOW, 400, 450, came(SLOW))).worst() == [LateBatch(1, 7, 150e-9, 40e-9)]
    assert not folded(gives(SLOW, 100, 400, came(SLOW))).worst(), "it held up nothing"


def test_the_ten_latest_batches_are_named_the_worst_first() -> None:
    epoch = folded(*(gives(None, 100, 200, held_up(batch, batch * 37 % 100)) for batch in range(100)))
    for found in (epoch, summed([EpochCounters(2, 1), epoch])):
        assert [round(late.seconds * 1e9) for late in found.worst()] == list(range(99, 89, -1))
        assert all(late.batch * 37 % 100 == round(late.seconds * 1e9) for late in found.worst())


# ---- workers ----------------------------------------------------------------------------------


def waited(worker: WorkerCounters) -> tuple[int, int]:
    """Nanoseconds that a worker waited for tasks that were sent, and that were not."""
    found = worker.snapshot()
    return round(found.idle_seconds * 1e9), round(found.blocked_seconds * 1e9)
