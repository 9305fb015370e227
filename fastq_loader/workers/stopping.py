"""Shutdown of workers: they get as much time to stop as in torch, and are then ended.

Runs in the consumer. A worker that only waits for a task ends within milliseconds, and the caller waits for
it. A worker that is in the middle of a sample, or of user code's exit handlers, may be writing a file. It
finishes in the background, so that neither `next()` nor the change of epoch waits for it. A thread watches
the workers of such a pool; `close()` and the exit of the process wait until that thread is done.

The resources that a worker may still write to are released when the last worker of its pool has ended.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable

from fastq_loader.system import process_id
from fastq_loader.system.calls import readable
from fastq_loader.system.interrupts import without_signals
from fastq_loader.system.unpatched import time
from fastq_loader.workers.children import Child

#: Seconds that a worker gets to finish after a stop message: torch's MP_STATUS_CHECK_INTERVAL, for which
#: torch joins each worker.
ORDERLY = 5.0
#: The same after Ctrl-C, or if waiting for the worker was in vain before; and the seconds between SIGTERM and
#: SIGKILL.
BRIEF = 0.5
#: Seconds for which the caller itself waits for workers.
_INSTANT = 0.2


class _Leaving:
    """A worker that was asked to stop, and has `patience` seconds to do so."""

    def __init__(self, child: Child, patience: float) -> None:
        self.child = child
        self.deadline = time.monotonic() + patience
        self._means = [child.process.kill, child.process.terminate]

    def escalate(self) -> None:
        """Terminate the worker; the second time, kill it. An interrupt may cut it short."""
        if self._means:
            with contextlib.suppress(PermissionError):  # it has the ids that this process had then
                self._means.pop()()
        self.deadline = time.monotonic() + BRIEF if self._means else math.inf


class Stopping:
    """The workers of one pool that were asked to stop.

    Args:
        owner: the owner of the workers, see `wait`.
        leaving: the workers, each with the seconds that it gets to end by itself.
        after: functions to call when all have ended, in this order, on any thread.

    Attributes:
        over: set when all workers have ended and the `after` functions were called.
    """

    def __init__(self, owner: object, leaving: dict[Child, float], after: list[Callable[[], None]]) -> None:
        self.owner = owner
        self.over = threading.Event()
        self._leaving = [_Leaving(child, patience) for child, patience in leaving.items()]
        self._after = list(after)
        self._lock = threading.RLock()  # a signal handler may close the loader in the middle of a step
        self._thread: threading.Thread | None = None

    def finish(self) -> None:
        """Wait for an instant, and leave workers that need longer to a thread. May be called again, also
        when an interrupt cut it short."""
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
        """Terminate the workers now; kill the ones that were terminated before."""
        with self._lock:
            for leaving in self._leaving:
                leaving.escalate()

    def _attend(self, until: float = math.inf) -> None:
        """Take every step that is due, until all workers have ended or the time is `until`."""
        while not self.over.is_set() and (now := time.monotonic()) < until:
            due = self._step()
            if not self.over.is_set():
                # At most BRIEF, because `hurry` on another thread may bring a deadline forward.
                seconds = min(due - now, until - now, BRIEF)
                readable([leaving.child.descriptor for leaving in self._leaving], max(seconds, 0))

    def _step(self) -> float:
        """Take the steps that are due now. Returns the time (of `time.monotonic`) of the next one."""
        with self._lock, without_signals():  # each is released once
            descriptors = [leaving.child.descriptor for leaving in self._leaving]
            ended = set(readable(descriptors, 0)) if descriptors else set[int]()
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
                with contextlib.ExitStack() as stack:  # it calls all, whatever one raises
                    while self._after:
                        stack.callback(self._after.pop())
            finally:
                _active.discard(self)
                self.over.set()
            return math.inf

    # ---- the thread -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start the thread that attends to the workers, unless it is running."""
        # It blocks signals: a Ctrl-C that is delivered to it would not wake the other threads.
        with self._lock, without_signals():
            if self._thread is not None and self._thread.is_alive():
                return
            try:
                if sys.is_finalizing():  # before Python 3.12, `start` would wait for ever
                    raise RuntimeError("no thread starts at the end of the interpreter")
                name = "fastq_loader: stopping workers"
                self._thread = threading.Thread(target=self._attend, name=name, daemon=True)
                self._thread.start()
                return
            except RuntimeError:  # there are too many threads, or the process is exiting
                self._thread = None
        try:
            self._attend()
        except BaseException:  # an interrupt: the wait is over
            hurry()
            self._attend()
            raise


_active: set[Stopping] = set()  # pools whose workers a thread watches


def wait(owner: object = None) -> None:
    """Wait until the workers of an owner (None: all owners) have ended; an interrupt ends their time, too."""
    try:
        for stopping in list(_active):
            if owner is None or stopping.owner is owner:
                stopping.wait()
    except BaseException:
        hurry(owner)
        raise


def hurry(owner: object = None) -> None:
    """End the workers of an owner (None: all owners) now."""
    for stopping in list(_active):
        if owner is None or stopping.owner is owner:
            stopping.hurry()


process_id.in_forked_children(_active.clear)  # they have no such workers and threads
