"""What `schedule=` may be: two classes, their short forms, and errors that name the argument."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from fastq_loader import Dynamic, RoundRobin
from fastq_loader.ipc.claim_table import WORKERS
from fastq_loader.memory import arena
from fastq_loader.scheduling.schedules import WIDEST_WINDOW, read_schedule


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


@pytest.mark.parametrize(
    ("value", "error"), [("static", ValueError), (None, TypeError), (Dynamic, TypeError), (3, TypeError)]
)
def test_what_is_no_schedule_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"schedule=.* is unknown: use 'round_robin', 'dynamic'"):
        read_schedule(value)


def test_nothing_can_be_set_later() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Dynamic().window = 3  # type: ignore[misc]


def test_the_table_of_claims_has_room_for_the_widest_window() -> None:
    assert arena.CLAIMS - WORKERS >= 2 * (WIDEST_WINDOW + 1)
