"""The tasks that a worker knows of: which one it takes next, and what becomes of the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.ipc.claim_table import Busy
from fastq_loader.ipc.messages import Task
from fastq_loader.workers import task_queue
from fastq_loader.workers.task_queue import TaskQueue
from tests.support.simulation import Table


class Claims(Table):
    """A table of claims in which another worker may be in the middle of a claim."""

    def __init__(self) -> None:
        super().__init__(1 << 12)
        self.busy: set[int] = set()

    def claim(self, ticket: int, worker: int) -> bool:
        if ticket in self.busy:
            raise Busy
        return super().claim(ticket, worker)


def task(seq: int, attempt: int = 0, epoch: int = 1) -> Task:
    """An attempt at a batch, with a ticket of its own."""
    return Task(epoch, seq, attempt, seq, (), (), 100 * epoch + 50 * attempt + seq)


def queue(claims: Claims, *seqs: int, worker: int = 0, shared: bool = True) -> TaskQueue:
    """A worker that was sent tasks in this order; all of them are on offer."""
    tasks = TaskQueue(claims, shared, worker)  # type: ignore[arg-type]
    for seq in seqs:
        if claims.holder(100 + seq) is None:
            claims.offer(100 + seq)
        tasks.add(task(seq))
    return tasks


def taken(tasks: TaskQueue) -> list[int]:
    seqs = []
    while (one := tasks.take()) is not None:
        seqs.append(one.seq)
    return seqs


@given(st.permutations(range(6)))
def test_shared_tasks_are_taken_from_the_lowest_and_assigned_ones_as_they_came(order: list[int]) -> None:
    claims = Claims()
    assert taken(queue(claims, *order, shared=False)) == order
    assert taken(queue(claims, *order)) == sorted(order)
    assert claims.holder(102) == 0


def test_what_others_have_is_passed_over_and_forgotten_until_it_is_sent_again() -> None:
    claims = Claims()
    one, other = (queue(claims, 0, 1, 2, worker=worker) for worker in (0, 1))
    assert [tasks.take() for tasks in (one, other)] == [task(0), task(1)]
    claims.offer(150)  # the first worker dies
    other.add(task(0, attempt=1))
    assert (other.take(), taken(other), taken(one)) == (task(0, attempt=1), [2], [])
    assert len(one) == len(other) == 0


@pytest.mark.parametrize("shared", [True, False])
def test_what_a_worker_works_on_is_known_until_it_has_answered(shared: bool) -> None:
    claims = Claims()
    tasks = queue(claims, 0, 1, worker=5, shared=shared)
    for seq in (0, 1):
        assert tasks.take() is not None
        assert claims.begun(5) == 100 + seq
    tasks.answered()
    assert claims.begun(5) is None
    assert tasks.take() is None
    assert claims.begun(5) is None


def test_a_busy_task_is_kept_for_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(task_queue.time, "sleep", waits.append)
    claims = Claims()
    tasks = queue(claims, 0, 1)
    claims.busy = {100}
    assert taken(tasks) == [1]
    assert len(tasks) == len(waits) == 1
    claims.busy = set()
    assert taken(tasks) == [0]


def test_a_worker_that_takes_nothing_can_forget_what_others_have() -> None:
    claims = Claims()
    tasks = queue(claims, 0, 1, 2)
    claims.claim(101, 3)
    tasks.prune()
    assert len(tasks) == 2
    assert taken(tasks) == [0, 2]


def test_assigned_tasks_of_an_old_epoch_wait_for_an_answer_and_shared_ones_do_not() -> None:
    assigned, shared = (queue(Claims(), 0, shared=shared) for shared in (False, True))
    assert assigned.drop() == [task(0)]
    assert shared.drop() == assigned.drop() == []
    assert taken(shared) == []


def test_who_cannot_work_leaves_shared_tasks_to_the_others_until_the_next_epoch() -> None:
    claims = Claims()
    tasks = queue(claims, 0)
    tasks.retire()
    tasks.add(task(2))
    assert taken(tasks) == []
    assert claims.holder(100) is None
    tasks.drop()
    tasks.add(task(0, epoch=2))
    assert tasks.take() is None, "another epoch, another ticket"
    claims.offer(200)
    tasks.add(task(0, epoch=2))
    assert taken(tasks) == [0]


def test_who_cannot_work_answers_for_all_that_is_its_own() -> None:
    tasks = queue(Claims(), 0, shared=False)
    tasks.retire()
    tasks.add(task(1))
    assert taken(tasks) == [0, 1]
