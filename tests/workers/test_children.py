"""One child process: its descriptor, its end in words, and what is left of it."""

from __future__ import annotations

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


def started(target: Any = time.sleep, *arguments: Any) -> Child:
    child = Child(FORK.Process(target=target, args=arguments or (60,), daemon=True))
    child.start()
    return child


@pytest.mark.parametrize("pidfd", [True, False])
def test_its_descriptor_says_when_it_has_ended(pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pidfd:
        monkeypatch.setattr(calls, "pidfd_open", no_pidfd)
    child = started()
    assert (child.descriptor == child.process.sentinel) is not pidfd
    assert calls.readable([child.descriptor], 0) == []
    child.kill()
    assert calls.readable([child.descriptor], 0) == [child.descriptor]
    assert child.killed
    child.release()
    assert child.process.exitcode == -signal.SIGKILL, "code outside may still ask"
    assert child.process not in multiprocessing.active_children()
    child.release()


def no_pidfd(pid: int) -> int:
    raise OSError("not in this sandbox")


def test_one_that_was_never_started_holds_nothing() -> None:
    child = Child(FORK.Process(target=time.sleep))
    assert child.pid == 0
    child.release()


@pytest.mark.parametrize(
    ("end", "killed", "ours", "torchs"),
    [
        (lambda: os._exit(7), False, "exited with code 7", "exited unexpectedly with exit code 7. Details"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            True,
            "was killed by SIGKILL (by the kernel's out-of-memory killer?)",
            "is killed by signal: Killed. ",
        ),
        (
            lambda: os.kill(os.getpid(), signal.SIGTERM),
            True,
            "was killed by SIGTERM",
            "is killed by signal: Terminated. ",
        ),
        (lambda: os.kill(os.getpid(), 40), True, "was killed by signal 40", "is killed by signal: "),
    ],
    ids=["exit", "SIGKILL", "SIGTERM", "a signal without a name"],
)
def test_its_death_is_told(end: Any, killed: bool, ours: str, torchs: str) -> None:
    child = Child(FORK.Process(target=end, daemon=True))
    child.start()
    assert wait_until(lambda: bool(calls.readable([child.descriptor], 0)), 5)
    text, cause = child.death()
    assert (text, child.killed) == (ours, killed)
    assert cause.startswith(f"DataLoader worker (pid {child.pid}) {torchs}")
    child.release()


def test_where_sigchld_is_ignored_nobody_knows_how_it_ended() -> None:
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        child = started(os._exit, 3)
        calls.readable([child.descriptor], None)
        text, cause = child.death()
        assert text == "ended, its exit code is unknown"
        assert cause == f"DataLoader worker (pid {child.pid}) exited unexpectedly"
        child.release()
        assert child.process.exitcode == UNKNOWN_EXIT
    finally:
        signal.signal(signal.SIGCHLD, previous)
