"""The scheduler among simulated workers, a sampler, and a user who keeps some batches: any order of events.

Workers answer late, hang, die with or without a restart, and are replaced; epochs are abandoned; the window
is torch's, another fixed one, or one that grows. After every step: exactly once, in order, bounded, alive,
errors at their position, and no block written that the user references or that is another task's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Set
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastq_loader.errors import PoisonBatch, ProtocolError
from fastq_loader.ipc.messages import (
    BATCH,
    BROKEN,
    ERROR,
    PART_ENDED,
    SKIPPED,
    Answer,
    BeginEpoch,
    Space,
    Task,
)
from fastq_loader.memory.blocks import GRANTED, HELD, Extents
from fastq_loader.memory.pool import BlockPool
from fastq_loader.scheduling.events import Died, Draw, Finish, IterationFailed, Send, Wait
from fastq_loader.scheduling.in_flight import Batch
from fastq_loader.scheduling.progress import Progress
from fastq_loader.scheduling.scheduler import DEADLY, Scheduler
from fastq_loader.scheduling.schedules import Window
from tests.support import invariants
from tests.support.simulation import REGION, Loaded, SimulatedArena, SimulatedWorker, Table

ASSIGNED, SHARED, ITERABLE = "assigned", "shared", "iterable"
SIZES = st.lists(st.sampled_from([1000, 70_000, 90_000, 5_000_000]), max_size=3)
WINDOWS = st.one_of(  # (least, widest, budget, group)
    st.none(),
    st.integers(1, 8).flatmap(lambda size: st.tuples(*map(st.just, (size, size, 0)), st.integers(1, size))),
    st.tuples(st.integers(1, 6), st.integers(1, 16), st.sampled_from([1 << 20, 40 << 20])),
)
SEEDS = st.integers(0, 1 << 16)
SELDOM = st.sampled_from([True, False, False, False])

Key = tuple[int, int]  # (epoch, seq)


def key_of(one: Task | Answer) -> Key:
    return one.epoch, one.seq


def arrive(scheduler: Scheduler, worker: int, answer: Loaded, fault: ProtocolError | None = None) -> Batch:
    """An answer that is due has come; its batch."""
    scheduler.claimant = lambda ticket: worker
    batch = scheduler.answered(worker, answer, None, answer.used, fault)
    assert batch is not None, f"worker {worker} does not owe {answer[:3]}"
    return batch


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
    ) -> None:
        limits = window or (workers * prefetch,)
        # Only that of shared tasks widens, and asks for batches together.
        self.limits = limits if kind == SHARED else limits[:1]
        self.restarts = 0 if kind == ITERABLE else restarts  # the loader refuses them
        self.in_order, self.kind, self.count, self.spare = in_order, kind, workers, spare
        self.new_pool()

    def new_pool(self) -> None:
        self.least, self.widest = self.limits[0], max(self.limits[:2])
        slots = self.widest + self.count + self.spare  # so few that numbers come round soon
        self.arena: Any = SimulatedArena()
        self.pool = BlockPool(self.arena)
        self.scheduler = Scheduler(
            self.count,
            self.pool,
            Window(*self.limits),
            in_order=self.in_order,
            shared_tasks=self.kind == SHARED,
            restarts=self.restarts,
            slots=slots,
        )
        self.table = Table(slots)
        self.workers = [self.new_worker(number, ((number * REGION, REGION),)) for number in range(self.count)]
        self.epoch = self.seqs = 0
        self.tickets: set[int] = set()  # that there were
        self.held: set[int] = set()  # blocks that the user references
        self.granted: dict[int, Key] = {}  # block → the task that it was granted to
        self.pending_tasks: dict[Key, Send] = {}  # tasks without an answer, and how they were sent last
        self.refused: dict[Key, int] = {}  # answers that were refused, and whose they were
        self.begin_epoch(10, set())

    def new_worker(self, number: int, space: Extents) -> SimulatedWorker:
        return SimulatedWorker(number, self.table, self.kind == SHARED, space)

    def alive(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if worker.alive]

    def states(self) -> dict[int, str]:
        return invariants.states(self.pool)

    # ---- the sampler --------------------------------------------------------------------------

    def draw(self, times: int) -> None:
        """The sampler is asked for indices."""
        for _ in range(times):
            if self.next_index < self.length:
                self.draw_one(self.next_index)
                self.next_index += 1
            else:
                self.exhausted = True
                self.scheduler.exhausted()

    def draw_one(self, index: int) -> None:
        seq = self.seqs
        if index in self.failing:
            self.scheduler.draw_failed(LookupError(index))
            self.number(index)
            self.ready.add(seq)
            return
        batch = self.scheduler.drawn(index)
        if self.scheduler.index_of(seq) is None:
            assert self.kind == ITERABLE, "an index was lost"
            return
        self.number(index)
        if batch is None:
            assert len(self.alive()) < self.count, "no worker was sent a batch"
            self.lost.add(seq)
            return
        assert batch.task is not None
        send = Send(batch.worker, batch.task)
        assert (send.task.seq, send.task.attempt) == (seq, 0)
        self.take_over(send)
        if index % 17 == 13:
            self.scheduler.undeliverable(send.task, TypeError(index))
            self.forget(key_of(send.task))
            self.ready.add(seq)
        else:
            self.carry_out(send)

    def number(self, index: int) -> None:
        self.drawn[self.seqs] = index
        self.seqs += 1
        while self.seqs in self.resumed:
            self.seqs += 1

    # ---- tasks --------------------------------------------------------------------------------

    def take_over(self, send: Send) -> None:
        """There is a new task, with its ticket and its blocks."""
        task, key = send.task, key_of(send.task)
        assert task.epoch == self.epoch
        assert task.index == self.drawn[task.seq]
        assert key not in self.pending_tasks, "sent again, and still under way"
        for offset, _ in task.grants:
            assert offset not in self.held, "granted while it is referenced"
            assert offset not in self.granted, "granted twice"
            self.granted[offset] = key
        assert (send.worker is None) == (self.kind == SHARED)
        if self.kind == SHARED:
            assert task.ticket not in self.tickets, "a ticket for two attempts"
            self.tickets.add(task.ticket)
            slots = [self.table.slot(self.pending_tasks[other].task.ticket) for other in self.unanswered()]
            assert self.table.slot(task.ticket) not in slots, "a claim was overwritten"
            self.table.offer(task.ticket)
        self.pending_tasks[key] = send

    def carry_out(self, send: Send) -> None:
        assert send.worker is None or self.workers[send.worker].alive, "a task for a dead worker"
        for worker in self.alive():
            if send.worker in (None, worker.number):
                worker.inbox.append(send.task)

    def forget(self, key: Key) -> None:
        """A task will not be answered, or its answer was refused: its blocks are free."""
        self.pending_tasks.pop(key, None)
        for offset in [offset for offset, mine in self.granted.items() if mine == key]:
            del self.granted[offset]

    def owner(self, key: Key) -> int | None:
        """The worker that has a task of this epoch; None: it is unclaimed."""
        send = self.pending_tasks[key]
        return self.table.holder(send.task.ticket) if self.kind == SHARED else send.worker

    def unanswered(self) -> list[Key]:
        """This epoch's tasks without an answer."""
        return sorted(key for key in self.pending_tasks if key[0] == self.epoch)

    # ---- epochs -------------------------------------------------------------------------------

    @rule(
        length=st.integers(0, 40),
        failing=st.sets(st.integers(0, 40), max_size=2),
        head=st.integers(0, 5),
        beyond=st.sets(st.integers(1, 8), max_size=4),
    )
    def begin_epoch(
        self, length: int, failing: set[int], head: int = 0, beyond: Set[int] = frozenset()
    ) -> None:
        """iter(): the epoch before may be finished, or abandoned with any number of tasks out. One that is
        resumed begins with the first `head` batches handed out before, and others `beyond` that position."""
        shared = self.unanswered() if self.kind == SHARED else []
        tickets = {self.pending_tasks[key].task.ticket: key for key in shared}
        assert sorted(self.scheduler.pending_tasks.tickets()) == sorted(tickets)
        taken = frozenset(ticket for ticket in tickets if self.table.take_back(ticket))
        claimed = {ticket: self.table.holder(ticket) for ticket in tickets.keys() - taken}
        assert None not in claimed.values(), "an unclaimed task cannot be taken back"
        head, beyond = (0, set()) if self.kind == ITERABLE else (head, {head + each for each in beyond})
        done = Progress(head + len(beyond), frozenset(beyond))
        count = self.scheduler.begin_epoch(self.epoch + 1, taken, claimed, done)
        assert count == self.scheduler.window.size
        for ticket in taken:
            self.forget(tickets[ticket])
        self.epoch += 1
        self.length, self.failing, self.next_index, self.seqs = length, failing, 0, head
        self.resumed = {*range(head), *beyond}  # handed out before
        self.drawn: dict[int, int] = {}  # seq → index
        self.ready: set[int] = set()  # arrived, or failed
        self.refused_seqs: set[int] = set()
        self.delivered: list[int] = []
        self.lost: set[int] = set()  # with a worker that was not replaced
        self.deaths: dict[int, int] = {}
        self.restarts_left = self.restarts
        self.finished = self.exhausted = False
        for worker in self.alive():
            worker.inbox.append(BeginEpoch(self.epoch, None, 0))
        self.draw(self.scheduler.window.size)

    # ---- workers ------------------------------------------------------------------------------

    def pick(self, data: st.DataObject, fits: Callable[[SimulatedWorker], object]) -> SimulatedWorker | None:
        candidates = [worker for worker in self.alive() if fits(worker)]
        return data.draw(st.sampled_from(candidates)) if candidates else None

    @rule(data=st.data(), look=st.booleans(), finish=st.booleans(), sizes=SIZES)
    def work(self, data: st.DataObject, look: bool, finish: bool, sizes: list[int]) -> None:
        """Some worker takes a task and works on it for a while, or finishes it."""
        worker = self.pick(data, lambda worker: not worker.hung)
        if worker is not None and worker.begin(look) and finish:
            self.finish(worker, data.draw(st.sampled_from(self.kinds())), tuple(sizes))

    def kinds(self) -> list[int]:
        return [BATCH, BATCH, BATCH, ERROR, PART_ENDED if self.kind == ITERABLE else BROKEN]

    def finish(self, worker: SimulatedWorker, kind: int, sizes: tuple[int, ...]) -> None:
        assert worker.task is not None
        key = key_of(worker.task)
        answer = worker.finish(kind, sizes)
        assert key in self.pending_tasks, "worked on what is not asked for"
        assert self.pending_tasks[key].task.attempt == answer.attempt
        fresh = {offset for offset, _ in answer.fresh}
        assert not fresh & set(self.states()), "made a block where one lies"
        for offset, _ in answer.used:
            assert offset in fresh or self.granted[offset] == key, "wrote to another task's block"

    @rule(data=st.data(), faulty=st.booleans())
    def receive(self, data: st.DataObject, faulty: bool) -> None:
        """One answer arrives; different workers' answers in any order."""
        worker = self.pick(data, lambda worker: worker.answers)
        if worker is not None:
            self.take_in(worker, faulty)

    def refuse(self, worker: SimulatedWorker) -> None:
        """An answer does not fit: its blocks may be written to, until the worker is dead."""
        answer = worker.answers.popleft()
        del self.pending_tasks[key_of(answer)]
        self.refused[key_of(answer)] = worker.number
        fault = ProtocolError(answer.seq)
        assert arrive(self.scheduler, worker.number, answer, fault).error is fault
        if answer.epoch == self.epoch:
            self.ready.add(answer.seq)
            self.refused_seqs.add(answer.seq)

    def take_in(self, worker: SimulatedWorker, faulty: bool = False) -> None:
        if faulty and self.kind != ITERABLE:
            self.refuse(worker)
            return
        answer = worker.answers.popleft()
        key = key_of(answer)
        for offset in [offset for offset, _ in answer.used] + list(answer.returned):
            assert self.granted.pop(offset, key) == key
        del self.pending_tasks[key]
        batch = arrive(self.scheduler, worker.number, answer)
        assert batch.error is None
        assert (batch.answer is answer) == (answer.epoch == self.epoch and answer.kind != SKIPPED)
        if answer.epoch == self.epoch and answer.kind not in (PART_ENDED, SKIPPED):
            self.ready.add(answer.seq)

    @rule(data=st.data(), hung=SELDOM)
    def hang(self, data: st.DataObject, hung: bool) -> None:
        """Some worker does nothing any more until it is killed, or was only very late."""
        worker = self.pick(data, lambda worker: worker.hung != hung)
        if worker is not None:
            worker.hung = hung

    @rule(data=st.data(), times=st.integers(1, DEADLY + 1), for_good=SELDOM)
    def die(self, data: st.DataObject, times: int, for_good: bool) -> None:
        """Some worker dies, and those in its place of what they do. Of its answers a part arrives."""
        worker = self.pick(data, lambda _: self.restarts_left or for_good)
        if worker is None:
            return
        self.kill(worker, heard=data.draw(st.integers(0, len(worker.answers))))
        for _ in range(min(times - 1, self.restarts_left)):
            successor = self.workers[worker.number]
            if successor.alive:
                successor.begin(look=True)
                self.kill(successor, heard=0)

    def kill(self, worker: SimulatedWorker, heard: int) -> None:
        for _ in range(heard):
            self.take_in(worker)
        worker.alive = False
        mine: list[Any] = [*worker.answers]  # it had begun it, or it was assigned to it
        mine += worker.unfinished() if self.kind != SHARED else filter(None, [worker.task])
        worker.answers.clear()
        lost = sorted(set(map(key_of, mine)))
        here = {
            seq: self.pending_tasks[epoch, seq].task.attempt for epoch, seq in lost if epoch == self.epoch
        }
        begun = worker.task
        blamed = begun.seq if begun is not None and begun.epoch == self.epoch else None
        tickets = self.scheduler.pending_tasks.tickets()
        claimed = frozenset(ticket for ticket in tickets if self.table.holder(ticket) == worker.number)
        event = Died(worker.number, blamed, "died", claimed)
        for key in lost + [key for key, whose in self.refused.items() if whose == worker.number]:
            self.forget(key)
            self.refused.pop(key, None)
        assert self.scheduler.restarts_left == self.restarts_left
        sends = self.scheduler.died(event)
        if self.restarts_left:
            if blamed is not None:
                self.deaths[blamed] = self.deaths.get(blamed, 0) + 1
            self.restarts_left -= 1
            assert sends is not None
            self.replace(worker, here, sends)
            return
        assert sends is None
        self.lost.update(here)
        if not self.alive():
            for key in self.unanswered():  # no worker will come to them
                self.lost.add(key[1])
                self.forget(key)

    def replace(self, dead: SimulatedWorker, lost: dict[int, int], sends: list[Send]) -> None:
        expected: list[tuple[int | None, int, int]] = []
        if self.kind == SHARED:
            sent = [self.pending_tasks[key].task for key in self.unanswered()]
            expected = [(dead.number, task.seq, task.attempt) for task in sent]
        poisonous = [seq for seq in lost if self.deaths.get(seq, 0) >= DEADLY]
        to = None if self.kind == SHARED else dead.number
        expected += [(to, seq, attempt + 1) for seq, attempt in lost.items() if seq not in poisonous]
        assert [(send.worker, send.task.seq, send.task.attempt) for send in sends] == expected
        self.ready.update(poisonous)
        worker = self.new_worker(dead.number, self.pool.clear_space(dead.number))
        self.workers[dead.number] = worker
        self.table.begin(dead.number, None)
        worker.inbox.append(BeginEpoch(self.epoch, None, 0))
        for send in sends:
            if self.kind == SHARED and send.worker is not None:
                assert send._replace(worker=None) == self.pending_tasks[key_of(send.task)]
            else:
                self.take_over(send)
            self.carry_out(send)

    # ---- the user -----------------------------------------------------------------------------

    @precondition(lambda self: not self.finished)
    @rule(keep=st.booleans())
    def ask(self, keep: bool) -> None:
        """The user calls next(), and may keep the batch."""
        self.next(keep)

    def next(self, keep: bool) -> bool:
        """What one call comes to; False: the consumer waits."""
        while True:
            found = self.scheduler.ready() or self.scheduler.wanted()
            if isinstance(found, Draw):
                self.draw_for(1)
            elif isinstance(found, Batch):
                self.draw_for(self.scheduler.to_draw)
                self.deliver(found, keep)
                return True
            elif isinstance(found, Wait):
                self.check_wait(found)
                self.sleep()
                return False
            elif isinstance(found, IterationFailed):
                self.check_break(found)
                return True
            else:
                assert found == Finish()
                self.check_finish()
                return True

    def draw_for(self, times: int) -> None:
        assert not (times and self.kind == SHARED and self.exhausted), "asked a sampler that has nothing more"
        self.draw(times)

    def sleep(self) -> None:
        """The consumer is about to sleep: a window that may grow does, before a worker idles."""
        window, each = self.scheduler.window, self.pool.batch_bytes
        size, exhausted = max(window.size, len(self.scheduler.in_flight.batches)), self.exhausted
        draws = self.scheduler.idle()
        assert not (draws and exhausted), "a sampler was asked that has nothing more"
        assert size + draws <= self.widest
        assert not draws or (size + draws) * each <= window.budget
        if len(self.unanswered()) < self.least and self.next_index < self.length:
            assert draws or size == self.widest or (size + 1) * each > window.budget, "workers idle"
        self.draw(draws)

    def deliver(self, deliver: Batch, keep: bool) -> None:
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
        assert deliver.answer.kind in (BATCH, ERROR, BROKEN), "there is nothing to hand out"
        offsets = [offset for offset, _ in deliver.used]
        if deliver.answer.kind == BATCH and keep:
            self.pool.deliver(offsets)
            self.held.update(offsets)
        else:
            self.pool.drop(offsets)

    def check_error(self, seq: int, error: BaseException | None) -> None:
        index = self.drawn[seq]
        if self.deaths.get(seq, 0) >= DEADLY:
            assert isinstance(error, PoisonBatch)
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
        for skipped in set(range(seq)) - set(self.delivered) - self.resumed:
            assert self.kind == ITERABLE, f"batch {skipped} was skipped"
            assert skipped not in self.ready, "the position of an error was skipped"

    def check_wait(self, wait: Wait) -> None:
        send = self.pending_tasks[self.epoch, wait.seq]
        assert (wait.worker, wait.attempt) == (send.worker, send.task.attempt)
        assert wait.behind == len(self.ready) - len(self.delivered)
        if not self.in_order:
            assert wait.behind == 0

    def check_break(self, instruction: IterationFailed) -> None:
        """A worker is not replaced, and the pool ends."""
        assert len(self.alive()) < self.count, "the living were given up"
        if instruction.seq is not None:
            assert instruction.seq in self.lost
            assert instruction.index == self.drawn[instruction.seq]
        if self.in_order and instruction.seq is not None:
            self.check_order(instruction.seq)
        elif self.in_order:  # it was idle
            assert self.kind == SHARED
        self.invariants_hold()
        self.new_pool()

    def check_finish(self) -> None:
        self.finished = True
        assert not self.unanswered() or self.kind == ITERABLE
        if self.kind != ITERABLE:
            assert sorted(self.delivered) == sorted(self.drawn), "a batch is missing"
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

    @rule()
    def trim(self) -> None:
        trimmed: list[int] = []
        self.pool.trim(self.scheduler.window.size + 2, trimmed.append)
        assert not self.held & set(trimmed)
        assert not self.granted.keys() & set(trimmed)
        for worker in self.alive():
            if space := self.pool.space(worker.number):
                worker.inbox.append(Space(space))

    # ---- after every step ---------------------------------------------------------------------

    @invariant()
    def invariants_hold(self) -> None:
        invariants.check(self.scheduler)
        states = self.states()
        of = {state: {o for o, s in states.items() if s == state} for state in (GRANTED, HELD)}
        assert of[HELD] == self.held
        assert of[GRANTED] == set(self.granted), "a grant that nobody has, or that somebody lost"

    @invariant()
    def the_window_is_bounded(self) -> None:
        assert self.least <= self.scheduler.window.size <= self.widest
        under_way = len(self.drawn) - len(self.delivered) - len(self.lost)
        if self.kind != ITERABLE:
            assert under_way <= len(self.scheduler.in_flight.batches) <= self.widest
        assert len(self.unanswered()) <= self.widest + (self.kind == ITERABLE) * len(self.workers)

    @invariant()
    def every_task_is_known_to_a_living_worker(self) -> None:
        """Liveness: what is outstanding is with a living worker, or all of those know of it."""
        for key in self.unanswered():
            owner = self.owner(key)
            if owner is None:
                assert self.alive(), "a batch for no worker"
                assert all(key in map(key_of, worker.knows()) for worker in self.alive()), (
                    "it was told nothing"
                )
            else:
                worker = self.workers[owner]
                assert worker.alive, "a dead worker has a batch"
                assert key in map(key_of, [*worker.unfinished(), *worker.answers]), "a batch was forgotten"

    # ---- many steps at once -------------------------------------------------------------------

    @rule(seed=SEEDS, steps=st.integers(1, 80))
    def go_on(self, seed: int, steps: int) -> None:
        """A while in which no worker dies."""
        chance = random.Random(seed)
        for _ in range(steps):
            if not self.finished:
                self.step(chance)

    @rule(seed=SEEDS)
    def drain(self, seed: int) -> None:
        """With no more deaths, workers that move in any order finish the epoch."""
        chance = random.Random(seed)
        for worker in self.alive():
            if worker.hung and self.restarts_left:
                self.kill(worker, heard=len(worker.answers))  # a timeout is over
            worker.hung = False
        while not self.finished:
            assert self.step(chance), "the consumer waits, and nothing moves"

    def step(self, chance: random.Random) -> bool:
        """Something that changes something; False: there is nothing."""
        while self.held and chance.random() < 0.3:
            self.drop(chance.choice(sorted(self.held)))
        if chance.random() < 0.6 and self.move_one(chance):
            return True
        return self.next(keep=chance.random() < 0.5) or self.move_one(chance)

    def move_one(self, chance: random.Random) -> bool:
        """One answer arrives, or one worker gives one; False if none can."""
        workers = self.alive()
        for worker in chance.sample(workers, len(workers)):
            if not worker.hung and chance.random() < 0.6 and worker.begin(look=chance.random() < 0.8):
                sizes = tuple(chance.choices([1000, 70_000, 5_000_000], k=2))
                self.finish(worker, chance.choice(self.kinds()), sizes)
                return True
            if worker.answers:
                self.take_in(worker, faulty=chance.random() < 0.05)
                return True
        return any(worker.answers or (not worker.hung and worker.begin(True)) for worker in workers)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.drain(0)
            self.invariants_hold()
