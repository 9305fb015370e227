"""The scheduler under random orders of events (see `scheduler_machine`), and case by case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck

from fastq_loader.ipc.messages import BATCH
from fastq_loader.memory.blocks import size_class
from fastq_loader.memory.pool import BlockPool
from fastq_loader.scheduling.events import Send, Wait
from fastq_loader.scheduling.in_flight import Batch
from fastq_loader.scheduling.progress import Progress
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.scheduling.schedules import Window
from tests.support import invariants
from tests.support.scheduler_machine import SchedulerMachine, arrive
from tests.support.simulation import REGION, Loaded, SimulatedArena
from tests.support.thorough import examples

Arrived = tuple[int, Loaded]

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = examples(
    200,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def started(
    workers: int = 2, prefetch: int = 2, length: int = 100, window: Window | None = None, **keywords: Any
) -> tuple[Scheduler, list[Send]]:
    arena: Any = SimulatedArena()
    window = window or Window(workers * prefetch)
    scheduler = Scheduler(workers, BlockPool(arena), window, **keywords)
    return scheduler, begin(scheduler, length)


def begin(scheduler: Scheduler, length: int = 100, **keywords: Any) -> list[Send]:
    """A new epoch over so many indices; the tasks that were sent."""
    return draw(scheduler, scheduler.begin_epoch(scheduler.epoch + 1, **keywords), range(length))


def draw(scheduler: Scheduler, times: int, indices: Iterable[int]) -> list[Send]:
    """Give the scheduler so many indices, as far as there are any."""
    sends: list[Any] = []
    for index in islice(indices, times):
        batch = scheduler.drawn(index)
        if batch is not None:
            assert batch.task is not None
            sends.append(Send(batch.worker, batch.task))
    return sends


def states(scheduler: Scheduler) -> dict[int, str]:
    """The blocks by offset."""
    return invariants.states(scheduler.pool)


def answer(send: Send, kind: int = BATCH, worker: int | None = None, nbytes: int = 0) -> Arrived:
    """The answer of the task's worker or of `worker`, with a batch of `nbytes` in a new block."""
    worker = send.worker if worker is None else worker
    assert worker is not None
    at = worker * REGION
    used, fresh = (((at, nbytes),), ((at, size_class(nbytes)),)) if nbytes else ((), ())
    task = send.task
    return worker, Loaded(task.epoch, task.seq, task.attempt, kind, 0, 0, fresh, (), None).put_into(used)


def delivered(scheduler: Scheduler) -> int:
    deliver = scheduler.wanted()
    assert isinstance(deliver, Batch)
    assert deliver.answer is None or deliver.worker is not None
    return deliver.seq


def handed_out(scheduler: Scheduler, index: int) -> list[Send]:
    assert isinstance(scheduler.wanted(), Batch)
    return draw(scheduler, scheduler.to_draw, [index])


def of(sends: Sequence[Send] | None) -> list[tuple[int | None, int, int]]:
    assert sends is not None, "the dead worker is replaced"
    return [(send.worker, send.task.seq, send.task.attempt) for send in sends]


def test_a_window_grows_while_the_next_batch_is_late_and_is_least_in_the_next_epoch() -> None:
    scheduler, sends = started(shared_tasks=True, window=Window(2, 8, 1 << 30))
    scheduler.wanted()
    assert scheduler.idle() == 0, "it is full of tasks without an answer"
    done = 1
    while done < len(sends):
        arrive(scheduler, *answer(sends[done], worker=1))
        done += 1
        assert scheduler.wanted() == Wait(None, 0, done - 1, blocked=True)
        sends += draw(scheduler, scheduler.idle(), range(len(sends), 100))
    assert done == scheduler.window.size == 8
    arrive(scheduler, *answer(sends[0], worker=0))
    for send in handed_out(scheduler, 0):
        arrive(scheduler, *answer(send, worker=0))
    assert len(scheduler.in_flight.batches) == scheduler.window.size == 8
    assert scheduler.begin_epoch(2) == scheduler.window.size == 2


@pytest.mark.parametrize("shared", [False, True])
def test_a_wait_says_whether_a_worker_has_nothing_to_do_because_the_window_is_full(shared: bool) -> None:
    scheduler, sends = started(shared_tasks=shared)  # two workers, four batches
    wait = scheduler.wanted()
    assert isinstance(wait, Wait)
    assert not wait.blocked
    for send in sends[1::2]:
        arrive(scheduler, *answer(send, worker=1))
    if shared:
        arrive(scheduler, *answer(sends[2], worker=1))
    wait = scheduler.wanted()
    assert isinstance(wait, Wait)
    assert wait.blocked
    scheduler.exhausted()
    wait = scheduler.wanted()
    assert isinstance(wait, Wait)
    assert not wait.blocked, "there is nothing more to do"


def test_a_resumed_epoch_gives_no_batch_the_number_of_one_that_was_delivered() -> None:
    scheduler, _ = started()
    sends = begin(scheduler, done=Progress(4, frozenset({3, 4})))
    assert [send.task.seq for send in sends] == [2, 5, 6, 7]
