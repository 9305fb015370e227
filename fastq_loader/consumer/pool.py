"""A running pool of workers: one entrance for one caller at a time, and an orderly shutdown.

Runs in the consumer. The event loop does the work. It must not be entered by two threads at once, nor again
after an interrupt has left a call half done: this module lets one thread in at a time, and refuses calls
after such an interrupt. It is called from any thread, from signal handlers in the middle of a call, from the
garbage collector, from forked children and at the exit of the process.

An iterator calls its `entrance`: the pool, or in its place an `Over`, which says why there is nothing more.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from fastq_loader.consumer.answers import PoolEpoch
from fastq_loader.consumer.event_loop import Closing, EventLoop
from fastq_loader.consumer.gate import CUT_SHORT, EXITING, FAILED, INSIDE, MOVES, OPEN, WAITING, Gate
from fastq_loader.consumer.outcomes import ENDED, OutcomeSlot
from fastq_loader.device.staging import DeviceSession
from fastq_loader.errors import IteratorInvalid
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.records import CLOSE
from fastq_loader.system import interrupts, process_id
from fastq_loader.system.torch_names import untraced
from fastq_loader.system.unpatched import time
from fastq_loader.workers import stopping
from fastq_loader.workers.config import Plan


class Over:
    """In the place of a pool whose epoch is over for an iterator.

    Args:
        reason: why; None if the iterator is exhausted.
    """

    def __init__(self, reason: str | None = None) -> None:
        self._reason = reason

    def call(self, iterator: PoolIterator, step: Callable[..., None], *arguments: Any) -> None:
        """See `Pool`. Stores the end as the outcome, or raises IteratorInvalid."""
        if self._reason is not None:
            raise IteratorInvalid(self._reason)
        iterator.outcome = iterator.outcome or ENDED


EXHAUSTED = Over()
_SUPERSEDED = Over(
    "this iterator ended when a newer iteration of the same persistent_workers=True loader began; use a "
    "second loader, or persistent_workers=False, to iterate twice at once"
)
#: In place of a reference to an iterator: returns none.
_nobody: Callable[[], Any] = object


class PoolIterator(OutcomeSlot, Protocol):
    """An iterator over an epoch of a pool.

    Attributes:
        entrance: what it calls. The pool replaces itself there when the epoch ends early.
    """

    entrance: Pool | Over


@untraced
class Pool:
    """A pool of workers behind a gate.

    Args:
        plan: configuration of the workers.
        base_seed, shared_seed: seeds of their generators, and of datapipe graphs.
        counters: counters of the loader, which outlive this pool.
        session: the loader's access to a device, or None.

    Attributes:
        gate: whether a call may enter, and how the pool has ended.

    Raises:
        TypeError, AttributeError, PicklingError: the start method pickles, and something cannot be pickled.
        OSError: descriptors, processes or memory are used up.
    """

    def __init__(
        self,
        plan: Plan,
        base_seed: int,
        shared_seed: int | None,
        counters: Counters,
        session: DeviceSession | None = None,
    ) -> None:
        self._pid = process_id.current()
        self.gate = Gate()
        # Reentrant, because a signal handler may call close() in the middle of next().
        self._lock = threading.RLock()
        #: Whether this thread is inside a call: then a signal handler is the caller.
        self._inside: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        self._iterator: Callable[[], PoolIterator | None] = _nobody  # that of the current epoch
        self._unchecked = _nobody  # the same, unless its next call has to be checked
        self._counters = counters
        self._processes: list[BaseProcess] = []  # the workers, once the loop is gone
        self._loop: EventLoop | None = None
        try:
            with interrupts.without_signals():  # it has descriptors, which an interrupt would leave
                self._loop = EventLoop(plan, counters, self.gate)
            self._loop.start(base_seed, shared_seed, session)
        except BaseException:
            self.gate.shut("close", "its workers could not be started")
            self._shut_down()
            raise
        _pools.add(self)

    # ---- the entrance -------------------------------------------------------------------------

    def call(self, iterator: PoolIterator, step: Callable[..., None], *arguments: Any) -> None:
        """Do a step of the event loop for an iterator. It may end the pool.

        Raises:
            IteratorInvalid: a newer epoch ended this one, or the pool was closed.
            BaseException: a signal handler raised it meanwhile. The next call continues where this one was,
                or reports that it cannot.
        """
        nested = self._inside()
        try:
            with self._lock:
                if self._unchecked() is not iterator:
                    if iterator.entrance is not self:  # it ended while this thread waited for the lock
                        iterator.entrance.call(iterator, step, *arguments)
                        return
                    self._admit(nested)
                self._unchecked, loop = _nobody, self._loop
                assert loop is not None, "it is not closed"
                try:
                    step(loop, *arguments)
                except BaseException as error:
                    self._leave_by(error)
                    raise
                if self.gate.end is None:
                    self._unchecked = _nobody if nested else self._iterator
                elif self.gate.end != EXITING:
                    log, loop = loop.answers.log, None  # it dies where signals are blocked
                    self._shut_down()
                    log.record(CLOSE, time.monotonic_ns())
        except IteratorInvalid:
            self._stay_at_exit()
            raise

    def start_epoch(self, iterator: PoolIterator, epoch: PoolEpoch) -> None:
        """Begin an epoch, which ends an older one of this pool.

        Raises:
            IteratorInvalid: the pool is closed.
        """
        iterator.entrance = self
        self.call(iterator, self._begin_epoch, iterator, epoch)

    def _begin_epoch(self, loop: EventLoop, iterator: PoolIterator, epoch: PoolEpoch) -> None:
        if self._iterator() is not iterator:
            self._replace(_SUPERSEDED)
        self._iterator = weakref.ref(iterator)
        loop.begin_epoch(epoch)

    def _replace(self, over: Over) -> None:
        """End the epoch for its iterator, unless it has ended."""
        iterator = None if self._iterator is _nobody else self._iterator()
        if iterator is not None and iterator.entrance is self:
            iterator.entrance = over

    def end_states(self) -> dict[int, bytes]:
        """States of the workers whose part of an iterable dataset has ended in this epoch, by worker."""
        loop = self._loop
        return {} if loop is None else loop.answers.end_states

    def _stay_at_exit(self) -> None:
        """Keep a daemon thread here until the process is gone, if that is exiting. It holds no lock."""
        if self.gate.end == EXITING and threading.current_thread() is not threading.main_thread():
            threading.Event().wait()

    def _leave_by(self, error: BaseException) -> None:
        """Handle an exception that a call of the loop has raised."""
        gate, interrupt = self.gate, not isinstance(error, Exception)
        if gate.end == EXITING:
            if not interrupt:  # the exit ends the workers during the call: errors that follow are expected
                raise self._ended() from None
            return
        if gate.phase != INSIDE:  # nothing is half done
            gate.phase = WAITING if interrupt else OPEN
        elif not interrupt:  # the call is half done, whatever the error
            gate.shut("close", f"{error!r} was raised in the middle of a call")
        if gate.end is not None:
            self._shut_down()
        if isinstance(error, Closing):
            raise self._ended() from None

    def _admit(self, nested: bool) -> None:
        if self.gate.end is not None or self._loop is None:
            raise self._ended()
        if self.gate.phase == INSIDE and nested:
            raise IteratorInvalid("next() was called in the middle of another call of it")
        self.gate.phase = MOVES[self.gate.phase, "enter"]
        if self.gate.phase == CUT_SHORT:
            raise IteratorInvalid("this iterator cannot go on: an interrupt cut a call of next() short")

    def _ended(self) -> IteratorInvalid:
        return IteratorInvalid(f"this iterator cannot go on: {self.gate.reason}")

    # ---- the end ------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether another epoch can be started."""
        is_open = self.gate.end is None and self.gate.phase in (OPEN, WAITING)
        return is_open and self._pid == process_id.current()

    def close(self, reason: str = "the loader was closed", wait: bool = False) -> None:
        """Stop the workers and release all resources; batches stay valid. May be called on any thread.

        Busy workers get as long as torch gives them to finish, in the background unless `wait` is true.
        Closing twice does nothing; closing again after an interrupt completes the first close.
        """
        if self._pid != process_id.current():
            return
        loop = self._loop
        if loop is not None:
            self._unchecked = _nobody
            self.gate.shut("close", reason)
            loop.group.wake()  # the call that waits now, or else the next one
            if self._inside():  # called by a signal handler: the interrupted call will shut down
                return
            loop = None  # it dies where signals are blocked
            with self._lock:
                self._shut_down()
        if wait:
            stopping.wait(self._counters)

    def _shut_down(self) -> None:
        self._unchecked = _nobody
        with interrupts.without_signals():
            if self._loop is not None:
                self._processes = self.processes()
                self._loop.shut_down(self._patience())
                _ended.append((self, self._loop.blocks.arena))
                self._loop = None
        if self.gate.end != EXITING:  # else see `_stay_at_exit`
            self._replace(EXHAUSTED if self.gate.end == FAILED else Over(str(self._ended())))
        _pools.discard(self)

    def _patience(self) -> float:
        """Seconds that workers have to finish their work. 0 where an interrupt may have left half a message
        in their sockets, or where Python has run its exit handlers: zmq cannot be used any more."""
        if self.gate.phase in (INSIDE, CUT_SHORT) or sys.is_finalizing():
            return 0
        in_vain = self._loop is not None and self._loop.deaths.timeout.was_over
        return stopping.BRIEF if self.gate.phase == WAITING or in_vain else stopping.ORDERLY

    def close_at_exit(self) -> None:
        """Close the pool at exit. If a daemon thread is inside, leave it there and kill the workers."""
        if self._pid != process_id.current():
            return
        self._unchecked = _nobody
        self.gate.shut("exit", "the process is exiting")
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self.close()
        elif self._loop is not None:
            self._loop.group.kill_all()

    def leave_to_parent(self) -> None:
        """Called in a forked child: the workers belong to its parent."""
        self._replace(
            Over(
                f"this iterator belongs to process {self._pid}; a forked child needs one of its own: "
                "iter(loader)"
            )
        )

    def __del__(self) -> object:
        # The last iterator or loader is gone, so no call is under way. A fork's copy is not closed: the
        # collector may run in a child before `process_id` is set anew, and must start no thread there.
        if getattr(self, "_pid", 0) != os.getpid() or getattr(self, "_loop", None) is None:
            return None
        return interrupts.finish(lambda: self.close("the loader and its iterators were dropped"))

    def processes(self) -> list[BaseProcess]:
        """The processes of all workers that were started, also of workers that have ended."""
        loop = self._loop
        return self._processes if loop is None else loop.group.processes()

    def blocks(self) -> tuple[int, int, int]:
        """Blocks in use, free blocks, and bytes of shared memory behind them; zeros once closed. Does not
        wait: while another call is under way, blocks that were released since it began count as in use."""
        loop = self._loop
        if loop is None or self._pid != process_id.current():
            return 0, 0, 0
        if not self._inside() and self._lock.acquire(blocking=False):
            try:
                if self._loop is not None:
                    loop.blocks.collect()
            finally:
                self._lock.release()
        return loop.blocks.usage()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
#: The last pools that ended, with their arenas. They die when others end, where signals are blocked: a
#: finalizer in Python, also multiprocessing's, handles signals at its entry, where their exceptions are lost.
_ended: deque[tuple[Pool, Any]] = deque(maxlen=2)


def _leave_to_parent() -> None:
    """In a forked child, end the epochs of the parent's pools for the copies of their iterators."""
    for pool in list(_pools):
        pool.leave_to_parent()
    _pools.clear()


process_id.in_forked_children(_leave_to_parent)


def _close_all() -> None:
    """Close all pools when the program ends. A process that multiprocessing started calls this from Python
    3.13 on, after multiprocessing has terminated its daemons."""
    for pool in list(_pools):
        pool.close_at_exit()
    if parent_process() is not None:
        stopping.hurry()
    stopping.wait()


atexit.register(_close_all)
