"""What `schedule=` may be, and the reorder window that it comes to."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from fastq_loader import Dynamic, RoundRobin
from fastq_loader.ipc.claim_table import WORKERS
from fastq_loader.memory.arena import CLAIMS
from fastq_loader.scheduling.schedules import (
    WIDEST_WINDOW,
    Schedule,
    Window,
    read_schedule,
)


def test_short_forms_and_configurations_mean_the_same() -> None:
    assert read_schedule("round_robin") == RoundRobin() != Dynamic()
    assert read_schedule("dynamic") == Dynamic() == Dynamic(window=None)
    schedule = Dynamic(window=64)
    assert read_schedule(schedule) is schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule != RoundRobin(window=64)


@pytest.mark.parametrize("kind", [RoundRobin, Dynamic])
@pytest.mark.parametrize(
    ("window", "error"),
    [(0, ValueError), (-1, ValueError), (WIDEST_WINDOW + 1, ValueError), (2.5, TypeError), (True, TypeError)],
)
def test_a_wrong_window_is_named_when_it_is_made(kind: Any, window: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"{kind.__name__}\(window={window}.*\): window must be"):
        kind(window=window)
    with pytest.raises(error):
        dataclasses.replace(kind(window=WIDEST_WINDOW), window=window)


def test_what_is_not_true_or_false_is_named() -> None:
    with pytest.raises(TypeError, match=r"RoundRobin\(.*=1\): save_generators must be True or False"):
        RoundRobin(save_generators=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "error"), [("static", ValueError), (None, TypeError), (Dynamic, TypeError), (3, TypeError)]
)
def test_what_is_no_schedule_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"schedule=.* is unknown: use 'round_robin', 'dynamic'"):
        read_schedule(value)


@pytest.mark.parametrize(
    ("schedule", "iterable", "limits"),
    [
        (RoundRobin(), False, (8,)),
        (RoundRobin(window=3), True, (3,)),
        (Dynamic(), True, (8,)),
        (Dynamic(window=30), True, (30,)),
        (Dynamic(), False, (12, 128, (1 << 26) + 256, 4)),
        (Dynamic(window=30), False, (30, 30, 0, 4)),
        (Dynamic(window=10), False, (10, 10, 0, 2)),
        (Dynamic(window=8), False, (8, 8, 0, 1)),
        (Dynamic(window=1), False, (1, 1, 0, 1)),
    ],
)
def test_what_a_schedule_comes_to(schedule: Schedule, iterable: bool, limits: tuple[int, ...]) -> None:
    """With four workers that each prefetch two batches, on a machine of 1 GiB and a page."""
    found = Window.of(schedule, workers=4, prefetch=2, iterable=iterable, memory_bytes=(1 << 30) + 4097)
    assert found == Window(*limits)


@pytest.mark.parametrize(("prefetch", "least"), [(10, 1100), (143, 14_335), (9000, 14_335)])
def test_the_window_is_bounded_on_large_machines_too(prefetch: int, least: int) -> None:
    """The table of claims has room for two of the widest."""
    found = Window.of(Dynamic(), workers=100, prefetch=prefetch, iterable=False, memory_bytes=1 << 50)
    assert found == Window(least, WIDEST_WINDOW, 1 << 30, 100)
    assert 2 * WIDEST_WINDOW <= CLAIMS - WORKERS
