"""Whose turn it is, and who is dead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.errors import InvalidTransition
from fastq_loader.scheduling.states import WorkerTable


def turns(table: WorkerTable, count: int, share_of: int | None = None) -> list[int | None]:
    return [table.take_turn(share_of) for _ in range(count)]


def test_turns_go_round_the_workers_that_have_something_left_to_read() -> None:
    table = WorkerTable(3)
    assert turns(table, 4) == [0, 1, 2, 0]
    table.move(2, "end")
    assert table.active() == 2
    assert turns(table, 3) == [1, 0, 1]
    table.begin_epoch()
    assert turns(table, 3) == [0, 1, 2]
    for worker in range(3):
        table.move(worker, "end")
    assert turns(table, 1) == [None]


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
    """A dead worker is reported at the first batch that would be its own."""
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
