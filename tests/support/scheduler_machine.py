"""The scheduler among simulated workers, a sampler, and a user who keeps some batches: any order of events.

Workers answer late, hang, die with or without a restart, and are replaced; epochs are abandoned; the window
is torch's, another fixed one, or one that grows. After every step: exactly once, in order, bounded, alive,
errors at their position, and no block written that the user references or that is another task's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastq_loader.errors import InvalidTransition, PoisonousBatch, ProtocolError
from fastq_loader.ipc.messages import BATCH, BROKEN, ENDED, ERROR, SKIPPED, Answer, Epoch, Ping, Space, Task
from fastq_loader.memory.blocks import GRANTED, HELD, PROMISED, Extents
from fastq_loader.memory.pool import BlockPool
from fastq_loader.scheduling.backlog import Backlog
from fastq_loader.scheduling.events import (
    Arrived,
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
from fastq_loader.scheduling.scheduler import DEADLY, Scheduler
from fastq_loader.scheduling.window import Window
from tests.support.simulation import REGION, SimulatedArena, SimulatedWorker, Table

ASSIGNED, SHARED, ITERABLE = "assigned", "shared", "iterable"
SIZES = st.lists(st.sampled_from([1000, 70_000, 90_000, 5_000_000]), max_size=3)
WINDOWS = st.one_of(  # (least, widest, budget, group)
    st.none(),
    st.integers(1, 8).flatmap(lambda size: st.tuples(*map(st.just, (size, size, 0)), st.integers(1, size))),
    st.tuples(st.integers(1, 6), st.integers(1, 16), st.sampled_from([1 << 20, 40 << 20])),
)

Key = tuple[int, int]  # (epoch, seq)


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler with its surroundings. The model knows who was given what, and not why."""

    @initialize(
        workers=st.integers(1, 4),
        prefetch=st.integers(1, 3),
        in_order=st.booleans(),
        kind=st.sampled_from([ASSIGNED, SHARED, SHARED, ITERABLE]),
        window=WINDOWS,
        restarts=st.integers(0, 5),
        spare=st.integers(0, 3),
        limit=st.integers(1, 12),
    )
    def start(
        self,
        workers: int,
        prefetch: int,
        in_order: bool,
        kind: str,
        window: tuple[int, ...] | None,
        restarts: int,
        spare: int,
        limit: int,
    ) -> None:
        if kind != SHARED:  # no other window widens, and no batches are asked for together
            window = window and window[:1]
        if kind == ITERABLE:  # the loader refuses them
            restarts = 0
        self.in_order, self.kind, self.restarts = in_order, kind, restarts
        self.shape, self.spare, self.limit = (workers, prefetch, window), spare, limit
        self.new_pool()

    def new_pool(self) -> None:
        workers, prefetch, window = self.shape
        least = workers * prefetch if window is None else window[0]
        self.widest = max(least, window[1]) if window and len(window) > 1 else least
        self.least = least
        slots = self.widest + workers + self.spare  # so few that numbers come round soon
        self.arena: Any = SimulatedArena()
        self.pool = BlockPool(self.arena, workers)
        self.scheduler = Scheduler(
            workers,
            self.pool,
            Window(least) if window is None else Window(*window),
            in_order=self.in_order,
            shared_tasks=self.kind == SHARED,
            restarts=self.restarts,
            slots=slots,
        )
        self.table = Table(slots)
        self.backlog: Backlog[Epoch | Task] = Backlog(self.limit)
        for number in range(workers):
            self.backlog.begin(number)
        self.workers = [self.new_worker(number, ((number * REGION, REGION),)) for number in range(workers)]
        self.epoch = self.seqs = 0
        self.tickets: set[int] = set()  # that there were
        self.held: set[int] = set()  # blocks that the user references
        self.granted: dict[int, Key] = {}  # block → the task that it was granted to
        self.promised: dict[int, Key] = {}
        self.pending_tasks: dict[Key, Send] = {}  # tasks without an answer, and how they were sent last
        self.refused: dict[Key, int] = {}  # answers that were refused, and whose they were
        self.unresolved: set[Key] = set()  # of abandoned epochs; it is not known which worker has them
        self.ghosts: list[tuple[int, Answer]] = []  # what dead workers would have answered
        self.broken = False
        self.begin_epoch(10, set(), set())

    def new_worker(self, number: int, space: Extents) -> SimulatedWorker:
        return SimulatedWorker(number, self.table, self.kind == SHARED, space)

    # ---- the sampler --------------------------------------------------------------------------

    def states(self) -> dict[int, str]:
        return self.pool._ledger.states()

    def draw_all(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            assert isinstance(instruction, Draw)
            for _ in range(instruction.times):
                self.draw()

    def draw(self) -> None:
        """The sampler is asked for one index."""
        if self.next_index >= self.length:
            self.exhausted = True
            assert self.scheduler.handle(Exhausted()) == []
            return
        index, seq = self.next_index, self.seqs
        self.next_index += 1
        if index in self.failing:
            self.scheduler.handle(DrawFailed(LookupError(index)))
            self.number(index)
            self.ready.add(seq)
            return
        sends = self.scheduler.handle(Drawn(index))
        if self.scheduler.index_of(seq) is None:
            assert self.kind == ITERABLE, "an index was lost"
            return
        self.number(index)
        if not sends:
            assert not all(worker.alive for worker in self.workers), "no worker was sent a batch"
            self.lost.add(seq)
        for send in sends:
            assert isinstance(send, Send)
            assert (send.task.seq, send.task.attempt) == (seq, 0)
            if index % 17 == 13:
                self.take_over_blocks(send)
                self.offer(send)
                self.scheduler.handle(Undeliverable(send, TypeError(index)))
                self.forget((send.task.epoch, seq))
                self.ready.add(seq)
            else:
                self.carry_out(send)

    def number(self, index: int) -> None:
        self.drawn[self.seqs] = index
        self.seqs += 1

    # ---- what the event loop does -------------------------------------------------------------

    def carry_out(self, send: Send) -> None:
        self.take_over_blocks(send)
        self.offer(send)
        if send.worker is None:
            due = self.backlog.offer({send.task.ticket: send.task}, self.table.on_offer)
            self.to_all(send.task, due)
        else:
            assert self.workers[send.worker].alive, "a task for a dead worker"
            self.workers[send.worker].inbox.append(send.task)

    def to_all(self, message: Task | Epoch, due: list[int]) -> None:
        for worker in self.workers:
            if worker.alive and worker.number not in self.backlog.behind:
                worker.inbox.append(message)
        for number in due:
            self.workers[number].inbox.append(Ping())

    def receive_pings(self) -> None:
        """The consumer reads its socket, and sends workers that were passed over what they have missed."""
        for worker in self.workers:
            for _ in range(worker.pings):
                self.backlog.read(worker.number)
            worker.pings = 0
        sends, due = self.backlog.catch_up(self.table.on_offer)
        for number, messages in sends.items():
            self.workers[number].inbox.extend(messages)
        for number in due:
            self.workers[number].inbox.append(Ping())

    def offer(self, send: Send) -> None:
        assert (send.worker is None) == (self.kind == SHARED)
        if self.kind == SHARED:
            ticket = send.task.ticket
            assert ticket not in self.tickets, "a ticket for two attempts"
            self.tickets.add(ticket)
            slot = self.table.slot(ticket)
            for key, other in self.pending_tasks.items():
                known = other is send or (key[0] != self.epoch and key not in self.unresolved)
                assert known or self.table.slot(other.task.ticket) != slot, "a claim was overwritten"
            self.table.offer(ticket)

    def take_over_blocks(self, send: Send) -> None:
        task = send.task
        key = task.epoch, task.seq
        assert task.epoch == self.epoch
        assert task.index == self.drawn[task.seq]
        assert key not in self.pending_tasks, "sent again, and still under way"
        self.pending_tasks[key] = send
        for offset, _ in task.grants:
            assert offset not in self.held, "granted while it is referenced"
            assert offset not in self.granted, "granted twice"
            self.granted[offset] = key
        for offset, _ in task.promises:
            assert offset in self.held, "promised though it is free: it could have been granted"
            assert offset not in self.promised, "promised twice"
            self.promised[offset] = key

    def forget(self, key: Key) -> None:
        """A task will not be answered, or its answer was refused: its blocks are free."""
        self.pending_tasks.pop(key, None)
        for blocks in (self.granted, self.promised):
            for offset in [offset for offset, mine in blocks.items() if mine == key]:
                del blocks[offset]

    def owner(self, key: Key) -> int | None:
        """The worker that has a task of this epoch; None: it is unclaimed."""
        if self.kind == SHARED:
            return self.table.holder(self.pending_tasks[key].task.ticket)
        return self.pending_tasks[key].worker

    def unanswered(self) -> list[Key]:
        """This epoch's tasks without an answer."""
        return sorted(key for key in self.pending_tasks if key[0] == self.epoch)

    # ---- epochs -------------------------------------------------------------------------------

    @rule(
        length=st.integers(0, 40),
        failing=st.sets(st.integers(0, 40), max_size=2),
        stopped=st.sets(st.integers(0, 3), max_size=1),
    )
    def new_epoch(self, length: int, failing: set[int], stopped: set[int]) -> None:
        """iter(): the epoch before may be finished, or abandoned with any number of tasks out. Who is
        `stopped` in the middle of a claim cannot be asked what it has."""
        if self.broken:
            self.new_pool()
        else:
            self.begin_epoch(length, failing, stopped)

    def begin_epoch(self, length: int, failing: set[int], stopped: set[int]) -> None:
        taken, claimed = {}, {}
        shared = [*self.unresolved, *self.unanswered()] if self.kind == SHARED else []
        tickets = [self.pending_tasks[key].task.ticket for key in shared]
        assert sorted(self.scheduler.pending_tasks.tickets()) == sorted(tickets)
        for key, ticket in zip(shared, tickets, strict=True):
            owner = self.owner(key)
            if any(self.is_claiming(number, key, owner) for number in stopped):
                self.unresolved.add(key)
                stopped = set()  # it claims one at a time
                continue
            self.unresolved.discard(key)
            if self.table.take_back(ticket):
                taken[ticket] = key
            else:
                assert owner is not None, "an unclaimed task cannot be taken back"
                claimed[ticket] = owner
        instructions = self.scheduler.handle(EpochStarted(self.epoch + 1, frozenset(taken), claimed))
        assert instructions == [Draw(self.scheduler.window.size)]
        for key in taken.values():
            self.forget(key)
        self.epoch += 1
        self.length, self.failing, self.next_index, self.seqs = length, failing, 0, 0
        self.drawn: dict[int, int] = {}  # seq → index
        self.ready: set[int] = set()  # arrived, or failed
        self.refused_seqs: set[int] = set()
        self.delivered: list[int] = []
        self.lost: set[int] = set()  # with a worker that was not replaced
        self.deaths: dict[int, int] = {}
        self.restarts_left = self.restarts
        self.finished = self.exhausted = False
        if self.kind == SHARED:
            self.to_all(self.epoch_message(), self.backlog.announce(self.epoch_message()))
        else:
            self.to_all(self.epoch_message(), [])
        self.draw_all(instructions)

    def is_claiming(self, number: int, key: Key, owner: int | None) -> bool:
        """Whether a worker that was stopped may be about to claim a task, or has just done so."""
        if number >= len(self.workers) or not self.workers[number].alive:
            return False
        task = self.workers[number].task
        return owner is None if task is None else key == (task.epoch, task.seq)

    def epoch_message(self) -> Epoch:
        return Epoch(self.epoch, None, 0)

    # ---- workers ------------------------------------------------------------------------------

    def pick(self, data: st.DataObject, workers: Iterable[SimulatedWorker]) -> SimulatedWorker | None:
        candidates = list(workers)
        return data.draw(st.sampled_from(candidates)) if candidates else None

    @precondition(lambda self: not self.broken)
    @rule(data=st.data(), look=st.booleans())
    def begin(self, data: st.DataObject, look: bool) -> None:
        """Some worker takes a task, and works on it for a while."""
        idle = (worker for worker in self.workers if worker.can_move and worker.task is None)
        worker = self.pick(data, idle)
        if worker is not None:
            worker.begin(look)

    @precondition(lambda self: not self.broken)
    @rule(data=st.data(), look=st.booleans(), sizes=SIZES)
    def work(self, data: st.DataObject, look: bool, sizes: list[int]) -> None:
        """Some worker finishes the task that it works on, or its next one."""
        worker = self.pick(data, (worker for worker in self.workers if worker.can_move))
        if worker is not None and worker.begin(look):
            self.finish(worker, data.draw(st.sampled_from(self.outcomes())), tuple(sizes))

    def outcomes(self) -> list[int]:
        return [BATCH, BATCH, BATCH, ERROR, ENDED if self.kind == ITERABLE else BROKEN]

    def finish(self, worker: SimulatedWorker, outcome: int, sizes: tuple[int, ...]) -> None:
        assert worker.task is not None
        key = worker.task.epoch, worker.task.seq
        answer = worker.finish(outcome, sizes, self.held)
        assert key in self.pending_tasks, "worked on what is not asked for"
        assert self.pending_tasks[key].task.attempt == answer.attempt
        fresh = {offset for offset, _ in answer.fresh}
        assert not fresh & set(self.states()), "made a block where one lies"
        for offset, _ in answer.used:
            assert offset in fresh or self.granted[offset] == key, "wrote to another task's block"

    @precondition(lambda self: not self.broken)
    @rule(data=st.data(), accepted=st.sampled_from([True, True, True, False]))
    def receive(self, data: st.DataObject, accepted: bool) -> None:
        """One answer arrives; different workers' answers in any order."""
        worker = self.pick(data, (worker for worker in self.workers if worker.answers))
        if worker is not None:
            if accepted or self.kind == ITERABLE:
                self.take_in(worker)
            else:
                self.refuse(worker)

    def refuse(self, worker: SimulatedWorker) -> None:
        """An answer does not fit: its blocks may be written to, until the worker is dead."""
        answer = worker.answers.popleft()
        key = answer.epoch, answer.seq
        del self.pending_tasks[key]
        self.unresolved.discard(key)
        self.refused[key] = worker.number
        refused = self.scheduler.refused
        assert self.scheduler.handle(Arrived(worker.number, answer, ProtocolError(answer.seq))) == []
        assert self.scheduler.refused == refused + 1
        if answer.epoch == self.epoch:
            self.ready.add(answer.seq)
            self.refused_seqs.add(answer.seq)

    def take_in(self, worker: SimulatedWorker) -> None:
        answer = worker.answers.popleft()
        key = answer.epoch, answer.seq
        for offset in [offset for offset, _ in answer.used] + list(answer.returned):
            if self.promised.pop(offset, None) is not None:
                continue  # declined: the user still references it
            assert self.granted.pop(offset, key) == key
        del self.pending_tasks[key]
        self.unresolved.discard(key)
        assert self.scheduler.pending_tasks.due(worker.number, answer)
        refused, stale = self.scheduler.refused, self.scheduler.stale
        assert self.scheduler.handle(Arrived(worker.number, answer)) == []
        assert self.scheduler.refused == refused, "a true answer was refused"
        assert self.scheduler.stale == stale + (answer.epoch != self.epoch)
        if answer.epoch == self.epoch and answer.outcome not in (ENDED, SKIPPED):
            self.ready.add(answer.seq)

    @precondition(lambda self: not self.broken)
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        """Some worker does nothing any more, until it is killed."""
        worker = self.pick(data, (worker for worker in self.workers if worker.can_move))
        if worker is not None and data.draw(st.integers(0, 3)) == 0:
            worker.hung = True

    @precondition(lambda self: not self.broken)
    @rule(data=st.data())
    def go_on_after_all(self, data: st.DataObject) -> None:
        """Some worker was only very late."""
        worker = self.pick(data, (worker for worker in self.workers if worker.alive and worker.hung))
        if worker is not None:
            worker.hung = False

    @precondition(lambda self: not self.broken)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Some worker dies. Of what it had answered a part arrives, and the rest never will."""
        worker = self.pick(data, (worker for worker in self.workers if worker.alive))
        if worker is not None and (self.restarts_left or data.draw(st.integers(0, 3)) == 0):
            self.kill(worker, heard=data.draw(st.integers(0, len(worker.answers))))

    @precondition(lambda self: not self.broken)
    @rule(number=st.integers(0, 3), times=st.integers(1, DEADLY))
    def die_of_a_batch(self, number: int, times: int) -> None:
        """Some processes of one worker die of what they do, one after the other."""
        number %= len(self.workers)
        for _ in range(times):
            worker = self.workers[number]
            if self.restarts_left and worker.alive:
                worker.begin(look=True)
                self.kill(worker, heard=len(worker.answers))

    def kill(self, worker: SimulatedWorker, heard: int) -> None:
        for _ in range(heard):
            self.take_in(worker)
        worker.alive = False
        worker.pings = 0
        self.backlog.end(worker.number)
        lost = self.lost_with(worker)
        here = {
            seq: self.pending_tasks[epoch, seq].task.attempt for epoch, seq in lost if epoch == self.epoch
        }
        begun = worker.task
        blamed = begun.seq if begun is not None and begun.epoch == self.epoch else None
        tickets = self.scheduler.pending_tasks.tickets()
        claimed = frozenset(ticket for ticket in tickets if self.table.holder(ticket) == worker.number)
        event = Died(worker.number, blamed, "died", claimed)
        self.remember_ghosts(worker, lost)
        for key in lost + [key for key, whose in self.refused.items() if whose == worker.number]:
            self.forget(key)
            self.refused.pop(key, None)
            self.unresolved.discard(key)
        assert self.scheduler.can_replace == (self.restarts_left > 0)
        instructions = self.scheduler.handle(event)
        if self.restarts_left:
            if blamed is not None:
                self.deaths[blamed] = self.deaths.get(blamed, 0) + 1
            self.restarts_left -= 1
            self.replace(worker, event, here, instructions)
            return
        assert instructions == []
        self.lost.update(here)
        if not any(other.alive for other in self.workers):
            for key in self.unanswered():  # no worker will come to them
                self.lost.add(key[1])
                self.forget(key)
            for key in self.unresolved:
                self.forget(key)
            self.unresolved.clear()

    def lost_with(self, worker: SimulatedWorker) -> list[Key]:
        """What will not be answered now that `worker` is dead: it had begun it, or it was assigned to it."""
        mine: list[Task | Answer] = [*worker.answers]
        if self.kind != SHARED:
            mine += worker.unfinished()
        elif worker.task is not None:
            mine.append(worker.task)
        return sorted({(one.epoch, one.seq) for one in mine})

    def remember_ghosts(self, worker: SimulatedWorker, lost: list[Key]) -> None:
        for answer in worker.answers:
            if (answer.epoch, answer.seq) in lost:
                self.ghosts.append((worker.number, answer))
        for task in worker.unfinished():
            if (task.epoch, task.seq) in lost:
                self.ghosts.append((worker.number, worker.late_answer(task)))
        worker.answers.clear()

    def replace(
        self, dead: SimulatedWorker, event: Died, lost: dict[int, int], instructions: list[Instruction]
    ) -> None:
        assert instructions[0] == Replace(dead.number, event.seq, event.cause)
        expected: list[tuple[int | None, int, int]] = []
        to = None if self.kind == SHARED else dead.number
        if self.kind == SHARED:
            expected += [
                (dead.number, seq, self.pending_tasks[epoch, seq].task.attempt)
                for epoch, seq in self.unanswered()
            ]
        poisonous = [seq for seq in lost if self.deaths.get(seq, 0) >= DEADLY]
        expected += [(to, seq, attempt + 1) for seq, attempt in lost.items() if seq not in poisonous]
        sends = [send for send in instructions[1:] if isinstance(send, Send)]
        assert len(sends) == len(instructions) - 1
        assert [(send.worker, send.task.seq, send.task.attempt) for send in sends] == expected
        self.ready.update(poisonous)
        space = self.pool.clear_space(dead.number)
        worker = self.workers[dead.number] = self.new_worker(dead.number, space)
        self.table.begin(dead.number, None)
        self.backlog.begin(dead.number)
        worker.inbox.append(self.epoch_message())
        for send in sends:
            if self.kind == SHARED and send.worker is not None:
                assert send._replace(worker=None) == self.pending_tasks[send.task.epoch, send.task.seq]
                worker.inbox.append(send.task)
            else:
                self.carry_out(send)

    @precondition(lambda self: not self.broken and self.ghosts)
    @rule(data=st.data())
    def late(self, data: st.DataObject) -> None:
        """An answer of an attempt that was given up comes all the same."""
        number, answer = data.draw(st.sampled_from(self.ghosts))
        before = self.states()
        assert self.scheduler.pending_tasks.due(number, answer) is None
        with pytest.raises(InvalidTransition, match="does not owe"):
            self.scheduler.handle(Arrived(number, answer))
        assert self.states() == before

    # ---- the user -----------------------------------------------------------------------------

    @precondition(lambda self: not self.broken and not self.finished)
    @rule(keep=st.booleans())
    def ask(self, keep: bool) -> None:
        """The user calls next(), and may keep the batch."""
        self.receive_pings()
        while True:
            exhausted = self.exhausted
            instructions = self.scheduler.handle(Wanted())
            if self.kind == SHARED and exhausted:
                assert Draw not in map(type, instructions), "a sampler was asked that has nothing more"
            for instruction in instructions:
                if isinstance(instruction, Draw):
                    self.draw_all([instruction])
                elif isinstance(instruction, Deliver):
                    self.deliver(instruction, keep)
                    return
                elif isinstance(instruction, Wait):
                    self.check_wait(instruction)
                    self.sleep()
                    return
                elif isinstance(instruction, Break):
                    self.check_break(instruction)
                    return
                else:
                    assert instruction == Finish()
                    self.check_finish()
                    return

    def sleep(self) -> None:
        """The consumer is about to sleep: a window that may grow does, before a worker idles."""
        window, each = self.scheduler.window, self.pool.batch_bytes
        size, exhausted = max(window.size, self.scheduler.undelivered), self.exhausted
        instructions = self.scheduler.handle(Idle())
        draws = sum(draw.times for draw in instructions if isinstance(draw, Draw))
        assert not (draws and exhausted), "a sampler was asked that has nothing more"
        assert size + draws <= self.widest
        assert not draws or (size + draws) * each <= window.budget
        if len(self.unanswered()) < self.least and self.next_index < self.length:
            assert draws or size == self.widest or (size + 1) * each > window.budget, "workers idle"
        self.draw_all(instructions)

    def deliver(self, deliver: Deliver, keep: bool) -> None:
        seq = deliver.seq
        assert seq not in self.delivered, "delivered twice"
        assert seq in self.ready, "delivered, and not there"
        if self.in_order:
            self.check_order(seq)
        self.delivered.append(seq)
        if deliver.answer is None:
            self.check_error(seq, deliver.error)
            return
        assert self.deaths.get(seq, 0) < DEADLY, "a batch was loaded again that kills its workers"
        assert (deliver.answer.epoch, deliver.answer.seq) == (self.epoch, seq)
        assert deliver.answer.outcome in (BATCH, ERROR, BROKEN), "there is nothing to hand out"
        offsets = [offset for offset, _ in deliver.answer.used]
        if deliver.answer.outcome == BATCH and keep:
            self.pool.deliver(offsets)
            self.held.update(offsets)
        else:
            self.pool.drop(offsets)

    def check_error(self, seq: int, error: BaseException | None) -> None:
        index = self.drawn[seq]
        if self.deaths.get(seq, 0) >= DEADLY:
            assert isinstance(error, PoisonousBatch)
            assert f"batch {seq} (indices {index})" in str(error)
            return
        if seq in self.refused_seqs:
            assert isinstance(error, ProtocolError)
            assert error.args == (seq,), "an error at another batch's position"
            return
        kind = LookupError if index in self.failing else TypeError
        assert isinstance(error, kind)
        assert error.args == (index,), "an error at another batch's position"

    def check_order(self, seq: int) -> None:
        assert all(earlier < seq for earlier in self.delivered), "out of order"
        for skipped in set(range(seq)) - set(self.delivered):
            assert self.kind == ITERABLE, f"batch {skipped} was skipped"
            assert skipped not in self.ready, "the position of an error was skipped"

    def check_wait(self, wait: Wait) -> None:
        send = self.pending_tasks[self.epoch, wait.seq]
        assert (wait.worker, wait.attempt) == (send.worker, send.task.attempt)
        assert wait.behind == len(self.ready) - len(self.delivered)
        if not self.in_order:
            assert wait.behind == 0

    def check_break(self, instruction: Break) -> None:
        self.broken = True
        assert not all(worker.alive for worker in self.workers), "the living were given up"
        if instruction.seq is not None:
            assert instruction.seq in self.lost
            assert instruction.index == self.drawn[instruction.seq]
        if self.in_order and instruction.seq is not None:
            self.check_order(instruction.seq)
        elif self.in_order:  # it was idle
            assert self.kind == SHARED

    def check_finish(self) -> None:
        self.finished = True
        assert not self.unanswered() or self.kind == ITERABLE
        if self.kind != ITERABLE:
            assert sorted(self.delivered) == list(range(self.seqs)), "a batch is missing"
            assert self.next_index == self.length, "an index was never asked for"

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """The last view of some block dies."""
        if self.held:
            self.drop(data.draw(st.sampled_from(sorted(self.held))))

    def drop(self, offset: int) -> None:
        self.held.remove(offset)
        self.arena.released.append(offset)
        self.pool.collect()
        if offset in self.promised:
            self.granted[offset] = self.promised.pop(offset)

    @rule()
    def trim(self) -> None:
        trimmed: list[int] = []
        self.pool.trim(self.scheduler.window.size + 2, trimmed.append)
        assert not self.held & set(trimmed)
        assert not self.granted.keys() & set(trimmed)
        for worker in self.workers:
            if worker.alive and (space := self.pool.space(worker.number)):
                worker.inbox.append(Space(space))

    # ---- after every step ---------------------------------------------------------------------

    @invariant()
    def invariants_hold(self) -> None:
        self.scheduler.check()
        states = self.states()
        of = {state: {o for o, s in states.items() if s == state} for state in (GRANTED, HELD, PROMISED)}
        assert of[PROMISED] == set(self.promised)
        assert of[HELD] | of[PROMISED] == self.held
        assert of[GRANTED] == set(self.granted), "a grant that nobody has, or that somebody lost"

    @invariant()
    def the_window_is_bounded(self) -> None:
        assert self.least <= self.scheduler.window.size <= self.widest
        under_way = self.seqs - len(self.delivered) - len(self.lost)
        if self.kind != ITERABLE:
            assert under_way <= self.scheduler.undelivered <= self.widest
        assert len(self.unanswered()) <= self.widest + (self.kind == ITERABLE) * len(self.workers)

    @invariant()
    def every_task_is_known_to_a_living_worker(self) -> None:
        """Liveness: what is outstanding is with a living worker, or a living worker knows of it."""
        if self.broken:
            return
        for key in self.unanswered():
            owner = self.owner(key)
            if owner is None:
                near = [worker for worker in self.workers if worker.alive]
                for worker in near:
                    if worker.number in self.backlog.behind:
                        assert worker.pings or Ping() in worker.inbox, "it waits for ever"
                    else:
                        assert key in [(task.epoch, task.seq) for task in worker.knows()], (
                            "it was told nothing"
                        )
                assert near, "a batch for no worker"
                continue
            worker = self.workers[owner]
            assert worker.alive, "a dead worker has a batch"
            mine = [(task.epoch, task.seq) for task in worker.unfinished()]
            mine += [(answer.epoch, answer.seq) for answer in worker.answers]
            assert key in mine, "a batch was forgotten"

    @invariant()
    def what_a_worker_has_to_read_is_bounded(self) -> None:
        if self.kind != SHARED:
            return
        for worker in self.workers:
            to_read = sum(isinstance(message, (Task, Epoch)) for message in worker.inbox)
            # Twice up to a ping; what was on offer when it was caught up or started; an epoch each time.
            assert to_read <= 2 * (self.limit + self.widest + 2), "a busy worker's queue grows"

    # ---- many steps at once -------------------------------------------------------------------

    @precondition(lambda self: not self.broken)
    @rule(seed=st.integers(0, 1 << 16), steps=st.integers(1, 80))
    def go_on(self, seed: int, steps: int) -> None:
        """A while in which no worker dies."""
        chance = random.Random(seed)
        for _ in range(steps):
            if not (self.finished or self.broken):
                self.step(chance)

    @precondition(lambda self: not self.broken)
    @rule(seed=st.integers(0, 1 << 16))
    def drain(self, seed: int) -> None:
        """With no more deaths, workers that move in any order finish the epoch."""
        chance = random.Random(seed)
        for worker in list(self.workers):
            if worker.alive and worker.hung and self.restarts_left:
                self.kill(worker, heard=len(worker.answers))  # a timeout is over
        for worker in self.workers:
            worker.hung = False
        while not (self.finished or self.broken):
            assert self.step(chance), "the consumer waits, and nothing moves"
        assert self.finished or not all(worker.alive for worker in self.workers)

    def step(self, chance: random.Random) -> bool:
        """Something that changes something; False: there is nothing."""
        while self.held and chance.random() < 0.3:
            self.drop(chance.choice(sorted(self.held)))
        if chance.random() < 0.6 and self.move_one(chance):
            return True
        before = len(self.delivered)
        self.ask(keep=chance.random() < 0.5)
        return len(self.delivered) > before or self.finished or self.broken or self.move_one(chance)

    def move_one(self, chance: random.Random) -> bool:
        """One answer arrives, or one worker gives one; False if none can."""
        for worker in chance.sample(self.workers, len(self.workers)):
            if worker.can_move and chance.random() < 0.6 and worker.begin(look=chance.random() < 0.8):
                sizes = tuple(chance.choices([1000, 70_000, 5_000_000], k=2))
                self.finish(worker, chance.choice(self.outcomes()), sizes)
                return True
            if worker.answers:
                self.take_in(worker)
                return True
            if worker.pings:
                self.receive_pings()
                return True
        return any(
            worker.answers or (worker.can_move and worker.begin(True)) or worker.pings
            for worker in self.workers
        )

    def teardown(self) -> None:
        if hasattr(self, "scheduler") and not self.broken:
            self.drain(0)
            self.invariants_hold()
