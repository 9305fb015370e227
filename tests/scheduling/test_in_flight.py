"""What is in flight, whose turn it is, and what a busy worker has to read. See `scheduler_machine` too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.consumer.deaths import Timeout
from fastq_loader.errors import InvalidTransition
from fastq_loader.scheduling.backlog import BroadcastFlowControl
from fastq_loader.scheduling.in_flight import InFlight, InOrder, PendingTasks
from fastq_loader.scheduling.progress import START, Progress, WorkerProgress
from fastq_loader.scheduling.states import Batch, WorkerTable
from tests.support.invariants import check_tasks
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


def test_the_lowest_batch_that_was_lost_with_a_worker() -> None:
    in_flight = InFlight()
    for worker in (1, 0, 1, 0):
        in_flight.new(worker, None).move("send")
    for seq in (1, 3, 2):
        in_flight.batches[seq].move("die")
    batches = in_flight.batches
    assert [in_flight.lost_by(worker) for worker in range(3)] == [batches[1], batches[2], None]
    with pytest.raises(InvalidTransition, match="a batch is lost: event 'deliver' is not allowed"):
        batches[1].move("deliver")


def outstanding(*workers: int | None, slots: int = 100) -> tuple[PendingTasks, list[Batch]]:
    tasks, batches = PendingTasks(slots), [Batch(seq, worker, None) for seq, worker in enumerate(workers)]
    for batch in batches:
        tasks.add(1, batch)
    return tasks, batches


@pytest.mark.parametrize(
    ("tasks", "workers", "idle"),
    [
        ((), 0, False),
        ((), 1, True),
        ((0, 0, 0), 2, True),
        ((0, 1, 0), 2, False),
        ((None, None), 3, True),
        ((None, None), 2, False),
        ((None, 1), 2, False),  # one is known to be claimed
        ((1, 1, None), 3, True),
    ],
)
def test_with_few_tasks_workers_are_idle(tasks: tuple[int | None, ...], workers: int, idle: bool) -> None:
    assert outstanding(*tasks)[0].has_idle_worker(workers) is idle


@examples(100)
@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=40))
def test_no_two_shared_tasks_have_a_slot_in_common(slots: int, steps: list[int]) -> None:
    """However late the batch of an epoch is: the numbers that come round go past it."""
    tasks, waiting, tickets = PendingTasks(slots), list[Batch](), set[int]()
    for epoch, step in enumerate(steps):
        if len(waiting) == slots:
            with pytest.raises(AssertionError, match="narrower than the claim table"):
                tasks.add(epoch, Batch(0, None, None))
            batch = waiting.pop(step % slots)
            key = next(key for key, other in tasks.items() if other is batch)
            if step % 2:
                tasks.settle(*key)
            else:
                tasks.release_slot(batch)
                batch.worker = 0
        waiting.append(Batch(0, None, None))
        tasks.add(epoch, waiting[-1])
        assert waiting[-1].ticket not in tickets | {0}
        tickets.add(waiting[-1].ticket)
        check_tasks(tasks)
        assert tasks.tickets() == [batch.ticket for batch in tasks.values() if batch.worker is None]
    for key in list(tasks):
        tasks.settle(*key)
    check_tasks(tasks)
    assert not tasks


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


def test_a_dead_worker_keeps_its_turns_and_an_ended_one_does_not() -> None:
    table = WorkerTable(2)
    assert not table.is_dead(0)
    assert not table.is_dead(None)
    table.move(0, "die")
    assert (table.is_dead(0), table.is_dead(1), table.is_dead(None)) == (True, False, False)
    assert turns(table, 2) == [0, 1]
    table.move(0, "end")
    assert turns(table, 2) == [1, 1]
    assert table.is_dead(0)
    assert table.exhausted(0)
    table.begin_epoch()
    assert table.is_dead(0)
    assert not table.exhausted(0)
    table.move(1, "die")
    assert table.is_dead(None)
    table.move(0, "replace")
    assert not table.is_dead(0)
    with pytest.raises(InvalidTransition, match="a worker is active: event 'replace' is not allowed"):
        table.move(0, "replace")


@examples(100)
@given(st.permutations(range(12)), st.integers(0, 12))
def test_every_position_counts_once_in_whatever_order_they_come(order: list[int], come: int) -> None:
    progress = START
    for position in order[:come]:
        progress = progress.after(position)
    handed_out = set(order[:come])
    head = next(position for position in range(13) if position not in handed_out)
    assert progress.delivered == come
    assert progress.head == head
    assert progress.beyond == {position for position in handed_out if position > head}


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from((b"", b"a", b"b"))), max_size=10))
def test_each_worker_is_counted_and_its_last_word_kept(batches: list[tuple[int, bytes]]) -> None:
    progress = Progress(workers=(WorkerProgress(),) * 3)
    for worker, state in batches:
        progress = progress.after_worker(worker, state, None)
    assert progress.delivered == len(batches)
    for number, worker in enumerate(progress.workers):
        said = [state for at, state in batches if at == number]
        assert worker.delivered == len(said)
        assert worker.state == next((state for state in reversed(said) if state), b"")


def test_a_worker_of_a_dataset_with_indices_moves_both_counts() -> None:
    progress = Progress(workers=(WorkerProgress(),) * 2).after_worker(1, b"x", 1)
    assert progress == Progress(1, frozenset({1}), (WorkerProgress(), WorkerProgress(1, b"x")))


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
@given(HEADS, st.sampled_from([(0, False), (0, True), (5, False)]))
def test_torchs_timeout_is_of_a_message(heads: list[tuple[int, int, int]], options: tuple[int, bool]) -> None:
    patience = Timeout(*options)
    assert {patience.seconds(*head) for head in heads} <= {options[0] or None}


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


def test_numbers_that_were_handed_out_before_the_epoch_was_resumed_are_passed_over() -> None:
    in_flight = InFlight(1, frozenset({2, 3}))
    assert [in_flight.new(0, None).seq for _ in range(2)] == [1, 4]
