"""Which task a worker takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.ipc.messages import (
    Task,
)
from fastq_loader.workers.task_queue import TaskQueue
from tests.support.simulation import Table


def attempt_at(seq: int, attempt: int = 0, epoch: int = 1) -> Task:
    return Task(epoch, seq, attempt, seq, (), 100 * epoch + 50 * attempt + seq)


def queue(claims: Table, *seqs: int, worker: int = 0, shared: bool = True) -> TaskQueue:
    tasks = TaskQueue(claims, shared, worker)  # type: ignore[arg-type]
    for seq in seqs:
        if claims.holder(100 + seq) is None:
            claims.offer(100 + seq)
        tasks.add(attempt_at(seq))
    return tasks


def taken(tasks: TaskQueue) -> list[int]:
    seqs = []
    while tasks and (one := tasks.take()) is not None:
        seqs.append(one.seq)
    return seqs


@given(st.permutations(range(6)))
def test_shared_tasks_are_taken_from_the_lowest_and_assigned_ones_as_they_came(order: list[int]) -> None:
    claims = Table(1 << 12)
    assert taken(queue(claims, *order, shared=False)) == order
    assert taken(queue(claims, *order)) == sorted(order)
    assert claims.holder(102) == 0


def test_what_others_have_is_passed_over_and_forgotten_until_it_is_sent_again() -> None:
    claims = Table(1 << 12)
    one, other = (queue(claims, 0, 1, 2, worker=worker) for worker in (0, 1))
    assert [tasks.take() for tasks in (one, other)] == [attempt_at(0), attempt_at(1)]
    claims.offer(150)  # the first worker dies
    other.add(attempt_at(0, attempt=1))
    assert (other.take(), taken(other), taken(one)) == (attempt_at(0, attempt=1), [2], [])
    assert len(one) == len(other) == 0
