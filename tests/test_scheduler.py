"""The scheduler under random arrival orders, delays, deaths, epochs, abandoned iterators and held blocks.

No process is started: a simulation plays the workers (each a queue of tasks and a part of the address
range), the sampler, and a user who keeps some batches. After every step the invariants are checked:
exactly once, in order, bounded, alive, errors in their place, and no block granted while it is looked at.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastq_loader.blocks import BlockLedger, size_class
from fastq_loader.errors import InvalidTransition
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
from fastq_loader.messages import BATCH, BROKEN, ENDED, ERROR, SKIPPED, Answer
from fastq_loader.scheduler import BATCH_TRANSITIONS, WORKER_TRANSITIONS, Scheduler

REGION = 1 << 40


class SimulatedWorker:
    """Answers tasks in order, as the real loop does; writes to granted blocks or makes new ones."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tasks: deque[Send] = deque()
        self.answers: deque[Answer] = deque()  # sent, and not received yet
        self.bump = number * REGION
        self.let_go: set[int] = set()  # promised blocks whose flag is up
        self.epoch = 0
        self.ended = False
        self.alive = True
        self.clock = 0

    def new_epoch(self, epoch: int) -> None:
        while self.tasks:
            self._answer(self.tasks.popleft(), SKIPPED, ())
        self.epoch, self.ended = epoch, False

    def work(self, outcome: int, sizes: tuple[int, ...]) -> None:
        task = self.tasks.popleft()
        if self.ended:
            outcome, sizes = SKIPPED, ()
        if outcome == ENDED:
            self.ended, sizes = True, ()
        self._answer(task, outcome, sizes)

    def _answer(self, task: Send, outcome: int, sizes: tuple[int, ...]) -> None:
        grants, used, fresh = list(task.grants), [], []
        grants += [promise for promise in task.promises if promise[0] in self.let_go]
        declined = [offset for offset, _ in task.promises if offset not in self.let_go]
        self.let_go.difference_update(offset for offset, _ in task.promises)
        for nbytes in sizes:
            fits = [grant for grant in grants if size_class(nbytes) <= grant[1] <= 2 * size_class(nbytes)]
            if fits:
                grants.remove(fits[0])
                used.append((fits[0][0], nbytes))
            else:
                fresh.append((self.bump, size_class(nbytes)))
                used.append((self.bump, nbytes))
                self.bump += size_class(nbytes)
        self.clock += 1
        returned = (*(offset for offset, _ in grants), *declined)
        self.answers.append(
            Answer(
                task.epoch,
                task.seq,
                0,
                outcome,
                self.clock,
                self.clock,
                tuple(used),
                tuple(fresh),
                returned,
                None,
            )
        )


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler with its simulated surroundings."""

    @initialize(
        workers=st.integers(1, 4),
        prefetch=st.integers(1, 3),
        in_order=st.booleans(),
        iterable=st.booleans(),
    )
    def start(self, workers: int, prefetch: int, in_order: bool, iterable: bool) -> None:
        self.ledger = BlockLedger()
        self.scheduler = Scheduler(workers, prefetch, in_order, self.ledger)
        self.in_order, self.iterable = in_order, iterable
        self.workers = [SimulatedWorker(number) for number in range(workers)]
        self.window = workers * prefetch
        self.epoch = 0
        self.held: list[int] = []  # offsets that the user looks at
        self.promised: dict[int, int] = {}  # offset → the worker it was promised to
        self.granted: dict[int, tuple[int, int]] = {}  # offset → the task (epoch, seq) it was granted to
        self.broken = False
        self.new_epoch(length=10, failing=set())

    # ---- the surroundings ---------------------------------------------------------------------

    def draw(self) -> None:
        """The sampler is asked for one index."""
        if self.next_index >= self.length:
            return
        index = self.next_index
        self.next_index += 1
        if index in self.failing:
            self.scheduler.handle(DrawFailed(LookupError(index)))
            self.drawn[self.seqs] = index
            self.seqs += 1
            return
        sends = self.scheduler.handle(Drawn(index))
        for send in sends:
            assert isinstance(send, Send)
            assert send.index == index
            assert send.epoch == self.epoch
            assert self.workers[send.worker].alive
            for offset, _ in send.grants:
                assert offset not in self.held, "granted while somebody looks"
                assert offset not in self.granted, "granted twice"
                self.granted[offset] = (send.epoch, send.seq)
            for offset, _ in send.promises:
                assert offset in self.held, "promised though nobody looks: it could have been granted"
                assert offset not in self.promised, "promised twice"
                self.promised[offset] = send.worker
            if index % 17 == 13:
                for offset, _ in send.grants:
                    del self.granted[offset]
                for offset, _ in send.promises:
                    del self.promised[offset]
                self.scheduler.handle(Undeliverable(send, TypeError(index)))
                self.undeliverable.add(send.seq)
            else:
                self.workers[send.worker].tasks.append(send)
            self.owner[send.seq] = send.worker
        before, self.seqs = self.seqs, self.seqs + self.taken()
        if self.seqs > before:
            self.drawn[before] = index

    def taken(self) -> int:
        """Whether the last index got a place: torch drops it when nobody is left to take it."""
        return int(self.scheduler.index_of(self.seqs) is not None)

    @rule(length=st.integers(0, 40), failing=st.sets(st.integers(0, 40), max_size=2))
    def new_epoch(self, length: int, failing: set[int]) -> None:
        """iter(): the epoch before may be finished, or abandoned with any number of tasks out."""
        if getattr(self, "broken", False):
            return
        self.epoch += 1
        self.length, self.failing, self.next_index = length, failing, 0
        self.drawn: dict[int, int] = {}
        self.owner: dict[int, int] = {}
        self.seqs = 0
        self.undeliverable: set[int] = set()
        self.delivered: list[int] = []
        self.expected_error: dict[int, int] = {}
        self.finished = False
        self.lost_owner: set[int] = {w.number for w in self.workers if not w.alive}
        for worker in self.workers:
            if worker.alive:
                worker.new_epoch(self.epoch)
        instructions = self.scheduler.handle(EpochStarted(self.epoch))
        assert instructions == [Draw()] * self.window
        for _ in instructions:
            self.draw()

    @rule(data=st.data(), sizes=st.lists(st.sampled_from([1000, 70_000, 90_000, 5_000_000]), max_size=3))
    def work(self, data: st.DataObject, sizes: list[int]) -> None:
        """Some worker finishes its next task."""
        busy = [worker for worker in self.workers if worker.alive and worker.tasks]
        if not busy:
            return
        worker = data.draw(st.sampled_from(busy))
        outcomes = [BATCH, BATCH, BATCH, ERROR, BROKEN] + [ENDED] * self.iterable
        worker.work(data.draw(st.sampled_from(outcomes)), tuple(sizes))

    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        """One answer arrives; different workers' answers in any order."""
        senders = [worker for worker in self.workers if worker.answers]
        if senders and not self.broken:
            self.take_in(data.draw(st.sampled_from(senders)))

    def take_in(self, worker: SimulatedWorker) -> None:
        answer = worker.answers.popleft()
        for offset in [offset for offset, _ in answer.used] + list(answer.returned):
            if self.promised.pop(offset, None) is not None:
                continue  # declined: the user still looks
            assert self.granted.pop(offset, (answer.epoch, answer.seq)) == (answer.epoch, answer.seq)
        assert self.scheduler.handle(Arrived(worker.number, answer)) == []

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """A worker dies; what it had sent still arrives first."""
        alive = [worker for worker in self.workers if worker.alive]
        if not alive or self.broken or data.draw(st.integers(0, 9)):
            return
        worker = data.draw(st.sampled_from(alive))
        while worker.answers:
            self.take_in(worker)
        worker.alive = False
        for task in worker.tasks:
            for offset, _ in task.grants:
                del self.granted[offset]
            for offset, _ in task.promises:
                if self.promised.pop(offset, None) is None:
                    del self.granted[offset]
        worker.tasks.clear()
        self.lost_owner.add(worker.number)
        assert self.scheduler.handle(Died(worker.number)) == []

    @precondition(lambda self: not self.broken and not self.finished)
    @rule(keep=st.booleans())
    def ask(self, keep: bool) -> None:
        """The user calls next(), and may keep the batch."""
        while True:
            instructions = self.scheduler.handle(Wanted())
            for instruction in instructions:
                if isinstance(instruction, Draw):
                    self.draw()
                elif isinstance(instruction, Deliver):
                    self.deliver(instruction, keep)
                    return
                elif isinstance(instruction, Wait):
                    self.check_wait(instruction)
                    return
                elif isinstance(instruction, Break):
                    assert not self.workers[instruction.worker].alive, "a living worker was given up"
                    if self.in_order:
                        assert instruction.seq is not None
                        self.check_order(instruction.seq)
                    self.broken = True
                    return
                else:
                    assert isinstance(instruction, Finish)
                    self.check_finish()
                    return

    def deliver(self, deliver: Deliver, keep: bool) -> None:
        seq = deliver.seq
        assert seq not in self.delivered, "delivered twice"
        if self.in_order:
            self.check_order(seq)
        self.delivered.append(seq)
        index = self.drawn[seq]
        if deliver.answer is None:
            if index in self.failing:
                assert isinstance(deliver.error, LookupError)
            else:
                assert seq in self.undeliverable
                assert isinstance(deliver.error, TypeError)
            assert deliver.error.args == (index,), "an error at another batch's place"
            return
        assert (deliver.answer.epoch, deliver.answer.seq) == (self.epoch, seq)
        assert deliver.answer.outcome in (BATCH, ERROR, BROKEN), "there is nothing to hand out"
        assert deliver.worker == self.owner[seq]
        offsets = [offset for offset, _ in deliver.answer.used]
        if deliver.answer.outcome == BATCH and keep:
            self.ledger.deliver(offsets)
            self.held += offsets
        else:
            for offset in offsets:
                self.ledger.drop(offset)

    def check_order(self, seq: int) -> None:
        assert all(earlier < seq for earlier in self.delivered), "out of order"
        for skipped in range(seq):
            if skipped not in self.delivered:
                owner = self.owner.get(skipped)
                assert owner is not None, "the place of a sampler's error was skipped"
                assert self.iterable, f"batch {skipped} was skipped"

    def check_wait(self, wait: Wait) -> None:
        """Liveness: what is waited for is really under way, and with a living worker."""
        worker = self.workers[wait.worker]
        assert worker.alive, "waits for a dead worker"
        under_way = [task.seq for task in worker.tasks if task.epoch == self.epoch]
        under_way += [answer.seq for answer in worker.answers if answer.epoch == self.epoch]
        assert wait.seq in under_way, "waits for what nobody loads"

    def check_finish(self) -> None:
        self.finished = True
        if not self.iterable:
            assert sorted(self.delivered) == sorted(self.drawn), "a batch is missing"
            assert self.in_order is False or self.next_index >= self.length or not self.drawn

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """The last view of some block dies."""
        if self.held:
            offset = data.draw(st.sampled_from(self.held))
            self.held.remove(offset)
            self.ledger.release(offset)
            worker = self.promised.pop(offset, None)
            if worker is not None:  # the flag goes up, and the promise is a grant
                self.workers[worker].let_go.add(offset)
                self.granted[offset] = self.task_of_promise(worker, offset)

    def task_of_promise(self, worker: int, offset: int) -> tuple[int, int]:
        for task in self.workers[worker].tasks:
            if offset in [promised for promised, _ in task.promises]:
                return task.epoch, task.seq
        for answer in self.workers[worker].answers:  # declined a moment ago
            if offset in answer.returned:
                return answer.epoch, answer.seq
        raise AssertionError(f"block {offset} was promised to no task")

    @rule()
    def trim(self) -> None:
        for offset, _ in self.ledger.trim(self.window + 2):
            assert offset not in self.held
            assert offset not in self.granted

    # ---- after every step ---------------------------------------------------------------------

    @invariant()
    def invariants_hold(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        states = self.ledger.states()
        assert all(states[offset] in ("held", "promised") for offset in self.held)
        assert all(states[offset] == "promised" for offset in self.promised)
        assert all(states[offset] == "granted" for offset in self.granted)

    @invariant()
    def memory_is_bounded(self) -> None:
        """What is neither held by the user nor cold is bounded by the window (here: 3 blocks a batch)."""
        if not hasattr(self, "scheduler"):
            return
        outstanding = sum(len(w.tasks) + len(w.answers) for w in self.workers)
        current = sum(task.epoch == self.epoch for w in self.workers for task in w.tasks)
        assert current <= self.window + len(self.workers)
        assert sum(state == "granted" for state in self.ledger.states().values()) <= 3 * outstanding


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# ---- directed cases ---------------------------------------------------------------------------------


def started(
    workers: int = 2, prefetch: int = 2, in_order: bool = True, length: int = 100
) -> tuple[Scheduler, list[Send]]:
    """A scheduler at the beginning of an epoch, and the tasks it sent."""
    scheduler = Scheduler(workers, prefetch, in_order, BlockLedger())
    sends: list[Any] = []
    for index, _ in zip(range(length), scheduler.handle(EpochStarted(1)), strict=False):
        sends += scheduler.handle(Drawn(index))
    return scheduler, sends


def answer(send: Send, outcome: int = BATCH) -> Arrived:
    return Arrived(send.worker, Answer(send.epoch, send.seq, 0, outcome, 0, 0, (), (), (), None))


def test_the_window_is_sent_round_robin_when_the_epoch_starts() -> None:
    _, sends = started(workers=3, prefetch=2)
    assert [(send.worker, send.seq) for send in sends] == [(0, 0), (1, 1), (2, 2), (0, 3), (1, 4), (2, 5)]


def test_one_index_is_drawn_for_every_batch_and_before_it_is_handed_out() -> None:
    scheduler, sends = started()
    scheduler.handle(answer(sends[0]))
    instructions = scheduler.handle(Wanted())
    assert [type(instruction) for instruction in instructions] == [Draw, Deliver]


def test_a_batch_that_came_early_waits_for_the_ones_before_it() -> None:
    scheduler, sends = started()
    scheduler.handle(answer(sends[1]))
    assert scheduler.handle(Wanted()) == [Wait(0, 0)]
    scheduler.handle(answer(sends[0]))
    delivered = [scheduler.handle(Wanted())[-1], scheduler.handle(Wanted())[-1]]
    assert [d.seq for d in delivered if isinstance(d, Deliver)] == [0, 1]


def test_what_a_worker_skipped_may_come_before_its_end_was_looked_at() -> None:
    scheduler, sends = started(in_order=False)
    scheduler.handle(answer(sends[0], ENDED))
    scheduler.handle(answer(sends[2], SKIPPED))
    scheduler.check()
    scheduler.handle(answer(sends[1]))
    assert scheduler.handle(Wanted()) == [Draw()]  # for the end
    delivered = scheduler.handle(Wanted())[-1]
    assert isinstance(delivered, Deliver)
    assert delivered.seq == 1
    scheduler.check()


def test_out_of_order_hands_out_what_came() -> None:
    scheduler, sends = started(in_order=False)
    scheduler.handle(answer(sends[3]))
    delivered = scheduler.handle(Wanted())[-1]
    assert isinstance(delivered, Deliver)
    assert delivered.seq == 3


def test_out_of_order_gives_the_next_index_to_a_worker_with_room() -> None:
    """torch: a worker takes at most window // active workers; the turn passes to the next one."""
    scheduler, sends = started(in_order=False)
    scheduler.handle(answer(sends[1]))  # worker 1 is fast, worker 0 has two batches undelivered
    scheduler.handle(Wanted())
    (send,) = scheduler.handle(Drawn(4))
    assert isinstance(send, Send)
    assert send.worker == 1


def test_a_worker_whose_stream_ended_gives_its_turn_away() -> None:
    scheduler, sends = started()
    scheduler.handle(answer(sends[0], ENDED))
    assert scheduler.handle(Wanted()) == [Draw()]
    (send,) = scheduler.handle(Drawn(4))
    assert isinstance(send, Send)
    assert send.worker == 1
    scheduler.handle(answer(sends[2], SKIPPED))
    scheduler.handle(answer(sends[1]))
    delivered = scheduler.handle(Wanted())[-1]
    assert isinstance(delivered, Deliver)
    assert delivered.seq == 1


def test_a_dead_worker_is_reported_at_the_batch_it_lost() -> None:
    scheduler, sends = started()
    scheduler.handle(answer(sends[0]))
    scheduler.handle(Died(1))
    assert isinstance(scheduler.handle(Wanted())[-1], Deliver)
    assert scheduler.handle(Wanted()) == [Break(1, 1, 1)]


def test_a_death_between_epochs_is_reported_in_the_next_one() -> None:
    scheduler, _ = started(workers=1, prefetch=1, length=0)
    assert scheduler.handle(Wanted()) == [Finish()]
    scheduler.handle(Died(0))
    scheduler.handle(EpochStarted(2))
    assert scheduler.handle(Drawn("index")) == []
    assert scheduler.handle(Wanted()) == [Break(0, 0, "index")]


def test_the_death_of_an_exhausted_worker_hurts_nobody_in_this_epoch() -> None:
    scheduler, sends = started(prefetch=1, length=2)
    scheduler.handle(answer(sends[0], ENDED))
    assert scheduler.handle(Wanted()) == [Draw()]
    scheduler.handle(Died(0))
    scheduler.handle(answer(sends[1]))
    assert isinstance(scheduler.handle(Wanted())[-1], Deliver)
    assert scheduler.handle(Wanted()) == [Finish()]


def test_answers_of_an_abandoned_epoch_are_counted_and_dropped() -> None:
    scheduler, sends = started(workers=1, prefetch=1)
    scheduler.handle(EpochStarted(2))
    block = (0, size_class(100_000))
    late = Answer(1, sends[0].seq, 0, BATCH, 0, 0, ((0, 100_000),), (block,), (), None)
    scheduler.handle(Arrived(0, late))
    assert scheduler.take_stale() == 1
    assert scheduler.take_stale() == 0
    assert scheduler.ledger.states() == {0: "free"}
    (send,) = scheduler.handle(Drawn(0))
    assert isinstance(send, Send)
    assert send.grants == (block,)


def test_an_answer_that_is_not_owed_is_refused() -> None:
    scheduler, sends = started()
    scheduler.handle(answer(sends[0]))
    with pytest.raises(InvalidTransition, match="does not owe"):
        scheduler.handle(answer(sends[0]))
    with pytest.raises(InvalidTransition, match="does not owe"):
        scheduler.handle(answer(sends[1]._replace(worker=0)))


def test_epochs_only_go_up() -> None:
    scheduler, _ = started()
    with pytest.raises(InvalidTransition, match="epoch 1 follows epoch 1"):
        scheduler.handle(EpochStarted(1))


@pytest.mark.parametrize("table", [BATCH_TRANSITIONS, WORKER_TRANSITIONS])
def test_tables_are_closed_and_every_state_is_reachable(table: dict[str, dict[str, str]]) -> None:
    reached = {target for row in table.values() for target in row.values()}
    assert reached <= set(table)
    assert set(table) - reached <= {"new"}
