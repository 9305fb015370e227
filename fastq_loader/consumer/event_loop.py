"""The consumer's only event loop: ask the scheduler, carry out its instructions, wait for what comes.

Runs in the consumer, inside a call of `next()` or `iter()`, one thread at a time; the engine sees to that.
Owns everything that belongs to one pool of workers (arena, ledger, scheduler, group), makes it together and
takes it down together.

A handler of a signal may raise between any two steps of a call. The loop says at every moment whether it
could be left there: it is `busy` from the beginning of a call to its end, except while it is `waiting`. The
outcome of a call is put down for the iterator in the same moment in which `busy` ends, so it is never lost on
its way up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from fastq_loader.consumer.delivery import END, Delivery, Failed, Outcome, OutcomeSlot
from fastq_loader.consumer.receiver import Receiver
from fastq_loader.device.session import DeviceSession
from fastq_loader.device.staging import Staging
from fastq_loader.errors import (
    LoaderTimeout,
    WorkerDied,
    WorkerReplaced,
    warn_user,
)
from fastq_loader.ipc.claim_table import places
from fastq_loader.ipc.messages import Epoch, Space, Task, encode
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.ledger import BlockLedger
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.scheduling.events import (
    Break,
    Deliver,
    Died,
    Draw,
    DrawFailed,
    Drawn,
    EpochStarted,
    Exhausted,
    Finish,
    Idle,
    Instruction,
    Replace,
    Send,
    Undeliverable,
    Wait,
    Wanted,
)
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.scheduling.timeout import Timeout
from fastq_loader.scheduling.window import Window
from fastq_loader.statistics import Counters
from fastq_loader.system import standard_streams
from fastq_loader.system.interrupts import refuse_interrupt
from fastq_loader.workers.group import WorkerGroup
from fastq_loader.workers.pool import Plan

#: Seconds without a message after which a dead worker's socket counts as empty: what it sent before its death
#: is in this process's buffers already, and needs a turn of zmq's own thread. Where what is not heard is only
#: loaded again, it is not worth that long a wait.
_LAST_WORDS, _LAST_WORDS_IF_REPLACED = 0.02, 0.002
#: Seconds beyond the timeout. A consumer that was stopped for longer than that wakes up together with the
#: thread of zmq that has its messages.
_GRACE = 0.05
#: Batches beyond the window that the pool keeps blocks for: the one the user looks at, and the next.
_SPARE_BATCHES = 2


class Woken(Exception):
    """`wake` was called: the engine is closing."""


class EventLoop:
    """One pool of workers, from their start to their end.

    Args:
        plan: what they do.
        counters: the loader's; they outlive this pool.
        session: the loader's way to a device, or None.

    Attributes:
        busy: a call is under way, or was left by an exception in the middle of something.
        waiting: the loop sleeps: nothing is half done.
        gave_up: the last call has waited for a worker in vain.
    """

    def __init__(self, plan: Plan, counters: Counters, session: DeviceSession | None = None) -> None:
        self.plan = plan
        self._session = session
        self.busy = False
        self.waiting = False
        self.gave_up = False
        self._fatal: str | None = None
        self._counters = counters
        self._sampler: Iterator[Any] = iter(())
        standard_streams.occupy()
        self._arena = Arena(plan.workers, whole=plan.to_device)
        self._ledger = BlockLedger(self._arena.mapping.region)
        self.scheduler = Scheduler(
            plan.workers,
            plan.prefetch,
            plan.in_order,
            self._ledger,
            dynamic=plan.claimed,
            window=Window(*plan.window),
            restarts=plan.restarts,
            places=places(self._arena.mapping.claims),
        )
        self._group = WorkerGroup(plan, self._arena, counters)
        self._unpacker = Unpacker(self._arena, plan.workers, self._group.token, plan.to_device)
        self._delivery = Delivery(self._unpacker, self._ledger, counters)
        self._receiver = Receiver(plan, self._group, self.scheduler, self._unpacker, counters)
        self._epoch: Epoch | None = None
        self._unsent: dict[int, bytes] = {}  # tasks that are anyone's, by their tickets, encoded
        self._patience = Timeout(plan.timeout, of_head=plan.dynamic and plan.in_order)

    @property
    def fatal(self) -> str | None:
        """Why the iteration is over, once a worker's failure has ended it."""
        return self._fatal or self._delivery.fatal

    def start(self, base_seed: int, shared_seed: int | None) -> None:
        """Start the workers. Whatever happens in here, `shut_down` takes it back.

        Raises:
            TypeError, AttributeError, PicklingError: the start method pickles, and something cannot be.
            OSError: descriptors, processes or temporary folders are used up.
            RuntimeError: the device cannot be initialised.
        """
        self._group.start(base_seed, shared_seed)
        if self._session is not None:  # after the workers, which must not inherit anything of the device
            self._delivery.staging = Staging(self._session, self._unpacker, self._arena.mapping)

    def begin_epoch(self, sampler: Iterator[Any], shared_seed: int | None, base_seed: int | None) -> int:
        """Begin an epoch over the indices of `sampler`; whatever is left of the one before is dropped.

        Returns:
            The number of the epoch.
        """
        scheduler = self.scheduler
        if self._delivery.staging is not None:  # before the blocks of what is dropped go to others
            self._delivery.free(self._delivery.staging.drain())
        abandoned = scheduler.undelivered > 0
        taken, claimed = self._group.take_back(scheduler.outstanding.tickets())
        number = scheduler.epoch + 1
        draws = scheduler.handle(EpochStarted(number, frozenset(taken), claimed))
        self._epoch = Epoch(number, abandoned, shared_seed, base_seed)
        self._counters.epochs += 1
        self._sampler = sampler
        self._group.begin_epoch(self._epoch)
        for _ in draws:
            self._draw()
        self._flush()
        self.busy = False
        return number

    def next(self, into: OutcomeSlot, finish: Callable[[Any], Any]) -> None:
        """Put the next outcome down: a batch, or what is to be raised in its place.

        Args:
            into: where.
            finish: what a batch goes through last.

        Raises:
            Woken: the engine is closing.
        """
        try:
            outcome = self._next(finish)
        except Failed as failed:
            outcome = Outcome(None, failed.error)
        # One moment: there is no call in here, and only a call can be cut short.
        into.outcome = outcome
        self.busy = False
        del outcome  # an error holds this frame by its traceback

    def _next(self, finish: Callable[[Any], Any]) -> Outcome:
        self.gave_up = False
        self.hear_releases()
        while self._group.behind and self._receive():  # somebody may wait for what it has missed
            continue
        spare = _SPARE_BATCHES
        if self._delivery.staging is not None:
            self._delivery.free(self._delivery.staging.turn())
            spare += 2 * self._delivery.staging.ahead
        self._counters.window = self.scheduler.window.size
        if trimmed := self._ledger.trim(self.scheduler.window.size + spare):
            self._trim(trimmed)
        while True:
            for instruction in self.scheduler.handle(_WANTED):
                kind = type(instruction)
                if kind is Draw:
                    self._draw()
                elif kind is Deliver:
                    self._flush()
                    assert isinstance(instruction, Deliver)
                    return self._deliver(instruction, finish)
                elif kind is Wait:
                    assert isinstance(instruction, Wait)
                    self._wait(instruction)
                elif kind is Finish:
                    return END
                else:
                    assert isinstance(instruction, Break)
                    self._break(instruction)

    # ---- instructions -------------------------------------------------------------------------

    def _draw(self) -> None:
        try:
            index = next(self._sampler)
        except StopIteration:
            self.scheduler.handle(Exhausted())
            return
        except Exception as error:
            refuse_interrupt(error)
            self.scheduler.handle(DrawFailed(error))
            return
        for instruction in self.scheduler.handle(Drawn(index)):
            self._send(instruction)

    def _send(self, send: Instruction) -> None:
        assert isinstance(send, Send)
        task = Task(*send[1:])
        try:
            if send.worker is None:
                self._unsent[send.ticket] = encode(task, self._group.token)
                self._group.claims.offer(send.ticket)
            else:
                self._group.socket.send(send.worker, task)
        except Exception as error:  # whatever pickling the index raises
            refuse_interrupt(error)
            self.scheduler.handle(Undeliverable(send, error))

    def _flush(self) -> None:
        """Send the tasks that are anyone's, those of one moment together."""
        if self._unsent:
            self._group.offer(self._unsent)
            self._unsent.clear()
        if self._group.behind:
            self._group.catch_up()

    def _deliver(self, deliver: Deliver, finish: Callable[[Any], Any]) -> Outcome:
        if not self.plan.persistent and not self.scheduler.undelivered:  # it is the last one
            self._group.dismiss()  # they end, which takes a while, beside the last step of the epoch
        try:
            batch = self._delivery.hand_out(deliver)
            if self._delivery.staging is not None:
                self._stage_ahead(self._delivery.staging)
            return Outcome(finish(batch), None)
        except Failed:
            raise
        except Exception as error:  # the user's, and it has its place
            refuse_interrupt(error)
            raise Failed(error) from None

    # ---- on to the device ---------------------------------------------------------------------

    def poll(self) -> None:
        """Begin the copies of batches that have become ready, without waiting for anything."""
        staging = self._delivery.staging
        if staging is not None:
            self._delivery.free(staging.reap())
            self._stage_ahead(staging, wait=False)
        self.busy = False

    def _stage_ahead(self, staging: Staging, wait: bool = True) -> None:
        while self._receive():
            continue
        staging.begin(self.scheduler.upcoming(staging.ahead), wait)

    # ---- waiting ------------------------------------------------------------------------------

    def _wait(self, wait: Wait) -> None:
        if self._receive():
            return
        if self.scheduler.window.widens:
            for _ in self.scheduler.handle(_IDLE):
                self._draw()
        self._flush()
        attempt = self.scheduler.attempt_of(wait.seq)
        seconds = self._patience.seconds(wait.seq, attempt, time.monotonic())
        began = time.monotonic_ns()
        self.waiting = True
        ready = self._group.socket.wait(seconds)
        self.busy, self.waiting = True, False  # a handler of a signal may have called meanwhile
        self._counters.waited(time.monotonic_ns() - began, self.scheduler.epoch, wait.seq, wait.behind)
        if self._group.socket.woken:
            raise Woken
        if not ready and self._patience.is_over(self._group.socket.wait_for_message(_GRACE)):
            self._give_up(wait)
        self._receive()
        for worker in self._group.ended(ready):
            self._handle_death(worker)

    def _receive(self) -> bool:
        """Hand everything that has come to the scheduler, in the order in which the workers finished."""
        arrived = self._receiver.take()
        # A promised block's release is in our queue before a worker can see it: hear of it before its answer.
        self.hear_releases()
        self._receiver.hand_on(arrived)
        return bool(arrived)

    def hear_releases(self) -> None:
        """Blocks whose last view has died are free again."""
        for offset in self._arena.released_blocks():
            self._ledger.release(offset)

    def _trim(self, blocks: list[tuple[int, int]]) -> None:
        for offset, size in blocks:
            if self._delivery.staging is not None:  # a device would go on to read the pages that it locked
                self._delivery.staging.forget(offset)
            self._arena.mapping.punch(offset, size)
        for worker in range(self.plan.workers):
            if not self._group.is_dead(worker) and (space := self._ledger.space(worker)):
                self._group.socket.send(worker, Space(space))

    # ---- workers that die or hang -------------------------------------------------------------

    def _give_up(self, wait: Wait) -> None:
        """The timeout is over: replace the worker that hangs, or say who it is."""
        self._patience.forget()
        self.gave_up = True
        worker, timeout = wait.worker, self.plan.timeout
        if worker is None:
            ticket = self.scheduler.outstanding.ticket_of(self.scheduler.epoch, wait.seq)
            worker = None if ticket is None else self._group.holder(ticket)
        if worker is not None and self.scheduler.can_replace and self._group.is_ready(worker):
            stacks = self._group.stacks(worker)
            self._group.kill(worker)
            self._handle_death(
                worker, f"was ended, because it did not answer within {timeout:g} seconds,", stacks
            )
            return
        text = self._group.report_late(worker, wait.seq, self.scheduler.index_of(wait.seq))
        raise Failed(LoaderTimeout(f"DataLoader timed out after {timeout:g} seconds: {text}"))

    def _handle_death(self, worker: int, how: str | None = None, stacks: str = "") -> None:
        """A worker has ended. What it answered before counts; the rest is lost, or another one's to load."""
        patience = _LAST_WORDS_IF_REPLACED if self.scheduler.can_replace else _LAST_WORDS
        while self._group.socket.wait_for_message(patience):
            self._receive()
        seq, claimed = self._group.claimed_by(worker, self.scheduler.outstanding, self.scheduler.epoch)
        words = how or self._group.death(worker)[0]
        index = None if seq is None else self.scheduler.index_of(seq)
        who = self._group.report(worker, words, seq, index)
        self._group.mark_dead(worker)
        for instruction in self.scheduler.handle(Died(worker, seq, words, claimed)):
            if isinstance(instruction, Replace):
                self._replace(worker, who)
            else:
                self._send(instruction)
        self._flush()
        if not self._group.is_dead(worker):
            after = f". Its Python stacks:\n{stacks}" if stacks else ""
            try:
                warn_user(f"{who}; another one was started in its place{after}", WorkerReplaced)
            except WorkerReplaced as warning:  # it was made an error, and the loop can go on after it
                raise Failed(warning) from None

    def _replace(self, worker: int, who: str) -> None:
        assert self._epoch is not None, "batches are loaded in epochs"
        self._unpacker.forget(worker)
        try:
            self._group.replace(worker, self._ledger, self._epoch)
        except OSError as error:
            refuse_interrupt(error)
            self._fatal = f"{who}; no other one could be started in its place: {error}"
            self._end(error)

    def _break(self, lost: Break) -> NoReturn:
        words, torch_text = self._group.death(lost.worker)
        self._fatal = self._group.report(lost.worker, words, lost.seq, lost.index)
        self._end(RuntimeError(torch_text))

    def _end(self, cause: Exception) -> NoReturn:
        died = WorkerDied(self._fatal)
        died.__cause__ = cause
        raise Failed(died)

    # ---- the end ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let the loop raise `Woken` the next time it waits. May be called on any thread."""
        self._group.wake()

    def kill_workers(self) -> None:
        """End the workers. May be called on any thread, while another one is in the loop."""
        self._group.kill_all()

    def shut_down(self, patience: float) -> None:
        """End the workers and give everything back but what users look at; what a worker may still write to,
        when they have ended. May be called again when an interrupt cut it short."""
        failure: Exception | None = None
        if self._delivery.staging is not None:  # copies read the blocks until they have run
            try:
                self._delivery.free(self._delivery.staging.close())
            except Exception as error:  # the device's; an interrupt leaves the rest to the next call
                failure = error
            self._delivery.staging = None
        self.scheduler.abandon()
        self._group.stop(patience, self._ledger)
        if failure is not None:
            raise failure

    def processes(self) -> list[BaseProcess]:
        """The workers, so far as they were started."""
        return self._group.processes()

    def blocks(self) -> tuple[int, int, int]:
        """Blocks in use, blocks free, and bytes of shared memory behind them. May be asked on any thread."""
        free = self._ledger.free_blocks
        return len(self._ledger) - free, free, self._ledger.nbytes


_WANTED, _IDLE = Wanted(), Idle()
