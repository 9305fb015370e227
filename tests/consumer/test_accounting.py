"""What the event loop tells the counters: the causes of waits, and what a call gave."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader.consumer.accounting import Accounting
from fastq_loader.ipc.messages import BATCH, Answer, Indices
from fastq_loader.scheduling.events import Wait
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.snapshots import LateBatch

ANSWER = Answer(1, 4, 0, BATCH, 10, 50, (), (), None, slowest=30, slowest_at=1, collated=40)


def accounting(index: Any = None) -> tuple[Accounting, Counters]:
    """Of a pool whose window is 4 batches wide, in the middle of a call."""
    counters = Counters()
    scheduler: Any = SimpleNamespace(window=SimpleNamespace(least=4), index_of=lambda seq: index)
    account = Accounting(counters, scheduler)
    account.notes = counters.begin_epoch(0, 0)
    return account, counters


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
def test_what_a_wait_is_lost_to(behind: int, blocked: bool, cause: str) -> None:
    account, counters = accounting()
    account.waited(Wait(0, 4, behind, 0, blocked), 0)
    account.notes.left(9, None, None, None)
    found = {name for name, took in account.notes.counted().by_cause.items() if took and name != "transport"}
    assert found == {cause}
    assert counters.wait_seconds == account.notes.counted().by_cause[cause] / 1e9
    assert bool(counters.snapshot().late_batches) == (cause == "head_of_line")


@pytest.mark.parametrize("index", [[7, 8], Indices(array("q", [7, 8]).tobytes())])
def test_the_sample_that_held_up_others_is_named(index: Any) -> None:
    account, counters = accounting(index)
    assert account.late is None, "nothing was held up"
    account.waited(Wait(0, 4, 1, 0, True), 0)
    assert account.late is index
    account.came_late(ANSWER)
    assert account.late is None
    (late,) = counters.snapshot().late_batches
    assert late == LateBatch(0, 4, late.seconds, 40e-9, 8, 30e-9)
