"""The consumer's only event loop: ask the scheduler, carry out its instructions, wait for what comes.

Runs in the consumer, inside a call of `next()` or `iter()`, one thread at a time; the engine sees to that.
Owns everything that belongs to one pool of workers (arena, ledger, scheduler, sockets, processes, endpoint
folder), makes it together and takes it down together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NoReturn

from fastq_loader.arena import Arena
from fastq_loader.blocks import BlockLedger
from fastq_loader.errors import LoaderTimeout, WorkerDied, describe_index
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
from fastq_loader.messages import BATCH, BROKEN, Answer, Epoch, Hello, Stop, Task, load_index
from fastq_loader.processes import Plan, WorkerPool
from fastq_loader.scheduler import Scheduler
from fastq_loader.statistics import Counters, WorkerCounters
from fastq_loader.transport import ConsumerSocket, endpoint_folder, remove_folder
from fastq_loader.unpacking import Unpacker

#: Seconds without a message after which a dead worker's socket counts as empty: what it sent before its
#: death is in this process's buffers already, and needs a turn of zmq's own thread.
_LAST_WORDS = 0.02
#: Batches beyond the window that the pool keeps blocks for: the one the user looks at, and the next.
_SPARE_BATCHES = 2


class Woken(Exception):
    """`wake` was called: the engine is closing."""


class Failed(Exception):
    """The next thing to hand out is `error`, which user code raised.

    The engine raises it, outside of the loop's frames: they look at it, and in its traceback they would
    make a cycle that keeps the loop and its memory until the garbage collector comes.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error


class EventLoop:
    """One pool of workers, from their start to their end.

    Args:
        plan: what they do.
        counters: the loader's; they outlive this pool.

    Attributes:
        waiting: whether the loop sleeps: nothing is half done then.
        orderly: whether the last exception came out at a place where the loop can go on, or has ended.
        fatal: why the iteration is over, once a worker's failure has ended it.
    """

    def __init__(self, plan: Plan, counters: Counters) -> None:
        self.plan = plan
        self.waiting = False
        self.orderly = False
        self.fatal: str | None = None
        # Where only the sampler decides on the order, a second look at the socket is saved.
        self._one_by_one = plan.in_order and not plan.rules.iterable
        self._counters = counters
        self._sampler: Iterator[Any] = iter(())
        self._ledger = BlockLedger()
        self.scheduler = Scheduler(plan.workers, plan.prefetch, plan.in_order, self._ledger)
        self._greeted: set[int] = set()
        self._dead: set[int] = set()
        self._arena = Arena(plan.workers)
        self._unpacker = Unpacker(self._arena, plan.workers)
        self._pool = WorkerPool(plan)
        self._folder: str | None = None
        self._socket: ConsumerSocket | None = None

    def start(self, base_seed: int, shared_seed: int | None) -> None:
        """Start the workers. Whatever happens in here, `shut_down` takes it back.

        Raises:
            TypeError, AttributeError, PicklingError: the start method pickles, and something cannot be.
            OSError: descriptors, processes or temporary folders are used up.
        """
        plan = self.plan
        self._folder = endpoint_folder()
        self._pool.start(self._arena, self._folder, base_seed, shared_seed)
        # The context of zmq has threads: it is made after the forks (design, rule 9).
        self._socket = ConsumerSocket(self._folder, plan.workers)
        for descriptor in self._pool.descriptors:
            self._socket.watch(descriptor)
        self._counters.workers = [
            WorkerCounters(worker, self._pool.pid(worker)) for worker in range(plan.workers)
        ]

    @property
    def socket(self) -> ConsumerSocket:
        assert self._socket is not None, "the loop was started, and not shut down"
        return self._socket

    def begin_epoch(self, sampler: Iterator[Any], shared_seed: int | None) -> int:
        """Begin an epoch over the indices of `sampler`; whatever is left of the one before is dropped.

        Returns:
            The number of the epoch.
        """
        epoch = self.scheduler.epoch + 1
        message = Epoch(epoch, self.scheduler.undelivered > 0, shared_seed)
        self._counters.epochs += 1
        self._sampler = sampler
        for worker in range(self.plan.workers):
            self.socket.send(worker, message)
        for _ in self.scheduler.handle(EpochStarted(epoch)):
            self._draw()
        return epoch

    def next(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: there is none.
            WorkerDied: a worker died before it answered.
            LoaderTimeout: no message came within the timeout; the next call waits again.
            Woken: the engine is closing.
            Failed: user code raised at this place.
        """
        self.orderly = False
        self._hear_releases()
        for offset, size in self._ledger.trim(self.scheduler.window + _SPARE_BATCHES):
            self._arena.mapping.punch(offset, size)
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
                    self.orderly = True
                    raise StopIteration
                else:
                    assert isinstance(instruction, Break)
                    self._break(instruction)

    # ---- instructions -------------------------------------------------------------------------

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
            task = Task(send.epoch, send.seq, 0, send.index, send.grants, send.promises, send.space)
            try:
                self.socket.send(send.worker, task)
            except Exception as error:  # whatever pickling the index raises
                self.scheduler.handle(Undeliverable(send, error))

    def _deliver(self, deliver: Deliver) -> Any:
        self.orderly = True  # what is raised from here on is the user's, and has its place
        answer = deliver.answer
        if answer is None:
            assert deliver.error is not None
            raise Failed(deliver.error)
        handle = answer.handle
        assert handle is not None
        if answer.outcome != BATCH:
            self._raise(deliver, self._unpacker.exception(handle))
        leased, copied = self._unpacker.blocks(handle)
        self._ledger.deliver(leased)
        try:
            batch = self._unpacker.unpack(handle)
        finally:
            for offset in copied:
                self._ledger.drop(offset)
        self._counters.batches += 1
        self._counters.bytes += handle.spec.nbytes
        return batch

    def _raise(self, deliver: Deliver, error: BaseException) -> NoReturn:
        answer = deliver.answer
        assert answer is not None
        for offset, _ in answer.used:
            self._ledger.drop(offset)
        if answer.outcome == BROKEN:
            # torch's worker goes on after a failed worker_init_fn, and fails at every batch.
            self.fatal = f"worker {deliver.worker} could not start: {error!r}"
        if isinstance(error, StopIteration):  # out of next() it would end the epoch without a word
            stopped, error = error, RuntimeError(f"a worker raised StopIteration: {error}")
            error.__cause__ = stopped
        raise Failed(error)

    def _break(self, lost: Break) -> NoReturn:
        worker, pid = lost.worker, self._pool.pid(lost.worker)
        words, torch_text = self._pool.death(worker)
        doing = "between batches"
        if lost.seq is not None:
            doing = f"before it answered batch {lost.seq} (indices {describe_index(load_index(lost.index))})"
        text = f"DataLoader worker (pid(s) {pid}) exited unexpectedly: worker {worker} {words} {doing}"
        self.orderly = True
        self.fatal = text
        raise WorkerDied(text) from RuntimeError(torch_text)

    # ---- waiting ------------------------------------------------------------------------------

    def _wait(self, wait: Wait) -> None:
        if self._receive():
            return
        began = time.monotonic_ns()
        self.waiting = True
        ready = self.socket.wait(self.plan.timeout or None)
        self.waiting = False
        self._counters.wait_ns += time.monotonic_ns() - began
        if self.socket.woken:
            self.orderly = True
            raise Woken
        self._receive()
        if not ready:
            self._raise_timeout(wait)
        for worker, descriptor in enumerate(self._pool.descriptors):
            if descriptor in ready and worker not in self._dead:
                self._bury(worker)

    def _receive(self) -> bool:
        """Hand everything that has come to the scheduler, in the order in which the workers finished."""
        arrived: list[Arrived] = []
        while (received := self.socket.receive()) is not None:
            worker, message = received
            if isinstance(message, Hello):
                self._greet(worker)
                continue
            arrived.append(Arrived(worker, self._learn(worker, message)))
            if self._one_by_one:
                break
        # A promised block's release is in our queue before a worker can see it: hear of it before its answer.
        self._hear_releases()
        if len(arrived) > 1:
            arrived.sort(key=_finished)
        for event in arrived:
            self.scheduler.handle(event)
        self._counters.stale_answers += self.scheduler.take_stale()
        return bool(arrived)

    def _learn(self, worker: int, answer: Answer) -> Answer:
        self._counters.workers[worker].answered(answer.started, answer.finished)
        self._counters.blocks_grown += len(answer.fresh)
        if answer.handle is None:
            return answer
        return Answer(*answer[:-1], self._unpacker.learn(worker, answer.handle))

    def _greet(self, worker: int) -> None:
        self._greeted.add(worker)
        descriptor = self._pool.start_next()
        if descriptor is not None:
            started = len(self._pool.descriptors) - 1
            self.socket.watch(descriptor)
            self._counters.workers[started].pid = self._pool.pid(started)
        if len(self._greeted) == self.plan.workers and self._folder is not None:
            remove_folder(self._folder)  # all are connected: no name is needed any more
            self._folder = None

    def _bury(self, worker: int) -> None:
        """A worker has ended. What it answered before counts; the rest is lost."""
        self.socket.unwatch(self._pool.descriptors[worker])
        self._dead.add(worker)
        while self.socket.wait_for_message(_LAST_WORDS):
            self._receive()
        self.scheduler.handle(Died(worker))

    def _raise_timeout(self, wait: Wait) -> NoReturn:
        # Before its hello a worker has no handler for the signal, which would end it.
        greeted = wait.worker in self._greeted
        stacks = self._pool.stacks(wait.worker) if greeted else "  (it is still starting)"
        index = load_index(self.scheduler.index_of(wait.seq))
        self.orderly = True
        raise LoaderTimeout(
            f"DataLoader timed out after {self.plan.timeout:g} seconds: worker {wait.worker} (pid "
            f"{self._pool.pid(wait.worker)}) has not answered batch {wait.seq} "
            f"(indices {describe_index(index)}). Its Python stacks:\n{stacks}"
        )

    def _hear_releases(self) -> None:
        for offset in self._arena.released_blocks():
            self._ledger.release(offset)

    # ---- the end ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let the loop raise `Woken` the next time it waits. May be called on any thread."""
        if self._socket is not None:
            self._socket.wake()

    def stop_workers(self, ask: bool) -> None:
        """End the workers; with `ask` they may finish what they do within half a second."""
        if ask and self._socket is not None:
            for worker in range(self.plan.workers):
                self._socket.send(worker, Stop())
            self._pool.stop()
        else:
            self._pool.stop(patience=0)
        if self._folder is not None:
            remove_folder(self._folder)
            self._folder = None

    def shut_down(self, ask: bool) -> None:
        """End the workers and give everything back but what users look at. May be called again when an
        interrupt cut it short."""
        self.stop_workers(ask)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if not self._arena.retired:
            self._hear_releases()
            for worker in range(self.plan.workers):
                self._ledger.writer_dead(worker)
            self.scheduler.abandon()
            self._arena.retire(self._ledger.held())

    def blocks(self) -> tuple[int, int, int]:
        """Blocks in use, blocks free, and bytes of shared memory behind them."""
        self._hear_releases()
        free = self._ledger.free_blocks
        return len(self._ledger) - free, free, self._ledger.nbytes


_WANTED = Wanted()


def _finished(event: Arrived) -> int:
    return event.answer.finished
