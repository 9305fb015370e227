"""The event loop between its calls: what it is in the middle of, and where an outcome is put down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader import DataLoader
from fastq_loader.consumer.delivery import ENDED, Delivered, Raised
from fastq_loader.consumer.event_loop import BUSY, IDLE, EventLoop
from fastq_loader.statistics.epoch import EpochCounters
from fastq_loader.statistics.notes import Notes


@contextmanager
def started() -> Iterator[EventLoop]:
    """The loop of a pool with one worker."""
    loader = DataLoader(list(range(4)), batch_size=None, num_workers=1, persistent_workers=True)
    assert list(loader) == [0, 1, 2, 3]
    (engine,) = loader._resources.engines
    assert engine._loop is not None
    yield engine._loop
    del engine  # it is shut down with the last reference
    loader.close()


def outcomes(loop: EventLoop, sampler: Iterator[Any], finish: Any = lambda batch: batch) -> Iterator[Any]:
    """What the calls of an epoch put down."""
    loop.begin_epoch(sampler, None, None, Notes(EpochCounters(1, 0)))
    slot: Any = SimpleNamespace(outcome=None)
    while True:
        loop.phase = BUSY  # as the engine does
        assert loop.next(slot, finish)
        assert loop.phase == IDLE
        assert loop.next(slot, finish), "it is not taken yet, and stays"
        outcome, slot.outcome = slot.outcome, None
        yield outcome
        if outcome is ENDED:
            return


@pytest.mark.processes
def test_every_outcome_is_put_down_and_the_loop_is_idle_after_it() -> None:
    phases = []

    def sampler() -> Iterator[int]:
        for index in (2, 9, 1):
            yield index
            phases.append(loop.phase)

    def finish(batch: int) -> int:
        return 10 // (batch - 1)

    with started() as loop:
        found = list(outcomes(loop, sampler(), finish))
    assert [type(outcome) for outcome in found] == [Delivered, Raised, Raised, type(ENDED)]
    assert found[0].batch == 10
    assert isinstance(found[1].error, IndexError), "of the dataset"
    assert isinstance(found[2].error, ZeroDivisionError), "of what a batch goes through last"
    assert phases[-1] == BUSY, "while the sampler is asked in the middle of a call"
    assert loop.fatal is None


@pytest.mark.processes
def test_an_error_of_the_sampler_has_its_position() -> None:
    def sampler() -> Iterator[int]:
        yield 3
        raise LookupError("no more cards")

    with started() as loop:
        delivered, raised, ended = outcomes(loop, sampler())
    assert delivered.batch == 3
    assert isinstance(raised.error, LookupError)
    assert ended is ENDED


@pytest.mark.processes
def test_a_call_that_is_woken_puts_nothing_down() -> None:
    with started() as loop:
        loop.begin_epoch(iter(()), None, None, Notes(EpochCounters(1, 0)))
        slot: Any = SimpleNamespace(outcome=None)
        assert loop.next(slot, lambda batch: batch)
        assert slot.outcome is ENDED
        loop.begin_epoch(iter([0]), None, None, Notes(EpochCounters(1, 0)))
        loop.wake()
        slot.outcome, loop.phase = None, BUSY
        while loop.next(slot, lambda batch: batch):  # an answer that was here first still counts
            slot.outcome = None
            loop.begin_epoch(iter([0]), None, None, Notes(EpochCounters(1, 0)))
        assert slot.outcome is None
