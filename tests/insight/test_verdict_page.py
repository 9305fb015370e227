"""A diagnosis as a page."""

from __future__ import annotations

import html
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.insight import verdict
from fastq_loader.insight.verdict import Diagnosis
from fastq_loader.statistics.snapshots import CAUSES, EpochStatistics, WorkerStatistics

EPOCH = EpochStatistics(
    epoch=3,
    batches=1563,
    seconds=12.4,
    consumer_seconds=4.96,
    workers_seconds=7.378,
    transport_seconds=0.062,
    wait_p50=0.00008,
    wait_p95=0.031,
    wait_p99=0.09,
    ready=(0.0, 1.0, 4.0, 8.0),
)
WORKER = WorkerStatistics(
    *(0, 70, 0, 100, 9.0),
    fetch_seconds=8.0,
    collate_seconds=0.5,
    packing_seconds=0.5,
    idle_seconds=1.0,
)
PAGE = Diagnosis(
    "workers",
    0.595,
    "pad: 4 s of 7.4 s",
    ("num_workers 2 → 4: about 1.8 ×, until the consumer limits; 2 cores are free",),
    EPOCH,
    (WORKER,),
    "num_workers=1, prefetch_factor=2, round_robin",
)


def test_a_page_as_it_is_printed() -> None:
    assert verdict.text(PAGE).splitlines() == [
        "Loading limits: 60% of the time was spent waiting for it.",
        "  pad: 4 s of 7.4 s",
        "",
        "Epoch 3: 1,563 batches in 12.4 s, 126 a second; num_workers=1,",
        "prefetch_factor=2, round_robin",
        "",
        "  training step      4.96 s  40%  ████████████████",
        "  loading            7.38 s  60%  ███████████████████████▊",
        "  transport           62 ms   0%  ▎",
        "",
        "  next() took  p50 80 µs   p95 31 ms   p99 90 ms",
        "  ready ahead  ▁▂▅█  up to 8 batches",
        "",
        "  worker     busy  blocked     idle    fetch  collate     pack",
        "  0           90%       0%      10%    80 ms     5 ms     5 ms",
        "",
        "What would help:",
        "  - num_workers 2 → 4: about 1.8 ×, until the consumer limits; 2 cores are free",
    ]


SECONDS = st.floats(0, 1e5)
NAMES = st.text(max_size=300)


@given(
    st.sampled_from([*CAUSES, "balanced", "unknown"]),
    st.lists(SECONDS, min_size=8, max_size=8),
    st.lists(SECONDS, max_size=64),
    st.integers(0, 40),
    NAMES,
    st.lists(NAMES, max_size=4),
)
def test_any_page_has_80_columns_and_fits_a_screen(
    limit: str, spent: list[float], ready: list[float], workers: int, culprit: str, advice: list[str]
) -> None:
    epoch = EpochStatistics(
        0,
        10**6,
        sum(spent),
        **{f"{cause}_seconds": seconds for cause, seconds in zip(CAUSES, spent, strict=True)},
        ready=tuple(ready),
    )
    found = Diagnosis(limit, 0.5, culprit, tuple(advice), epoch, (WORKER,) * workers, "num_workers=40")
    page = verdict.text(found)
    assert all(len(line) <= 80 for line in page.split("\n"))
    assert page.count("\n") < 60
    assert verdict.in_ascii(page).isascii()


def test_what_is_long_is_wrapped_and_what_is_much_is_averaged() -> None:
    epoch = replace(EPOCH, ready=(3.0,) * 63)
    page = verdict.text(replace(PAGE, culprit="slow " * 40, advice=("words " * 40,), epoch=epoch))
    assert max(map(len, page.split("\n"))) <= 80
    assert "  ready ahead  ████████████████████████████████  up to 3 batches" in page


def test_without_anything_ready_there_is_no_line_for_it() -> None:
    for ready in ((), (0.0, 0.0)):
        assert "ready" not in verdict.text(replace(PAGE, epoch=replace(EPOCH, ready=ready)))


def test_an_epoch_that_is_not_there_is_one_line() -> None:
    assert verdict.text(Diagnosis("unknown", 0.0)) == "Nothing can be said yet: there is too little data."


def test_all_epochs_together_have_no_number_and_workers_in_excess_no_line() -> None:
    page = verdict.text(replace(PAGE, epoch=replace(EPOCH, epoch=0), workers=(WORKER,) * 10))
    assert "All epochs: 1,563 batches" in page
    assert page.count("90%") == 8
    assert "and 2 more" in page


def test_workers_on_other_machines_say_where_they_run() -> None:
    names = ("10.0.0.12", None, "a-name.that.is.long.example")
    workers = tuple(replace(WORKER, id=at, node=node) for at, node in enumerate(names))
    found = replace(PAGE, workers=workers)
    table = [line for line in verdict.text(found).splitlines() if "blocked" in line or "90%" in line]
    assert [line[62:] for line in table] == ["  node", "  10.0.0.12", "  ", "  a-name.that.is.l"]


@pytest.mark.parametrize(("share", "bar"), [(0.0, ""), (0.5, "####"), (1.0, "########"), (1.2, "########")])
def test_a_bar_is_as_long_as_its_share(share: float, bar: str) -> None:
    assert verdict.in_ascii(verdict._bar(share)) == 5 * bar


def test_ascii_keeps_what_it_can() -> None:
    assert verdict.in_ascii("2 → 4: 1.8 ×, 3 µs, Größe …") == "2 -> 4: 1.8 x, 3 us, Gr\\xf6\\xdfe ..."


def test_what_is_the_users_is_escaped_in_html() -> None:
    found = replace(PAGE, culprit="<script>alert('&')</script>")
    assert found._repr_html_() == f"<pre>{html.escape(verdict.text(found))}</pre>"
    assert "<script>" not in found._repr_html_()


def test_what_starts_is_named() -> None:
    without = Diagnosis("start_up", 0.5)
    assert verdict.headline(without) == (
        "Starting and ending an epoch limits: 50% of the time was lost to it."
    )
    workers = (WorkerStatistics(0, 1),)
    assert verdict.headline(replace(without, workers=workers)) == (
        "Starting and ending the workers limits: 50% of the time was lost to it."
    )
