"""What every trace must be, whoever wrote it, and what can be read from one."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

Event = dict[str, Any]

#: Nanoseconds that a time may be off after its way through a float of microseconds.
_ROUNDING = 1


def opened(text: str) -> list[Event]:
    """A trace that may have been cut off anywhere, as viewers read it: what is left of the last event does
    not count."""
    whole, _, _ = text.rpartition(",\n")
    for closed in (text, f"{text}]", f"{whole}]"):
        with suppress(json.JSONDecodeError):
            events: list[Event] = json.loads(closed)
            return events
    assert len(text.splitlines()) < 3, "more than the first event is lost"
    return []


def read(path: Path) -> list[Event]:
    """The events of a trace that was closed."""
    events: list[Event] = json.loads(path.read_text())
    return events


def of(events: list[Event], ph: str, name: str | None = None) -> list[Event]:
    """The events of a kind, and of a name if one is given."""
    return [event for event in events if event["ph"] == ph and name in (None, event["name"])]


def interval(event: Event) -> tuple[int, int]:
    """When a span began and ended, in nanoseconds."""
    began = round(event["ts"] * 1000)
    return began, began + round(event["dur"] * 1000)


def tracks(events: list[Event]) -> dict[str, list[Event]]:
    """The spans of each track, by its name, in the order of their beginnings."""
    names = {event["tid"]: event["args"]["name"] for event in of(events, "M", "thread_name")}
    found: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(of(events, "X"), key=lambda event: (interval(event)[0], -interval(event)[1])):
        found[names[event["tid"]]].append(event)
    return found


def asynchronous(events: list[Event], name: str) -> dict[int, list[Event]]:
    """The spans that may overlap others, by number: of each, the begins and ends of itself and its parts."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "be" and event["cat"] == name:
            found[event["id"]].append(event)
    return found


def batches(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    """The parts of each batch that was handed out, by epoch and number, in the order of time."""
    found = {}
    for begin, *parts, _ in asynchronous(events, "batch").values():
        found[begin["args"]["epoch"], begin["args"]["batch"]] = [
            {**part, "ph": "X", "dur": end["ts"] - part["ts"]}
            for part, end in zip(parts[::2], parts[1::2], strict=True)
        ]
    return found


def check(events: list[Event]) -> None:
    """Raise AssertionError unless viewers show all of a trace, and it adds up."""
    for name, spans in tracks(events).items():
        _check_nesting(name, spans)
    for event in events:
        assert event["ph"] == "M" or event["ts"] >= 0, event
        assert event.get("dur", 0) >= 0, event
    for name in {event["cat"] for event in events if event["ph"] in "be"}:
        for found in asynchronous(events, name).values():
            _check_asynchronous(name, found)
    counts = sorted(of(events, "C"), key=lambda event: event["ts"])
    assert all(event["args"]["batches"] >= 0 for event in counts)
    _check_lives(events)


def _check_asynchronous(name: str, events: list[Event]) -> None:
    """What is begun is ended, the last first, and it is one span."""
    stack: list[str] = []
    for at, event in enumerate(events):
        assert (event["name"] == name) == (at in (0, len(events) - 1))
        assert not at or events[at - 1]["ts"] <= event["ts"]
        if event["ph"] == "b":
            stack.append(event["name"])
        else:
            assert stack.pop() == event["name"]
    assert not stack


def _check_nesting(name: str, spans: list[Event]) -> None:
    stack: list[int] = []
    for span in spans:
        began, ended = interval(span)
        while stack and stack[-1] <= began + _ROUNDING:
            stack.pop()
        assert not stack or ended <= stack[-1] + _ROUNDING, f"{name}: {span} overlaps what it lies in"
        stack.append(ended)


def _check_lives(events: list[Event]) -> None:
    """The spans of a batch cover its life, from its task to the end of the call that gives it."""
    given = {
        (span["args"]["epoch"], span["args"]["batch"]): interval(span)[1]
        for span in of(events, "X", "next")
        if "batch" in span["args"]
    }
    for batch, spans in batches(events).items():
        edges = [interval(span) for span in spans]
        life = given.get(batch, edges[-1][1]) - edges[0][0]  # the call may have begun before the trace
        covered = sum(ended - began for began, ended in edges)
        assert abs(covered - life) <= max(0.01 * life, len(edges) * _ROUNDING), f"batch {batch}"
