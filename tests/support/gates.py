"""Gates in the place of sleeping: who is to be late waits until the test opens its gate.

Gates are files in a folder, so they work under every start method, in scripts, and for who is killed. Seconds
stand here as limits only, ten times as long as anything takes on a busy machine.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import pytest
from torch.utils.data import Dataset

from fastq_loader.consumer import deaths
from tests.conftest import wait_until
from tests.support.datasets import Sized

LIMIT = 60.0  # seconds


@dataclass(frozen=True)
class Gates:
    """Gates with names, in an empty folder of their own."""

    folder: Path

    def arrive(self, name: object) -> None:
        """Leave a mark of this process at a gate, and go on."""
        (self.folder / f"at-{name}-{os.getpid()}").touch()

    def wait_at(self, name: object) -> None:
        """Wait until a gate is open."""
        self.arrive(name)
        assert wait_until((self.folder / f"open-{name}").exists, LIMIT), f"nobody opened gate {name}"

    def open(self, *names: object) -> None:
        for name in names:
            (self.folder / f"open-{name}").touch()

    def arrived(self, name: object) -> list[int]:
        """The processes that have come to a gate, the last one last."""
        marks = sorted(self.folder.glob(f"at-{name}-*"), key=lambda mark: mark.stat().st_mtime_ns)
        return [int(mark.name.rpartition("-")[2]) for mark in marks]

    def expect(self, name: object, processes: int = 1) -> None:
        """Wait until some processes have come to a gate."""
        assert wait_until(lambda: len(self.arrived(name)) >= processes, LIMIT), f"nobody came to gate {name}"


@dataclass(eq=False)
class Gated(Sized, Dataset[int]):
    """Integers, some of which wait at a gate of their number."""

    length: int
    gates: Gates
    shut: Collection[int]

    def __getitem__(self, index: int) -> int:
        if index in self.shut:
            self.gates.wait_at(index)
        return index


def at_rest(pid: int) -> bool:
    """Whether a process sleeps or is stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "ST"


def is_inside(function: FunctionType, thread: threading.Thread | None = None) -> bool:
    """Whether a thread, by default the main one, is in some function."""
    frame = sys._current_frames().get((thread or threading.main_thread()).ident or 0)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


@contextmanager
def once(condition: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Another thread acts in here as soon as a condition holds."""

    def run() -> None:
        if wait_until(lambda: over.is_set() or bool(condition()), LIMIT) and not over.is_set():
            acted.append(act())

    over, acted = threading.Event(), list[object]()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert acted, "what was waited for did not happen"


@dataclass
class _WhenDue:
    """In the place of `deaths.Timeout`, which has tests of its own, with the time as an argument."""

    due: Callable[[], object]
    was_due: bool = False

    def seconds(self, seq: int, attempt: int, now: float) -> float:
        self.was_due = bool(self.due())  # before the wait: so what was sent until then is received in it
        return 0.02  # then it is asked again

    def is_over(self, message: bool) -> bool:
        return self.was_due and not message

    def forget(self) -> None:
        pass


def end_timeout_when(due: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders' timeouts are over when `due` says so, and not by the clock."""
    monkeypatch.setattr(deaths, "Timeout", lambda timeout, of_head: _WhenDue(due))
