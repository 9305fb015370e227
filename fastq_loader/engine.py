"""One pool of workers with everything that belongs to it, and the consumer's only event loop.

Runs in the consumer, on the thread that calls `next()`; a lock lets several threads take turns. The loop
is `next_batch`: ask the scheduler, carry out its instructions, wait for whatever comes. The engine owns
the arena, the sockets and the processes, and closes them together.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

from fastq_loader.arena import Arena
from fastq_loader.blocks import BlockLedger
from fastq_loader.errors import IteratorInvalid, LoaderTimeout, WorkerDied, describe_index
from fastq_loader.events import (
    Arrived,
    Break,
    Deliver,
    Died,
    Draw,
    DrawFailed,
    Drawn,
    EpochStarted,
    Finish,
    Send,
    Undeliverable,
    Wait,
    Wanted,
)
from fastq_loader.messages import BATCH, BROKEN, Answer, Epoch, Hello, Stop, Task
from fastq_loader.processes import Plan, WorkerPool
from fastq_loader.scheduler import Scheduler
from fastq_loader.statistics import Counters, WorkerCounters
from fastq_loader.transport import ConsumerSocket, endpoint_folder, remove_folder
from fastq_loader.unpacking import Unpacker

#: Seconds without a message after which a dead worker's socket counts as empty: what it sent before its
#: death is in this process's buffers already, and needs a turn of zmq's own thread.
_LAST_WORDS = 0.02
#: Batches beyond the window that the pool keeps warm blocks for: the one the user looks at, and the next.
_SPARE_BATCHES = 2


class Engine:
    """A pool of workers.

    Args:
        plan: what they do.
        base_seed, shared_seed: of the workers' generators, and of datapipe graphs.
        counters: the loader's; they outlive this engine.

    Raises:
        RuntimeError: this system has no memfd.
        TypeError, AttributeError, PicklingError: the start method pickles, and something cannot be.
    """

    def __init__(self, plan: Plan, base_seed: int, shared_seed: int | None, counters: Counters) -> None:
        self.pid = os.getpid()
        self.plan = plan
        self.closed: str | None = None  # why, once it is
        self._counters = counters
        self.failed = False  # a worker's failure closed it: its iterator is exhausted
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread inside
        self._busy = False  # True outside a call: a KeyboardInterrupt cut one short
        self._waiting = False
        self._sampler: Iterator[Any] = iter(())
        self._ledger = BlockLedger()
        self.scheduler = Scheduler(plan.workers, plan.prefetch, plan.in_order, self._ledger)
        self._dead: set[int] = set()
        self._silent = plan.workers  # workers that have not said hello
        self._arena = Arena(plan.workers)
        self._unpacker = Unpacker(self._arena, plan.workers)
        self._folder: str | None = None
        self._pool: WorkerPool | None = None
        self._socket: ConsumerSocket | None = None
        try:
            self._start(base_seed, shared_seed)
        except BaseException:
            self._shut_down("the workers could not be started")
            raise
        _engines.add(self)

    def _start(self, base_seed: int, shared_seed: int | None) -> None:
        plan = self.plan
        self._folder = endpoint_folder()
        self._pool = WorkerPool(plan, self._arena, self._folder, base_seed, shared_seed)
        # The context of zmq has threads: it is made after the forks (design, rule 9).
        self._socket = ConsumerSocket(self._folder, plan.workers)
        for descriptor in self._pool.descriptors:
            self._socket.watch(descriptor)
        self._counters.workers = [
            WorkerCounters(worker, self._pool.pid(worker)) for worker in range(plan.workers)
        ]

    # ---- what iterators call ------------------------------------------------------------------

    def start_epoch(self, sampler: Iterator[Any], shared_seed: int | None) -> int:
        """Begin an epoch over the indices of `sampler`; whatever is left of the one before is dropped.

        Returns:
            The number of the epoch.
        """
        with self._lock:
            self._check_usable()
            self._busy = True
            epoch = self.scheduler.epoch + 1
            abandoned = self.scheduler.undelivered > 0
            self._counters.epochs += 1
            self._sampler = sampler
            assert self._socket is not None
            for worker in range(self.plan.workers):
                self._socket.send(worker, Epoch(epoch, abandoned, shared_seed))
            for _ in self.scheduler.handle(EpochStarted(epoch)):
                self._draw()
            self._busy = False
            return epoch

    def next_batch(self, epoch: int) -> Any:
        """The next batch of an epoch.

        Raises:
            StopIteration: there is none.
            IteratorInvalid: the epoch was ended by a newer one, or the engine was closed.
            WorkerDied: a worker died before it answered; the engine is closed.
            LoaderTimeout: no message came within the timeout; the next call waits again.
            Exception: what the user's code raised at this place.
        """
        with self._lock:
            self._check_usable()
            if epoch != self.scheduler.epoch:
                raise IteratorInvalid(
                    "this iterator ended when a newer iteration of the same persistent_workers=True loader "
                    "began; use a loader of its own, or persistent_workers=False, to iterate twice at once"
                )
            self._busy = True
            self._owner = threading.get_ident()
            try:
                batch = self._next()
            except Exception:  # an orderly way out, StopIteration among them
                self._busy = False
                raise
            except BaseException:
                self._busy = not self._waiting  # while waiting nothing is half done
                raise
            finally:
                self._owner = None
                if self.closed is not None:
                    self._shut_down(self.closed)
            self._busy = False
            return batch

    def close(self, reason: str = "the loader was closed") -> None:
        """Stop the workers and give everything back; batches stay valid. May be called on any thread."""
        # A signal handler may call this in the middle of `next()`, whose thread then does the work.
        if self.closed is not None or self.pid != os.getpid():
            return
        self.closed = reason
        if self._socket is not None:
            self._socket.wake()
        if self._owner != threading.get_ident():
            with self._lock:
                self._shut_down(reason)

    def close_at_exit(self) -> None:
        """Close, and leave a daemon thread that is inside where it is."""
        if self._owner in (None, threading.get_ident()):
            self.close(_EXITING)
        elif self.pid == os.getpid() and self._pool is not None:
            self.closed = _EXITING
            self._pool.stop(patience=0)
            if self._folder is not None:
                remove_folder(self._folder)

    def __del__(self) -> None:
        # The last iterator or loader is gone, so nobody is inside. A fork's copy is not ours to close.
        if getattr(self, "_pool", None) is not None:
            self.close("the loader and its iterators were dropped")

    @property
    def usable(self) -> bool:
        """Whether another epoch can be started."""
        return self.closed is None and not self._busy and self.pid == os.getpid()

    def _check_usable(self) -> None:
        if self.pid != os.getpid():
            raise IteratorInvalid(
                f"this iterator belongs to process {self.pid}; a forked child needs one of its own: "
                "iter(loader)"
            )
        if self.closed is not None:
            raise IteratorInvalid(f"this iterator cannot go on: {self.closed}")
        if self._busy:
            raise IteratorInvalid("this iterator cannot go on: an interrupt cut a call of next() short")

    # ---- the event loop -----------------------------------------------------------------------

    def _next(self) -> Any:
        self._collect_released()
        while True:
            for instruction in self.scheduler.handle(_WANTED):
                kind = type(instruction)
                if kind is Draw:
                    self._draw()
                elif kind is Deliver:
                    assert isinstance(instruction, Deliver)
                    return self._deliver(instruction)
                elif kind is Wait:
                    assert isinstance(instruction, Wait)
                    self._wait(instruction)
                elif kind is Finish:
                    raise StopIteration
                else:
                    assert isinstance(instruction, Break)
                    self._break(instruction)

    def _hear_releases(self) -> None:
        for offset in self._arena.released_blocks():
            self._ledger.release(offset)

    def _collect_released(self) -> None:
        self._hear_releases()
        for offset, size in self._ledger.trim(self.scheduler.window + _SPARE_BATCHES):
            self._arena.mapping.punch(offset, size)

    def _draw(self) -> None:
        try:
            index = next(self._sampler)
        except StopIteration:
            return
        except Exception as error:
            self.scheduler.handle(DrawFailed(error))
            return
        for send in self.scheduler.handle(Drawn(index)):
            assert isinstance(send, Send)
            assert self._socket is not None
            try:
                self._socket.send(
                    send.worker, Task(send.epoch, send.seq, 0, send.index, send.grants, send.promises)
                )
            except Exception as error:  # whatever pickling the index raises
                self.scheduler.handle(Undeliverable(send, error))

    def _deliver(self, deliver: Deliver) -> Any:
        answer = deliver.answer
        if answer is None:
            assert deliver.error is not None
            raise deliver.error
        assert answer.handle is not None
        assert deliver.worker is not None
        if answer.outcome != BATCH:
            error = self._unpacker.exception(answer.handle)
            for offset, _ in answer.used:
                self._ledger.drop(offset)
            if answer.outcome == BROKEN:
                # torch's worker goes on after a failed worker_init_fn, and fails at every batch.
                self._finish_with(f"worker {deliver.worker} could not start: {error!r}")
            raise error
        leased, copied = self._unpacker.blocks(deliver.worker, answer.handle)
        self._ledger.deliver(leased)
        batch = self._unpacker.unpack(deliver.worker, answer.handle)
        for offset in copied:
            self._ledger.drop(offset)
        self._counters.batches += 1
        self._counters.bytes += self._unpacker.nbytes(deliver.worker, answer.handle)
        return batch

    # ---- waiting ------------------------------------------------------------------------------

    def _wait(self, wait: Wait) -> None:
        if self._receive():
            return
        assert self._socket is not None
        assert self._pool is not None
        began = time.monotonic_ns()
        self._waiting = True
        ready = self._socket.wait(self.plan.timeout or None)
        self._waiting = False
        self._counters.wait_ns += time.monotonic_ns() - began
        if self.closed is not None:
            if self.closed == _EXITING:
                threading.Event().wait()  # a daemon thread, which the exit leaves behind where it is
            raise IteratorInvalid(f"this iterator cannot go on: {self.closed}")
        self._receive()
        if not ready:
            self._raise_timeout(wait)
        for worker, descriptor in enumerate(self._pool.descriptors):
            if descriptor in ready and worker not in self._dead:
                self._bury(worker)

    def _receive(self) -> bool:
        """Hand everything that has come to the scheduler, in the order in which the workers finished."""
        assert self._socket is not None
        arrived: list[Arrived] = []
        greeted = False
        while (received := self._socket.receive()) is not None:
            worker, message = received
            if isinstance(message, Hello):
                greeted = True
                self._greet()
                continue
            self._learn(worker, message)
            arrived.append(Arrived(worker, message))
        # A promised block's release is in our queue before its flag is up: hear of it before its answer.
        self._hear_releases()
        if len(arrived) > 1:
            arrived.sort(key=_finished)
        for event in arrived:
            self.scheduler.handle(event)
        self._counters.stale_answers += self.scheduler.take_stale()
        return bool(arrived) or greeted

    def _learn(self, worker: int, answer: Answer) -> None:
        if answer.handle is not None:
            self._unpacker.learn(worker, answer.handle)
        self._counters.workers[worker].answered(answer.started, answer.finished)
        self._counters.blocks_grown += len(answer.fresh)

    def _greet(self) -> None:
        self._silent -= 1
        if not self._silent and self._folder is not None:  # all are connected: no name is needed any more
            remove_folder(self._folder)
            self._folder = None

    def _bury(self, worker: int) -> None:
        """A worker has ended. What it answered before counts; the rest is lost."""
        assert self._socket is not None
        assert self._pool is not None
        self._socket.unwatch(self._pool.descriptors[worker])
        self._dead.add(worker)
        while self._socket.wait_for_message(_LAST_WORDS):
            self._receive()
        self.scheduler.handle(Died(worker))

    def _raise_timeout(self, wait: Wait) -> NoReturn:
        assert self._pool is not None
        stacks = self._pool.stacks(wait.worker)
        raise LoaderTimeout(
            f"DataLoader timed out after {self.plan.timeout:g} seconds: worker {wait.worker} (pid "
            f"{self._pool.pid(wait.worker)}) has not answered batch {wait.seq} "
            f"(indices {describe_index(self.scheduler.index_of(wait.seq))}). Its Python stacks:\n{stacks}"
        )

    def _break(self, lost: Break) -> NoReturn:
        assert self._pool is not None
        worker, pid = lost.worker, self._pool.pid(lost.worker)
        words, torch_text = self._pool.death(worker)
        doing = "between batches"
        if lost.seq is not None:
            doing = f"before it answered batch {lost.seq} (indices {describe_index(lost.index)})"
        text = f"DataLoader worker (pid(s) {pid}) exited unexpectedly: worker {worker} {words} {doing}"
        self._finish_with(text)
        raise WorkerDied(text) from RuntimeError(torch_text)

    def _finish_with(self, reason: str) -> None:
        self.failed = True
        self._shut_down(reason)

    # ---- the end ------------------------------------------------------------------------------

    def _shut_down(self, reason: str) -> None:
        self.closed = reason
        if self._pool is not None:
            if self._socket is not None:
                for worker in range(self.plan.workers):
                    self._socket.send(worker, Stop())
            self._pool.stop()
            self._pool = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._folder is not None:
            remove_folder(self._folder)
            self._folder = None
        if not self._arena.retired:
            self._hear_releases()
            for worker in range(self.plan.workers):
                self._ledger.writer_dead(worker)
            self.scheduler.abandon()
            self._arena.retire(self._ledger.held())
        _engines.discard(self)

    # ---- what can be seen ---------------------------------------------------------------------

    def blocks(self) -> tuple[int, int, int]:
        """Blocks in use, blocks free, and bytes of shared memory behind them."""
        if self.closed is not None:
            return 0, 0, 0
        self._hear_releases()
        free = self._ledger.free_blocks
        return len(self._ledger) - free, free, self._ledger.warm_bytes


_WANTED = Wanted()


def _finished(event: Arrived) -> int:
    return event.answer.finished


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


_EXITING = "the process is exiting"


@atexit.register
def _close_all() -> None:
    for engine in list(_engines):
        engine.close_at_exit()
