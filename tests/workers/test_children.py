"""A child process: its descriptor, its end in words, its stacks; and the process that forks successors."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fastq_loader.system import calls
from fastq_loader.system.calls import readable
from fastq_loader.workers import children
from fastq_loader.workers.children import UNKNOWN_EXIT, Child, Stacks, Zygote
from tests.conftest import process_table, wait_until
from tests.support.forking import end_of, fork

FORK = multiprocessing.get_context("fork")

pytestmark = pytest.mark.processes


@pytest.fixture(params=["pidfd", "thread", "pipe"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the end of a child is noticed: the last two are for a kernel or sandbox that lacks the others."""

    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    if request.param != "pidfd":
        monkeypatch.setattr(calls, "pidfd_open", lambda pid: -1)
    if request.param == "pipe":
        monkeypatch.setattr(children.threading.Thread, "start", refuse)
    return str(request.param)


def started(target: Any = time.sleep, *arguments: Any) -> Child:
    child = Child(FORK.Process(target=target, args=arguments or (60,), daemon=True))
    child.start()
    return child


def ended(child: Child) -> bool:
    return calls.readable([child.descriptor], 5) == [child.descriptor]


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


def test_no_signal_comes_while_the_thread_starts_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a handler raises there comes out as a KeyError of `threading`."""
    blocked: list[set[signal.Signals]] = []

    def end_of_child(pid: int) -> int:
        blocked.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        raise OSError

    monkeypatch.setattr(children, "_end_of", end_of_child)
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    child = Child(process)
    assert child.descriptor == process.sentinel
    assert signal.SIGALRM in blocked[0]
    process.join()


def kill_itself(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("end", "number", "ours", "torchs"),
    [
        (os._exit, 7, "exited with code 7", "exited unexpectedly with exit code 7. Details"),
        (
            kill_itself,
            signal.SIGKILL,
            "was killed by SIGKILL (by the kernel's out-of-memory killer?)",
            "is killed by signal: Killed. ",
        ),
        (kill_itself, signal.SIGTERM, "was killed by SIGTERM", "is killed by signal: Terminated. "),
        (kill_itself, 40, "was killed by signal 40", "is killed by signal: "),  # it has no name
    ],
)
def test_its_death_is_told(end: Any, number: int, ours: str, torchs: str) -> None:
    child = started(end, number)
    assert ended(child)
    text, cause = child.death()
    assert (text, child.killed) == (ours, end is kill_itself)
    assert cause.startswith(f"DataLoader worker (pid {child.pid}) {torchs}")
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
    assert not reaps or wait_until(lambda: child.pid in taken, 10)
    text, cause = child.death()
    assert text == "ended, its exit code is unknown"
    assert cause == f"DataLoader worker (pid {child.pid}) exited unexpectedly"
    child.release()
    assert child.process.exitcode == UNKNOWN_EXIT


def dawdle() -> None:
    time.sleep(60)


def test_a_process_that_hangs_shows_where_and_one_that_is_stopped_or_gone_does_not() -> None:
    written = Stacks()
    ready, say = os.pipe()

    def hang() -> None:
        children.write_stacks(written.write_end)
        os.write(say, b".")
        dawdle()

    pid = fork(hang)
    os.read(ready, 1)
    assert wait_until(lambda: "in dawdle" in written.of(pid), 5)  # it may still be on its way there
    os.kill(pid, signal.SIGSTOP)
    assert written.of(pid) == "  (it did not write them)"
    os.kill(pid, signal.SIGKILL)
    assert end_of(pid) == -signal.SIGKILL
    assert written.of(pid) == "  (it did not write them)"
    written.close()
    os.close(ready)
    os.close(say)


# ---- the process that forks successors ------------------------------------------------------------------


def make(code: int, seconds: float = 0) -> Any:
    """A process that leaves with a code; it is made in the zygote."""
    return FORK.Process(target=leave, args=(code, seconds), daemon=True)


def leave(code: int, seconds: float) -> None:
    time.sleep(seconds)
    os._exit(code)


@contextlib.contextmanager
def zygote(make: Any = make) -> Iterator[Zygote]:
    one = Zygote(FORK, make, "/nowhere")
    try:
        yield one
    finally:
        one.close()


def forked(one: Zygote, *arguments: Any) -> Child:
    child = Child(one.process(*arguments))
    child.start()
    return child


def test_its_children_look_like_the_consumers_own() -> None:
    with zygote() as one:
        leaves, hangs = forked(one, 7), forked(one, 0, 60)
        assert hangs.process in multiprocessing.active_children()
        assert readable([leaves.descriptor], 5)
        assert leaves.death()[0] == "exited with code 7"
        assert hangs.process.exitcode is None
        hangs.process.kill()
        hangs.process.join(5)
        assert hangs.process.exitcode == -signal.SIGKILL
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
            forked(one, 1)
        child = forked(one, 0)
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
                forked(one, 3)
            child = forked(one, 7)
            assert readable([child.descriptor], 5)
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
        one = Zygote(FORK, make, "/nowhere")
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_was_stopped_or_killed_holds_nobody_up_and_takes_exit_codes_along(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a child of it, which holds its end of the connection, goes on."""
    monkeypatch.setattr("fastq_loader.workers.children._ANSWER", 0.1 if number == signal.SIGSTOP else 60)
    with zygote() as one:
        held = forked(one, 0, 60)
        os.kill(one._child.pid, number)
        with pytest.raises(OSError, match="the process that starts new workers has ended"):
            forked(one, 7)
        held.kill()
        held.process.join(5)
        assert held.process.exitcode == UNKNOWN_EXIT
        held.release()
