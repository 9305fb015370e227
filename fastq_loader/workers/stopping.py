"""Workers that were told to stop: they get the time that torch gives them, and are ended after it.

Runs in the consumer. A worker that only waits for a task leaves within milliseconds, and whoever stopped it
waits for that. One that is in the middle of a sample, or of the exit handlers of user code, writes a file,
perhaps: it is left to finish behind the consumer's back, so that neither `next()` nor the turn of an epoch
waits for it. A thread watches those workers as long as there are any; `close()` and the exit of the process
wait until it is done.

What a worker may still write to is given back when the last one of its pool has ended (design, rule 1).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from fastq_loader.system.calls import readable
from fastq_loader.workers.children import release

#: Seconds that a worker which was told to stop has to finish: torch's MP_STATUS_CHECK_INTERVAL, for which it
#: joins each of them.
ORDERLY = 5.0
#: The same where somebody is in a hurry (after Ctrl-C), or has waited for the worker in vain already; and
#: what SIGTERM leaves it before SIGKILL.
BRIEF = 0.5
#: Seconds that are waited for workers which need no more than that.
_INSTANT = 0.2


class Member:
    """One process.

    Args:
        process: it was started.
        descriptor: becomes readable when it has ended.
        owned: whether the descriptor is to be closed then.
        patience: seconds that it has to leave on its own.
    """

    def __init__(self, process: BaseProcess, descriptor: int, owned: bool, patience: float) -> None:
        self.process = process
        self.descriptor = descriptor
        self.owned = owned
        self.deadline = time.monotonic() + patience
        self._means = [process.kill, process.terminate]

    def press(self) -> None:
        """Its time is over: SIGTERM, and the next time SIGKILL. An interrupt may cut it short."""
        if self._means:
            self._means.pop()()
        self.deadline = time.monotonic() + BRIEF if self._means else math.inf

    def release(self) -> None:
        """It has ended: give back what is left of it."""
        self.process.join()
        if self.owned:
            self.owned = False
            os.close(self.descriptor)
        release(self.process)


class Stopping:
    """The processes of one pool that were told to stop.

    Args:
        owner: whose they are, for those who wait.
        members: the processes.
        after: what is done when all have ended, in this order, on any thread.
        forget: what a forked copy of this process does instead.

    Attributes:
        over: set when they have ended, and all was done.
    """

    def __init__(
        self,
        owner: object,
        members: list[Member],
        after: list[Callable[[], None]],
        forget: Callable[[], None],
    ) -> None:
        self.owner = owner
        self.over = threading.Event()
        self.forget = forget
        self._members = members
        self._after = after[::-1]
        self._stepping = threading.RLock()

    @property
    def descriptors(self) -> list[int]:
        return [member.descriptor for member in self._members]

    def step(self) -> float:
        """Do what is due; the time (of `time.monotonic`) at which something will be."""
        with self._stepping:
            ended = set(readable(self.descriptors, 0))
            now = time.monotonic()
            for member in list(self._members):
                if member.descriptor in ended:
                    if member in self._members:  # else a signal handler closed the loader meanwhile
                        self._members.remove(member)
                        member.release()
                elif member.deadline <= now:
                    member.press()
            if self._members:
                return min(member.deadline for member in self._members)
            try:
                while self._after:
                    self._after.pop()()
            finally:
                if not self._after:
                    self.forget = _nothing  # it may be a method of whoever keeps this object
                    self.over.set()
            return math.inf

    def hurry(self) -> None:
        """Their time is over now."""
        for member in list(self._members):
            member.deadline = min(member.deadline, time.monotonic())


def _nothing() -> None:
    pass


def finish(group: Stopping) -> None:
    """Wait for an instant, and leave those that need longer to the thread. May be called again, also when an
    interrupt cut it short."""
    if group in _groups:
        return
    try:
        until = time.monotonic() + _INSTANT
        while not group.over.is_set() and (now := time.monotonic()) < until:
            due = group.step()
            if not group.over.is_set():
                readable(group.descriptors, max(min(due, until) - now, 0))
    finally:
        if not group.over.is_set():
            _watch(group)


def wait(owner: object = None) -> None:
    """Wait until those of an owner, or of everybody, have ended; an interrupt ends their time too."""
    for group in _groups:
        if owner is None or group.owner is owner:
            try:
                if not group.over.is_set():
                    _attended()
                group.over.wait()
            except BaseException:
                hurry(owner)
                raise


def hurry(owner: object = None) -> None:
    """End those of an owner, or of everybody, now."""
    for group in _groups:
        if owner is None or group.owner is owner:
            group.hurry()
    _wake()


# ---- the thread ---------------------------------------------------------------------------------------

_lock = threading.RLock()  # a garbage collection in here may end a loader
_groups: tuple[Stopping, ...] = ()  # replaced and never changed: anybody may be reading it
_thread: threading.Thread | None = None
_pipe: tuple[int, int] | None = None  # wakes the thread


def _watch(group: Stopping) -> None:
    global _groups
    with _lock:
        _groups = (*_groups, group)
    _attended()


def _attended() -> None:
    """Have the thread running; an interrupt may have cut its start short."""
    global _thread, _pipe
    with _lock:
        if _thread is not None and _thread.is_alive():
            _wake()
            return
        # Signals are the other threads' to notice: a Ctrl-C that came to this one would not wake them.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            if _pipe is None:
                _pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            _thread = threading.Thread(target=_attend, name="fastq_loader: stopping workers", daemon=True)
            _thread.start()
            return
        except (OSError, RuntimeError):  # none can be started: there are too many, or the process is exiting
            _thread = None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    try:
        _attend()
    except BaseException:  # an interrupt: nobody waits any longer
        hurry()
        _attend()
        raise


def _wake() -> None:
    with _lock:
        if _pipe is not None:
            with contextlib.suppress(BlockingIOError):  # it is full of wake-ups
                os.write(_pipe[1], b".")


def _attend() -> None:
    """Watch all groups until none is left."""
    global _groups, _thread, _pipe
    while True:
        due = math.inf
        for group in _groups:
            try:
                due = min(due, group.step())
            except Exception:  # is told like any thread's, and does not keep the others from their end
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
                due = 0
        with _lock:
            _groups = tuple([group for group in _groups if not group.over.is_set()])
            if not _groups:
                pipe, _pipe, _thread = _pipe, None, None
                for end in pipe or ():
                    os.close(end)
                return
            watched = [descriptor for group in _groups for descriptor in group.descriptors]
            wake = -1 if _pipe is None else _pipe[0]
        if wake in readable([*watched, wake], max(due - time.monotonic(), 0)):
            os.read(wake, 1 << 10)


def _after_fork_in_child() -> None:
    """The workers are siblings of a forked copy, and there is no thread."""
    global _lock, _groups, _thread, _pipe
    _lock = threading.RLock()
    for group in _groups:
        group.forget()
    _groups = ()
    for end in _pipe or ():
        os.close(end)
    _thread, _pipe = None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
