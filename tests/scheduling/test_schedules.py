"""What `schedule=` may be, and the reorder window that it comes to."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader import Dynamic, RoundRobin
from fastq_loader.ipc.claim_table import WORKERS
from fastq_loader.memory.arena import CLAIMS
from fastq_loader.scheduling.schedules import (
    WIDEST_WINDOW,
    Schedule,
    Window,
    read_schedule,
)
from tests.support.thorough import examples


def test_short_forms_and_configurations_mean_the_same() -> None:
    assert read_schedule("round_robin") == RoundRobin() != Dynamic()
    assert read_schedule("dynamic") == Dynamic() == Dynamic(window=None)
    schedule = Dynamic(window=64)
    assert read_schedule(schedule) is schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule != RoundRobin(window=64)


@pytest.mark.parametrize("kind", [RoundRobin, Dynamic])
@pytest.mark.parametrize(
    ("window", "error"),
    [(0, ValueError), (-1, ValueError), (WIDEST_WINDOW + 1, ValueError), (2.5, TypeError), (True, TypeError)],
)
def test_a_wrong_window_is_named_when_it_is_made(kind: Any, window: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"{kind.__name__}\(window={window}.*\): window must be"):
        kind(window=window)
    with pytest.raises(error):
        dataclasses.replace(kind(window=WIDEST_WINDOW), window=window)


def test_what_is_not_true_or_false_is_named() -> None:
    with pytest.raises(TypeError, match=r"RoundRobin\(.*=1\): save_generators must be True or False"):
        RoundRobin(save_generators=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "error"), [("static", ValueError), (None, TypeError), (Dynamic, TypeError), (3, TypeError)]
)
def test_what_is_no_schedule_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"schedule=.* is unknown: use 'round_robin', 'dynamic'"):
        read_schedule(value)


@dataclass
class InFlight:
    window: Window
    under_way: int = 0
    unanswered: int = 0

    def ask(self, batches: int) -> None:
        for _ in range(batches):
            self.under_way += 1
            self.unanswered += 1
            self.window.widen_to(self.under_way)

    def hand_out(self) -> None:
        self.under_way -= 1
        self.unanswered = min(self.unanswered, self.under_way)
        self.ask(max(self.window.size - self.under_way, 0))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("answer"), st.integers(1, 20)),
        st.tuples(st.just("late"), st.sampled_from([0.0, 1.0, 7.5, 100.0])),
        st.tuples(st.just("hand out"), st.integers(1, 200)),
        st.tuples(st.just("drained"), st.just(0)),
    ),
    max_size=40,
)


@examples(200)
@given(
    st.integers(1, 12),
    st.integers(0, 40),
    st.sampled_from([0, 20, 200, 1 << 30]),
    STEPS,
)
def test_it_stays_between_its_bounds_whatever_happens(
    least: int, widest: int, budget: int, steps: list[tuple[str, float]]
) -> None:
    window = Window(least, widest, budget)
    in_flight = InFlight(window)
    in_flight.ask(window.size)
    for what, amount in steps:
        if what == "answer":
            in_flight.unanswered = max(in_flight.unanswered - int(amount), 0)
        elif what == "late":
            before = max(in_flight.under_way, window.size)
            room = window.room(in_flight.under_way, in_flight.unanswered, amount)
            assert not room or (before + room) * amount <= budget, "past the budget"
            assert room <= max(least - in_flight.unanswered, 0), "more than keeps the workers busy"
            size = window.size
            in_flight.ask(room)
            assert window.size == max(size, in_flight.under_way)
            if not room and in_flight.unanswered < least and before < window.widest:
                assert (before + 1) * amount > budget, "workers idle without a reason"
        elif what == "hand out":
            for _ in range(min(int(amount), in_flight.under_way)):
                size = window.size
                in_flight.hand_out()
                assert window.size <= size
        else:  # the sampler had nothing more for a while
            in_flight.under_way = in_flight.unanswered = 0
            in_flight.ask(1)
        assert least <= window.size <= window.widest == max(least, widest)
        assert in_flight.under_way <= window.widest


@pytest.mark.parametrize(
    ("schedule", "iterable", "limits"),
    [
        (RoundRobin(), False, (8,)),
        (RoundRobin(window=3), True, (3,)),
        (Dynamic(), True, (8,)),
        (Dynamic(window=30), True, (30,)),
        (Dynamic(), False, (12, 128, (1 << 26) + 256, 4)),
        (Dynamic(window=30), False, (30, 30, 0, 4)),
        (Dynamic(window=10), False, (10, 10, 0, 2)),
        (Dynamic(window=8), False, (8, 8, 0, 1)),
        (Dynamic(window=1), False, (1, 1, 0, 1)),
    ],
)
def test_what_a_schedule_comes_to(schedule: Schedule, iterable: bool, limits: tuple[int, ...]) -> None:
    """With four workers that each prefetch two batches, on a machine of 1 GiB and a page."""
    found = Window.of(schedule, workers=4, prefetch=2, iterable=iterable, memory_bytes=(1 << 30) + 4097)
    assert found == Window(*limits)


@pytest.mark.parametrize(("prefetch", "least"), [(10, 1100), (143, 14_335), (9000, 14_335)])
def test_the_window_is_bounded_on_large_machines_too(prefetch: int, least: int) -> None:
    """The table of claims has room for two of the widest."""
    found = Window.of(Dynamic(), workers=100, prefetch=prefetch, iterable=False, memory_bytes=1 << 50)
    assert found == Window(least, WIDEST_WINDOW, 1 << 30, 100)
    assert 2 * WIDEST_WINDOW <= CLAIMS - WORKERS
