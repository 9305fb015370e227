"""Who loads what next, and what is handed out next, as one state machine.

Pure: no socket, clock or process; the event loop does what it says, on the consumer's thread. The records and
the tables that they move by are in `states`. What happens for every batch has a method: `drawn`, `arrived`
and `ready`. What happens seldom is an event for `handle`, which answers with instructions.

The order is torch's (`_MultiProcessingDataLoaderIter`): tasks go to the active workers in turn, one index is
drawn for every batch delivered and before it is handed out, arrivals are processed one at a time and only
while the wanted batch is not here, and a worker whose part of an iterable dataset ended gives its turn away.
What differs on purpose: an error of the sampler or of an index takes the position of its batch instead of
overtaking the batches before it, and a dead worker is reported at the position of the batch that it lost.

A *shared* task is sent to all workers, and the first that is free claims it. Who that was is known when the
answer comes, or when the worker has died. With `restarts` a dead worker is replaced, and what it had not
answered is sent again, as the next attempt; an answer to an older attempt does not count any more.

`EpochStarted` answers with a `Draw` of as many indices as the window is wide. Each comes back to `drawn`, as
`DrawFailed`, or as `Exhausted` if there is none. When the user calls `next()`, `ready` gives the batch that
is next, with the number of indices that are to be drawn before it is handed out. If it is not here, `wanted`
says why: `Draw` (and ask again), `Wait`, `Break` or `Finish`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from fastq_loader.errors import InvalidTransition, PoisonousBatch, ProtocolError
from fastq_loader.ipc.messages import ENDED, SKIPPED, Answer, Task
from fastq_loader.memory.blocks import Holder
from fastq_loader.memory.pool import BlockPool
from fastq_loader.scheduling.events import (
    Break,
    Died,
    Draw,
    DrawFailed,
    EpochStarted,
    Event,
    Exhausted,
    Finish,
    Idle,
    Instruction,
    Replace,
    Send,
    Undeliverable,
    Wait,
)
from fastq_loader.scheduling.in_flight import InFlight, PendingTasks
from fastq_loader.scheduling.progress import START, Progress
from fastq_loader.scheduling.schedules import Window
from fastq_loader.scheduling.states import LOST, NEXT, Batch, WorkerTable

#: A batch that has cost so many workers their lives is given up.
DEADLY = 3


class Scheduler:
    """Schedules the batches of one epoch after the other over a fixed number of workers.

    Args:
        workers: number of workers, at least 1.
        pool: the blocks of shared memory.
        window: how many batches may be asked for and not delivered.
        in_order: deliver in the order of the sampler; False delivers in the order of arrival.
        shared_tasks: any worker may claim a task. Not for iterable datasets: their workers cannot stand in
            for each other.
        restarts: how many dead workers are replaced in an epoch.
        slots: of the table of claims; more than the widest window and the workers together.

    Attributes:
        pending_tasks: those that are to be answered.
        ring: batches that have come, in their order.
        to_draw: indices that are to be drawn before the batch is handed out that came out last.
        stale: answers that were dropped because their epoch was over.
        refused: answers that could not be used.
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
        self.in_order = in_order
        self.shared_tasks = shared_tasks
        self.epoch = 0
        self.stale = self.refused = self.to_draw = 0
        self.pending_tasks = PendingTasks(slots)
        self._holders = [Holder(worker) for worker in range(workers)]
        self._restarts = restarts
        self._worker_table = WorkerTable(workers)
        self._reset(START)

    def _reset(self, done: Progress) -> None:
        # A worker whose part of the dataset ends makes room for one more draw: up to `workers` batches beyond
        # the window may be waiting at once.
        self._in_flight = InFlight(
            self.window.widest + self.workers + len(done.beyond), done.head, done.beyond
        )
        self.ring = self._in_flight.ring
        self._arrivals: deque[Batch | Died] = deque()
        self._restarts_left = self._restarts
        self._deaths: dict[int, int] = {}  # seq → workers that died of it
        self._idle_deaths: list[int] = []  # workers that died between batches, and were not replaced
        self.window.begin_epoch()

    @property
    def undelivered(self) -> int:
        """Batches of this epoch that were asked for and not handed out."""
        return len(self._in_flight)

    @property
    def can_replace(self) -> bool:
        """Whether a worker that dies now is replaced."""
        return self._restarts_left > 0

    def index_of(self, seq: int) -> Any:
        """The index of a batch that is not delivered yet, for error texts; None if it is unknown."""
        batch = self._in_flight.get(seq)
        return None if batch is None else batch.index

    def upcoming(self, count: int) -> list[Answer]:
        """The answers with a batch among the next `count` to be handed out, up to the first that has not
        come."""
        return self._in_flight.upcoming(self._arrivals, count, self.in_order)

    def handle(self, event: Event) -> list[Instruction]:
        """Something has happened that does not happen for every batch."""
        return _HANDLERS[type(event)](self, event)

    # ---- a new epoch --------------------------------------------------------------------------

    def _epoch_started(self, event: EpochStarted) -> list[Instruction]:
        if event.epoch <= self.epoch:
            raise InvalidTransition(f"epoch {event.epoch} follows epoch {self.epoch}")
        for (epoch, seq), batch in list(self.pending_tasks.items()):
            if batch.worker is None and batch.ticket in event.taken_back:
                self._give_back(self.pending_tasks.settle(epoch, seq))
            elif batch.worker is None and batch.ticket in event.claimed:
                self._claimed(batch, event.claimed[batch.ticket])
        self.abandon()
        self.epoch = event.epoch
        self._worker_table.begin_epoch(event.done.head)
        self._reset(event.done)
        if self.shared_tasks:  # else a dead worker is reported at the first batch that is its own
            self._idle_deaths = list(filter(self._worker_table.is_dead, range(self.workers)))
        return [Draw(self.window.size)]

    def abandon(self) -> None:
        """Drop what arrived and was not delivered; answers that are still to come will be stale."""
        waiting = self._answers()
        self._arrivals.clear()
        self._in_flight.clear()
        for answer in waiting:
            self._drop(answer)

    def _answers(self) -> list[Answer]:
        """Those that wait to be handed out, in no particular order."""
        arrived = [each.answer for each in self._arrivals if type(each) is Batch and each.answer is not None]
        return arrived + self._in_flight.answers()

    def _drop(self, answer: Answer) -> None:
        self.pool.drop(offset for offset, _ in answer.used)

    # ---- indices in ---------------------------------------------------------------------------

    def drawn(self, index: Any) -> Batch | None:
        """The sampler yielded an index. Returns its batch, whose task is to be sent; None: there is nothing
        to be sent."""
        worker = None
        if not self.shared_tasks:
            worker = self._worker_table.take_turn(None if self.in_order else self.window.size)
            if worker is None:  # no worker has room, or more to read: torch loses the index here too
                return None
        batch = self._in_flight.new(worker, index)
        if self.shared_tasks and (under_way := len(self._in_flight.batches)) > self.window.size:
            self.window.widen_to(under_way)
        if self._worker_table.some_dead and self._worker_table.is_dead(worker):
            batch.move("send_to_dead")
            batch.worker = worker or 0
            return None
        batch.state = NEXT[batch.state, "send"]
        self._make_task(batch)
        return batch

    def _make_task(self, batch: Batch) -> Task:
        self.pending_tasks.add(self.epoch, batch)
        worker, ticket = batch.worker, batch.ticket
        # As `batch.holder` and `Task()`, and quicker.
        holder = tuple.__new__(Holder, (None, ticket)) if worker is None else self._holders[worker]
        grants, promises = self.pool.grant(holder)
        head = self.epoch, batch.seq, batch.attempt, batch.index
        task = batch.task = tuple.__new__(Task, (*head, grants, promises, ticket))
        return task

    def _claimed(self, batch: Batch, worker: int) -> None:
        self.pending_tasks.free_slot(batch)
        task = batch.task
        if task is not None and (task.grants or task.promises):
            self.pool.hand_over(batch.holder, worker, batch.blocks)
        batch.worker = worker

    def _give_back(self, batch: Batch) -> None:
        self.pool.give_back(offset for offset, _ in batch.blocks)

    def _exhausted(self, event: Exhausted) -> list[Instruction]:
        self.window.close()
        return []

    def _draw_failed(self, event: DrawFailed) -> list[Instruction]:
        self._fail(self._in_flight.new(None, None), event.error)
        if self.shared_tasks:
            self.window.widen_to(len(self._in_flight.batches))
        return []

    def _undeliverable(self, event: Undeliverable) -> list[Instruction]:
        batch = self.pending_tasks.settle(event.send.task.epoch, event.send.task.seq)
        self._give_back(batch)
        self._fail(batch, event.error)
        return []

    def _fail(self, batch: Batch, error: BaseException) -> None:
        batch.move("fail")
        batch.error = error
        if self._arrivals or not self.in_order:
            self._arrivals.append(batch)
        else:
            self.ring.push(batch.seq, batch)

    # ---- answers in ---------------------------------------------------------------------------

    def arrived(self, batch: Batch, worker: int, answer: Answer, fault: ProtocolError | None = None) -> None:
        """A worker has answered.

        Args:
            batch: whose task, as `pending_tasks.due` has found it.
            worker: who.
            answer: what.
            fault: why the answer cannot be used.
        """
        del self.pending_tasks[answer.epoch, answer.seq]
        if batch.worker is None:
            self._claimed(batch, worker)
        task = batch.task
        assert task is not None, "it was sent"
        try:
            if fault is not None:
                raise fault
            if answer.used or answer.fresh or answer.returned or task.grants or task.promises:
                given = task.grants + task.promises
                self.pool.accept(worker, answer.used, answer.fresh, answer.returned, given)
        except ProtocolError as error:
            self._refuse(batch, error)
            return
        if answer.epoch != self.epoch:
            self.stale += 1
            self._drop(answer)
        elif answer.kind != SKIPPED:  # else its batch leaves when it is at the head
            batch.answer = answer
            if self._arrivals or not self.in_order or answer.kind == ENDED:
                self._arrivals.append(batch)
            else:  # torch would take it off its queue later, and nothing would come of that
                batch.state = NEXT[batch.state, "answer"]
                self.ring.push(batch.seq, batch)

    def _refuse(self, batch: Batch, fault: ProtocolError) -> None:
        """Its blocks stay the worker's until that has ended: it may still write to them."""
        self.refused += 1
        if self._in_flight.get(batch.seq) is batch:
            self._fail(batch, fault)

    # ---- deaths -------------------------------------------------------------------------------

    def _died(self, event: Died) -> list[Instruction]:
        worker = event.worker
        self._worker_table.move(worker, "die")
        lost = self._lose(event)
        self.pool.mark_dead(worker)
        if self._restarts_left:
            return self._replace(event, lost)
        self._arrivals.append(event)
        if self.shared_tasks and not lost:
            self._idle_deaths.append(worker)
        return []

    def _lose(self, event: Died) -> list[Batch]:
        """The batches of this epoch that were lost with a worker, ascending."""
        last = self._worker_table.is_dead(None) and not self._restarts_left
        lost = []
        for epoch, at in self.pending_tasks.lost_with(event, self.epoch, last):
            batch = self.pending_tasks.settle(epoch, at)
            if batch.worker is None:
                self._give_back(batch)
                batch.worker = event.worker
            if self._in_flight.get(at) is batch:  # else of an older epoch, or past its worker's end
                batch.move("die")
                lost.append(batch)
        return sorted(lost, key=lambda batch: batch.seq)

    def _replace(self, event: Died, lost: list[Batch]) -> list[Instruction]:
        worker = event.worker
        self._restarts_left -= 1
        self._worker_table.move(worker, "replace")
        if event.seq is not None:
            self._deaths[event.seq] = self._deaths.get(event.seq, 0) + 1
        instructions: list[Instruction] = [Replace(worker, event.seq, event.cause)]
        if self.shared_tasks:  # what the others have been sent already
            tasks = [batch.task for (of, _), batch in sorted(self.pending_tasks.items()) if of == self.epoch]
            instructions += [Send(worker, task) for task in tasks if task is not None]
        for batch in lost:
            if self._deaths.get(batch.seq, 0) >= DEADLY:
                deaths = f"{self._deaths[batch.seq]} workers died of it, and the last {event.cause}"
                self._fail(batch, PoisonousBatch(f"{batch} was given up: {deaths}"))
                continue
            batch.move("replay")
            batch.attempt += 1
            if self.shared_tasks:
                batch.worker = None
            instructions.append(Send(batch.worker, self._make_task(batch)))
        return instructions

    # ---- batches out --------------------------------------------------------------------------

    def ready(self) -> Batch | None:
        """The batch that is next, with its answer or its error, if it has come: it is handed out. None: see
        `wanted`."""
        batch = self.ring.pop()
        return None if batch is None else self._hand_out(batch)

    def wanted(self) -> Batch | Instruction:
        """As `ready`, and else what has to be done: draw, wait, or end with the epoch or for a death."""
        while True:
            head = self._in_flight.head_batch(self._worker_table.exhausted)
            if head is None:
                return Finish()
            batch = self.ready()
            if batch is not None:
                return batch
            if head.state == LOST and (self.in_order or not self._arrivals):
                return self._break(head)
            if not self._arrivals:
                if self._idle_deaths:
                    return Break(self._idle_deaths.pop(), None, None)
                active = self._worker_table.active()
                blocked = not self.window.closed and self.pending_tasks.leave_idle(active)
                return Wait(head.worker, head.seq, self._in_flight.waiting, head.attempt, blocked)
            found = self._process(self._arrivals.popleft())
            if found is not None:
                return found

    def _idle(self, event: Idle) -> list[Instruction]:
        unanswered = [epoch for epoch, _ in self.pending_tasks].count(self.epoch)
        room = self.window.room(len(self._in_flight), unanswered, self.pool.batch_bytes)
        return [Draw(room)] if room else []

    def _process(self, arrival: Batch | Died) -> Batch | Instruction | None:
        """One arrival, as torch takes one item off its result queue. None: take the next."""
        if type(arrival) is Died:
            if self.in_order or self._worker_table.exhausted(arrival.worker):
                return None
            lost = self._in_flight.lost_by(arrival.worker)
            return Break(arrival.worker, None, None) if lost is None else self._break(lost)
        assert type(arrival) is Batch
        if arrival.answer is not None and arrival.answer.kind == ENDED:
            assert arrival.worker is not None, "a part of an iterable dataset is a worker's"
            self._in_flight.leave(arrival, "end")
            self._worker_table.move(arrival.worker, "end")
            return Draw(1)
        if arrival.error is None:
            arrival.move("answer")
        if self.in_order:
            self.ring.push(arrival.seq, arrival)
            return None
        return self._hand_out(arrival)

    def _hand_out(self, batch: Batch) -> Batch:
        batch.state = NEXT[batch.state, "deliver"]
        del self._in_flight.batches[batch.seq]
        if self.shared_tasks:
            self.to_draw = self.window.delivered(len(self._in_flight.batches))
        else:
            self.to_draw = 1  # torch asks a sampler again that has nothing more
            if batch.worker is not None:
                self._worker_table.gave(batch.worker)
        return batch

    def _break(self, batch: Batch) -> Break:
        assert batch.worker is not None, "a lost batch is a worker's"
        self._in_flight.leave(batch, "break")
        if not self.shared_tasks:
            self._worker_table.gave(batch.worker)
        return Break(batch.worker, batch.seq, batch.index)


_HANDLERS: dict[type, Callable[[Scheduler, Any], list[Instruction]]] = {
    DrawFailed: Scheduler._draw_failed,
    Exhausted: Scheduler._exhausted,
    Undeliverable: Scheduler._undeliverable,
    Died: Scheduler._died,
    Idle: Scheduler._idle,
    EpochStarted: Scheduler._epoch_started,
}
