"""The batches and tasks in flight, whose turn it is, and what was handed out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.errors import InvalidTransition
from fastq_loader.scheduling.events import Died
from fastq_loader.scheduling.in_flight import InFlight, PendingTasks, ReorderRing
from fastq_loader.scheduling.progress import START, Progress, WorkerProgress
from fastq_loader.scheduling.states import Batch, WorkerTable

STEPS = st.lists(
    st.tuples(st.just("push"), st.integers(-2, 12))  # relative to the head
    | st.tuples(st.sampled_from(("pop", "skip", "clear")), st.just(0)),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9), STEPS)
def test_the_ring_behaves_like_a_dict(capacity: int, steps: list[tuple[str, int]]) -> None:
    ring: ReorderRing[Any] = ReorderRing(capacity)
    model: dict[int, Any] = {}
    head = 0
    for number, (step, relative) in enumerate(steps):
        number %= 3  # items that count as false are items too
        seq = head + relative
        if step == "push" and (not 0 <= relative < capacity or seq in model):
            with pytest.raises(ValueError, match=f"seq={seq} "):
                ring.push(seq, -1)
        elif step == "push":
            ring.push(seq, number)
            model[seq] = number
        elif step == "pop":
            assert ring.pop() == model.get(head)
            head += model.pop(head, None) is not None
        elif step == "skip" and head in model:
            with pytest.raises(ValueError, match=f"seq={head} "):
                ring.skip()
        elif step == "skip":
            ring.skip()
            head += 1
        else:
            ring.clear()
            model.clear()
        assert (ring.head, ring.filled) == (head, len(model))
        assert sorted(ring.items()) == sorted(model.values())


def test_the_lowest_batch_that_was_lost_with_a_worker() -> None:
    in_flight = InFlight(4)
    for worker in (1, 0, 1, 0):
        in_flight.new(worker, None).move("send")
    for seq in (1, 3, 2):
        in_flight[seq].move("die")
    assert [in_flight.lost_by(worker) for worker in range(3)] == [in_flight[1], in_flight[2], None]
    with pytest.raises(InvalidTransition, match="a batch is lost: event 'deliver' is not allowed"):
        in_flight[1].move("deliver")


def outstanding(*workers: int | None, slots: int = 100) -> tuple[PendingTasks, list[Batch]]:
    """Tasks of epoch 1, one for each worker; None: shared."""
    tasks, batches = PendingTasks(slots), [Batch(seq, worker, None) for seq, worker in enumerate(workers)]
    for batch in batches:
        tasks.add(1, batch)
    return tasks, batches


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
def test_with_few_tasks_workers_are_idle(tasks: tuple[int | None, ...], workers: int, idle: bool) -> None:
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


def test_what_is_lost_with_a_worker() -> None:
    tasks, batches = outstanding(0, 1, None, None, None)
    claimed = frozenset([batches[3].ticket])
    assert tasks.lost_with(Died(1, 4), 1, last=False) == [(1, 1), (1, 4)]
    assert tasks.lost_with(Died(1, 4), 2, last=False) == [(1, 1)], "batch 4 of another epoch"
    assert tasks.lost_with(Died(2, None, "died", claimed), 1, last=False) == [(1, 3)]


def test_the_batch_of_a_ticket() -> None:
    tasks, batches = outstanding(None, 1)
    assert [tasks.seq_of(1, batch.ticket) for batch in batches] == [0, 1]
    assert tasks.seq_of(2, batches[0].ticket) is tasks.seq_of(1, 99) is tasks.seq_of(1, None) is None


def turns(table: WorkerTable, count: int, share_of: int | None = None) -> list[int | None]:
    return [table.take_turn(share_of) for _ in range(count)]


@given(st.integers(1, 5), st.integers(1, 20), st.sets(st.integers(0, 4)))
def test_no_worker_has_more_than_its_share_of_a_window(workers: int, window: int, ended: set[int]) -> None:
    table = WorkerTable(workers)
    ended = {worker for worker in ended if worker < workers - 1}
    for worker in ended:
        table.move(worker, "end")
    going = workers - len(ended)
    exact = window % workers == 0  # torch's
    taken = [worker for worker in turns(table, 3 * window + 3, window) if worker is not None]
    share = window // going if exact else -(-window // going)
    assert sorted(taken) == sorted(share * [worker for worker in range(workers) if worker not in ended])
    assert exact or len(taken) >= window, "an index would be lost"
    for worker in set(taken):
        table.gave(worker)
        assert table.undelivered(worker) == share - 1
        assert turns(table, 2, window) == [worker, None]


def test_a_dead_worker_keeps_its_turns_and_an_ended_one_does_not() -> None:
    table = WorkerTable(2)
    assert not table.is_dead(0)
    assert not table.is_dead(None)
    table.move(0, "die")
    assert (table.is_dead(0), table.is_dead(1), table.is_dead(None)) == (True, False, False)
    assert turns(table, 2) == [0, 1]
    table.move(0, "end")
    assert turns(table, 2) == [1, 1]
    assert table.is_dead(0)
    assert table.exhausted(0)
    table.begin_epoch()
    assert table.is_dead(0)
    assert not table.exhausted(0)
    table.move(1, "die")
    assert table.is_dead(None)
    table.move(0, "replace")
    assert not table.is_dead(0)
    with pytest.raises(InvalidTransition, match="worker 0 is active: event 'replace' is not allowed"):
        table.move(0, "replace")


@given(st.permutations(range(12)), st.integers(0, 12))
def test_every_position_counts_once_in_whatever_order_they_come(order: list[int], come: int) -> None:
    progress = START
    for position in order[:come]:
        progress = progress.after(position)
    handed_out = set(order[:come])
    head = next(position for position in range(13) if position not in handed_out)
    assert progress.delivered == come
    assert progress.head == head
    assert progress.beyond == {position for position in handed_out if position > head}


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from((b"", b"a", b"b"))), max_size=10))
def test_each_worker_is_counted_and_its_last_word_kept(batches: list[tuple[int, bytes]]) -> None:
    progress = Progress(workers=(WorkerProgress(),) * 3)
    for worker, state in batches:
        progress = progress.after_worker(worker, state, None)
    assert progress.delivered == len(batches)
    for number, worker in enumerate(progress.workers):
        said = [state for at, state in batches if at == number]
        assert worker.delivered == len(said)
        assert worker.state == next((state for state in reversed(said) if state), b"")


def test_a_worker_of_a_dataset_with_indices_moves_both_counts() -> None:
    progress = Progress(workers=(WorkerProgress(),) * 2).after_worker(1, b"x", 1)
    assert progress == Progress(1, frozenset({1}), (WorkerProgress(), WorkerProgress(1, b"x")))
