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
    """The spans that may overlap others, by number: of each, its begin and its end."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "be" and event["cat"] == name:
            found[event["id"]].append(event)
    return found


def batches(events: list[Event]) -> dict[tuple[int, int], tuple[int, int]]:
    """When each batch that was handed out was given out, and when it was handed out, by epoch and number."""
    found = {}
    for begin, end in asynchronous(events, "batch").values():
        times = round(begin["ts"] * 1000), round(end["ts"] * 1000)
        found[begin["args"]["epoch"], begin["args"]["batch"]] = times
    return found


def check(events: list[Event]) -> None:
    """Raise AssertionError unless viewers show all of a trace, and it adds up."""
    for name, spans in tracks(events).items():
        _check_nesting(name, spans)
    for event in events:
        assert event["ph"] == "M" or event["ts"] >= 0, event
        assert event.get("dur", 0) >= 0, event
    for name in {event["cat"] for event in events if event["ph"] in "be"}:
        for begin, end in asynchronous(events, name).values():
            assert (begin["ph"], end["ph"]) == ("b", "e")
            assert begin["ts"] <= end["ts"]
    _check_lives(events)


def _check_nesting(name: str, spans: list[Event]) -> None:
    stack: list[int] = []
    for span in spans:
        began, ended = interval(span)
        while stack and stack[-1] <= began + _ROUNDING:
            stack.pop()
        assert not stack or ended <= stack[-1] + _ROUNDING, f"{name}: {span} overlaps what it lies in"
        stack.append(ended)


def _check_lives(events: list[Event]) -> None:
    """A batch lasts up to the end of the call that gives it."""
    given = {
        (span["args"]["epoch"], span["args"]["batch"]): interval(span)[1]
        for span in of(events, "X", "next")
        if "batch" in span["args"]
    }
    for batch, (sent, ended) in batches(events).items():
        assert abs(given.get(batch, ended) - ended) <= _ROUNDING  # the call may have begun before the trace
        assert sent <= ended
