"""What a busy worker has to read is bounded, and how long the consumer waits. See `scheduler_machine` too."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.consumer.deaths import Timeout
from fastq_loader.scheduling.backlog import Backlog


class Pool:
    """Workers that read nothing by themselves; messages are tickets, epochs are negative, a ping is None."""

    def __init__(self, workers: int, limit: int) -> None:
        self.offered: set[int] = set()
        self.backlog: Backlog[int] = Backlog(limit)
        self.queues: dict[int, list[int | None]] = {}
        for worker in range(workers):
            self.start(worker)

    def start(self, worker: int) -> None:
        self.backlog.begin(worker)
        self.queues[worker] = []

    def die(self, worker: int) -> None:
        self.backlog.end(worker)
        del self.queues[worker]

    def _to_all(self, messages: list[int], due: list[int]) -> None:
        for worker, queue in self.queues.items():
            if worker not in self.backlog.behind:
                queue.extend(messages)
        self._ping(due)

    def _ping(self, due: list[int]) -> None:
        for worker in due:
            self.queues[worker].append(None)

    def offer(self, *tickets: int) -> None:
        self.offered.update(tickets)
        due = self.backlog.offer({ticket: ticket for ticket in tickets}, self.offered.__contains__)
        self._to_all(list(tickets), due)

    def announce(self, epoch: int) -> None:
        self._to_all([-epoch], self.backlog.announce(-epoch))

    def read(self, worker: int) -> list[int]:
        read, self.queues[worker] = self.queues[worker], []
        for message in read:
            if message is None:
                self.backlog.read(worker)
        return [message for message in read if message is not None]

    def catch_up(self) -> None:
        sends, due = self.backlog.catch_up(self.offered.__contains__)
        for worker, messages in sends.items():
            self.queues[worker].extend(messages)
        self._ping(due)


def test_a_busy_workers_queue_is_bounded_and_it_is_sent_what_is_left() -> None:
    pool = Pool(workers=2, limit=4)
    for ticket in range(1, 1000):
        pool.offer(ticket)
        pool.read(1)
        if ticket != 700:
            pool.offered.discard(ticket)  # worker 1 has it
        pool.catch_up()
        assert len(pool.queues[0]) <= 4 + 4 + 1
    assert pool.backlog.behind == {0}
    assert pool.read(0) == list(range(1, 9))
    pool.catch_up()
    assert not pool.backlog.behind
    assert pool.read(0) == [700]
    pool.offer(1000)
    assert pool.read(0) == pool.read(1) == [1000]


def test_what_was_missed_is_kept_as_long_as_it_is_on_offer_and_no_longer() -> None:
    pool = Pool(workers=1, limit=2)
    for ticket in range(1, 500):
        pool.offer(ticket)
        pool.offered.discard(ticket - 3)
        assert len(pool.backlog._missed) <= 2 * 2 + 3
    pool.read(0)
    pool.catch_up()
    assert pool.read(0) == [497, 498, 499]
    assert not pool.backlog._missed


def test_a_worker_that_was_passed_over_is_told_the_epoch_first_and_only_the_last_one() -> None:
    pool = Pool(workers=1, limit=2)
    for ticket in range(1, 6):
        pool.offer(ticket)
    for epoch in range(2, 100):
        pool.offered.clear()  # they were taken back
        pool.announce(epoch)
        pool.offer(10 * epoch)
    assert len(pool.queues[0]) <= 2 + 2 + 1
    pool.read(0)
    pool.catch_up()
    assert pool.read(0) == [-99, 990]
    pool.offer(1000)
    assert pool.read(0) == [1000]


@pytest.mark.parametrize("window", [1, 5, 300])
def test_in_order_no_worker_is_passed_over_in_an_epoch(window: int) -> None:
    """The worker in the middle of batch `seq` has read what came before that, and gets a window at most."""
    for busy_from in range(window + 2):
        pool = Pool(workers=1, limit=window)
        pool.announce(1)
        for seq in range(busy_from):
            pool.offer(seq)
            pool.read(0)
        for seq in range(busy_from, busy_from + window):
            pool.offer(seq)
        assert not pool.backlog.behind


STEPS = st.sampled_from(["offer", "claim", "read", "epoch", "look", "restart"])


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 3), st.integers(1, 6), st.lists(st.tuples(STEPS, st.integers(0, 5)), max_size=80))
def test_each_worker_knows_the_tasks_or_asks(workers: int, limit: int, steps: list[tuple[str, int]]) -> None:
    pool, known, epoch, ticket = Pool(workers, limit), [set[int]() for _ in range(workers)], 1, 0
    pool.announce(1)
    for what, number in steps:
        worker = number % workers
        if what == "offer":
            new = range(ticket + 1, ticket + 2 + number)
            ticket = new[-1]
            pool.offer(*new)
        elif what == "claim" and pool.offered:
            pool.offered.remove(sorted(pool.offered)[number % len(pool.offered)])
        elif what == "read":
            known[worker] |= set(pool.read(worker))
        elif what == "epoch":
            pool.offered.clear()
            epoch += 1
            pool.announce(epoch)
        elif what == "look":
            pool.catch_up()
        elif what == "restart":  # the new one is told by whoever starts it
            pool.die(worker)
            pool.start(worker)
            known[worker] = pool.offered | {-epoch}
        for one, queue in pool.queues.items():
            if one in pool.backlog.behind:
                assert None in queue or one not in pool.backlog._pinged, "it waits for ever"
            else:
                assert pool.offered | {-epoch} <= known[one] | set(queue), "it was told nothing"
    for one in range(workers):
        known[one] |= set(pool.read(one))
    pool.catch_up()
    for one in range(workers):
        assert pool.offered | {-epoch} <= known[one] | set(pool.queues[one])


HEADS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 5)), max_size=30)


@given(HEADS, st.sampled_from([(0, False), (0, True), (5, False)]))
def test_torchs_timeout_is_of_a_message(heads: list[tuple[int, int, int]], options: tuple[int, bool]) -> None:
    patience = Timeout(*options)
    assert {patience.seconds(*head) for head in heads} <= {options[0] or None}


@given(HEADS, st.integers(1, 60))
def test_of_a_head_it_ends_at_a_fixed_moment(heads: list[tuple[int, int, int]], timeout: int) -> None:
    patience = Timeout(timeout, of_head=True)
    now, since, last = 0, 0, None
    for seq, attempt, later in heads:
        now += later
        if (seq, attempt) != last:
            last, since = (seq, attempt), now
        assert patience.seconds(seq, attempt, now) == max(since + timeout - now, 0)
    patience.forget()
    if last is not None:
        assert patience.seconds(*last, now + 1) == timeout


def test_a_consumer_that_was_stopped_gives_each_head_one_grace() -> None:
    patience = Timeout(1, of_head=True)
    for seq in (0, 1):
        patience.seconds(seq, 0, 5)
        assert patience.is_over(message=False)
        assert not patience.is_over(message=True)
        assert patience.is_over(message=True), "the same head again"
    patience.forget()
    assert not any(patience.is_over(message=True) for _ in range(2)), "no batch is waited for"
    each = Timeout(1, of_head=False)
    assert not any(each.is_over(message=True) for _ in range(3))
