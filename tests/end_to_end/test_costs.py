"""What a batch costs does not grow with the epoch, with the batches that are kept, or faster than its leaves.

Costs are counted in calls of Python and C functions, not in seconds: the same on every machine.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from fastq_loader.ipc.messages import BATCH, Answer
from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.memory.pool import BlockPool
from fastq_loader.scheduling.events import Draw, EpochStarted, Exhausted
from fastq_loader.scheduling.in_flight import InFlight
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.scheduling.schedules import Window
from fastq_loader.scheduling.states import Batch
from tests.support.pair import LARGE, Pair, paired
from tests.support.simulation import SimulatedArena

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # The invariants look at every block, which is what is not to be counted here.
    monkeypatch.setattr("tests.support.pair.check_pool", lambda pool: None)
    with paired() as both:
        yield both


def calls(action: Callable[[], object]) -> int:
    """How many functions `action` calls, directly and indirectly."""
    count = 0

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # what the collector calls is not the action's
    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def batch_of(leaves: int, elements: int) -> dict[str, torch.Tensor]:
    return {str(leaf): torch.ones(elements) for leaf in range(leaves)}


@pytest.mark.parametrize("elements", [8, LARGE])
def test_a_batch_costs_the_same_however_many_are_kept(pair: Pair, elements: int) -> None:
    batch = batch_of(2, elements)
    kept = [pair.trip(batch) for _ in range(10)]
    few = calls(lambda: kept.append(pair.trip(batch)))
    kept += [pair.trip(batch) for _ in range(300)]
    many = calls(lambda: kept.append(pair.trip(batch)))
    assert many <= few


@pytest.mark.parametrize("elements", [8, LARGE])
def test_a_batch_costs_what_its_leaves_cost(pair: Pair, elements: int) -> None:
    costs = []
    for leaves in (1, 11, 21, 201):
        for _ in range(3):  # the spec is known, and the blocks are there
            pair.trip(batch_of(leaves, elements))
        batch = batch_of(leaves, elements)
        costs.append(calls(lambda batch=batch: pair.trip(batch)))
    ten = costs[1] - costs[0]
    assert costs[2] - costs[1] <= ten * 1.1
    assert costs[3] - costs[2] <= 18 * ten * 1.1


def scheduler(window: Window, **keywords: Any) -> Scheduler:
    """One over two workers."""
    arena: Any = SimulatedArena()
    return Scheduler(2, BlockPool(arena, 2), window, **keywords)


def drawn(scheduler: Scheduler, times: int, indices: Iterator[int]) -> list[Batch]:
    """Draw so many indices; the batches whose tasks are sent."""
    sent: list[Batch] = []
    for _ in range(times):
        index = next(indices, None)
        batch = scheduler.handle(Exhausted()) if index is None else scheduler.drawn(index)
        sent += [batch] if isinstance(batch, Batch) else []
    return sent


def begun(scheduler: Scheduler, indices: Iterator[int]) -> list[Batch]:
    """The first batches of an epoch."""
    (draw,) = scheduler.handle(EpochStarted(1))
    assert isinstance(draw, Draw)
    return drawn(scheduler, draw.times, indices)


def load(scheduler: Scheduler, batch: Batch) -> None:
    """The answer to a batch's task has come."""
    answer = Answer(scheduler.epoch, batch.seq, 0, BATCH, 0, 0, (), (), None)
    scheduler.arrived(batch, batch.worker or 0, answer)


@pytest.mark.parametrize("shared_tasks", [False, True])
def test_scheduling_a_batch_costs_the_same_all_epoch_long(shared_tasks: bool) -> None:
    one, indices = scheduler(Window(4), shared_tasks=shared_tasks), itertools.count()
    sent = begun(one, indices)

    def step() -> None:
        load(one, sent.pop(0))
        assert one.ready() is not None
        sent.extend(drawn(one, one.to_draw, indices))

    costs = [calls(step) for _ in range(2000)]
    assert set(costs[10:]) == {costs[10]}


@pytest.mark.parametrize("in_order", [False, True])
def test_an_epoch_in_one_wide_window_costs_what_its_batches_cost(in_order: bool) -> None:
    """Also when it ends: the window empties, and the sampler has nothing more to fill it with."""

    def epoch(batches: int) -> int:
        one = scheduler(Window(batches, group=2), in_order=in_order, shared_tasks=True)
        indices = iter(range(2 * batches))

        def play() -> None:
            sent = begun(one, indices)
            handed_out = 0
            while handed_out < 2 * batches:
                if sent:  # the last one first: all of them wait for the head of the line
                    load(one, sent.pop())
                if isinstance(one.ready() or one.wanted(), Batch):
                    handed_out += 1
                    sent += drawn(one, one.to_draw, indices)
                one.upcoming(2)

        return calls(play)

    assert epoch(1000) <= 10 * epoch(100) * 1.1


def test_what_goes_to_a_device_next_is_found_without_a_look_at_all_that_is_ready() -> None:
    answers = [Answer(1, seq, 0, BATCH, 0, 0, (), (), None) for seq in range(100)]
    line = InFlight(100)
    for answer in answers:
        line.new(0, answer.seq).answer = answer
    arrived = iter(list(line))
    assert line.upcoming(arrived, 3, in_order=True) == answers[:3]
    assert next(arrived).answer == answers[0], "in order nobody asks what has arrived"
    assert line.upcoming(arrived, 3, in_order=False) == answers[1:4]
    assert next(arrived).answer == answers[4]
