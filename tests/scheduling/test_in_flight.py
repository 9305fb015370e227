"""What is in flight, and whose turn it is. See `scheduler_machine` too."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.consumer.deaths import Timeout
from fastq_loader.scheduling.in_flight import AsTheyCome
from fastq_loader.scheduling.states import READY, WorkerTable
from tests.support.thorough import examples


def turns(in_flight: AsTheyCome, table: WorkerTable, count: int, window: int) -> list[int]:
    """Whose turns so many draws are; without those for which there was nobody."""
    taken = []
    for _ in range(count):
        if (worker := in_flight.turn(table, window)) is not None:
            in_flight.new(worker, None).state = READY
            taken.append(worker)
    return taken


@examples(100)
@given(st.integers(1, 5), st.integers(1, 20), st.sets(st.integers(0, 4)))
def test_no_worker_has_more_than_its_share_of_a_window(workers: int, window: int, ended: set[int]) -> None:
    table, in_flight = WorkerTable(workers), AsTheyCome()
    ended = {worker for worker in ended if worker < workers - 1}
    for worker in ended:
        table.move(worker, "end")
    going = workers - len(ended)
    exact = window % workers == 0  # torch's
    taken = turns(in_flight, table, 3 * window + 3, window)
    share = window // going if exact else -(-window // going)
    assert sorted(taken) == sorted(share * [worker for worker in range(workers) if worker not in ended])
    assert exact or len(taken) >= window, "an index would be lost"
    for batch in list(in_flight.batches.values())[: len(set(taken))]:
        in_flight.add(batch)
        assert in_flight.take() is batch
        assert turns(in_flight, table, 2, window) == [batch.worker]


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
    assert [each.seconds(0, 0, now) for now in (5, 6, 9)] == [1, 1, 1], "each wait has its own"
    assert not any(each.is_over(message=True) for _ in range(3))
