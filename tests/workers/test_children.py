"""A child process: its descriptor, and its end where somebody else reaps it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

from fastq_loader.system import calls
from fastq_loader.workers.children import UNKNOWN_EXIT, Child
from tests.conftest import wait_until

FORK = multiprocessing.get_context("fork")

pytestmark = pytest.mark.processes


@pytest.fixture(params=["pidfd", "pipe"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the end of a child is noticed: multiprocessing's pipe is for a child of which no pidfd can be
    opened."""

    def refuse(pid: int) -> int:
        raise ProcessLookupError

    if request.param == "pipe":
        monkeypatch.setattr(calls, "pidfd_open", refuse)
    return str(request.param)


def started(target: Any = time.sleep, *arguments: Any) -> Child:
    child = Child(FORK.Process(target=target, args=arguments or (60,), daemon=True))
    child.start()
    return child


def ended(child: Child) -> bool:
    return calls.readable([child.descriptor], 60) == [child.descriptor]


def test_its_descriptor_says_when_it_has_ended(means: str) -> None:
    child = started()
    assert (child.descriptor == child.process.sentinel) is (means == "pipe")
    assert calls.readable([child.descriptor], 0) == []
    child.kill()
    assert ended(child)
    assert child.killed
    child.release()
    assert child.process.exitcode == -signal.SIGKILL, "code outside may still ask"
    assert child.process not in multiprocessing.active_children()
    child.release()


@pytest.mark.parametrize("reaps", [False, True], ids=["ignored", "reaped"])
def test_where_somebody_else_reaps_it_nobody_knows_how_it_ended(
    reaps: bool, means: str, request: pytest.FixtureRequest
) -> None:
    """Exit codes go to nobody, or to a handler of the user's."""
    taken: list[int] = []

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                taken.append(pid)

    previous = signal.signal(signal.SIGCHLD, reap if reaps else signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGCHLD, previous))
    child = started(os._exit, 3)
    assert ended(child)
    assert not reaps or wait_until(lambda: child.pid in taken, 60)
    text, cause = child.death()
    assert text == "ended, its exit code is unknown"
    assert cause == f"DataLoader worker (pid {child.pid}) exited unexpectedly"
    child.release()
    assert child.process.exitcode == UNKNOWN_EXIT
