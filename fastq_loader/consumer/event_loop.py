"""The consumer's only event loop: ask the scheduler, carry out its instructions, wait for messages.

Runs in the consumer, inside a call of `next()` or `iter()`, on one thread at a time, as `pool` ensures.
Owns everything that belongs to one pool of workers (memory, scheduler, workers), from its start to its end.

A signal handler may raise between any two steps of a call. The gate shows at every moment whether the loop
can be left there: it is INSIDE from the beginning of a call to its end, except while it is WAITING. The
outcome of a call is stored for the iterator in the same step that opens the gate, so it is never lost on its
way up.
"""

from __future__ import annotations

import pickle
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastq_loader.consumer.answers import Answers, PoolEpoch, finished
from fastq_loader.consumer.deaths import Deaths
from fastq_loader.consumer.gate import CLOSED, EXITING, FAILED, INSIDE, OPEN, WAITING, Gate
from fastq_loader.consumer.outcomes import ENDED, Ended, Outcome, OutcomeSlot
from fastq_loader.device.staging import DeviceSession, Staging
from fastq_loader.ipc.claim_table import slots
from fastq_loader.ipc.limits import expect_descriptors, require_threads
from fastq_loader.ipc.messages import PASSED, BeginEpoch, Space, Task, encode, encode_task, seal
from fastq_loader.ipc.sockets import THREADS
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.pool import BlockPool
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.scheduling.events import Died, Draw, Finish, IterationFailed, Wait
from fastq_loader.scheduling.in_flight import Batch
from fastq_loader.scheduling.progress import START
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.records import CUT, NEXT
from fastq_loader.system import calls
from fastq_loader.system.unpatched import time
from fastq_loader.workers.config import Plan
from fastq_loader.workers.group import WorkerGroup
from fastq_loader.workers.worker import Worker

#: Seconds beyond the timeout. A consumer that was stopped for longer than the timeout resumes together with
#: its workers.
_GRACE = 0.05
#: Threads of a worker that count against a process limit: its own, one that watches this process, zmq's.
_PER_WORKER = 2 + THREADS
#: Descriptors of a pool (memory, claims, stacks, zmq, and what it takes to start a process) and of a worker.
_DESCRIPTORS = 20, 5
#: Batches beyond the window for which the pool keeps blocks: the user's, and the next one.
_SPARE_BATCHES = 2
#: Nanoseconds between two checks for memory that is not needed any more.
_TIDY_EVERY = 50_000_000


class Closing(Exception):
    """The pool is closing: a call of `next()` was woken, and has no outcome."""


class EventLoop:
    """One pool of workers, from start to end.

    Args:
        plan: configuration of the workers.
        counters: counters of the loader, which outlive this pool.
        gate: shows where a call is, and ends with a worker's failure. The pool enters it before each call.

    Attributes:
        blocks: the memory that the workers write to.
        group, answers, deaths: the workers, what they send, and how they end.
    """

    def __init__(self, plan: Plan, counters: Counters, gate: Gate) -> None:
        self.plan = plan
        self._gate = gate
        self._counters = counters
        calls.occupy_standard_streams()
        expect_descriptors(_DESCRIPTORS[0] + _DESCRIPTORS[1] * plan.workers)
        arena = Arena(plan.workers)
        self.blocks = BlockPool(arena)
        self.scheduler = Scheduler(
            plan.workers,
            self.blocks,
            replace(plan.window),
            in_order=plan.in_order,
            shared_tasks=plan.shared_tasks,
            restarts=plan.restarts,
            slots=slots(arena.mapping.claims),
        )
        self.group = WorkerGroup(plan, self.blocks, counters)
        unpacker = Unpacker(arena, self.group.token, plan.for_device)
        self.answers = Answers(plan, self.group, self.scheduler, unpacker, counters)
        self.deaths = Deaths(plan, self.group, self.scheduler, self.answers)
        self._epoch: PoolEpoch | None = None
        self._message: BeginEpoch | None = None  # the start of the epoch, for workers
        self._sources: deque[Any] = deque()  # contains an iterator of indices
        self._unsent: dict[int, bytes] = {}  # ticket → encoded shared task
        self._tidy_at = 0  # when to check the memory again
        self._now = 0  # when the call under way looked at the clock last
        # Of the call under way. Not passed from frame to frame: an error's traceback references all frames.
        self._outcome: Outcome | None = None

    def start(self, base_seed: int, shared_seed: int | None, session: DeviceSession | None) -> None:
        """Start the workers. `shut_down` undoes this, also after an exception in the middle of it.

        Args:
            base_seed, shared_seed: see `Pool`.
            session: the loader's access to a device, or None.

        Raises:
            TypeError, AttributeError, PicklingError: the start method pickles, and something cannot be
                pickled.
            OSError: descriptors, processes or threads are used up.
            RuntimeError: the device cannot be initialised.
        """
        # Check for all threads before any is started: else workers and sockets take each other's. Under
        # `ulimit -d`, where this process may lack room for so many stacks, check only for zmq's: without them
        # zmq would end the process.
        threads = THREADS
        if calls.limit_of("DATA") is None:
            threads += _PER_WORKER * self.plan.workers + bool(self.plan.restarts)
        require_threads(threads)
        self.group.start(base_seed, shared_seed)
        self.scheduler.claimant = self.group.holder
        if session is not None:  # after the workers, which must not inherit anything of the device
            self.answers.start_staging(session)

    def begin_epoch(self, epoch: PoolEpoch) -> None:
        """Begin an epoch, and drop the rest of the previous one."""
        scheduler, answers, bad_samples = self.scheduler, self.answers, epoch.bad_samples
        self._drop()
        self._tidy_at = 0
        if answers.staging is not None:  # before blocks of dropped batches go to others
            self.blocks.drop(answers.staging.drain())
        taken, claimed = self.group.take_back(scheduler.pending_tasks.tickets())
        number = 0 if bad_samples is None else bad_samples.epoch
        resume = list(epoch.resume)
        sealed = seal(pickle.dumps(resume), self.group.token) if resume else b""
        start, done, log = epoch.start, epoch.progress, epoch.log
        seed = start.base_seed if self.plan.options.is_dynamic else None
        head = scheduler.epoch + 1, start.shared_seed, seed
        self._epoch, self._message = epoch, BeginEpoch(*head, sealed, number, start.base_seed, log.profiled)
        answers.begin_epoch(epoch)
        # Tasks of an iterable dataset are sent again, and workers skip batches that were delivered before.
        drawn = START if self.plan.rules.iterable else done
        count = scheduler.begin_epoch(self._message.epoch, taken, claimed, drawn)
        self._sources = deque([epoch])
        self.group.socket.send_all(self.group.lines, encode(self._message))
        self._draw(count)
        if epoch.is_plain:  # from now on
            self._sources = epoch.sources
        self._gate.phase = OPEN

    def next(self, slot: OutcomeSlot, finish: Callable[[Any], Any] | None) -> None:
        """Store the next outcome in `slot`; a batch goes through `finish` first, unless that is None.

        Raises:
            Closing: there is no outcome.
        """
        gate = self._gate
        gate.phase = INSIDE
        if slot.outcome is not None:  # another thread's, which has not taken it yet
            gate.phase = OPEN
            return
        self.deaths.timeout.was_over = False
        log, now = self.answers.log, time.monotonic_ns()
        if log.asked:  # an interrupt ended the call before
            log.record(CUT, now)
        log.asked = now
        if now >= self._tidy_at:
            self._tidy(now)
        if self.blocks.arena.released:
            self.blocks.collect()
        if self.answers.staging is not None:
            self.blocks.drop(self.answers.staging.reap())
        scheduler, batch = self.scheduler, None
        # As in torch, the next index is drawn after a batch was unpickled.
        while self._outcome is None:
            batch = scheduler.ready() if scheduler.in_flight.is_next_here else None
            if batch is None and not self.answers.receive():
                batch = self._await_batch()
            if batch is not None:
                self._deliver(batch)
                self._draw(scheduler.to_draw)
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Ended):
            log.end(time.monotonic_ns(), time.process_time_ns())
        elif batch is None:
            log.record(NEXT, time.monotonic_ns(), error=outcome.error)
        else:
            if finish is not None:
                outcome = finished(outcome, finish, batch)
                self._now = time.monotonic_ns()
            if not (self.plan.persistent or scheduler.in_flight.batches):  # it was the last one
                # Ending takes them a while, which the last step of the epoch hides. Not before the batch was
                # unpickled: its descriptors are the worker's until then.
                self.group.dismiss()
            log.record(NEXT, self._now, batch.loaded, batch.index, outcome.error)
        # A single step for interrupts: only a call can be cut short, and these lines have none.
        if outcome.fatal is None:
            slot.outcome = outcome
        else:
            self._fail(outcome, slot)
        gate.phase = OPEN
        del outcome, batch  # an error's traceback references this frame

    def _fail(self, outcome: Outcome, slot: OutcomeSlot) -> None:
        """Store the outcome that ends the iteration, and end the pool in the same step."""
        if self._gate.end == EXITING:  # the exit has ended the workers
            raise Closing
        # Without restarts later calls raise StopIteration, as in torch; with restarts, IteratorInvalid.
        slot.outcome, self._gate.reason = outcome, outcome.fatal
        self._gate.end = CLOSED if self.plan.restarts else FAILED

    def _tidy(self, now: int) -> None:
        """Do the work that is not needed for every batch."""
        self._tidy_at = now + _TIDY_EVERY
        window, staging = self.scheduler.window.size, self.answers.staging
        self._counters.window = window
        spare = _SPARE_BATCHES + (0 if staging is None else 2 * staging.ahead)
        forget = None if staging is None else staging.forget
        if self.blocks.nbytes and self.blocks.trim(window + spare, forget):
            for worker in self.group.workers:
                if worker.line is not None and (space := self.blocks.space(worker.number)):
                    self.group.socket.send(worker.line, Space(space))

    # ---- the next batch -----------------------------------------------------------------------

    def _await_batch(self) -> Batch | None:
        """Do one step towards the next batch. Return the batch if it is there already, else None."""
        match self.scheduler.wanted():
            case Batch() as batch:
                return batch
            case Wait() as wait:
                self._wait(wait)
            case Draw():
                self._draw(1)
            case IterationFailed() as failed:
                self._outcome = self.deaths.of(failed)
            case Finish():
                self._outcome = ENDED
        return None

    def _deliver(self, batch: Batch) -> None:
        """Make a batch the outcome of the call, unless it was left out."""
        answers = self.answers
        if batch.answer is not None and batch.answer.kind == PASSED:
            return  # it was delivered before the epoch was resumed
        began = 0 if answers.staging is None else time.monotonic_ns()
        self._outcome = answers.deliver(batch)
        if answers.staging is not None:
            self._stage_ahead(answers.staging)
            answers.log.device_until = now = time.monotonic_ns()
            answers.log.device += now - began
        if self._outcome is None and self._epoch is not None:
            self._epoch.leave_out(answers.progress or 1)

    def _draw(self, times: int) -> None:
        """Draw indices, and send their tasks. Set `_now`."""
        scheduler, epoch, began = self.scheduler, self._epoch, time.monotonic_ns()
        assert epoch is not None, "it has begun"
        self._now = began
        for _ in range(times):
            try:
                index = next(self._sources[0])
            except StopIteration:
                scheduler.exhausted()
                epoch.ended = True
            except Exception as error:
                scheduler.draw_failed(error)
            else:
                batch = scheduler.drawn(index)
                if batch is not None and batch.task is not None:
                    batch.sent = began
                    self._send(batch.worker, batch.task)
        if self._unsent or self.group.some_behind:
            self._flush()
        if times:
            log = epoch.log
            log.drew_until = self._now = now = time.monotonic_ns()
            log.drew += now - began
            if self._sources is epoch.sources:
                epoch.drawn = scheduler.in_flight.drawn

    def _send(self, worker: int | None, task: Task) -> None:
        try:
            if worker is None:
                self._unsent[task.ticket] = encode_task(task, self.group.token)
            else:
                line = self.group.workers[worker].line
                assert line is not None, "no task is made for a dead worker"
                self.group.send_task(line, task)
        except Exception as error:  # whatever pickling the index raises
            self.scheduler.undeliverable(task, error)

    def _flush(self) -> None:
        """Send the pending shared tasks together. A worker that was passed over, and reads again, is sent all
        that are still on offer."""
        group = self.group
        if self._unsent:
            group.offer(self._unsent)
            self._unsent.clear()
        if group.some_behind and (lines := group.reading_again()):
            tasks = [batch.task for batch in self.scheduler.pending_tasks.values() if batch.task is not None]
            on_offer = [task for task in tasks if group.claims.on_offer(task.ticket)]
            if on_offer:
                group.socket.send_all(lines, *[encode_task(task, group.token) for task in on_offer])

    # ---- copies to a device -------------------------------------------------------------------

    def poll(self) -> None:
        """Begin the copies of batches that have become ready, without waiting for anything."""
        if (staging := self.answers.staging) is not None:
            self.blocks.drop(staging.reap())
            self._stage_ahead(staging, wait=False)
        self._gate.phase = OPEN

    def _stage_ahead(self, staging: Staging, wait: bool = True) -> None:
        while self.answers.receive():
            continue
        staging.begin(self.scheduler.in_flight.upcoming(staging.ahead), wait)

    # ---- waiting ------------------------------------------------------------------------------

    def _wait(self, wait: Wait) -> None:
        if self.scheduler.window.widens:
            self._draw(self.scheduler.idle())
        self._flush()
        socket, timeout = self.group.socket, self.deaths.timeout
        seconds = timeout.seconds(wait.seq, wait.attempt, time.monotonic())
        began = time.monotonic_ns()
        self._gate.phase = WAITING
        ended, heard = socket.wait(seconds)
        self._gate.phase = INSIDE  # a signal handler may have called meanwhile
        least = self.scheduler.window.least
        self.answers.log.waited_for(began, time.monotonic_ns(), wait.behind, wait.blocked, least)
        if socket.woken:
            raise Closing
        if not heard and timeout.is_over(socket.wait_for_message(_GRACE)):
            self._give_up(wait)
        self.answers.receive()
        for worker in self.group.ended(ended):
            if self._outcome is None:
                self._handle_death(worker)

    # ---- workers that die or hang -------------------------------------------------------------

    def _give_up(self, wait: Wait) -> None:
        """The timeout is over: replace the worker that hangs, or report it."""
        self.deaths.timeout.forget()
        worker, late = self.deaths.who_is_late(wait)
        if late is None or not self.scheduler.restarts_left:
            self._outcome = self.deaths.timed_out(worker, wait.seq)
            return
        stacks = self.group.stacks(late)
        self.group.evict(late, f"it did not answer within {self.plan.timeout:g} seconds")
        self._handle_death(late, stacks)

    def _handle_death(self, number: int, stacks: str = "") -> None:
        """Handle a worker's end. Its earlier answers count; its other batches are lost, or loaded by another
        worker."""
        while self.answers.receive():
            continue
        pending, claims = self.scheduler.pending_tasks, self.group.claims
        claimed = frozenset(ticket for ticket in pending.tickets() if claims.holder(ticket) == number)
        begun = self.scheduler.epoch, claims.begun(number)
        seq = next((seq for (epoch, seq), each in pending.items() if (epoch, each.ticket) == begun), None)
        worker = self.group.mark_dead(number)
        report = self.deaths.sentence(worker, seq)
        sends = self.scheduler.died(Died(number, seq, worker.cause, claimed))
        if sends is not None and self._replace(worker, report):
            for send in sends:
                self._send(*send)
            self._flush()
            self._outcome = self.deaths.warn_of_replacement(report, stacks)

    def _replace(self, worker: Worker, report: str) -> bool:
        """Start another process for a dead worker. Return False if that failed, which ends the iteration."""
        assert self._message is not None, "batches are loaded in epochs"
        try:
            self.group.replace(worker.number, self._message)
        except OSError as error:
            report = f"{report}; no other one could be started in its place: {error}"
            self._outcome = self.deaths.end(report, error)
            return False
        if self._counters.trace is not None:
            self._counters.trace.add_replaced(worker.number, worker.pid, report)
        return True

    # ---- the end ------------------------------------------------------------------------------

    def shut_down(self, patience: float) -> None:
        """End the workers, and release everything that is not in use any more. May be called again after an
        interrupt."""
        failure: Exception | None = None
        if self.answers.staging is not None:  # copies read the blocks until they have run
            try:
                self.blocks.drop(self.answers.staging.close())
            except Exception as error:  # from the device; after an interrupt the next call does the rest
                failure = error
            self.answers.staging = None
        self.scheduler.abandon()
        self._drop()
        # They are gone when somebody asks. At the end of the interpreter nobody will, and `open` is gone.
        for worker in () if sys.is_finalizing() else self._counters.workers:
            worker.look_at_cpu()
        self.group.stop(patience)
        if failure is not None:
            raise failure

    def _drop(self) -> None:
        """Record that batches of the epoch that were not delivered are dropped."""
        if self._epoch is not None:
            self._epoch.log.drop(time.monotonic_ns())
