"""The process that forks successors, and what its children look like in the consumer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fastq_loader.system.calls import pidfd_open, readable
from fastq_loader.workers.children import UNKNOWN_EXIT, Child
from fastq_loader.workers.zygote import Zygote
from tests.conftest import process_table, wait_until
from tests.support.forking import end_of, fork

FORK = multiprocessing.get_context("fork")

pytestmark = pytest.mark.processes


def make(code: int, seconds: float = 0) -> Any:
    """A process that leaves with a code; it is made in the zygote."""
    return FORK.Process(target=leave, args=(code, seconds), daemon=True)


def leave(code: int, seconds: float) -> None:
    time.sleep(seconds)
    os._exit(code)


@contextmanager
def zygote(make: Any = make) -> Iterator[Zygote]:
    one = Zygote.forked(FORK, make)
    try:
        yield one
    finally:
        one.close()


def started(one: Zygote, *arguments: Any) -> Child:
    child = Child(one.process(*arguments))
    child.start()
    return child


def test_its_children_look_like_the_consumers_own() -> None:
    with zygote() as one:
        leaves, hangs = started(one, 7), started(one, 0, 60)
        assert hangs.process in multiprocessing.active_children()
        assert readable([leaves.descriptor], 5)
        assert leaves.death()[0] == "exited with code 7"
        assert hangs.process.exitcode is None
        hangs.process.terminate()
        hangs.process.join(5)
        assert hangs.process.exitcode == -signal.SIGTERM
        for child in (leaves, hangs):
            child.release()
            child.process.kill()  # nobody is hit who has the number now
        assert not {leaves.process, hangs.process} & set(multiprocessing.active_children())


def test_what_cannot_be_forked_is_an_error_here_and_it_goes_on() -> None:
    def refuse(code: int) -> Any:
        if code:
            raise OSError(11, "no processes left")
        return make(code)

    with zygote(refuse) as one:
        with pytest.raises(OSError, match="no processes left"):
            started(one, 1)
        child = started(one, 0)
        assert readable([child.descriptor], 5)
        child.release()


def test_a_signal_in_the_middle_of_a_request_leaves_no_answer_to_the_next_one() -> None:
    def interrupting(code: int) -> Any:
        if code == 3:
            os.kill(os.getppid(), signal.SIGUSR1)
        return make(code)

    def interrupt(*_: object) -> None:
        raise KeyError("interrupted")

    over = threading.Event()  # of a thread that takes the signal while this one does not
    threading.Thread(target=over.wait).start()
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with zygote(interrupting) as one:
            with pytest.raises(KeyError):
                started(one, 3)
            child = started(one, 7)
            assert readable([child.descriptor], 5)
            assert child.death()[0] == "exited with code 7"
            child.release()
    finally:
        over.set()
        signal.signal(signal.SIGUSR1, before)


def test_when_it_has_died_none_can_be_started_and_no_exit_code_be_had() -> None:
    with zygote() as one:
        child = started(one, 7)
        os.kill(one._child.pid, signal.SIGKILL)
        readable([one._child.descriptor, child.descriptor], 5)
        with pytest.raises(OSError, match="the process that starts new workers has ended"):
            started(one, 0)
        child.process.join(5)
        assert child.process.exitcode == UNKNOWN_EXIT
        child.release()


def test_it_leaves_with_the_consumer() -> None:
    """Also while a child of the user's holds the consumer's end of their pipe."""
    pids, say = os.pipe()
    hold, let_go = os.pipe()

    def consume() -> None:
        one = Zygote.forked(FORK, make)
        fork(lambda: (os.close(let_go), os.read(hold, 1)))
        os.write(say, str(one._child.pid).encode())

    assert end_of(fork(consume)) == 0
    pid = int(os.read(pids, 20))
    try:
        assert wait_until(lambda: pid not in {e.pid for e in process_table() if not e.zombie}, 3)
    finally:
        os.write(let_go, b"!")
    for end in (pids, say, hold, let_go):
        os.close(end)


def test_it_says_nothing_when_the_consumer_dies_before_its_answer(capfd: pytest.CaptureFixture[str]) -> None:
    def consume() -> None:
        consumer = os.getpid()

        def outlive(code: int) -> Any:
            os.kill(consumer, signal.SIGKILL)
            readable([pidfd_open(consumer)], 5)
            return make(code)

        started(Zygote.forked(FORK, outlive), 0)

    over, held = os.pipe()
    pid = fork(consume)
    os.close(held)
    assert end_of(pid) == -signal.SIGKILL
    assert os.read(over, 1) == b""  # all that were forked have ended
    os.close(over)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_was_stopped_or_killed_holds_nobody_up(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a child of it, which holds its end of the connection, goes on."""
    monkeypatch.setattr("fastq_loader.workers.zygote._ANSWER", 0.1 if number == signal.SIGSTOP else 60)
    with zygote() as one:
        held = started(one, 0, 60)
        os.kill(one._child.pid, number)
        with pytest.raises(OSError, match="the process that starts new workers has ended"):
            started(one, 7)
        held.kill()
        held.release()
