"""What is noted is counted once, in its order, by whoever asks first."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.ipc.messages import BATCH, Answer
from fastq_loader.statistics.epoch import EpochCounters
from fastq_loader.statistics.notes import NoteList, Notes
from fastq_loader.statistics.workers import WorkerCounters
from tests.support.alarms import Alarm

Step = tuple[str, tuple[Any, ...]]


def batches(count: int) -> list[Step]:
    """What happens to so many batches, each of which takes 100 ns."""
    worker, found = WorkerCounters(0, 4711), []
    for seq in range(count):
        at = 100 * seq
        answer = Answer(1, seq, 0, BATCH, at, at + 60, (), (), None, fetched=at + 30, collated=at + 40)
        waits = ("waited", ("workers", at + 10, at + 70)), ("used_device", (at + 70, at + 75))
        found += [
            ("entered", (at,)),
            ("drew", (at, at + 5)),
            ("sent", (seq, at + 5)),
            ("answered", (0, answer, True, worker)),
            *(waits if seq % 3 else ()),
            ("left", (at + 80, answer, seq, None)),
        ]
    return found


def put_down(notes: Notes, step: Step) -> None:
    name, arguments = step
    if name == "drew":
        notes.drew = (*arguments, [])  # type: ignore[assignment]
    elif name == "sent":
        assert notes.drew is not None
        notes.drew = (*notes.drew[:2], [arguments[0]])
    elif name == "answered":
        notes.answers.append(arguments)  # type: ignore[arg-type]
    elif name in ("waited", "used_device"):
        notes.others.append((getattr(notes, name), *arguments))
    else:
        getattr(notes, name)(*arguments)


@given(st.integers(0, 5), st.data())
def test_it_makes_no_difference_when_notes_are_counted(count: int, data: Any) -> None:
    at_once, counters = EpochCounters(1, 0), EpochCounters(1, 0)
    for name, arguments in batches(count):
        getattr(at_once, name)(*arguments)
    later = Notes(counters)
    for step in batches(count):
        put_down(later, step)
        if data.draw(st.booleans()):
            later.counted()
    later.flush()
    assert later.counted().snapshot() == at_once.snapshot()
    assert later.counted().costs == at_once.costs
    assert later.counted().batches == count


def test_an_error_is_not_kept() -> None:
    counters = EpochCounters(1, 0)
    notes = Notes(counters, among := NoteList())
    notes.left(5, None, None, None)
    assert notes.left(6, None, 3, KeyError())
    notes.counted()
    assert (counters.batches, among.notes) == (2, [])


def test_an_interrupt_loses_no_note() -> None:
    counters = EpochCounters(1, 0)
    notes, drew = Notes(counters), []

    def interrupted(number: int) -> None:
        drew.append(number)
        if number == 1:
            raise Alarm

    for number in range(4):
        notes.others.append((interrupted, number))
        notes.flush()
    with pytest.raises(Alarm):
        notes.counted()
    notes.counted()
    assert drew == [0, 1, 2, 3]


def test_only_one_counts_at_a_time() -> None:
    counters = EpochCounters(1, 0)
    notes, order = Notes(counters), []

    def asked() -> None:
        order.append("first")
        notes.counted()  # in the handler of a signal
        thread = threading.Thread(target=notes.counted)
        thread.start()
        thread.join()
        notes.others.append((counters.used_cpu, 7))
        notes.flush()

    for other in ((asked,), (order.append, "second")):
        notes.others.append(other)
        notes.flush()
    notes.counted()
    assert order == ["first", "second"]
    assert counters.cpu == 0, "it came after"
    assert notes.counted().cpu == 7


def test_epochs_of_one_loader_are_counted_in_the_order_of_what_happened() -> None:
    watching, among = Mock(), NoteList()
    first, second = (Notes(EpochCounters(number, 0), among) for number in (1, 2))
    for notes in (first, second):
        notes.observe(watching)
    for now, notes in enumerate((first, second, first, second)):
        notes.entered(now + 1)
        notes.flush()
    first.counted()
    assert [told.args[:2] for told in watching.entered.call_args_list] == [(1, 1), (2, 2), (1, 3), (2, 4)]
