"""What is advised, what users are told without asking, and what not."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.extras.insight.advice import advice
from fastq_loader.extras.insight.causes import Breakdown
from fastq_loader.extras.insight.hints import duplicate_data, idle_workers, memory_pressure, tiny_batches
from fastq_loader.extras.insight.model import Costs, LoaderFacts, RunProfile, Setting
from fastq_loader.extras.insight.snapshots import CAUSES, EpochStatistics, WorkerStatistics
from fastq_loader.statistics.snapshots import StagingStatistics
from tests.support.thorough import examples

EPOCH = EpochStatistics(1, 100, seconds=10.0, workers_seconds=7.7, head_of_line_seconds=2.3)
UNEVEN = Costs((0.01,) * 9 + (0.3,))


TWO = Setting(2)
ARGUMENTS = {field.name for field in fields(LoaderFacts)}


def lines(limit: str, costs: Costs, setting: Setting = TWO, cpus: float = 4.0, **known: Any) -> str:
    """Advice on a run; `known`: fields of its profile, and of the facts about the loader."""
    loader = LoaderFacts(**{name: known.pop(name) for name in ARGUMENTS & known.keys()})
    found = {"epoch": EPOCH, "costs": costs, "setting": setting, "cpus": cpus, **known}
    return "\n".join(advice(RunProfile(**found, loader=loader), [limit]))


@pytest.mark.parametrize(
    ("costs", "workers", "cpus", "line"),
    [
        (Costs((0.1,)), 2, 4, "2 → 4: about 2 ×, until the CPUs limit; 2 cores are free"),
        (Costs((0.1,), step=0.028), 2, 8, "2 → 4: about 1.8 ×, until the consumer limits; 6 cores are free"),
        (Costs((0.1,), step=0.0245), 2, 8, "2 → 4: about 2 ×, until the consumer limits; 6 cores are free"),
        (Costs((0.1,)), 1, 2, "1 → 2: about 2 ×, until the CPUs limit; 1 core is free"),
        (Costs((0.1,), load_cpu=0.01), 2, 2, "2 → 32: about 16 ×; 2 cores are free"),
        (Costs((0.1,), step=0.1), 0, 2, "0 → 1: about 2 ×, until the consumer limits; 1 core is free"),
    ],
)
def test_more_workers_as_far_as_they_help(costs: Costs, workers: int, cpus: float, line: str) -> None:
    assert lines("workers", costs, Setting(workers), cpus) == f"num_workers {line}"


@pytest.mark.parametrize(
    ("limit", "costs", "workers", "text"),
    [
        ("workers", Costs((0.1,)), 0, "num_workers 0 → 4"),
        ("consumer", Costs((1e-3,), step=0.1), 4, "would do"),
        ("transport", Costs((1e-5,), overhead=1e-3), 2, "num_workers=0 is"),
        ("start_up", Costs((0.01,)), 2, "num_workers=0 is"),
    ],
)
def test_a_loader_that_chooses_the_number_of_workers_is_advised_none(
    limit: str, costs: Costs, workers: int, text: str
) -> None:
    assert text in lines(limit, costs, Setting(workers))
    assert text not in lines(limit, costs, Setting(workers), chooses_workers=True)


DECODED = {
    "costs": Costs((0.1,), batch_bytes=100e6),
    "setting": Setting(2),
    "cpus": 2.0,
    "epoch": EpochStatistics(1, 100, 10.0, workers_seconds=9.0),
    "workers": (WorkerStatistics(0, 7, fetch_seconds=9.2, collate_seconds=0.8),),
    "batch_size": 20,
    "free_bytes": 20_000_000_000,
}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "92%.*would hold all samples in 10 GB: up to about 5.4 × from the second epoch on"),
        ({"free_bytes": 14_000_000_000}, "would hold 70% of the samples in 7 GB: up to about 2.3 ×"),
        ({"costs": Costs((0.1,), batch_bytes=640)}, "would hold all samples in 1 MB: up to"),
        ({"free_bytes": 1_000_000_000}, None),  # too few to be worth it
        ({"is_cached": True}, None),
        ({"iterable": True}, None),
        ({"batch_size": 0}, None),
        ({"costs": Costs((0.1,))}, None),  # whose sizes nobody knows
        ({"costs": Costs((2e-3,), batch_bytes=20 * 150e3)}, "would hold"),
        ({"costs": Costs((0.9e-3,), batch_bytes=20 * 150e3)}, None),  # a hit takes no less
        ({"workers": (WorkerStatistics(0, 7, fetch_seconds=1, collate_seconds=9),)}, None),
    ],
)
def test_where_a_cache_would_pay(fields: dict[str, Any], line: str | None) -> None:
    found = [each for each in lines("workers", **{**DECODED, **fields}).splitlines() if "cached" in each]
    assert (len(found) == 0) if line is None else re.search(line, found[0])


def test_what_takes_microseconds_needs_no_workers() -> None:
    costs = Costs((40e-6,), pack=20e-6, overhead=200e-6)
    measured = EpochStatistics(1, 1000, 0.3, start_up_seconds=0.08)
    for limit in ("workers", "transport", "balanced"):
        assert "a batch takes 40 µs to load: num_workers=0 is about 5.5 × as fast" in lines(
            limit, costs, epoch=measured
        )
    assert "num_workers=0" not in lines("transport", costs, Setting(0), epoch=measured)


SLOW = EpochStatistics(1, 10, 1.0, start_up_seconds=0.6, workers_seconds=0.4)
MAPPED = (WorkerStatistics(0, 70, work_seconds=1.0, new_memory_seconds=0.5),)
IDLE, PACKED = Costs((0.1,), load_cpu=0.0), Costs((0.01,), pack=0.03)
PUT_TOGETHER, QUICK = Costs((1e-5,), overhead=0.01), Costs((1e-5,), overhead=3e-4, step=5e-5)
DRAWN, COPIED = Costs((0.001,), draw=0.02, step=0.01), Costs((0.001,), device=0.02, step=0.01)
PAGEABLE = StagingStatistics("cuda", "pageable", "no room")
NARROW = Setting(4, fixed_window=1)
STEP = "a step takes 31 ms, a batch"

#: What limits, the costs, facts about the run, and the advice: all of it, or a part of it after "…".
RULES: list[tuple[str, Costs, dict[str, Any], str]] = [
    ("workers", IDLE, {"setting": Setting(0), "epoch": replace(EPOCH, seconds=9.0)}, "…persistent_workers=T"),
    (
        "workers",
        IDLE,
        {"setting": Setting(0), "iterable": True},
        "…, if the dataset is split among workers: ",
    ),
    ("workers", Costs((0.1,)), {"cpus": 2}, "a batch takes 100 ms to load: in half of that, about 2 ×"),
    ("head_of_line", UNEVEN, {}, "…schedule='dynamic' removes the 23% lost at the head of the line: about "),
    (
        *("head_of_line", Costs((0.01,) * 99 + (9.0,)), {"setting": Setting(4, dynamic=True), "cpus": 64}),
        "…no batch that takes longer than 20 ms to load",
    ),
    (
        *("consumer", Costs((0.012,), step=0.031), {"setting": Setting(4)}),
        f"{STEP} 12 ms: one worker would do, at the same speed",
    ),
    ("consumer", Costs((0.06,), step=0.031), {"setting": Setting(4)}, f"…{STEP} 60 ms: 2 workers would do"),
    ("consumer", Costs((1e-5,), step=0.031), {"setting": Setting(4)}, f"…{STEP} 10 µs: num_workers=0 would"),
    ("consumer", Costs((0.012,), step=0.031), {"setting": Setting(1)}, ""),
    ("start_up", Costs((0.04,)), {"epoch": SLOW}, "…persistent_workers=True: about 2.5 × from the second"),
    ("start_up", Costs((0.04,)), {"epoch": SLOW}, "…num_workers=0 is about 2.5 × as fast"),
    ("start_up", Costs((0.04,)), {"epoch": SLOW, "persistent": True}, ""),
    ("memory", IDLE, {"setting": NARROW}, "schedule=RoundRobin() without window=1: about 4 ×"),
    (
        *("memory", IDLE, {"setting": replace(NARROW, dynamic=True)}),
        "schedule=Dynamic() without window=1: about 4 ×",
    ),
    ("memory", IDLE, {"setting": Setting(4, fixed_window=64)}, ""),
    (
        "memory",
        Costs((0.1,), pack=0.02),
        {"workers": MAPPED},
        "…new memory takes 50% of the workers' time, b",
    ),
    ("transport", PACKED, {"collate": "pad"}, "…pad makes tensors in memory of fastq_loader.empty("),
    ("transport", PUT_TOGETHER, {}, "…and no objects that are pickled"),
    ("transport", QUICK, {}, "…batches twice as large: up to about 1.7 × as many samples a second"),
    (
        *("sampler", DRAWN, {"sampler": "Mine"}),
        "Mine takes 20 ms a batch; shuffle=True, or fastq_loader.PermutationSampler, in its place: up to "
        "about 3 ×",
    ),
    ("sampler", DRAWN, {"sampler": "RandomSampler", "shuffles": True}, "…a batch; fastq_loader.Permutation"),
    ("sampler", DRAWN, {"sampler": "Mine", "iterable": True}, ""),
    ("device_copy", COPIED, {"staging": PAGEABLE}, "…(no room)"),
    ("device_copy", COPIED, {"staging": replace(PAGEABLE, pin="register")}, ""),
    ("device_copy", COPIED, {"transform": "crop"}, "crop in the workers, as part of collate_fn: about 2.9 ×"),
    ("device_copy", COPIED, {"transform": "crop", "setting": Setting(0)}, ""),
]


@pytest.mark.parametrize(("limit", "costs", "facts", "expected"), RULES)
def test_what_each_limit_is_advised(limit: str, costs: Costs, facts: dict[str, Any], expected: str) -> None:
    found = lines(limit, costs, **facts)
    assert expected[1:] in found if expected.startswith("…") else found == expected


def test_what_is_quick_is_not_advised_to_be_quicker() -> None:
    assert "empty" not in lines("transport", PACKED), "it is torch's own collate function"
    assert "empty" not in lines("transport", Costs((1e-5,), pack=9e-5), collate="pad")
    assert "as many samples" not in lines("transport", PUT_TOGETHER)
    assert "pickled" not in lines("transport", QUICK)


@pytest.mark.parametrize(
    ("took", "facts", "line"),
    [
        (0.02, {}, r"memory takes 20 ms, 67% of the time: device='cuda' .*pin_memory=True: up to about 3 ×"),
        (0.001, {}, r"takes 1 ms, 9% of the time: .*: up to about 1.1 ×"),
        (0.0005, {}, None),  # below 5 %
        (0.02, {"pins": False}, None),
        (0.02, {"staging": StagingStatistics("cuda")}, None),
        (0.02, {"transform": "normalize"}, None),  # which may be what takes the time
        (0.001, {"costs": Costs((0.2,), device=0.001, step=0.01)}, None),  # loading limits
    ],
)
def test_copies_to_page_locked_memory_are_told_whatever_limits(
    took: float, facts: dict[str, Any], line: str | None
) -> None:
    costs = Costs((0.001,), device=took, step=0.01)
    epoch = EpochStatistics(1, 100, 100 * (took + 0.01), consumer_seconds=1.0, device_copy_seconds=100 * took)
    for limit in ("consumer", "workers", "device_copy"):
        found = [
            each
            for each in lines(limit, **{"costs": costs, "epoch": epoch, "pins": True, **facts}).splitlines()
            if "page-locked" in each
        ]
        assert (not found) if line is None else re.search(line, found[0])


def test_without_costs_there_is_no_advice() -> None:
    assert advice(RunProfile(EPOCH), ["workers"]) == ()


SECONDS = st.floats(1e-6, 1.0)


@examples(100)
@given(
    st.lists(st.sampled_from([*CAUSES, "balanced", "unknown"]), max_size=9),
    st.lists(SECONDS, min_size=1, max_size=9),
    st.lists(SECONDS, min_size=4, max_size=4),
    st.integers(0, 4),
    st.booleans(),
    st.floats(0.5, 8.0),
)
def test_little_gains_are_not_mentioned_and_the_best_comes_first(
    limits: list[str], loads: list[float], others: list[float], workers: int, dynamic: bool, cpus: float
) -> None:
    pack, overhead, draw, step = others
    costs = Costs(tuple(loads), pack=pack, overhead=overhead, draw=draw, step=step)
    run = RunProfile(EPOCH, costs, Setting(workers, 2, dynamic), cpus, loader=LoaderFacts(collate="pad"))
    found = advice(run, limits)
    gains = [float(match.group(1)) for line in found if (match := re.search(r"about ([\d.e+]+) ×", line))]
    assert len(found) <= 4
    assert all(gain > 1 for gain in gains)
    assert gains == sorted(gains, reverse=True)


Batch = tuple[bytes, int]


def batches(letters: str, nbytes: int = 8) -> list[Batch]:
    return [(letter.encode(), nbytes) for letter in letters]


ALIKE = {
    "all eight": [batches("abcdefgh")] * 2,
    "fewer, if there are no more": [batches("abc")] * 2,
    "two, with enough in them": [batches("ab", 12)] * 2,
    "with repetitions": [batches("aabbcc")] * 2,
}
DIFFERENT = {
    "parts": [batches("abcd"), batches("efgh")],
    "the last one differs": [batches("abcd"), batches("abce")],
    "one has more": [batches("abcd"), batches("abcde")],
    "another order": [batches("abcd"), batches("bacd")],
    "constant data": [batches("aaaaaaaa", 10**6)] * 2,
    "two alike": [batches("aa", 10**6)] * 2,
    "numbers that may agree by chance": [batches("ab")] * 2,
    "nothing": [],
}


@pytest.mark.parametrize("case", [*ALIKE, *DIFFERENT])
def test_workers_that_give_the_same_data(case: str) -> None:
    first = dict(enumerate({**ALIKE, **DIFFERENT}[case]))
    text = duplicate_data("Stream", first)
    assert (text is not None) == (case in ALIKE)
    if text is not None:
        pair = (0, len(first) - 1)
        assert f"Workers {pair[0]} and {pair[1]} gave the same data (their first {len(first[0])}" in text
        assert "get_worker_info()" in text


@pytest.mark.parametrize(
    ("given_by", "idle"),
    [
        ([8, 0, 8], "1 of 3 workers gave no batch in a whole epoch (worker 1)"),
        ([0, 8, 0, 8], "2 of 4 workers gave no batch in a whole epoch (worker 0, 2)"),
        ([8, 8], None),
        ([8, 7, 0], None),
        ([0, 0], None),
    ],
)
def test_workers_that_give_nothing(given_by: list[int], idle: str | None) -> None:
    first = {worker: [(b"", 0)] * count for worker, count in enumerate(given_by) if count}
    text = idle_workers("Shards", first, len(given_by))
    assert (text is None) == (idle is None)
    if text is not None and idle is not None:
        assert text.startswith(idle)
        assert f"num_workers={len(first)}" in text


def epoch_of(batches: int, *, load: int, way: int, step: int = 0, start_up: int = 0) -> Breakdown:
    parts = {"transport": way, "consumer": step, "start_up": start_up}
    seconds: Any = {f"{cause}_seconds": part / 1e6 * batches for cause, part in parts.items()}
    epoch = EpochStatistics(1, batches, recorded_batches=batches, **seconds)
    return Breakdown(epoch, True, [(seq, load * 1000, 0) for seq in range(10)], load * 1000.0)


@pytest.mark.parametrize(
    ("epoch", "told"),
    [
        (epoch_of(1000, load=500, way=10_000), True),
        (epoch_of(999, load=500, way=10_000), False),  # a short epoch
        (epoch_of(10, load=1, way=10**6), False),
        (epoch_of(5000, load=10, way=1011), True),
        (epoch_of(5000, load=10, way=1009), False),  # less than five seconds were lost
        (epoch_of(60_000, load=100, way=201), True),
        (epoch_of(60_000, load=100, way=199), False),  # less than twice as fast
        (epoch_of(60_000, load=20, way=180, step=190), False),  # the step takes as long
        (epoch_of(60_000, load=100, way=100, start_up=10**6), False),  # a slow start is something else
    ],
)
def test_where_it_does_not_matter_nothing_is_said(epoch: Breakdown, told: bool) -> None:
    assert (tiny_batches(epoch, 2) is not None) == told


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
    text = memory_pressure(window, batch_bytes, left)
    assert (text is not None) == told
    if text is not None:
        assert f"{window} batches of {batch_bytes / 1e6:,.1f} MB may be loaded ahead" in text
        assert "prefetch_factor" in text
