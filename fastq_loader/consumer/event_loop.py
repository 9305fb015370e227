"""The consumer's only event loop: ask the scheduler, carry out its instructions, wait for messages.

Runs in the consumer, inside a call of `next()` or `iter()`, on one thread at a time, as the engine ensures.
Owns everything that belongs to one pool of workers (memory, scheduler, workers), from its start to its end.

A signal handler may raise between any two steps of a call. `phase` shows at every moment whether the loop can
be left there: it is BUSY from the beginning of a call to its end, except while it is WAITING. The outcome of
a call is stored for the iterator in the same step that ends the phase, so it is never lost on its way up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.consumer.bad_samples import BadSampleCounter
from fastq_loader.consumer.deaths import Deaths, Timeout, death
from fastq_loader.consumer.delivery import CLOSED, ENDED, Delivery, Outcome, OutcomeSlot, finished
from fastq_loader.consumer.receiver import Receiver
from fastq_loader.device.staging import DeviceSession, Staging
from fastq_loader.ipc.claim_table import slots
from fastq_loader.ipc.endpoints import naming_the_limit, require_threads
from fastq_loader.ipc.messages import PASSED, Epoch, Space, Task, encode_task
from fastq_loader.ipc.sockets import THREADS
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.pool import BlockPool
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.scheduling.events import Died, Draw, Finish, Wait
from fastq_loader.scheduling.progress import START, Progress
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.scheduling.states import Batch
from fastq_loader.statistics import records
from fastq_loader.statistics.counters import Counters, EpochLog
from fastq_loader.system import calls
from fastq_loader.system.interrupts import refuse_interrupt
from fastq_loader.workers.config import Plan
from fastq_loader.workers.group import WorkerGroup
from fastq_loader.workers.worker import Worker

Resume = Sequence[tuple[int, dict[str, Any] | None]]

IDLE, BUSY, WAITING = "idle", "busy", "waiting"

#: Seconds beyond the timeout. A consumer that was stopped for longer than the timeout resumes together with
#: its workers.
_GRACE = 0.05
#: Threads of a worker that count against a process limit: its own, one that watches this process, zmq's.
_PER_WORKER = 2 + THREADS
#: Descriptors of a pool, not counting its workers': memory, claims, stacks, sockets.
_DESCRIPTORS = 12
#: Batches beyond the window for which the pool keeps blocks: the user's, and the next one.
_SPARE_BATCHES = 2
#: Nanoseconds between two checks for memory that is not needed any more.
_TIDY_EVERY = 5_000_000


class EventLoop:
    """One pool of workers, from start to end.

    Args:
        plan: configuration of the workers.
        counters: counters of the loader, which outlive this pool.
        session: the loader's access to a device, or None.

    Attributes:
        phase: IDLE between calls; BUSY during one, or where an exception left one in the middle of a step;
            WAITING while the loop sleeps and nothing is half done.
        fatal: why the iteration is over, once a worker's failure has ended it.
        timed_out: the last call has waited for a worker in vain.
        pool: the memory that the workers write to.
        holds: batches are not drawn ahead, but only when no other is under way.
    """

    def __init__(self, plan: Plan, counters: Counters, session: DeviceSession | None = None) -> None:
        self.plan = plan
        self.phase = IDLE
        self.fatal: str | None = None
        self.timed_out = self.holds = False
        self._session = session
        self._counters = counters
        self._sampler: Iterator[Any] = iter(())
        calls.occupy_standard_streams()
        with naming_the_limit(_DESCRIPTORS):
            arena = Arena(plan.workers, whole=plan.for_device)
        self.pool = BlockPool(arena, plan.workers)
        self.scheduler = Scheduler(
            plan.workers,
            self.pool,
            replace(plan.window),
            in_order=plan.in_order,
            shared_tasks=plan.shared_tasks,
            restarts=plan.restarts,
            slots=slots(arena.mapping.claims),
        )
        self._group = WorkerGroup(plan, self.pool, counters)
        self._unpacker = Unpacker(arena, plan.workers, self._group.token, plan.for_device)
        self._delivery = Delivery(self._unpacker, self.pool, counters, plan.rules.iterable)
        self._receiver = Receiver(plan, self._group, self.scheduler, self._unpacker, counters)
        self._deaths = Deaths(plan, self._group, self.scheduler)
        self._epoch: Epoch | None = None
        self._unsent: dict[int, bytes] = {}  # ticket → encoded shared task
        self._receive = self._receiver.receive
        self._tidy_at = 0  # when to check the memory again
        self._timeout = Timeout(plan.timeout, of_head=plan.dynamic and plan.in_order)
        # Of the call under way. Not passed from frame to frame: an error's traceback references all frames.
        self._outcome: Outcome | None = None

    def start(self, base_seed: int, shared_seed: int | None) -> None:
        """Start the workers. `shut_down` undoes this, also after an exception in the middle of it.

        Raises:
            TypeError, AttributeError, PicklingError: the start method pickles, and something cannot be
                pickled.
            OSError: descriptors, processes, threads or temporary folders are used up.
            RuntimeError: the device cannot be initialised.
        """
        # Check for all threads before any is started: else workers and sockets take each other's. Under
        # `ulimit -v` or `-d`, where this process may lack room for so many stacks, check only for zmq's:
        # without them zmq would end the process.
        threads = THREADS
        if calls.limit_of("AS") is None and calls.limit_of("DATA") is None:
            threads += _PER_WORKER * self.plan.workers + bool(self.plan.restarts)
        require_threads(threads)
        self._group.start(base_seed, shared_seed)
        if self._session is not None:  # after the workers, which must not inherit anything of the device
            self._delivery.staging = Staging(self._session, self._unpacker, self.pool.arena.mapping)

    def begin_epoch(
        self,
        sampler: Iterator[Any],
        shared_seed: int | None,
        base_seed: int | None,
        log: EpochLog,
        done: Progress = START,
        resume: Resume = (),
        bad_samples: BadSampleCounter | None = None,
    ) -> int:
        """Begin an epoch, and drop the rest of the previous one. See `Engine.start_epoch`."""
        scheduler = self.scheduler
        self._drop()
        self._log = self._receiver.log = log
        self._tidy_at = 0
        if self._delivery.staging is not None:  # before blocks of dropped batches go to others
            self.pool.drop(self._delivery.staging.drain())
        taken, claimed = self._group.take_back(scheduler.pending_tasks.tickets())
        number = 0 if bad_samples is None else bad_samples.epoch
        sealed = self._group.sealed(resume)
        self._epoch = Epoch(scheduler.epoch + 1, shared_seed, base_seed, sealed, number)
        self._delivery.progress, self._delivery.bad_samples = done, bad_samples
        self.end_states = self._receiver.end_states = dict[int, bytes]()
        # Tasks of an iterable dataset are sent again, and workers skip batches that were handed out before.
        drawn = START if self.plan.rules.iterable else done
        count = scheduler.begin_epoch(self._epoch.epoch, taken, claimed, drawn)
        self._sampler = sampler
        self._group.begin_epoch(self._epoch)
        self._draw(count)
        self._flush()
        self.phase = IDLE
        return self._epoch.epoch

    def next(self, slot: OutcomeSlot, finish: Callable[[Any], Any] | None) -> bool:
        """Store the next outcome in `slot`; a batch goes through `finish` first, unless that is None. Return
        False if there is no outcome because the engine is closing."""
        self.phase = BUSY
        if slot.outcome is not None:  # another thread's, which has not taken it yet
            self.phase = IDLE
            return True
        self.timed_out = False
        now = time.monotonic_ns()
        self._log.enter(now)
        if now >= self._tidy_at:
            self._tidy(now)
        if self.pool.released:
            self.pool.collect()
        if self._group.behind:
            self._let_catch_up()
        if self._delivery.staging is not None:
            self._begin_staging(self._delivery.staging)
        scheduler, batch = self.scheduler, None
        while self._outcome is None:
            batch = scheduler.ready() if scheduler.arrivals.filled else None
            if batch is None and self._receive():
                continue
            batch = batch or self._await_batch()
            if batch is not None:
                if scheduler.to_draw:
                    self._draw(scheduler.to_draw)
                self._deliver(batch, slot)
        outcome, self._outcome = self._outcome, None
        if outcome is CLOSED:
            return False
        if outcome is ENDED:
            self._log.leave(records.END, time.monotonic_ns(), time.process_time_ns())
        else:
            if finish is not None and outcome.error is None:
                assert batch is not None, "it is the outcome of one"
                outcome = finished(outcome, finish, batch)
            answer, seq = (None, None) if batch is None else (batch.answer, batch.seq)
            self._log.give(time.monotonic_ns(), answer, seq, outcome.error)
            del answer
        # A single step for interrupts: only a call can be cut short, and these lines have none.
        slot.outcome = outcome
        self.fatal = self.fatal or outcome.fatal
        self.phase = IDLE
        del outcome, batch  # an error's traceback references this frame
        return True

    def _tidy(self, now: int) -> None:
        """Do the work that is not needed for every batch."""
        self._tidy_at = now + _TIDY_EVERY
        self.pool.collect()  # also blocks that waited for a forked child to end
        window, staging = self.scheduler.window.size, self._delivery.staging
        self._counters.window = window
        spare = _SPARE_BATCHES + (0 if staging is None else 2 * staging.ahead)
        if self.pool.trim(window + spare, None if staging is None else staging.forget):
            for worker in self._group.workers:
                if not worker.is_dead and (space := self.pool.space(worker.number)):
                    self._group.socket.send(worker.number, Space(space))

    def _let_catch_up(self) -> None:
        while self._group.behind and self._receive():  # a worker may be waiting for tasks that it missed
            continue

    # ---- the next batch -----------------------------------------------------------------------

    def _await_batch(self) -> Batch | None:
        """Do one step towards the next batch. Return the batch if it is there already, else None."""
        found = self.scheduler.wanted()
        if isinstance(found, Batch):
            return found
        if isinstance(found, Wait):
            self._wait(found)
        elif isinstance(found, Draw):
            self._draw(1)
        else:
            self._outcome = ENDED if isinstance(found, Finish) else self._deaths.of(found)
        return None

    def _deliver(self, batch: Batch, slot: OutcomeSlot) -> None:
        """Hand out a batch, after sending the messages that are due before it."""
        if self._unsent or self._group.behind:
            self._flush()
        if not self.plan.persistent and not self.scheduler.undelivered:  # it is the last one
            self._group.dismiss()  # ending takes them a while, which the last step of the epoch hides
        if batch.answer is not None and batch.answer.kind == PASSED:
            return  # it was handed out before the epoch was resumed
        staging = self._delivery.staging
        if staging is None:
            self._outcome = self._delivery.hand_out(batch)
        else:
            began = time.monotonic_ns()
            self._outcome = self._delivery.hand_out(batch)
            self._stage_ahead(staging)
            self._log.steps += ((records.DEVICE, began, time.monotonic_ns()),)
        if self._outcome is None:
            slot.record_skipped(self._delivery.progress)

    def _draw(self, times: int) -> None:
        """Draw indices, and send their tasks."""
        scheduler, began = self.scheduler, time.monotonic_ns()
        if self.holds:
            times = 0 if scheduler.undelivered else 1
        seqs: list[int] = []
        for _ in range(times):
            try:
                index = next(self._sampler)
            except StopIteration:
                scheduler.exhausted()
            except Exception as error:
                refuse_interrupt(error)
                scheduler.draw_failed(error)
            else:
                batch = scheduler.drawn(index)
                if batch is not None and batch.task is not None:
                    seqs += (batch.seq,)
                    self._send(batch.worker, batch.task)
        self._log.steps += ((records.DREW, began, time.monotonic_ns(), seqs),)

    def _send(self, worker: int | None, task: Task) -> None:
        try:
            frame = encode_task(task, self._group.token)
            if worker is None:
                self._unsent[task.ticket] = frame
                self._group.offer_claim(task.ticket)
            else:
                self._group.send_frame(worker, frame)
        except Exception as error:  # whatever pickling the index raises
            refuse_interrupt(error)
            self.scheduler.undeliverable(task, error)

    def _flush(self) -> None:
        """Send the pending shared tasks together."""
        if self._unsent:
            self._group.offer(self._unsent)
            self._unsent.clear()
        if self._group.behind:
            self._group.catch_up()

    # ---- copies to a device -------------------------------------------------------------------

    def poll(self) -> None:
        """Begin the copies of batches that have become ready, without waiting for anything."""
        staging = self._delivery.staging
        if staging is not None:
            self.pool.drop(staging.reap())
            self._stage_ahead(staging, wait=False)
            if self._log.steps:
                self._log.leave(records.PART, time.monotonic_ns())
        self.phase = IDLE

    def _begin_staging(self, staging: Staging) -> None:
        began = time.monotonic_ns()
        self.pool.drop(staging.reap())
        self._log.steps += ((records.DEVICE, began, time.monotonic_ns()),)

    def _stage_ahead(self, staging: Staging, wait: bool = True) -> None:
        while self._receive():
            continue
        staging.begin(self.scheduler.upcoming(staging.ahead), wait)

    # ---- waiting ------------------------------------------------------------------------------

    def _wait(self, wait: Wait) -> None:
        if self.scheduler.window.widens:
            self._draw(self.scheduler.idle())
        self._flush()
        seconds = self._timeout.seconds(wait.seq, wait.attempt, time.monotonic())
        began = time.monotonic_ns()
        self.phase = WAITING
        ended, heard = self._group.socket.wait(seconds)
        self.phase = BUSY  # a signal handler may have called meanwhile
        self._note_wait(wait, began, time.monotonic_ns())
        if self._group.socket.woken:
            self._outcome = CLOSED
            return
        if not heard and self._timeout.is_over(self._group.socket.wait_for_message(_GRACE)):
            self._give_up(wait)
        self._receive()
        for worker in self._group.ended(ended):
            if self._outcome is None:
                self._handle_death(worker)

    def _note_wait(self, wait: Wait, began: int, ended: int) -> None:
        cause = records.cause_of_wait(wait.behind, wait.blocked, self.scheduler.window.least)
        index = self.scheduler.index_of(wait.seq) if cause == "head_of_line" else None
        self._log.steps += ((records.WAITED, began, ended, cause, wait.seq, index),)

    # ---- workers that die or hang -------------------------------------------------------------

    def _give_up(self, wait: Wait) -> None:
        """The timeout is over: replace the worker that hangs, or report it."""
        self._timeout.forget()
        self.timed_out = True
        worker, late = self._deaths.who_is_late(wait)
        if late is None or not self.scheduler.can_replace:
            self._outcome = self._deaths.timed_out(worker, wait.seq)
            return
        stacks = self._group.stacks(late)
        self._group.evict(late, f"it did not answer within {self.plan.timeout:g} seconds")
        self._handle_death(late, stacks)

    def _handle_death(self, number: int, stacks: str = "") -> None:
        """Handle a worker's end. Its earlier answers count; its other batches are lost, or loaded by another
        worker."""
        while self._receive():
            continue
        seq, claimed = self._group.claimed_by(number, self.scheduler.pending_tasks, self.scheduler.epoch)
        worker = self._group.mark_dead(number)
        report = self._deaths.sentence(worker, seq)
        sends = self.scheduler.died(Died(number, seq, worker.cause, claimed))
        if sends is not None and self._replace(worker, report):
            for send in sends:
                now = time.monotonic_ns()
                self._log.steps += ((records.DREW, now, now, (send.task.seq,)),)
                self._send(*send)
            self._flush()
            self._outcome = self._deaths.warn_of_replacement(report, stacks)

    def _replace(self, worker: Worker, report: str) -> bool:
        """Start another process for a dead worker. Return False if that failed, which ends the iteration."""
        assert self._epoch is not None, "batches are loaded in epochs"
        try:
            self._group.replace(worker.number, self._epoch)
        except OSError as error:
            refuse_interrupt(error)
            report = f"{report}; no other one could be started in its place: {error}"
            self._outcome = death(report, error)
            return False
        replaced = records.REPLACED, time.monotonic_ns(), worker.number, worker.pid, report
        self._log.steps += (replaced,)
        return True

    # ---- the end ------------------------------------------------------------------------------

    def wake(self) -> None:
        """End the call that waits now, or else the next one. May be called on any thread."""
        self._group.wake()

    def kill_workers(self) -> None:
        """End the workers. May be called on any thread, while another one is in the loop."""
        self._group.kill_all()

    def shut_down(self, patience: float) -> None:
        """End the workers, and release everything that is not in use any more. May be called again after an
        interrupt."""
        failure: Exception | None = None
        if self._delivery.staging is not None:  # copies read the blocks until they have run
            try:
                self.pool.drop(self._delivery.staging.close())
            except Exception as error:  # from the device; after an interrupt the next call does the rest
                failure = error
            self._delivery.staging = None
        self.scheduler.abandon()
        self._drop()
        self._group.stop(patience)
        if failure is not None:
            raise failure

    def _drop(self) -> None:
        """Record that batches of the epoch that were not handed out are dropped."""
        if self._epoch is not None:
            self._log.leave(records.DROP, time.monotonic_ns())

    def processes(self) -> list[BaseProcess]:
        """The processes of the workers that were started."""
        return self._group.processes()
