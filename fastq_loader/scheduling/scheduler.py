"""Decides which worker loads which task, and which batch is delivered next, as one state machine.

Pure: no socket, clock or process; the event loop carries out its decisions, on the consumer's thread. Batches
and workers, with their transition tables, are in `states`; the two orders of delivery are in `in_flight`.

The order is torch's (`_MultiProcessingDataLoaderIter`): tasks go to the active workers in turn, one index is
drawn for every batch that is delivered (shared tasks: a group at a time), arrivals are processed one at a
time and only while the wanted batch is missing, and a worker whose part of an iterable dataset has ended
loses its turn. Two things differ on purpose: an error of the sampler or of an index takes the position of its
batch instead of overtaking the batches before it, and a dead worker is reported at the position of the batch
that it lost.

A *shared* task is sent to all workers, and the first free one claims it. The claimant becomes known when its
answer arrives, or when it has died. With `restarts` a dead worker is replaced, and its unanswered tasks are
sent again, as the next attempt; an answer to an older attempt no longer counts.

`begin_epoch` requests as many indices as the window has batches. Each is passed to `drawn`, its error to
`draw_failed`, and the sampler's end to `exhausted`. Each answer is passed to `answered`. When the user calls
`next()`, `ready` returns the next batch, and `to_draw` is the number of indices to draw when it is delivered.
If it has not arrived, `wanted` returns what to do: `Draw` (and call it again), `Wait`, `IterationFailed` or
`Finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fastq_loader.errors import PoisonBatch, ProtocolError
from fastq_loader.ipc.messages import PART_ENDED, SKIPPED, Answer, BatchHandle, Task
from fastq_loader.memory.blocks import BlockOwner, Extents
from fastq_loader.memory.pool import BlockPool
from fastq_loader.scheduling.events import Died, Draw, Finish, IterationFailed, Send, Wait
from fastq_loader.scheduling.in_flight import AsTheyCome, Batch, InOrder, PendingTasks
from fastq_loader.scheduling.progress import START, Progress
from fastq_loader.scheduling.schedules import Window
from fastq_loader.scheduling.states import BATCH_TRANSITIONS, LOST, WorkerTable

#: A batch is given up after this many workers have died of it.
DEADLY = 3


class Scheduler:
    """Schedules the batches of one epoch after the other over a fixed number of workers.

    Args:
        workers: number of workers, at least 1.
        pool: the blocks of shared memory.
        window: limits the batches that are requested and not delivered.
        in_order: deliver in the order of the sampler; False delivers batches as they come.
        shared_tasks: any worker may claim a task. Not for iterable datasets: their workers cannot replace
            each other.
        restarts: number of dead workers that are replaced in an epoch.
        slots: number of slots in the claim table; more than the widest window and the workers together.

    Attributes:
        pending_tasks: the unanswered tasks.
        in_flight: the batches that were requested and not delivered, in their order of delivery.
        restarts_left: number of workers that may still be replaced in this epoch.
        to_draw: number of indices to draw for the batch that was returned last.
        claimant: returns the worker that has claimed a ticket, or None.
    """

    def __init__(
        self,
        workers: int,
        pool: BlockPool,
        window: Window,
        *,
        in_order: bool = True,
        shared_tasks: bool = False,
        restarts: int = 0,
        slots: int = 1 << 14,
    ) -> None:
        self.workers = workers
        self.pool = pool
        self.window = window
        self.shared_tasks = shared_tasks
        self.epoch = 0
        self.to_draw = 0
        self.claimant: Callable[[int], int | None] = lambda ticket: None
        self.pending_tasks = PendingTasks(slots)
        self._order: type[InOrder] | type[AsTheyCome] = InOrder if in_order else AsTheyCome
        self._holders = [BlockOwner(worker) for worker in range(workers)]
        self._restarts = restarts
        self._worker_table = WorkerTable(workers)
        self._reset(START)

    def _reset(self, done: Progress) -> None:
        self.in_flight: InOrder | AsTheyCome = self._order(done.head, done.beyond)
        self.restarts_left = self._restarts
        self._deaths: dict[int, int] = {}  # seq → workers that died of it
        self._idle_deaths: list[int] = []  # workers that died between batches and were not replaced
        self.window.size, self.window.closed = self.window.least, False

    def index_of(self, seq: int) -> Any:
        """The index of a batch that is not delivered yet, for error texts; None if it is unknown."""
        batch = self.in_flight.batches.get(seq)
        return None if batch is None else batch.index

    # ---- a new epoch --------------------------------------------------------------------------

    def begin_epoch(
        self,
        epoch: int,
        taken_back: Collection[int] = (),
        claimed: Mapping[int, int] | None = None,
        done: Progress = START,
    ) -> int:
        """Begin an epoch. Returns the number of indices to draw.

        Args:
            epoch: its number.
            taken_back: tickets of older shared tasks that no worker can claim any more.
            claimed: ticket → worker, of older shared tasks that were claimed.
            done: progress of a resumed epoch: its delivered positions are not drawn.
        """
        assert epoch > self.epoch, f"epoch {epoch} follows epoch {self.epoch}"
        owners = claimed or {}
        for (of, seq), batch in list(self.pending_tasks.items()):
            if batch.worker is None and batch.ticket in taken_back:
                self._give_back(self.pending_tasks.settle(of, seq))
            elif batch.worker is None and batch.ticket in owners:
                self._claimed(batch, owners[batch.ticket])
        self.abandon(done)
        self.epoch = epoch
        self._worker_table.begin_epoch(done.head)
        if self.shared_tasks:  # else a dead worker is reported at its first batch
            self._idle_deaths = list(filter(self._worker_table.is_dead, range(self.workers)))
        return self.window.size

    def abandon(self, done: Progress = START) -> None:
        """Drop undelivered answers; answers that arrive later will be stale. `done`: see `begin_epoch`."""
        waiting = list(self.in_flight.batches.values())
        self._reset(done)
        for batch in waiting:
            self.pool.drop(offset for offset, _ in batch.used)

    # ---- indices in ---------------------------------------------------------------------------

    def drawn(self, index: Any) -> Batch | None:
        """The sampler yielded an index. Returns the batch whose task is to be sent, or None if there is
        nothing to send."""
        worker, in_flight = None, self.in_flight
        if not self.shared_tasks:
            worker = in_flight.turn(self._worker_table, self.window.size)
            if worker is None:  # no worker has room or more to read: torch loses the index here, too
                return None
        batch = in_flight.new(worker, index)
        if self.shared_tasks and (under_way := len(in_flight.batches)) > self.window.size:
            self.window.widen_to(under_way)
        if self._worker_table.some_dead and self._worker_table.is_dead(worker):
            batch.move("send_to_dead")
            batch.worker = worker or 0
            return None
        batch.state = BATCH_TRANSITIONS[batch.state, "send"]
        self._make_task(batch)
        return batch

    def _make_task(self, batch: Batch) -> Task:
        self.pending_tasks.add(self.epoch, batch)
        worker, ticket = batch.worker, batch.ticket
        grants: Extents = ()
        if self.pool.wanted:  # else batches travel in messages
            grants = self.pool.grant(BlockOwner(None, ticket) if worker is None else self._holders[worker])
        # Same as `Task()`, but faster.
        task: Task = tuple.__new__(Task, (self.epoch, batch.seq, batch.attempt, batch.index, grants, ticket))
        batch.task = task
        return task

    def _claimed(self, batch: Batch, worker: int) -> None:
        self.pending_tasks.release_slot(batch)
        task = batch.task
        if task is not None and task.grants:
            self.pool.hand_over(BlockOwner(None, batch.ticket), worker, task.grants)
        batch.worker = worker

    def _give_back(self, batch: Batch) -> None:
        if batch.task is not None:
            self.pool.give_back(offset for offset, _ in batch.task.grants)

    def exhausted(self) -> None:
        """The sampler is exhausted, and is not called again in this epoch: with a wide window, that would be
        a call for each free slot at each batch."""
        self.window.closed = True

    def draw_failed(self, error: BaseException) -> None:
        """The sampler raised instead of yielding an index: the error takes the place of a batch."""
        self._fail(self.in_flight.new(None, None), error)
        if self.shared_tasks:
            self.window.widen_to(len(self.in_flight.batches))

    def undeliverable(self, task: Task, error: BaseException) -> None:
        """A task could not be put into a message: the error takes the place of its batch."""
        batch = self.pending_tasks.settle(task.epoch, task.seq)
        self._give_back(batch)
        self._fail(batch, error)

    def _fail(self, batch: Batch, error: BaseException) -> None:
        batch.move("fail")
        batch.error = error
        self.in_flight.add(batch)

    # ---- answers in ---------------------------------------------------------------------------

    def answered(
        self,
        worker: int,
        answer: Answer,
        handle: BatchHandle | None = None,
        used: Extents = (),
        fault: ProtocolError | None = None,
    ) -> Batch | None:
        """A worker has answered. Returns the batch of its task; None if it has no such task, or that attempt
        is over. An answer of an older epoch is dropped. An unusable one is the batch's error.

        Args:
            worker: number of the worker.
            answer: its answer.
            handle, used: see `Batch`.
            fault: error because of which the answer is unusable, or None.
        """
        key = answer.epoch, answer.seq
        batch = self.pending_tasks.get(key)
        if batch is None or batch.attempt != answer.attempt:
            return None
        owner = batch.worker
        if (self.claimant(batch.ticket) if owner is None else owner) != worker:
            return None
        if owner is None:
            self._claimed(batch, worker)
        del self.pending_tasks[key]
        try:
            if fault is not None:
                raise fault
            if used or answer.fresh or answer.returned:
                self.pool.accept(worker, used, answer.fresh, answer.returned)
        except ProtocolError as error:
            # Its blocks stay the worker's until that process has ended: it may still write to them.
            batch.error = error
            if self.in_flight.batches.get(batch.seq) is batch:
                self._fail(batch, error)
            return batch
        if answer.epoch != self.epoch:
            self.pool.drop(offset for offset, _ in used)
        elif answer.kind != SKIPPED:  # else its batch is removed when it is at the head
            batch.answer, batch.handle, batch.used = answer, handle, used
            if answer.kind != PART_ENDED:  # which is an event to process
                batch.state = BATCH_TRANSITIONS[batch.state, "answer"]
            self.in_flight.add(batch)
        return batch

    # ---- deaths -------------------------------------------------------------------------------

    def died(self, event: Died) -> list[Send] | None:
        """A worker is dead. Returns the tasks to send once another process has its number; None if it is not
        replaced: then `wanted` returns `IterationFailed` where it was needed."""
        worker = event.worker
        self._worker_table.move(worker, "die")
        lost = self._lose(event)
        self.pool.mark_dead(worker)
        if self.restarts_left:
            return self._replace(event, lost)
        self.in_flight.add_death(event)
        if self.shared_tasks and not lost:
            self._idle_deaths.append(worker)
        return None

    def _lose(self, event: Died) -> list[Batch]:
        """Settle the tasks lost with a worker. Returns this epoch's batches among them, ascending."""
        last = self._worker_table.is_dead(None) and not self.restarts_left
        lost = []
        for epoch, at in self.pending_tasks.lost_with(event, self.epoch, last):
            batch = self.pending_tasks.settle(epoch, at)
            if batch.worker is None:
                self._give_back(batch)
                batch.worker = event.worker
            if self.in_flight.batches.get(at) is batch:  # else of an older epoch, or after its worker's end
                batch.move("die")
                lost.append(batch)
        return sorted(lost, key=lambda batch: batch.seq)

    def _replace(self, event: Died, lost: list[Batch]) -> list[Send]:
        worker = event.worker
        self.restarts_left -= 1
        self._worker_table.move(worker, "replace")
        if event.seq is not None:
            self._deaths[event.seq] = self._deaths.get(event.seq, 0) + 1
        sends: list[Send] = []
        if self.shared_tasks:  # the tasks that the others were sent already
            tasks = [batch.task for (of, _), batch in sorted(self.pending_tasks.items()) if of == self.epoch]
            sends += [Send(worker, task) for task in tasks if task is not None]
        for batch in lost:
            if self._deaths.get(batch.seq, 0) >= DEADLY:
                deaths = f"{self._deaths[batch.seq]} workers died of it, and the last {event.cause}"
                self._fail(batch, PoisonBatch(f"{batch} was given up: {deaths}"))
                continue
            batch.move("replay")
            batch.attempt += 1
            if self.shared_tasks:
                batch.worker = None
            sends.append(Send(batch.worker, self._make_task(batch)))
        return sends

    # ---- batches out --------------------------------------------------------------------------

    def ready(self) -> Batch | None:
        """Deliver the next batch, with its answer or its error, if it has arrived. None: see `wanted`."""
        batch = self.in_flight.take()
        if batch is None:
            return None
        batch.state = BATCH_TRANSITIONS[batch.state, "deliver"]
        del self.in_flight.batches[batch.seq]
        self.to_draw = 1  # torch calls an exhausted sampler again
        if self.shared_tasks:  # until there is room for a group, none
            room = self.window.size - len(self.in_flight.batches)
            self.to_draw = room if room >= self.window.group and not self.window.closed else 0
        return batch

    def wanted(self) -> Batch | Draw | Wait | IterationFailed | Finish:
        """Deliver the next batch, or return what to do first: draw, wait, or end (epoch over, or a death)."""
        exhausted = self._worker_table.exhausted
        while (head := self.in_flight.head_batch(exhausted)) is not None:
            if (batch := self.ready()) is not None:
                return batch
            event = self.in_flight.next_event(head)
            if event is None:
                return self._wait(head)
            if (found := self._process(event)) is not None:
                return found
        return Finish()

    def _wait(self, head: Batch) -> Wait | IterationFailed:
        if self._idle_deaths:
            return IterationFailed(self._idle_deaths.pop(), None, None)
        active = len(self._worker_table.turns)
        blocked = not self.window.closed and self.pending_tasks.has_idle_worker(active)
        return Wait(head.worker, head.seq, self.in_flight.filled, head.attempt, blocked)

    def idle(self) -> int:
        """The next batch is late and nothing else has arrived. Returns how many more indices to draw."""
        unanswered = [epoch for epoch, _ in self.pending_tasks].count(self.epoch)
        return self.window.room(len(self.in_flight.batches), unanswered, self.pool.batch_bytes)

    def _process(self, event: Batch | Died) -> Draw | IterationFailed | None:
        """Process an event, as torch takes one item off its result queue. None: take the next."""
        if isinstance(event, Died):
            if self._worker_table.exhausted(event.worker):
                return None
            for batch in self.in_flight.batches.values():
                if batch.worker == event.worker and batch.state == LOST:
                    return self._break(batch)
            return IterationFailed(event.worker, None, None)
        if event.state == LOST:
            return self._break(event)
        assert event.worker is not None, "a part of an iterable dataset belongs to a worker"
        self.in_flight.leave(event, "end")
        self._worker_table.move(event.worker, "end")
        return Draw()

    def _break(self, batch: Batch) -> IterationFailed:
        assert batch.worker is not None, "a lost batch belongs to a worker"
        self.in_flight.leave(batch, "break")
        return IterationFailed(batch.worker, batch.seq, batch.index)
