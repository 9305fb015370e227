"""Percentiles of durations, without keeping every one."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.statistics.snapshots import Histogram

DURATIONS = st.lists(st.integers(10, 10**13), min_size=1, max_size=50)


def counted(durations: list[int]) -> Histogram:
    histogram = Histogram()
    for duration in durations:
        histogram.add(duration)
    return histogram


@given(DURATIONS, st.floats(1, 100))
def test_a_percentile_is_within_three_percent(durations: list[int], percent: float) -> None:
    exact = sorted(durations)[math.ceil(percent / 100 * len(durations) - 1e-9) - 1] / 1e9
    assert abs(counted(durations).percentile(percent) / exact - 1) < 0.03


@given(DURATIONS, DURATIONS)
def test_two_histograms_make_one(first: list[int], second: list[int]) -> None:
    both = counted(first)
    both.include(counted(second))
    for percent in (1, 50, 99):
        assert both.percentile(percent) == counted(first + second).percentile(percent)


def test_nothing_and_no_time_at_all() -> None:
    assert Histogram().percentile(50) == 0.0
    assert counted([0, 0, -5]).percentile(50) < 2e-9
