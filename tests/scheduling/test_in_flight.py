"""What is in flight, whose turn it is, and what a busy worker has to read. See `scheduler_machine` too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.consumer.deaths import Timeout
from fastq_loader.scheduling.backlog import BroadcastFlowControl
from fastq_loader.scheduling.in_flight import InOrder, PendingTasks
from fastq_loader.scheduling.states import Batch, WorkerTable
from tests.support.thorough import examples

STEPS = st.lists(st.integers(-2, 12) | st.none(), max_size=60)  # relative to the head; None: one is taken


@examples(200)
@given(st.integers(1, 9), STEPS)
def test_the_ring_behaves_like_a_dict(capacity: int, steps: list[int | None]) -> None:
    ring = InOrder(capacity)
    model: dict[int, Batch] = {}
    head = 0
    for relative in steps:
        if relative is None:
            assert ring.take() is model.get(head)
            head += model.pop(head, None) is not None
            continue
        batch = Batch(head + relative, 0, None)
        if not 0 <= relative < capacity or batch.seq in model:
            with pytest.raises(ValueError, match=f"seq={batch.seq} "):
                ring.add(batch)
        else:
            ring.add(batch)
            model[batch.seq] = batch
        assert (ring.head, ring.filled) == (head, len(model))


def outstanding(*workers: int | None, slots: int = 100) -> tuple[PendingTasks, list[Batch]]:
    tasks, batches = PendingTasks(slots), [Batch(seq, worker, None) for seq, worker in enumerate(workers)]
    for batch in batches:
        tasks.add(1, batch)
    return tasks, batches


def turns(table: WorkerTable, count: int, share_of: int | None = None) -> list[int | None]:
    return [table.take_turn(share_of) for _ in range(count)]


@examples(100)
@given(st.integers(1, 5), st.integers(1, 20), st.sets(st.integers(0, 4)))
def test_no_worker_has_more_than_its_share_of_a_window(workers: int, window: int, ended: set[int]) -> None:
    table = WorkerTable(workers)
    ended = {worker for worker in ended if worker < workers - 1}
    for worker in ended:
        table.move(worker, "end")
    going = workers - len(ended)
    exact = window % workers == 0  # torch's
    taken = [worker for worker in turns(table, 3 * window + 3, window) if worker is not None]
    share = window // going if exact else -(-window // going)
    assert sorted(taken) == sorted(share * [worker for worker in range(workers) if worker not in ended])
    assert exact or len(taken) >= window, "an index would be lost"
    for worker in set(taken):
        table.deliver_one(worker)
        assert table._undelivered[worker] == share - 1
        assert turns(table, 2, window) == [worker, None]


class Pool:
    """Workers that read nothing by themselves; messages are tickets, epochs are negative, a ping is None."""

    def __init__(self, workers: int, limit: int) -> None:
        self.offered: set[int] = set()
        self.backlog: BroadcastFlowControl[int] = BroadcastFlowControl(limit)
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


EVENTS = st.sampled_from(["offer", "claim", "read", "epoch", "look", "restart"])


@examples(200)
@given(st.integers(1, 3), st.integers(1, 6), st.lists(st.tuples(EVENTS, st.integers(0, 5)), max_size=80))
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


@examples(100)
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
