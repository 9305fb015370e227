"""Guards a pool of workers: one caller at a time, and an orderly shutdown.

Runs in the consumer. The event loop does the work, and relies on one thread at a time being in it and on no
call being cut short. This module ensures the first, and refuses further calls after an interrupt. It is
called from any thread, from signal handlers in the middle of a call, from the garbage collector, from forked
children and at the exit of the process.
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
#: Attempts to close an unreferenced engine, each of which an interrupt may cut short.
_ATTEMPTS = 100


class Engine:
    """A pool of workers behind a gate.

    Args:
        plan: configuration of the workers.
        base_seed, shared_seed: seeds of their generators, and of datapipe graphs.
        counters: counters of the loader, which outlive this engine.
        session: the loader's access to a device, or None.

    Attributes:
        closed: the reason, once the engine is closed; else None.
        failed: a worker's failure closed the engine, and its iterator is exhausted, as in torch. Stays False
            if workers are replaced, which torch does not do: then every later call raises IteratorInvalid.

    Raises:
        TypeError, AttributeError, PicklingError: the start method pickles, and something cannot be pickled.
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
        self._admits = 0  # the epoch whose calls skip the checks; anything unusual resets it to 0
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
        exits.register(_close_all)  # again, in case this process is a fork

    # ---- called by iterators ------------------------------------------------------------------

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
        """Begin an epoch, which ends an older one of this engine.

        Args:
            sampler: yields indices, without those in `done`.
            shared_seed, base_seed: see `ipc.messages.Epoch`.
            log: records the calls of the epoch.
            done: the positions delivered before the epoch was resumed.
            resume: for each worker of a resumed epoch, how many of its batches were delivered, and its state.
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
        """Store the next outcome of an epoch in `slot`: a batch, after `finish`; or an error to raise:
        StopIteration (no batch is left), WorkerDied (the engine is closed), LoaderTimeout (the next call
        waits again), or an error of the user's code at this position.

        Raises:
            IteratorInvalid: a newer epoch ended this one, or the engine was closed.
            BaseException: a signal handler raised it meanwhile. The next call continues where this one was,
                or reports that it cannot.
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

    def end_states(self) -> dict[int, bytes]:
        """States of the workers whose part of an iterable dataset has ended in this epoch, by worker."""
        loop = self._loop
        return {} if loop is None else loop.end_states

    def poll(self, epoch: int) -> None:
        """Begin the copies of batches that have become ready; see `EventLoop.poll`.

        Raises:
            IteratorInvalid: a newer epoch ended this one, or the engine was closed.
        """
        self._check_epoch(epoch)
        self._enter(EventLoop.poll)

    def _check_epoch(self, epoch: int) -> None:
        loop = self._loop
        if loop is not None and epoch != loop.scheduler.epoch and self.closed is None:
            raise IteratorInvalid(
                "this iterator ended when a newer iteration of the same persistent_workers=True loader "
                "began; use a second loader, or persistent_workers=False, to iterate twice at once"
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
                threading.Event().wait()  # a daemon thread: it stays here until the process is gone
            raise

    def _interrupted(self, error: BaseException) -> None:
        """Handle an exception that a call of the loop has raised."""
        self._hurried = not isinstance(error, Exception)
        if self.closed == _EXITING:
            if (
                not self._hurried
            ):  # the exit ends the workers during the call: errors that follow are expected
                raise self._ended() from None
            return
        if self._cut_short and not self._hurried:  # the call is half done, whatever the error
            self.closed = f"{error!r} was raised in the middle of a call"
        if self.closed is not None:
            self._shut_down()

    def _conclude(self, loop: EventLoop, result: Any) -> Any:
        """Finish a call of the loop. `result` is False if the call was woken because the engine is
        closing."""
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
        """Whether this thread is inside a call: then a signal handler is the caller."""
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    @property
    def _cut_short(self) -> bool:
        """Whether an exception left the loop in the middle of a step. Also true in the middle of a call that
        is under way."""
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
        """Stop the workers and release all resources; batches stay valid. May be called on any thread.

        Busy workers get as long as torch gives them to finish, in the background unless `wait` is true.
        Closing twice does nothing; closing again after an interrupt completes the first close.
        """
        if self._pid != process_id.current():
            return
        loop = self._loop
        if loop is not None:
            if self.closed is None:
                self.closed, self._admits = reason, 0
            loop.wake()
            if self._inside:  # called by a signal handler: the interrupted call will shut down
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
        """Seconds that workers have to finish their work. 0 where an interrupt may have left half a message
        in their sockets, or where Python has run its exit handlers: zmq cannot be used any more."""
        if self._cut_short or sys.is_finalizing():
            return 0
        in_vain = self._loop is not None and self._loop.timed_out
        return stopping.BRIEF if self._hurried or in_vain else stopping.ORDERLY

    def close_at_exit(self) -> None:
        """Close the engine at exit. If a daemon thread is inside, leave it there and kill the workers."""
        if self._pid != process_id.current():
            return
        self.closed, self._admits = self.closed or _EXITING, 0
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self.close(_EXITING)
        elif self._loop is not None:
            self._loop.kill_workers()

    def __del__(self) -> None:
        # The last iterator or loader is gone, so no call is under way. A fork's copy is not closed.
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
        """The processes of all workers that were started, also of workers that have ended."""
        loop = self._loop
        return self._processes if loop is None else loop.processes()

    def pause_prefetch(self, hold: bool) -> None:
        """Stop drawing ahead: only the next batch is drawn; with False, draw ahead again. Workers of an
        iterable dataset are not affected. May be called on any thread at any time."""
        loop = self._loop
        if loop is not None:
            loop.holds = hold and not loop.plan.rules.iterable

    def blocks(self) -> tuple[int, int, int]:
        """Blocks in use, free blocks, and bytes of shared memory behind them; zeros once closed. Does not
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
    """Close all engines when the process ends. Where multiprocessing started this process, busy workers get
    no time to finish: multiprocessing would end its daemons at once, too."""
    for engine in list(_engines):
        engine.close_at_exit()
    if not exits.is_program():
        stopping.hurry()
    stopping.wait()


exits.register(_close_all)
