"""Events and instructions: immutable values, each with its handler."""

from __future__ import annotations

import typing

from fastq_loader.consumer import event_loop
from fastq_loader.scheduling import events, scheduler


def test_every_event_and_every_instruction_has_a_handler() -> None:
    assert set(typing.get_args(events.Event)) == set(scheduler._HANDLERS)
    assert set(typing.get_args(events.Instruction)) == set(event_loop._ACTIONS)


def test_they_are_values() -> None:
    for kind in typing.get_args(events.Event) + typing.get_args(events.Instruction):
        assert issubclass(kind, tuple)
        assert kind.__doc__
