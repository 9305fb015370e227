"""Workers that were told to stop: they get the time that torch gives them, and are ended after it.

Runs in the consumer. A worker that only waits for a task leaves within milliseconds, and is waited for. One
that is in the middle of a sample, or of the exit handlers of user code, writes a file, perhaps: it is left to
finish behind the consumer's back, so that neither `next()` nor the turn of an epoch waits for it. A thread
watches the workers of such a pool; `close()` and the exit of the process wait until it is done.

What a worker may still write to is given back when the last one of its pool has ended.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

from fastq_loader.system.calls import readable
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers.children import Child

#: Seconds that a worker which was told to stop has to finish: torch's MP_STATUS_CHECK_INTERVAL, for which it
#: joins each of them.
ORDERLY = 5.0
#: The same after Ctrl-C, or where the worker was waited for in vain already; and
#: what SIGTERM leaves it before SIGKILL.
BRIEF = 0.5
#: Seconds that are waited for workers which need no more than that.
_INSTANT = 0.2


class _Leaving:
    """A worker that was told to stop, and has `patience` seconds for it."""

    def __init__(self, child: Child, patience: float) -> None:
        self.child = child
        self.deadline = time.monotonic() + patience
        self._means = [child.process.kill, child.process.terminate]

    def escalate(self) -> None:
        """Its time is over: SIGTERM, and the next time SIGKILL. An interrupt may cut it short."""
        if self._means:
            self._means.pop()()
        self.deadline = time.monotonic() + BRIEF if self._means else math.inf


class Stopping:
    """The workers of one pool that were told to stop.

    Args:
        owner: whose they are, see `wait`.
        leaving: the workers, each with the seconds that it has to leave on its own.
        after: called when all have ended, in this order, on any thread.

    Attributes:
        over: set when they have ended, and all was done.
    """

    def __init__(self, owner: object, leaving: dict[Child, float], after: list[Callable[[], None]]) -> None:
        self.owner = owner
        self.over = threading.Event()
        self._leaving = [_Leaving(child, patience) for child, patience in leaving.items()]
        self._after = after[::-1]
        self._lock = threading.RLock()  # a signal handler may close the loader in the middle of a step
        self._thread: threading.Thread | None = None

    def finish(self) -> None:
        """Wait for an instant, and leave those that need longer to a thread. May be called again, also when
        an interrupt cut it short."""
        if self in _active:
            return
        try:
            self._attend(time.monotonic() + _INSTANT)
        finally:
            if not self.over.is_set():
                _active.add(self)
                self._watch()

    def wait(self) -> None:
        """Wait until all have ended."""
        if not self.over.is_set():
            self._watch()  # an interrupt may have cut the start of its thread short
        self.over.wait()

    def hurry(self) -> None:
        """The time of the workers is over now."""
        with self._lock:
            for leaving in self._leaving:
                leaving.escalate()

    def _attend(self, until: float = math.inf) -> None:
        """Do what is due until all have ended, or until some time."""
        while not self.over.is_set() and (now := time.monotonic()) < until:
            due = self._step()
            if not self.over.is_set():
                # No longer than `hurry`, on another thread, may bring the next time nearer.
                seconds = min(due - now, until - now, BRIEF)
                readable([leaving.child.descriptor for leaving in self._leaving], max(seconds, 0))

    def _step(self) -> float:
        """Do what is due now; the time (of `time.monotonic`) at which something else will be."""
        with self._lock:
            ended = set(readable([leaving.child.descriptor for leaving in self._leaving], 0))
            now = time.monotonic()
            for leaving in list(self._leaving):
                if leaving.child.descriptor in ended:
                    if leaving in self._leaving:  # else a signal handler closed the loader meanwhile
                        self._leaving.remove(leaving)
                        leaving.child.release()
                elif leaving.deadline <= now:
                    leaving.escalate()
            if self._leaving:
                return min(leaving.deadline for leaving in self._leaving)
            try:
                while self._after:
                    self._after.pop()()
            finally:
                if not self._after:
                    _active.discard(self)
                    self.over.set()
            return math.inf

    # ---- the thread -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Have a thread attend."""
        # Signals are the other threads' to notice: a Ctrl-C that came to this one would not wake them.
        with self._lock, without_signals():
            if self._thread is not None and self._thread.is_alive():
                return
            try:
                name = "fastq_loader: stopping workers"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
                return
            except RuntimeError:  # there are too many, or the process is exiting
                self._thread = None
        try:
            self._run()
        except BaseException:  # an interrupt: the wait is over
            hurry()
            self._run()
            raise

    def _run(self) -> None:
        try:
            self._attend()
        except Exception:  # what is left is done before it is told
            self._run()
            raise


_active: set[Stopping] = set()  # those that a thread watches


def wait(owner: object = None) -> None:
    """Wait until those of an owner, or of everybody, have ended; an interrupt ends their time too."""
    try:
        for stopping in _of(owner):
            stopping.wait()
    except BaseException:
        hurry(owner)
        raise


def hurry(owner: object = None) -> None:
    """End those of an owner, or of everybody, now."""
    for stopping in _of(owner):
        stopping.hurry()


def _of(owner: object) -> list[Stopping]:
    return [stopping for stopping in list(_active) if owner is None or stopping.owner is owner]


if hasattr(os, "register_at_fork"):  # the workers are siblings of a forked copy, and there is no thread
    os.register_at_fork(after_in_child=_active.clear)
