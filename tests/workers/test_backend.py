"""The processes behind the numbers of the workers, of a kind that is made up here."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from fastq_loader.memory.arena import Arena
from fastq_loader.memory.blocks import Extents
from fastq_loader.statistics.counters import Counters
from fastq_loader.system.calls import readable
from fastq_loader.workers import stopping
from fastq_loader.workers.backend import WorkerBackend
from tests.support.worker_setup import make_plan, make_setup

pytestmark = pytest.mark.processes


def leave_or_sleep(worker: int, generation: int) -> None:
    """Worker 1 leaves at once."""
    if worker == 1:
        os._exit(4 + generation)
    time.sleep(60)


class Sleepers(WorkerBackend):
    """Starts one process at first."""

    given_back = False

    def start(self, arena: Arena, folder: str, token: bytes, base_seed: int, shared_seed: int | None) -> None:
        self._setup = make_setup(arena, None)
        self.start_next()

    def _process(self, worker: int, generation: int, folder: str, space: Extents | None) -> BaseProcess:
        context = multiprocessing.get_context("fork")
        return context.Process(target=leave_or_sleep, args=(worker, generation), daemon=True)

    def stacks(self, worker: int) -> str:
        return "none"

    def _give_back(self) -> None:
        self.given_back = True


@pytest.fixture
def sleepers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sleepers]:
    monkeypatch.setattr(stopping, "_INSTANT", 0.05)
    plan = make_plan(range(3), workers=2)
    backend = Sleepers(plan)
    arena = Arena(2)
    backend.start(arena, "folder", bytes(16), 1, None)
    yield backend
    backend.stop(lambda worker: 0, backend)
    stopping.wait(backend)
    arena.retire([])


def test_workers_are_started_one_by_one_and_replaced_under_their_numbers(sleepers: Sleepers) -> None:
    assert len(sleepers.processes) == len(sleepers.descriptors) == 1
    assert sleepers.pid(1) == 0
    assert sleepers.start_next()
    assert not sleepers.start_next(), "all were started"
    for generation in (1, 2):
        assert readable(sleepers.descriptors, 5) == [sleepers.descriptors[1]]
        assert sleepers.death(1)[0] == f"exited with code {3 + generation}"
        before = sleepers.pid(1)
        assert sleepers.replace(1, "another folder", ()) == generation
        assert sleepers.pid(1) != before
    sleepers.kill(0)
    assert sleepers.killed(0)


def test_all_is_given_back_when_the_last_one_has_ended(sleepers: Sleepers) -> None:
    told: list[Any] = []
    sleepers.stop(lambda worker: 0.1, sleepers, [lambda: told.append(sleepers.given_back)])
    assert sleepers.stopped
    stopping.wait(sleepers)
    assert sleepers.ended
    assert told == [True]
    assert not sleepers.start_next()


def test_what_each_worker_does_is_counted_under_its_number(sleepers: Sleepers) -> None:
    counters = Counters()
    sleepers.count_in(counters)
    assert [(worker.id, worker.pid) for worker in counters.workers] == [(0, sleepers.pid(0)), (1, 0)]
