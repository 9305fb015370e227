"""A schedule that is broken on purpose does not pass the check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.scheduling.states import DEAD, GONE, READY
from tests.scheduling.test_scheduler import answer, started
from tests.support import invariants
from tests.support.scheduler_machine import arrive

BREAKAGES: dict[str, Callable[[Scheduler], Any]] = {
    "an answer is lost": lambda scheduler: scheduler.pending_tasks.settle(1, 1),
    "a batch is delivered twice": lambda scheduler: scheduler._in_flight.ring.pop(),
    "a block is filled for no batch": lambda scheduler: scheduler._in_flight.ring.clear(),
    "an answer is forgotten": lambda scheduler: setattr(scheduler._in_flight[1], "state", READY),
    "a batch that is gone is kept": lambda scheduler: setattr(scheduler._in_flight[1], "state", GONE),
    "the window is too wide": lambda scheduler: setattr(scheduler.window, "size", 5),
    "too much is asked for": lambda scheduler: vars(scheduler.window).update(size=1, widest=1),
    "a worker is dead": lambda scheduler: scheduler._worker_table._states.__setitem__(1, DEAD),
    "a batch is not counted": lambda scheduler: scheduler._worker_table.gave(1),
    "an assigned task is shared": lambda scheduler: setattr(scheduler._in_flight[1], "worker", None),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_check_finds_what_is_wrong(breakage: str) -> None:
    scheduler, sends = started()
    arrive(scheduler, *answer(sends[0], nbytes=100_000))
    invariants.check(scheduler)
    BREAKAGES[breakage](scheduler)
    with pytest.raises(AssertionError):
        invariants.check(scheduler)
