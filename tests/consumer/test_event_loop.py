"""What a pool of workers makes of its plan."""

from __future__ import annotations

from fastq_loader.consumer.event_loop import EventLoop
from fastq_loader.consumer.gate import Gate
from fastq_loader.scheduling.schedules import Window
from fastq_loader.statistics.counters import Counters
from tests.support.worker_setup import make_plan


def test_a_window_that_widens_leaves_the_plan_as_it_is() -> None:
    plan = make_plan([1], dynamic=True, window=Window(2, 8, 1 << 30))
    loop = EventLoop(plan, Counters(), Gate())
    loop.scheduler.window.widen_to(5)
    assert plan.window == Window(2, 8, 1 << 30) != loop.scheduler.window
    loop.pool.arena.retire([])
