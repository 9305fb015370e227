"""The gate of a pool of workers, as a table."""

from __future__ import annotations

import pytest

from fastq_loader.consumer.gate import CLOSED, CUT_SHORT, EXITING, FAILED, INSIDE, MOVES, OPEN, WAITING, Gate
from fastq_loader.errors import InvalidTransition

ENDS = (FAILED, CLOSED, EXITING)


@pytest.mark.parametrize(
    ("phase", "entered"), [(OPEN, INSIDE), (WAITING, INSIDE), (INSIDE, CUT_SHORT), (CUT_SHORT, CUT_SHORT)]
)
def test_a_call_may_enter_while_nothing_is_half_done(phase: str, entered: str) -> None:
    gate = Gate()
    gate.phase = phase
    gate.enter()
    assert gate.phase == entered


@pytest.mark.parametrize("phase", [OPEN, INSIDE, WAITING, CUT_SHORT])
@pytest.mark.parametrize(("event", "end"), [("close", CLOSED), ("exit", EXITING)])
def test_the_first_end_stays_with_its_reason(phase: str, event: str, end: str) -> None:
    gate = Gate()
    gate.phase = phase
    gate.shut(event, "the first")
    for later in ("close", "exit"):
        gate.shut(later, "the second")
    assert (gate.phase, gate.end, gate.reason) == (phase, end, "the first")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("event", ["enter", "wait", "leave"])
def test_no_call_leads_out_of_an_end(end: str, event: str) -> None:
    with pytest.raises(InvalidTransition, match=f"a pool of workers is {end}"):
        MOVES[end, event]
