"""Tickets and their slots, and which answers are due."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.errors import InvalidTransition
from fastq_loader.ipc.messages import BATCH, Answer
from fastq_loader.scheduling.events import Died
from fastq_loader.scheduling.in_flight import PendingTasks
from fastq_loader.scheduling.states import Batch


def outstanding(*workers: int | None, slots: int = 100) -> tuple[PendingTasks, list[Batch]]:
    """Tasks of epoch 1, one for each worker; None: shared."""
    tasks, batches = PendingTasks(slots), [Batch(seq, worker, None) for seq, worker in enumerate(workers)]
    for batch in batches:
        tasks.add(1, batch)
    return tasks, batches


@pytest.mark.parametrize("worker", [0, None])
def test_an_answer_is_due_from_one_worker_and_for_this_attempt(worker: int | None) -> None:
    tasks, (batch,) = outstanding(worker)
    answer = Answer(1, 0, 0, BATCH, 0, 0, (), (), None)
    assert tasks.due(0, answer) is batch
    assert tasks.due(1, answer) is (batch if worker is None else None)
    for changed in ({"epoch": 2}, {"seq": 1}, {"attempt": 1}):
        assert tasks.due(0, answer._replace(**changed)) is None
    assert tasks.settle(1, 0) is batch
    assert tasks.due(0, answer) is None, "it was answered"


@pytest.mark.parametrize(
    ("tasks", "workers", "idle"),
    [
        ((), 0, False),
        ((), 1, True),
        ((0, 0, 0), 2, True),
        ((0, 1, 0), 2, False),
        ((None, None), 3, True),
        ((None, None), 2, False),
        ((None, 1), 2, False),  # one is known to be claimed
        ((1, 1, None), 3, True),
    ],
)
def test_a_worker_is_idle_when_there_are_fewer_tasks_than_workers(
    tasks: tuple[int | None, ...], workers: int, idle: bool
) -> None:
    assert outstanding(*tasks)[0].leave_idle(workers) is idle


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=40))
def test_no_two_shared_tasks_have_a_slot_in_common(slots: int, steps: list[int]) -> None:
    """However late the batch of an epoch is: the numbers that come round go past it."""
    tasks, waiting, tickets = PendingTasks(slots), list[Batch](), set[int]()
    for epoch, step in enumerate(steps):
        if len(waiting) == slots:
            with pytest.raises(InvalidTransition, match=f"all {slots} slots"):
                tasks.add(epoch, Batch(0, None, None))
            batch = waiting.pop(step % slots)
            key = next(key for key, other in tasks.items() if other is batch)
            if step % 2:
                tasks.settle(*key)
            else:
                tasks.free_slot(batch)
                batch.worker = 0
        waiting.append(Batch(0, None, None))
        tasks.add(epoch, waiting[-1])
        assert waiting[-1].ticket not in tickets | {0}
        tickets.add(waiting[-1].ticket)
        tasks.check()
        assert tasks.tickets() == [batch.ticket for batch in tasks.values() if batch.worker is None]
    for key in list(tasks):
        tasks.settle(*key)
    tasks.check()
    assert not tasks


def test_a_task_whose_slot_was_freed_does_not_take_it_from_another() -> None:
    tasks, (late,) = outstanding(None, slots=1)
    tasks.free_slot(late)
    late.worker = 0
    tasks.add(2, Batch(0, None, None))
    tasks.settle(1, 0)
    tasks.check()
    assert tasks.tickets() == [2]


def test_assigned_tasks_take_no_slots() -> None:
    tasks, batches = outstanding(0, 1, 0, slots=1)
    assert [batch.ticket for batch in batches] == [1, 2, 3]
    assert tasks.tickets() == []
    tasks.check()


def test_what_is_lost_with_a_worker() -> None:
    tasks, batches = outstanding(0, 1, None, None, None)
    claimed = frozenset([batches[3].ticket])
    assert tasks.lost_with(Died(0), 1, last=False) == [(1, 0)]
    assert tasks.lost_with(Died(1, 4), 1, last=False) == [(1, 1), (1, 4)]
    assert tasks.lost_with(Died(1, 4), 2, last=False) == [(1, 1)], "batch 4 of another epoch"
    assert tasks.lost_with(Died(2, None, "died", claimed), 1, last=False) == [(1, 3)]
    assert tasks.lost_with(Died(0), 1, last=True) == [(1, 0), (1, 2), (1, 3), (1, 4)]


def test_the_batch_of_a_ticket() -> None:
    tasks, batches = outstanding(None, 1)
    assert [tasks.seq_of(1, batch.ticket) for batch in batches] == [0, 1]
    assert tasks.seq_of(2, batches[0].ticket) is tasks.seq_of(1, 99) is tasks.seq_of(1, None) is None


@pytest.mark.parametrize("extra", [True, False])
def test_the_check_finds_slots_that_do_not_fit(extra: bool) -> None:
    tasks, (batch,) = outstanding(None)
    if extra:
        tasks[1, 7] = batch
    else:
        tasks.free_slot(batch)
    with pytest.raises(AssertionError, match=r"slot"):
        tasks.check()
