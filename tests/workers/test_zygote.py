"""The process that forks workers: a copy of the consumer, and a fresh interpreter."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from fastq_loader.system import calls
from fastq_loader.system.calls import readable
from fastq_loader.workers import payload
from fastq_loader.workers import zygote as zygotes
from fastq_loader.workers.children import Child
from fastq_loader.workers.zygote import Zygote, copy_of_consumer, fork_copy
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


@contextlib.contextmanager
def zygote(make: Any = make) -> Iterator[Zygote]:
    one = copy_of_consumer(FORK, lambda arguments: make(*arguments))
    try:
        yield one
    finally:
        one.close()


def forked(one: Zygote, *arguments: Any) -> Child:
    launch = partial(fork_copy, one, own=arguments)
    child = Child(FORK.Process(daemon=True), launch=launch)
    child.start()
    return child


def test_its_children_look_like_the_consumers_own() -> None:
    with zygote() as one:
        leaves, hangs = forked(one, 7), forked(one, 0, 60)
        assert hangs.process in multiprocessing.active_children()
        assert readable([leaves.descriptor], 60)
        assert leaves.death()[0] == "exited with code 7"
        assert hangs.process.exitcode is None
        hangs.process.kill()
        hangs.process.join(30)
        assert hangs.process.exitcode == -signal.SIGKILL
        for child in (leaves, hangs):
            child.release()
            child.process.kill()  # nobody is hit who has the number now
        assert not {leaves.process, hangs.process} & set(multiprocessing.active_children())


def test_a_lost_exit_code_and_a_descriptor_that_cannot_be_sent_end_no_zygote() -> None:
    with zygote() as one:
        with pytest.raises(OSError, match="Bad file descriptor"):
            one.ask(((7, 0), None), [0, -1])
        child = forked(one, 7)
        assert readable([child.descriptor], 60)
        assert one.ask(child.process.pid) == 7  # and an interrupt drops it
        assert child.death()[0] == "ended, its exit code is unknown"
        another = forked(one, 3)
        another.process.join(30)
        assert another.process.exitcode == 3
        for each in (child, another):
            each.release()


@pytest.mark.parametrize("action", [signal.SIG_IGN, lambda *_: os.waitpid(-1, os.WNOHANG)])
def test_what_the_consumer_does_at_the_end_of_a_child_takes_no_exit_code_from_the_zygote(action: Any) -> None:
    previous = signal.signal(signal.SIGCHLD, action)
    try:
        with zygote() as one:
            child = forked(one, 7)
            assert readable([child.descriptor], 60)
            assert child.death()[0] == "exited with code 7"
            child.release()
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_a_message_may_have_more_descriptors_than_the_system_sends_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as file:
        message = bytes(100_000)
        calls.send_message(ours.fileno(), message, [file.fileno()] * 600)
        got, descriptors = calls.receive_message(theirs.fileno())
        assert (got, {os.fstat(each) for each in descriptors}) == (message, {os.fstat(file.fileno())})
        assert len(descriptors) == 600
        payload.close_all(descriptors)


def test_a_signal_in_the_middle_of_a_request_leaves_no_answer_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = itertools.count()
    fork_one = zygotes._fork

    def interrupt_and_fork(*arguments: Any) -> int:  # in the zygote
        if not next(tries):
            os.kill(os.getppid(), signal.SIGUSR1)
        return fork_one(*arguments)

    def interrupt(*_: object) -> None:
        raise KeyError("interrupted")

    over = threading.Event()  # of a thread that takes the signal while this one does not
    threading.Thread(target=over.wait).start()
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        monkeypatch.setattr(zygotes, "_fork", interrupt_and_fork)
        with zygote() as one:
            with pytest.raises(KeyError):
                forked(one, 3)
            child = forked(one, 7)
            assert readable([child.descriptor], 60)
            assert child.death()[0] == "exited with code 7"
            child.release()
    finally:
        over.set()
        signal.signal(signal.SIGUSR1, before)


def test_it_leaves_with_the_consumer() -> None:
    """Also while a child of the user's holds the consumer's end of their pipe."""
    pids, say = os.pipe()
    hold, let_go = os.pipe()

    def consume() -> None:
        one = copy_of_consumer(FORK, make)
        fork(lambda: (os.close(let_go), os.read(hold, 1)))
        os.write(say, str(one._child.pid).encode())

    assert end_of(fork(consume)) == 0
    pid = int(os.read(pids, 20))
    try:
        assert wait_until(lambda: pid not in {e.pid for e in process_table() if not e.zombie}, 30)
    finally:
        os.write(let_go, b"!")
    for end in (pids, say, hold, let_go):
        os.close(end)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_was_stopped_or_killed_holds_nobody_up_and_takes_exit_codes_along(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a child of it, which holds its end of the connection, goes on."""
    with zygote() as one:
        held = forked(one, 0, 60)
        monkeypatch.setattr(zygotes, "_ANSWER", 0.1 if number == signal.SIGSTOP else 60)
        os.kill(one._child.pid, number)
        with pytest.raises(OSError, match="the process that starts new workers was killed by SIGKILL"):
            forked(one, 7)
        held.kill()
        held.process.join(30)
        assert held.death()[0] == "ended, its exit code is unknown"
        held.release()
