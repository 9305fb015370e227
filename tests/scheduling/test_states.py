"""The tables of a batch's and a worker's states."""

from __future__ import annotations

import pytest

from fastq_loader.errors import InvalidTransition
from fastq_loader.ipc.messages import Indices, Task
from fastq_loader.memory.blocks import Holder
from fastq_loader.scheduling.states import BATCH_TRANSITIONS, WORKER_TRANSITIONS, Batch, worker_after

TABLES = [BATCH_TRANSITIONS, WORKER_TRANSITIONS]
EVENTS = {event for row in BATCH_TRANSITIONS.values() for event in row}


@pytest.mark.parametrize("table", TABLES)
def test_tables_are_closed_and_every_state_is_reachable(table: dict[str, dict[str, str]]) -> None:
    reached = {target for row in table.values() for target in row.values()}
    assert reached <= set(table)
    assert set(table) - reached <= {"new"}


@pytest.mark.parametrize("state", BATCH_TRANSITIONS)
@pytest.mark.parametrize("event", sorted(EVENTS))
def test_a_batch_moves_by_the_table(state: str, event: str) -> None:
    batch = Batch(7, None, 3)
    batch.state = state
    if event in BATCH_TRANSITIONS[state]:
        batch.move(event)
        assert batch.state == BATCH_TRANSITIONS[state][event]
    else:
        with pytest.raises(InvalidTransition, match=f"a batch is {state}: event '{event}' is not allowed"):
            batch.move(event)
        assert batch.state == state


def test_a_batch_knows_who_holds_its_blocks() -> None:
    batch = Batch(0, None, Indices(bytes(8)))
    assert batch.blocks == ()
    batch.ticket = 9
    batch.task = Task(1, 0, 0, batch.index, ((0, 1),), ((2, 3),))
    assert batch.blocks == ((0, 1), (2, 3))
    assert batch.holder == Holder(None, 9)
    batch.worker = 4
    assert batch.holder == Holder(4)
    assert str(batch) == "batch 0 (indices [0])"


def test_a_worker_that_is_exhausted_and_dead_is_only_dead_in_the_next_epoch() -> None:
    state = "active"
    for event, after in (("end", "dry"), ("die", "dry_dead"), ("epoch", "dead"), ("replace", "active")):
        state = worker_after(0, state, event)
        assert state == after
    with pytest.raises(InvalidTransition, match="worker 5 is active: event 'replace'"):
        worker_after(5, "active", "replace")
