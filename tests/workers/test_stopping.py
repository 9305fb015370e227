"""Workers that were told to stop: who is waited for, for how long, and what is done when all have ended."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastq_loader.workers import stopping
from fastq_loader.workers.children import Child
from fastq_loader.workers.stopping import Stopping
from tests.conftest import wait_until
from tests.support.forking import end_of, fork
from tests.support.gates import LIMIT, Gates, is_inside, once

pytestmark = pytest.mark.processes

OWNER = object()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stopping, "BRIEF", 0.2)
    monkeypatch.setattr(stopping, "_INSTANT", 0.02)
    yield
    stopping.hurry()
    stopping.wait()


def child(seconds: float = 3600, ignores_sigterm: bool = False, leave: Gates | None = None) -> Child:
    """A process that leaves after some seconds, or through a gate."""

    def work() -> None:
        if ignores_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready.set()
        if leave is None:
            time.sleep(seconds)
        else:
            leave.wait_at("end")

    ready = multiprocessing.get_context("fork").Event()
    started = Child(multiprocessing.get_context("fork").Process(target=work, daemon=True))
    started.start()
    assert ready.wait(LIMIT)
    return started


class Told(list[str]):
    """What is called, in order."""

    def tell(self, what: str) -> Any:
        return lambda: self.append(what)


def stopped(*workers: Child, patience: float = 30, told: Told | None = None) -> Stopping:
    told = Told() if told is None else told
    group = Stopping(OWNER, dict.fromkeys(workers, patience), [told.tell("first"), told.tell("then")])
    group.finish()
    return group


def test_workers_that_leave_at_once_are_waited_for_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn of an epoch would take the whole instant that workers are given."""
    monkeypatch.setattr(stopping, "_INSTANT", math.inf)
    threads, told = threading.active_count(), Told()
    group = stopped(child(0), child(0.05), told=told)
    assert group.over.is_set()
    assert told == ["first", "then"]
    assert threading.active_count() <= threads
    group.finish()
    stopping.wait(OWNER)


def test_others_are_left_to_finish_behind_the_callers_back(tmp_path: Path) -> None:
    told, gates = Told(), Gates(tmp_path)
    group = stopped(child(0), child(leave=gates), patience=LIMIT, told=told)
    stopping.wait(object())  # somebody else's
    group.finish()
    assert not group.over.is_set()
    assert not told
    with once(lambda: is_inside(stopping.wait), lambda: gates.open("end")):
        stopping.wait(OWNER)
    assert group.over.is_set()
    assert told == ["first", "then"]


@pytest.mark.parametrize("ignores_sigterm", [False, True])
def test_those_that_take_too_long_are_ended(ignores_sigterm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "BRIEF", 0.05 if ignores_sigterm else LIMIT)
    worker = child(3600, ignores_sigterm)
    group = stopped(worker, patience=0.05)
    assert group.over.wait(LIMIT)
    assert worker.process.exitcode == -(signal.SIGKILL if ignores_sigterm else signal.SIGTERM)


def test_an_interrupt_while_somebody_waits_ends_their_time_too() -> None:
    group = stopped(child())
    interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
    with once(lambda: is_inside(stopping.wait), interrupt), pytest.raises(KeyboardInterrupt):
        stopping.wait(OWNER)
    assert group.over.wait(LIMIT)


def test_a_forked_copy_forgets_them() -> None:
    group = stopped(child())

    def check() -> None:
        assert multiprocessing.active_children() == []
        stopping.wait()  # for nobody

    assert end_of(fork(check)) == 0
    assert not group.over.is_set()
    stopping.hurry()
    assert wait_until(group.over.is_set, LIMIT)


def test_all_is_done_when_they_have_ended_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    leaving = Stopping(OWNER, {child(0): 100.0}, [lambda: 1 / 0, told.tell("after")])  # type: ignore[list-item]
    monkeypatch.setattr(stopping, "_INSTANT", math.inf)
    with pytest.raises(ZeroDivisionError):
        leaving.finish()
    leaving.wait()
    assert told == ["after"]
