"""Who may use a pool of workers, when, and how it ends.

Runs in the consumer. The event loop does the work, and trusts that one thread at a time is in it and that
nothing cuts it short. This module sees to both. It is called from any thread, from signal handlers in the
middle of a call, from the garbage collector, from forked children and at the exit of the process.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.consumer.bad_samples import BadSampleCounter
from fastq_loader.consumer.delivery import OutcomeSlot
from fastq_loader.consumer.event_loop import BUSY, EventLoop, Resume
from fastq_loader.device.staging import DeviceSession
from fastq_loader.errors import IteratorInvalid
from fastq_loader.scheduling.progress import START, Progress
from fastq_loader.statistics.counters import Counters, EpochLog
from fastq_loader.system import exits, process_id
from fastq_loader.workers import stopping
from fastq_loader.workers.config import Plan

_EXITING = "the process is exiting"
#: Interrupts that the end of an engine without references may meet.
_ATTEMPTS = 100


class Engine:
    """A pool of workers behind a gate.

    Args:
        plan: what the workers do.
        base_seed, shared_seed: of their generators, and of datapipe graphs.
        counters: the loader's; they outlive this engine.
        session: the loader's way to a device, or None.

    Attributes:
        closed: why, once it is.
        failed: a worker's failure closed it, and its iterator is exhausted, as torch's is. Where workers are
            replaced, which torch's are not, the iterator says at every call that it cannot go on.

    Raises:
        TypeError, AttributeError, PicklingError: the start method pickles, and something cannot be.
        OSError: descriptors, processes, memory or temporary folders are used up.
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
        self.closed: str | None = None
        self.failed = False
        # Reentrant, because a signal handler may call close() in the middle of next().
        self._lock = threading.RLock()
        self._admits = 0  # the epoch whose calls need not look whether they may; whatever is unusual sets 0
        self._hurried = False  # an interrupt ended the last call
        self._counters = counters
        self._processes: list[BaseProcess] = []  # the workers, once the loop is gone
        self._loop: EventLoop | None = EventLoop(plan, counters, session)
        try:
            self._loop.start(base_seed, shared_seed)
        except BaseException:
            self.closed = "its workers could not be started"
            self._shut_down()
            raise
        _engines.add(self)
        exits.register(_close_all)  # again, where this is a fork

    # ---- what iterators call ------------------------------------------------------------------

    def start_epoch(
        self,
        sampler: Iterator[Any],
        shared_seed: int | None,
        base_seed: int | None,
        log: EpochLog,
        done: Progress = START,
        resume: Resume = (),
        bad_samples: BadSampleCounter | None = None,
    ) -> int:
        """Begin an epoch; an older one of this engine ends.

        Args:
            sampler: yields indices, those in `done` not again.
            shared_seed, base_seed: see `messages.Epoch`.
            log: where its calls leave their records.
            done: what was handed out of the epoch before it was resumed.
            resume: what each worker is told of that: how many batches were its own, and its state.
            bad_samples: see `Delivery`.

        Returns:
            The number of the epoch.

        Raises:
            IteratorInvalid: the engine is closed.
        """
        epoch = sampler, shared_seed, base_seed, log, done, resume, bad_samples
        number: int = self._enter(EventLoop.begin_epoch, *epoch)
        return number

    def advance(self, epoch: int, slot: OutcomeSlot, finish: Callable[[Any], Any] | None) -> None:
        """Put the next outcome of an epoch down in `slot`: a batch, after `finish`; or what to raise:
        StopIteration (there is none), WorkerDied (the engine is closed), LoaderTimeout (the next call waits
        again), or what the user's code raised at this position.

        Raises:
            IteratorInvalid: the epoch was ended by a newer one, or the engine was closed.
            BaseException: what a handler of a signal raised meanwhile. The next call goes on where this one
                was, or says that it cannot.
        """
        with self._lock:
            if self._admits == epoch and self._pid == process_id.pid:
                self._admits, loop = 0, self._loop
                assert loop is not None, "it is not closed"
                try:
                    is_there = loop.next(slot, finish)
                except BaseException as error:
                    self._interrupted(error)
                    raise
                if is_there and loop.fatal is None and self.closed is None:
                    self._admits = epoch
                else:
                    self._conclude(loop, is_there)
                return
        nested = self._inside
        self._check_epoch(epoch)
        self._enter(EventLoop.next, slot, finish)
        with self._lock:
            if self.usable and not nested and self._loop is not None and self._loop.scheduler.epoch == epoch:
                self._admits = epoch

    def said(self) -> dict[int, bytes]:
        """The states of workers whose part of an iterable dataset has ended in this epoch."""
        loop = self._loop
        return {} if loop is None else loop.said

    def poll(self, epoch: int) -> None:
        """Begin the copies of batches that have become ready; see `EventLoop.poll`.

        Raises:
            IteratorInvalid: the epoch was ended by a newer one, or the engine was closed.
        """
        self._check_epoch(epoch)
        self._enter(EventLoop.poll)

    def _check_epoch(self, epoch: int) -> None:
        loop = self._loop
        if loop is not None and epoch != loop.scheduler.epoch and self.closed is None:
            raise IteratorInvalid(
                "this iterator ended when a newer iteration of the same persistent_workers=True loader "
                "began; use a loader of its own, or persistent_workers=False, to iterate twice at once"
            )

    def _enter(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            nested = self._inside
            with self._lock:
                self._admits = 0
                loop = self._check_usable(nested)
                loop.phase = BUSY
                self._hurried = False
                try:
                    result = call(loop, *arguments)
                except BaseException as error:
                    self._interrupted(error)
                    raise
                return self._conclude(loop, result)
        except IteratorInvalid:
            if self.closed == _EXITING and threading.current_thread() is not threading.main_thread():
                threading.Event().wait()  # a daemon thread, which the exit leaves behind where it is
            raise

    def _interrupted(self, error: BaseException) -> None:
        """A call of the loop has raised."""
        self._hurried = not isinstance(error, Exception)
        if self.closed == _EXITING:
            if (
                not self._hurried
            ):  # the workers are ended while the call runs: what follows from that is not news
                raise self._ended() from None
            return
        if self._cut_short and not self._hurried:  # whatever the error is, the call is half done
            self.closed = f"{error!r} came in the middle of a call"
        if self.closed is not None:
            self._shut_down()

    def _conclude(self, loop: EventLoop, result: Any) -> Any:
        """A call of the loop has ended; False: it was woken, because the engine is closing."""
        if loop.fatal is not None:
            if self.closed == _EXITING:
                raise self._ended()
            self.failed, self.closed = not loop.plan.restarts, loop.fatal
        if self.closed is not None and self.closed != _EXITING:
            self._shut_down()
        if result is False:
            raise self._ended()
        return result

    @property
    def _inside(self) -> bool:
        """Whether this thread is inside a call: a handler of a signal has called."""
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    @property
    def _cut_short(self) -> bool:
        """Whether an exception left the loop in the middle of something. While a call is under way it may be
        in the middle of something, too."""
        return self._loop is not None and self._loop.phase == BUSY

    def _check_usable(self, nested: bool) -> EventLoop:
        if self._pid != process_id.current():
            raise IteratorInvalid(
                f"this iterator belongs to process {self._pid}; a forked child needs one of its own: "
                "iter(loader)"
            )
        if self.closed is not None or self._loop is None:
            raise self._ended()
        if self._cut_short:
            raise IteratorInvalid(
                "next() was called in the middle of another call of it"
                if nested
                else "this iterator cannot go on: an interrupt cut a call of next() short"
            )
        return self._loop

    def _ended(self) -> IteratorInvalid:
        return IteratorInvalid(f"this iterator cannot go on: {self.closed}")

    # ---- the end ------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether another epoch can be started."""
        return self.closed is None and not self._cut_short and self._pid == process_id.current()

    def close(self, reason: str = "the loader was closed", wait: bool = False) -> None:
        """Stop the workers and give everything back; batches stay valid. May be called on any thread.

        Workers that are in the middle of something get torch's time to finish it, behind the caller's back
        unless it is to `wait`. Closing twice does nothing; closing again after an interrupt cut the first one
        short finishes it.
        """
        if self._pid != process_id.current():
            return
        loop = self._loop
        if loop is not None:
            if self.closed is None:
                self.closed, self._admits = reason, 0
            loop.wake()
            if self._inside:  # a handler of a signal called: the call that it is in will do it
                return
            with self._lock:
                self._shut_down()
        if wait:
            stopping.wait(self._counters)

    def _shut_down(self) -> None:
        self._admits = 0
        if self._loop is not None:
            self._processes = self.processes()
            self._loop.shut_down(self._patience())
            self._loop = None
        _engines.discard(self)

    def _patience(self) -> float:
        """Seconds that workers have to finish what they do. None where an interrupt may have left half a
        message in their sockets, or where Python has run its exit handlers: zmq cannot be used any more."""
        if self._cut_short or sys.is_finalizing():
            return 0
        in_vain = self._loop is not None and self._loop.timed_out
        return stopping.BRIEF if self._hurried or in_vain else stopping.ORDERLY

    def close_at_exit(self) -> None:
        """Close, and leave a daemon thread that is inside where it is."""
        if self._pid != process_id.current():
            return
        self.closed, self._admits = self.closed or _EXITING, 0
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self.close(_EXITING)
        elif self._loop is not None:
            self._loop.kill_workers()

    def __del__(self) -> None:
        # The last iterator or loader is gone, so no call is under way. A fork's copy is not ours to close.
        interrupt: BaseException | None = None
        for _ in range(_ATTEMPTS):
            if getattr(self, "_loop", None) is None:
                break
            try:
                self.close("the loader and its iterators were dropped")
            except BaseException as error:  # an interrupt: this is the last chance to finish
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def processes(self) -> list[BaseProcess]:
        """The workers, so far as they were started; also those that have ended."""
        loop = self._loop
        return self._processes if loop is None else loop.processes()

    def hold(self, hold: bool) -> None:
        """Give out no new batch but the one that is next, from here on; False: as ever. An iterable dataset's
        workers go on. Any thread, any time."""
        loop = self._loop
        if loop is not None:
            loop.holds = hold and not loop.plan.rules.iterable

    def blocks(self) -> tuple[int, int, int]:
        """Blocks in use, blocks free, and bytes of shared memory behind them; zeros once closed. Does not
        wait: while another call is under way, blocks that were released since it began count as in use."""
        loop = self._loop
        if loop is None or self._pid != process_id.current():
            return 0, 0, 0
        if not self._inside and self._lock.acquire(blocking=False):
            try:
                if self._loop is not None:
                    loop.pool.collect()
            finally:
                self._lock.release()
        return loop.pool.usage()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _close_all() -> None:
    """The process ends. One that multiprocessing started would end its daemons at once, busy ones too."""
    for engine in list(_engines):
        engine.close_at_exit()
    if not exits.is_program():
        stopping.hurry()
    stopping.wait()


exits.register(_close_all)
