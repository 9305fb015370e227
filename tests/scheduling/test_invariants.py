"""A schedule that is broken on purpose does not pass the check."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.scheduling.states import DEAD, GONE, READY
from tests.scheduling.test_scheduler import answer, started


def _lose_an_answer(scheduler: Scheduler) -> None:
    scheduler.pending_tasks.settle(1, 1)


def _deliver_twice(scheduler: Scheduler) -> None:
    scheduler._in_flight.skip()


def _fill_a_block_of_no_batch(scheduler: Scheduler) -> None:
    scheduler._arrivals.clear()


def _forget_an_answer(scheduler: Scheduler) -> None:
    scheduler._in_flight[1].state = READY


def _keep_a_batch_that_is_gone(scheduler: Scheduler) -> None:
    scheduler._in_flight[1].state = GONE


def _widen_the_window(scheduler: Scheduler) -> None:
    scheduler.window.size += 1


def _ask_for_too_much(scheduler: Scheduler) -> None:
    scheduler.window.size = scheduler.window.widest = 1


def _kill_a_worker(scheduler: Scheduler) -> None:
    scheduler._worker_table._states[1] = DEAD


def _miscount(scheduler: Scheduler) -> None:
    scheduler._worker_table.gave(1)


def _share_an_assigned_task(scheduler: Scheduler) -> None:
    scheduler._in_flight[1].worker = None


@pytest.mark.parametrize(
    "broken",
    [
        _lose_an_answer,
        _deliver_twice,
        _fill_a_block_of_no_batch,
        _forget_an_answer,
        _keep_a_batch_that_is_gone,
        _widen_the_window,
        _ask_for_too_much,
        _kill_a_worker,
        _miscount,
        _share_an_assigned_task,
    ],
)
def test_the_check_finds_what_is_wrong(broken: Callable[[Scheduler], None]) -> None:
    scheduler, sends = started()
    scheduler.handle(answer(sends[0], nbytes=100_000))
    scheduler.check()
    broken(scheduler)
    with pytest.raises(AssertionError):
        scheduler.check()
