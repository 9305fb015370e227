"""What is in flight, and whose turn it is. See `scheduler_machine` too."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.consumer.deaths import Timeout
from tests.support.thorough import examples

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
