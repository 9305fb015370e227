"""Limits that are found before zmq finds them."""

from __future__ import annotations

import _thread
import errno
import os
import resource
import signal
from typing import Any

import pytest

from fastq_loader.ipc.endpoints import expect_descriptors, expect_threads
from tests.conftest import open_descriptors
from tests.support.alarms import Alarm, alarm_after, ring


def tasks() -> set[str]:
    """Threads of this process, as the kernel counts them."""
    return set(os.listdir("/proc/self/task"))


@pytest.mark.processes
def test_too_few_descriptors_are_an_error_that_says_how_to_get_more() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before) + 8, limits[1]))
    try:
        expect_descriptors(5)
        with pytest.raises(OSError, match=r"needs 500 descriptors .* `ulimit -n`") as caught:
            expect_descriptors(500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.errno == errno.EMFILE
    assert open_descriptors().keys() == before.keys()


def test_another_error_is_not_taken_for_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> int:
        raise TimeoutError("a handler of a signal")

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(TimeoutError, match=r"^a handler of a signal$"):
        expect_descriptors(5)


@pytest.mark.parametrize("allowed", [0, 3, 5])
def test_too_few_threads_are_an_error_and_none_is_left(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = _thread.start_new_thread, []

    def limited(function: Any, arguments: Any) -> int:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(start(function, arguments))
        assert len(tasks() - before) == len(started), "they are counted together"
        return started[-1]

    before, looks = tasks(), [True] * 9
    monkeypatch.setattr(_thread, "start_new_thread", limited)
    monkeypatch.setattr(os.path, "exists", lambda path: looks.pop() if looks else os.access(path, os.F_OK))
    if allowed == 5:
        expect_threads(5)
    else:
        with pytest.raises(BlockingIOError, match=r"needs 5 threads .*`ulimit -u`.*pids") as caught:
            expect_threads(5)
        assert caught.value.errno == errno.EAGAIN
    assert not tasks() - before  # of tests before, some may be ending
    assert not (looks and allowed), "it waits until the kernel counts them no more"
    assert len(started) == allowed


def test_a_signal_waits_until_the_threads_were_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler may raise what is also raised where threads are used up."""
    start, started = _thread.start_new_thread, []

    def ringing(function: Any, arguments: Any) -> int:
        signal.raise_signal(signal.SIGALRM)
        started.append(start(function, arguments))
        return started[-1]

    monkeypatch.setattr(_thread, "start_new_thread", ringing)
    with alarm_after(60, ring), pytest.raises(Alarm):
        expect_threads(3)
    assert len(started) == 3
