"""The scheduler under random orders of events (see `scheduler_machine`), and case by case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fastq_loader.errors import InvalidTransition, PoisonousBatch
from fastq_loader.ipc.messages import BATCH, ENDED, SKIPPED, Answer
from fastq_loader.memory.blocks import size_class
from fastq_loader.memory.pool import BlockPool
from fastq_loader.scheduling.events import (
    Arrived,
    Break,
    Deliver,
    Died,
    Draw,
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
from fastq_loader.scheduling.window import Window
from tests.support.scheduler_machine import SchedulerMachine
from tests.support.simulation import REGION, SimulatedArena

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# ---- directed cases ---------------------------------------------------------------------------------


def started(
    workers: int = 2, prefetch: int = 2, length: int = 100, window: Window | None = None, **keywords: Any
) -> tuple[Scheduler, list[Send]]:
    """A scheduler at the beginning of an epoch, and the tasks it sent."""
    arena: Any = SimulatedArena()
    window = window or Window(workers * prefetch)
    scheduler = Scheduler(workers, BlockPool(arena, workers), window, **keywords)
    return scheduler, begin(scheduler, length)


def begin(scheduler: Scheduler, length: int = 100, **keywords: Any) -> list[Send]:
    """A new epoch over so many indices; the tasks that were sent."""
    draws = scheduler.handle(EpochStarted(scheduler.epoch + 1, **keywords))
    return draw(scheduler, draws, range(length))


def draw(scheduler: Scheduler, draws: Sequence[Instruction], indices: Iterable[int]) -> list[Send]:
    """Give the scheduler the indices that it asked for, as far as there are any."""
    times = sum(instruction.times for instruction in draws if isinstance(instruction, Draw))
    sends: list[Any] = []
    for index in islice(indices, times):
        sends += scheduler.handle(Drawn(index))
    return sends


def states(scheduler: Scheduler) -> dict[int, str]:
    """The blocks by offset."""
    return scheduler.pool._ledger.states()


def answer(
    send: Send, outcome: int = BATCH, worker: int | None = None, nbytes: int = 0, at: int = 0
) -> Arrived:
    """The answer of the task's worker or of `worker`, with a batch of `nbytes` in a new block, `at` bytes
    into the worker's part of the arena."""
    worker = send.worker if worker is None else worker
    assert worker is not None
    at += worker * REGION
    used, fresh = (((at, nbytes),), ((at, size_class(nbytes)),)) if nbytes else ((), ())
    task = send.task
    return Arrived(worker, Answer(task.epoch, task.seq, task.attempt, outcome, 0, 0, fresh, (), None, used))


def delivered(scheduler: Scheduler) -> int:
    """The batch that next() hands out."""
    deliver = scheduler.handle(Wanted())[-1]
    assert isinstance(deliver, Deliver)
    assert deliver.answer is None or deliver.worker is not None
    return deliver.seq


def of(sends: Sequence[Instruction]) -> list[tuple[int | None, int, int]]:
    return [(send.worker, send.task.seq, send.task.attempt) for send in sends if isinstance(send, Send)]


def unanswered(scheduler: Scheduler) -> list[tuple[int, int]]:
    """(seq, attempt) of the tasks of this epoch that are to be answered."""
    outstanding = sorted(scheduler.pending_tasks.items())
    return [(seq, batch.attempt) for (epoch, seq), batch in outstanding if epoch == scheduler.epoch]


def test_every_epoch_sends_a_window_in_turns_from_the_first_worker() -> None:
    scheduler, sends = started(workers=3, length=5)
    assert of(sends) == [(0, 0, 0), (1, 1, 0), (2, 2, 0), (0, 3, 0), (1, 4, 0)]
    assert of(begin(scheduler)) == [*of(sends), (2, 5, 0)]


def test_a_batch_that_came_early_waits_for_the_ones_before_it() -> None:
    scheduler, sends = started()
    scheduler.handle(answer(sends[1]))
    assert scheduler.handle(Wanted()) == [Wait(0, 0, 1)]
    scheduler.handle(answer(sends[0]))
    assert list(map(type, scheduler.handle(Wanted()))) == [Draw, Deliver], "torch draws first"
    assert delivered(scheduler) == 1


def test_without_order_batches_are_handed_out_as_they_come_and_fast_workers_take_more() -> None:
    """torch: a worker takes at most window // active workers; the turn passes to the next one."""
    scheduler, sends = started(in_order=False)
    scheduler.handle(answer(sends[3]))
    assert delivered(scheduler) == 3
    assert of(scheduler.handle(Drawn(4))) == [(1, 4, 0)]


def test_a_worker_whose_part_ended_gives_its_turn_away() -> None:
    scheduler, sends = started()
    scheduler.handle(answer(sends[0], ENDED))
    assert scheduler.handle(Wanted()) == [Draw(1)]
    assert of(scheduler.handle(Drawn(4))) == [(1, 4, 0)]
    scheduler.handle(answer(sends[2], SKIPPED))
    scheduler.handle(answer(sends[1]))
    assert delivered(scheduler) == 1


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
    assert scheduler.handle(Wanted()) == [Draw(1)]
    scheduler.handle(Died(0))
    scheduler.handle(answer(sends[1]))
    assert isinstance(scheduler.handle(Wanted())[-1], Deliver)
    assert scheduler.handle(Wanted()) == [Finish()]


def test_the_end_of_a_workers_part_may_be_processed_after_its_death() -> None:
    """And in the next epoch it is dead, and no longer excused."""
    scheduler, sends = started(prefetch=1, length=2)
    scheduler.handle(answer(sends[0], ENDED))
    scheduler.handle(Died(0))
    scheduler.check()
    assert scheduler.handle(Wanted()) == [Draw(1)]
    scheduler.handle(answer(sends[1]))
    assert delivered(scheduler) == 1
    assert scheduler.handle(Wanted()) == [Finish()]
    begin(scheduler)
    assert scheduler.handle(Wanted()) == [Break(0, 0, 0)]


def test_what_a_worker_skipped_after_its_end_is_passed_over() -> None:
    scheduler, sends = started()
    scheduler.handle(answer(sends[0], ENDED))
    scheduler.handle(answer(sends[2], SKIPPED))
    scheduler.handle(answer(sends[1]))
    scheduler.handle(answer(sends[3]))
    assert scheduler.handle(Wanted()) == [Draw(1)]
    assert [delivered(scheduler), delivered(scheduler)] == [1, 3]
    scheduler.check()
    assert scheduler.undelivered == 0
    assert scheduler.handle(Wanted()) == [Finish()]


def test_an_exhausted_worker_may_die_before_it_has_said_what_it_skipped() -> None:
    scheduler, sends = started(length=4)
    scheduler.handle(answer(sends[0], ENDED))
    scheduler.handle(answer(sends[1]))
    assert scheduler.handle(Wanted()) == [Draw(1)]
    assert delivered(scheduler) == 1
    assert scheduler.handle(Wanted()) == [Wait(1, 3, 0)]  # past batch 2, which will never come
    assert scheduler.handle(Died(0)) == []
    scheduler.check()
    scheduler.handle(answer(sends[3]))
    assert delivered(scheduler) == 3
    assert scheduler.handle(Wanted()) == [Finish()]


def test_answers_of_an_abandoned_epoch_are_counted_and_dropped() -> None:
    scheduler, sends = started(workers=1, prefetch=1)
    scheduler.handle(EpochStarted(2))
    block = (0, size_class(100_000))
    late = Answer(1, sends[0].task.seq, 0, BATCH, 0, 0, (block,), (), None, ((0, 100_000),))
    scheduler.handle(Arrived(0, late))
    assert scheduler.stale == 1
    assert states(scheduler) == {0: "free"}
    (send,) = scheduler.handle(Drawn(0))
    assert isinstance(send, Send)
    assert send.task.grants == (block,)


def test_an_answer_that_is_not_due_is_a_defect() -> None:
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


# ---- any other window -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("in_order", [True, False])
def test_no_index_is_lost_in_a_window_that_is_no_multiple_of_the_workers(size: int, in_order: bool) -> None:
    scheduler, sends = started(workers=3, in_order=in_order, window=Window(size))
    assert [send.task.index for send in sends] == list(range(size))
    for index in range(size, 30):
        scheduler.handle(answer(sends.pop(0)))
        sends += draw(scheduler, scheduler.handle(Wanted()), [index])
        assert sends[-1].task.index == index


@pytest.mark.parametrize("in_order", [True, False])
def test_without_order_a_worker_has_no_more_than_its_part_of_torchs_window(in_order: bool) -> None:
    """The part is rounded down when others have nothing left to read, as in torch."""
    scheduler, sends = started(workers=3, prefetch=1, in_order=in_order)
    scheduler.handle(answer(sends[0], ENDED))
    assert scheduler.handle(Wanted()) == [Draw(1)]
    assert of(scheduler.handle(Drawn(3))) == ([(1, 3, 0)] if in_order else [])


def test_new_blocks_that_the_batch_does_not_use_are_heard_of() -> None:
    scheduler, sends = started()
    event = answer(sends[0], nbytes=100_000)
    scheduler.handle(event._replace(answer=event.answer._replace(used=())))
    assert states(scheduler) == {0: "granted"}


def grown(least: int = 2, widest: int = 8, budget: int = 1 << 30) -> tuple[Scheduler, list[Send], int]:
    """A scheduler whose next batch is late; its tasks, all but one of them answered, and how many that
    are."""
    scheduler, sends = started(workers=2, shared_tasks=True, window=Window(least, widest, budget))
    done = 1
    while done < len(sends):
        scheduler.handle(answer(sends[done], worker=1))
        done += 1
        assert scheduler.handle(Wanted()) == [Wait(None, 0, done - 1)]
        sends += draw(scheduler, scheduler.handle(Idle()), range(len(sends), 100))
        scheduler.check()
    return scheduler, sends, done


def test_a_window_grows_while_the_next_batch_is_late() -> None:
    scheduler, sends, done = grown()
    assert done == len(sends) == scheduler.window.size == 8


def test_a_window_that_was_full_of_unanswered_tasks_grows_when_they_were_answered() -> None:
    scheduler, sends = started(workers=2, prefetch=1, shared_tasks=True, window=Window(2, 8, 1 << 30))
    scheduler.handle(Wanted())
    assert scheduler.handle(Idle()) == []
    scheduler.handle(answer(sends[1], worker=1))
    scheduler.handle(Wanted())
    assert scheduler.handle(Idle()) == [Draw(1)]


def test_a_window_stays_within_its_budget() -> None:
    scheduler, sends = started(workers=2, shared_tasks=True, window=Window(2, 64, 5 * size_class(100_000)))
    scheduler.handle(answer(sends[1], worker=1, nbytes=100_000))
    for seq in range(2, 20):
        scheduler.handle(Wanted())
        sends += draw(scheduler, scheduler.handle(Idle()), range(len(sends), 100))
        if seq < len(sends):
            block = seq * size_class(100_000)
            scheduler.handle(answer(sends[seq], worker=1, nbytes=100_000, at=block))
    assert len(sends) == scheduler.window.size == 5


def test_a_sampler_that_has_nothing_more_is_not_asked_again_and_again() -> None:
    scheduler, sends = started(workers=2, length=2, shared_tasks=True, window=Window(2, 8, 1 << 30))
    scheduler.handle(answer(sends[1], worker=1))
    scheduler.handle(Wanted())
    assert scheduler.handle(Idle()) == [Draw(1)]
    scheduler.handle(Exhausted())
    assert scheduler.handle(Wanted()) == [Wait(None, 0, 1)]
    assert scheduler.handle(Idle()) == []
    scheduler.handle(answer(sends[0], worker=1))
    for seq in range(2):
        (deliver,) = scheduler.handle(Wanted())
        assert isinstance(deliver, Deliver)
        assert deliver.seq == seq
    draws = scheduler.handle(EpochStarted(2))
    assert draws == [Draw(scheduler.window.size)], "there is a new sampler"
    draw(scheduler, draws, range(2))
    scheduler.handle(Arrived(0, Answer(2, 0, 0, BATCH, 0, 0, (), (), None)))
    assert Draw in map(type, scheduler.handle(Wanted()))


def test_a_window_shrinks_when_batches_are_not_late_any_more() -> None:
    scheduler, sends, _ = grown()
    scheduler.handle(answer(sends[0], worker=0))
    under_way = []
    for seq in range(200):
        instructions = scheduler.handle(Wanted())
        assert isinstance(instructions[-1], Deliver)
        assert instructions[-1].seq == seq
        for send in draw(scheduler, instructions, [seq]):
            scheduler.handle(answer(send, worker=0))
        under_way.append(scheduler.undelivered)
        scheduler.check()
    assert under_way[0] == 8
    assert under_way[-1] == scheduler.window.size == 2
    assert under_way == sorted(under_way, reverse=True)


def test_a_window_that_has_just_shrunk_does_not_grow_past_its_widest() -> None:
    """What is under way is more than the window then: it counts from there."""
    scheduler, sends, _ = grown(least=4, widest=16)
    scheduler.handle(answer(sends[0], worker=0))
    seq = 0
    while scheduler.window.size == 16:
        for send in draw(scheduler, scheduler.handle(Wanted()), range(100)):
            if send.task.seq != 64:  # four windows
                scheduler.handle(answer(send, worker=0))
        seq += 1
    assert (seq, scheduler.window.size, scheduler.undelivered) == (64, 13, 15)
    assert scheduler.handle(Wanted()) == [Wait(None, 64, 14)]
    assert scheduler.handle(Idle()) == [Draw(1)]


# ---- claims -----------------------------------------------------------------------------------------


def test_a_shared_task_is_sent_to_all_and_answered_by_one() -> None:
    scheduler, sends = started(shared_tasks=True)
    assert of(sends) == [(None, seq, 0) for seq in range(4)]
    assert unanswered(scheduler) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    scheduler.handle(answer(sends[0], worker=1))
    with pytest.raises(InvalidTransition, match="does not owe"):
        scheduler.handle(answer(sends[0], worker=0))
    assert unanswered(scheduler) == [(1, 0), (2, 0), (3, 0)]
    assert delivered(scheduler) == 0


def test_every_attempt_has_a_ticket_of_its_own() -> None:
    scheduler, sends = started(shared_tasks=True, length=3, restarts=3)
    again = [send for send in scheduler.handle(Died(0, 1)) if isinstance(send, Send)]
    assert [send.task.ticket for send in again[:-1]] == [sends[0].task.ticket, sends[2].task.ticket], (
        "they were sent already"
    )
    later = begin(scheduler, 4)
    tickets = [send.task.ticket for send in [*sends, again[-1], *later]]
    assert len(set(tickets)) == 8


def test_what_a_dead_worker_had_claimed_of_an_old_epoch_is_let_go() -> None:
    """It was stopped in the middle of the claim, so it was not known that it would have it."""
    scheduler, send, block = granted(restarts=1)
    begin(scheduler, length=0)
    assert scheduler.pending_tasks.tickets() == [send.task.ticket]
    assert scheduler.handle(Died(1, None, "died", frozenset([send.task.ticket]))) == [
        Replace(1, None, "died")
    ]
    assert scheduler.pending_tasks.tickets() == []
    assert states(scheduler) == {block: "free"}


def granted(**keywords: Any) -> tuple[Scheduler, Send, int]:
    """A scheduler with a task under way that was granted a block, at the returned offset."""
    scheduler, sends = started(workers=2, prefetch=1, shared_tasks=True, **keywords)
    scheduler.handle(answer(sends[0], worker=0, nbytes=100_000))
    instructions = scheduler.handle(Wanted())
    scheduler.pool.drop([0])
    (send,) = draw(scheduler, instructions, [2])
    assert send.task.grants == ((0, size_class(100_000)),)
    scheduler.handle(answer(sends[1], worker=0))
    delivered(scheduler)
    return scheduler, send, 0


def used_grant(send: Send, worker: int) -> Arrived:
    ((offset, _),) = send.task.grants
    return Arrived(worker, answer(send, worker=worker).answer._replace(used=((offset, 1),)))


def test_an_unclaimed_task_is_taken_back_with_its_blocks() -> None:
    scheduler, send, block = granted()
    begin(scheduler, length=0, taken_back=frozenset([send.task.ticket]))
    assert states(scheduler) == {block: "free"}
    with pytest.raises(InvalidTransition, match="does not owe"):
        scheduler.handle(used_grant(send, 0))


def test_a_task_of_an_older_epoch_is_its_claimants_and_its_blocks_too() -> None:
    scheduler, send, block = granted()
    begin(scheduler, length=0, claimed={send.task.ticket: 1})
    with pytest.raises(InvalidTransition, match="does not owe"):
        scheduler.handle(used_grant(send, 0))
    assert scheduler.handle(Died(0)) == []
    assert states(scheduler) == {block: "granted"}
    scheduler.handle(used_grant(send, 1))
    assert scheduler.stale == 1
    assert states(scheduler) == {block: "free"}


def test_the_blocks_of_an_older_epochs_task_go_with_the_worker_that_claimed_it() -> None:
    scheduler, send, block = granted(restarts=1)
    begin(scheduler, length=0, claimed={send.task.ticket: 1})
    assert scheduler.handle(Died(1)) == [Replace(1, None, "died")]
    assert states(scheduler) == {block: "free"}


def test_which_worker_has_a_task_of_an_older_epoch_may_be_unknown_until_it_answers() -> None:
    scheduler, send, block = granted()
    begin(scheduler)
    scheduler.handle(used_grant(send, 1))
    assert scheduler.stale == 1
    assert states(scheduler) == {block: "free"}


# ---- deaths with restarts ---------------------------------------------------------------------------


def test_a_dead_workers_batches_are_sent_again_in_their_order() -> None:
    scheduler, sends = started(restarts=1)
    scheduler.handle(answer(sends[1]))
    instructions = scheduler.handle(Died(0, 0))
    assert instructions[0] == Replace(0, 0, "died")
    assert of(instructions) == [(0, 0, 1), (0, 2, 1)]
    assert unanswered(scheduler) == [(0, 1), (2, 1), (3, 0)]
    assert scheduler.handle(Wanted()) == [Wait(0, 0, 1, attempt=1)]
    scheduler.check()
    for send in instructions[1:]:
        assert isinstance(send, Send)
        scheduler.handle(answer(send))
    assert [delivered(scheduler) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("begun", [True, False])
def test_of_shared_tasks_only_those_that_the_dead_worker_had_are_sent_again(begun: bool) -> None:
    """It may have claimed its next task while its last answer was still in its socket."""
    scheduler, sends = started(shared_tasks=True, restarts=1)
    scheduler.handle(answer(sends[0], worker=1))
    died = Died(1, 2) if begun else Died(1, None, "died", frozenset([sends[2].task.ticket]))
    instructions = scheduler.handle(died)
    assert instructions[0] == Replace(1, died.seq, "died")
    assert of(instructions) == [(1, 1, 0), (1, 3, 0), (None, 2, 1)]
    assert unanswered(scheduler) == [(1, 0), (2, 1), (3, 0)]


def test_a_task_that_is_sent_again_has_blocks_anew() -> None:
    scheduler, send, _ = granted(restarts=1)
    *_, again = scheduler.handle(Died(1, send.task.seq))
    assert isinstance(again, Send)
    assert (again.task.seq, again.task.attempt, again.task.grants) == (send.task.seq, 1, send.task.grants)
    scheduler.handle(used_grant(again, 0))
    scheduler.check()


def test_restarts_are_counted_and_every_epoch_has_its_own() -> None:
    scheduler, _ = started(restarts=1, length=0)
    assert scheduler.can_replace
    assert scheduler.handle(Died(0)) == [Replace(0, None, "died")]
    assert not scheduler.can_replace
    begin(scheduler)
    assert scheduler.can_replace
    scheduler.handle(Died(0, 0))
    assert scheduler.handle(Died(0, 0)) == []
    assert scheduler.handle(Wanted()) == [Break(0, 0, 0)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
def test_a_batch_of_which_three_workers_died_fails_at_its_position(shared: bool, in_order: bool) -> None:
    scheduler, sends = started(shared_tasks=shared, in_order=in_order, restarts=5)
    for deaths in (1, 2, 3):
        instructions = scheduler.handle(Died(1, 1, f"died for the {deaths}. time"))
        again = {(seq, attempt) for _, seq, attempt in of(instructions)}
        assert ((1, deaths) in again) == (deaths < 3)
        assert (3, 0 if shared else deaths) in again, "the others go on"
    scheduler.check()
    assert 1 not in dict(unanswered(scheduler))
    scheduler.handle(answer(sends[0], worker=0))
    outcomes = [scheduler.handle(Wanted())[-1] for _ in range(2)]
    error = next(outcome.error for outcome in outcomes if isinstance(outcome, Deliver) and outcome.seq == 1)
    assert isinstance(error, PoisonousBatch)
    assert str(error) == (
        "batch 1 (indices 1) was given up: 3 workers died of it, and the last died for the 3. time"
    )
    if in_order:
        assert [outcome.seq for outcome in outcomes if isinstance(outcome, Deliver)] == [0, 1]


def test_three_deaths_at_three_batches_poison_none() -> None:
    scheduler, _ = started(workers=1, prefetch=3, restarts=3)
    for seq in range(3):
        instructions = scheduler.handle(Died(0, seq))
        assert of(instructions) == [(0, lost, seq + 1) for lost in range(3)]


# ---- deaths without restarts ------------------------------------------------------------------------


def test_the_death_of_a_worker_that_has_answered_everything_costs_nothing() -> None:
    scheduler, sends = started(prefetch=1, length=2)
    scheduler.handle(answer(sends[1]))
    scheduler.handle(Died(1))
    assert scheduler.handle(Wanted()) == [Wait(0, 0, 1)]


def test_an_idle_workers_death_is_reported_when_there_is_nothing_else_to_do() -> None:
    scheduler, sends = started(shared_tasks=True)
    assert scheduler.handle(Died(1)) == []
    scheduler.handle(answer(sends[0], worker=0))
    assert delivered(scheduler) == 0
    assert scheduler.handle(Wanted()) == [Break(1, None, None)]


def test_a_death_is_reported_at_the_claimed_batch_that_was_lost() -> None:
    scheduler, sends = started(shared_tasks=True)
    assert scheduler.handle(Died(1, 1)) == []
    scheduler.handle(answer(sends[2], worker=0))
    scheduler.handle(answer(sends[0], worker=0))
    assert delivered(scheduler) == 0
    assert scheduler.handle(Wanted()) == [Break(1, 1, 1)]


def test_when_the_last_worker_is_dead_no_task_is_left() -> None:
    scheduler, sends = started(shared_tasks=True)
    scheduler.handle(Died(1))
    scheduler.handle(answer(sends[0], worker=0))
    scheduler.handle(Died(0, 3))
    scheduler.check()
    assert unanswered(scheduler) == []
    assert delivered(scheduler) == 0
    assert scheduler.handle(Drawn(4)) == []
    assert scheduler.handle(Wanted()) == [Break(0, 1, 1)]


@pytest.mark.parametrize("lost", [0, 1, None])
def test_out_of_order_a_death_is_reported_when_it_is_heard_of(lost: int | None) -> None:
    """Neither before what came earlier, nor only when nothing else is left."""
    scheduler, sends = started(shared_tasks=True, in_order=False)
    scheduler.handle(answer(sends[3], worker=0))
    scheduler.handle(Died(1, lost))
    assert delivered(scheduler) == 3
    assert scheduler.handle(Wanted()) == [Break(1, lost, lost)]


def test_a_task_that_could_not_be_sent_gives_its_blocks_back() -> None:
    scheduler, sends = started(workers=2, prefetch=1, shared_tasks=True)
    scheduler.handle(answer(sends[0], worker=0, nbytes=100_000))
    instructions = scheduler.handle(Wanted())
    scheduler.pool.drop([0])
    (send,) = draw(scheduler, instructions, [2])
    scheduler.handle(Undeliverable(send, TypeError("a lambda")))
    assert states(scheduler) == {0: "free"}
    scheduler.handle(answer(sends[1], worker=0))
    assert delivered(scheduler) == 1
    deliver = scheduler.handle(Wanted())[-1]
    assert isinstance(deliver, Deliver)
    assert isinstance(deliver.error, TypeError)


@pytest.mark.parametrize("in_order", [True, False])
def test_the_next_batches_that_have_come_are_known_beforehand(in_order: bool) -> None:
    scheduler, sends = started(in_order=in_order)
    arrived = [answer(send) for send in sends[1:3]]
    for event in arrived:
        scheduler.handle(event)
    assert scheduler.upcoming(9) == [event.answer for event in arrived]
    scheduler.handle(Wanted())  # without order this hands the first one out
    assert scheduler.upcoming(9) == [event.answer for event in arrived[not in_order :]]
    assert scheduler.upcoming(2) == [arrived[not in_order].answer]
