"""When a user is told something, and when not: tables and properties, without a loader."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.insight import hints
from fastq_loader.ipc.messages import BATCH, Answer
from fastq_loader.statistics.counters import WorkerCounters
from fastq_loader.statistics.epoch import EpochCounters

Batch = tuple[bytes, int]


def test_few_samples_in_the_same_order_say_nothing() -> None:
    assert hints.same_order("Shuffle", 7, 19) is None
    text = hints.same_order("Shuffle", 7, 20)
    assert text is not None
    assert "Shuffle gave the same order in epochs 6 and 7 (the first 20 samples" in text
    assert "set_epoch(epoch)" in text


# ---- duplicate data ---------------------------------------------------------------------------------


def batches(letters: str, nbytes: int = 8) -> list[Batch]:
    return [(letter.encode(), nbytes) for letter in letters]


ALIKE = {
    "all eight": [batches("abcdefgh")] * 2,
    "fewer, if there are no more": [batches("abc")] * 2,
    "two, with enough in them": [batches("ab", 12)] * 2,
    "with repetitions": [batches("aabbcc")] * 2,
    "any two workers": [batches("abcd"), batches("efgh"), batches("abcd")],
}
DIFFERENT = {
    "one worker": [batches("abcdefgh")],
    "parts": [batches("abcd"), batches("efgh")],
    "the last one differs": [batches("abcd"), batches("abce")],
    "one has more": [batches("abcd"), batches("abcde")],
    "another order": [batches("abcd"), batches("bacd")],
    "constant data": [batches("aaaaaaaa", 10**6)] * 2,
    "nearly constant": [batches("abababab", 10**6)] * 2,
    "two alike": [batches("aa", 10**6)] * 2,
    "one batch each": [batches("a", 10**6)] * 2,
    "numbers that may agree by chance": [batches("ab")] * 2,
    "nothing": [],
}


@pytest.mark.parametrize("case", [*ALIKE, *DIFFERENT])
def test_workers_that_give_the_same_data(case: str) -> None:
    first = dict(enumerate({**ALIKE, **DIFFERENT}[case]))
    text = hints.duplicate_data("Stream", first)
    assert (text is not None) == (case in ALIKE)
    if text is not None:
        pair = (0, len(first) - 1)
        assert f"Workers {pair[0]} and {pair[1]} gave the same data (their first {len(first[0])}" in text
        assert "get_worker_info()" in text


@given(st.dictionaries(st.integers(0, 4), st.lists(st.tuples(st.binary(), st.integers(0, 99)), max_size=8)))
def test_workers_without_a_batch_in_common_are_never_named(first: dict[int, Sequence[Batch]]) -> None:
    apart = {
        worker: [(b"%d %s" % (worker, digest), nbytes) for digest, nbytes in found]
        for worker, found in first.items()
    }
    assert hints.duplicate_data("Stream", apart) is None


# ---- idle workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_by", "idle"),
    [
        ([8, 0, 8], "1 of 3 workers gave no batch in a whole epoch (worker 1)"),
        ([0, 8, 0, 8], "2 of 4 workers gave no batch in a whole epoch (worker 0, 2)"),
        ([8, 8], None),
        ([8, 1], None),
        ([8, 7, 0], None),
        ([0, 0], None),
    ],
)
def test_workers_that_give_nothing(given_by: list[int], idle: str | None) -> None:
    first = {worker: [(b"", 0)] * count for worker, count in enumerate(given_by) if count}
    text = hints.idle_workers("Shards", first, len(given_by))
    assert (text is None) == (idle is None)
    if text is not None and idle is not None:
        assert text.startswith(idle)
        assert f"num_workers={len(first)}" in text


# ---- tiny batches -----------------------------------------------------------------------------------


def was_loaded(counters: EpochCounters, seq: int, load: int) -> None:
    took = load * 1000
    counters.answered(
        0, Answer(1, seq, 0, BATCH, 0, took, (), (), None, collated=took), True, WorkerCounters(0, 1)
    )


def epoch(
    batches: int, *, load: int, way: int, step: int = 0, start_up: int = 0, sampler: int = 0, copy: int = 0
) -> EpochCounters:
    """An epoch that is over; all times in microseconds for each batch."""
    counters = EpochCounters(1, 0)
    counters.batches = batches
    for seq in range(batches):
        was_loaded(counters, seq, load)
    counters.spent.update(
        transport=way * 1000 * batches,
        consumer=step * 1000 * batches,
        start_up=start_up * 1000 * batches,
        sampler=sampler * 1000 * batches,
        device_copy=copy * 1000 * batches,
    )
    counters._left = sum(counters.spent.values())
    return counters


def test_batches_that_are_worth_no_worker() -> None:
    text = hints.tiny_batches(epoch(60_000, load=20, way=180, step=30), 2)
    assert text is not None
    assert "takes 20 µs to load, and 210 µs with its way from 2 workers" in text
    assert "this epoch of 60000 batches would have taken about 3.0 s in place of 12.6 s" in text


@pytest.mark.parametrize(
    ("counters", "told"),
    [
        (epoch(1000, load=500, way=10_000), True),
        (epoch(999, load=500, way=10_000), False),  # a short epoch
        (epoch(10, load=1, way=10**6), False),
        (epoch(5000, load=10, way=1011), True),
        (epoch(5000, load=10, way=1009), False),  # less than five seconds were lost
        (epoch(60_000, load=100, way=201), True),
        (epoch(60_000, load=100, way=199), False),  # less than twice as fast
        (epoch(60_000, load=20, way=180, step=190), False),  # the step takes as long
        (epoch(60_000, load=20, way=180, sampler=190), False),
        (epoch(60_000, load=20, way=180, copy=190), False),
        (epoch(60_000, load=100, way=100, start_up=10**6), False),  # a slow start is something else
    ],
)
def test_where_it_does_not_matter_nothing_is_said(counters: EpochCounters, told: bool) -> None:
    assert (hints.tiny_batches(counters, 2) is not None) == told


def test_what_came_before_the_batches_whose_costs_are_kept_counts_too() -> None:
    counters = epoch(60_000, load=20, way=180)
    assert "from 1 worker and the step" in str(hints.tiny_batches(counters, 1))
    counters = epoch(0, load=0, way=0)
    was_loaded(counters, 0, 9_000_000)  # and then as before
    for seq in range(1, 60_000):
        was_loaded(counters, seq, 20)
    counters.batches, counters.spent["transport"] = 60_000, 180_000 * 60_000
    assert hints.tiny_batches(counters, 2) is None


def test_an_epoch_of_which_no_costs_are_known_says_nothing() -> None:
    counters = epoch(60_000, load=20, way=180)
    counters._costs.clear()
    assert hints.tiny_batches(counters, 2) is None


# ---- memory -----------------------------------------------------------------------------------------

MB = 1 << 20


@pytest.mark.parametrize(
    ("window", "batch_bytes", "left", "told"),
    [
        (16, 100 * MB, 3199 * MB, True),
        (16, 100 * MB, 3200 * MB, False),
        (16, 4 * MB, 0, True),
        (15, 4 * MB, 0, False),
    ],
)
def test_a_window_that_takes_half_of_the_memory(window: int, batch_bytes: int, left: int, told: bool) -> None:
    text = hints.memory_pressure(window, batch_bytes, left)
    assert (text is not None) == told
    if text is not None:
        assert f"{window} batches of {batch_bytes / 1e6:,.1f} MB may be loaded ahead" in text
        assert "prefetch_factor" in text
