"""What batches need, from the sizes of the recent ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.memory.ledger import EXPECTED, KINDS, PATIENCE, Demand

SIZES = st.lists(st.integers(1, 1000), max_size=4)


@settings(deadline=None, max_examples=100)
@given(st.lists(SIZES, min_size=1, max_size=KINDS, unique_by=lambda kind: tuple(sorted(kind))))
def test_a_task_gets_enough_for_any_recent_kind_of_batch(kinds: list[list[int]]) -> None:
    demand = Demand()
    for kind in kinds:
        demand.learn(kind)
    assert list(demand.wanted) == sorted(demand.wanted, reverse=True)
    assert demand.wanted_bytes == sum(demand.wanted)
    for kind in kinds:
        left = sorted(demand.wanted)
        for need in sorted(kind):
            fitting = [size for size in left if need <= size <= 2 * need]
            assert fitting, "a block of its own, at most twice as large"
            left.remove(fitting[0])


def test_a_kind_that_has_not_come_for_long_is_forgotten() -> None:
    demand = Demand()
    demand.learn([100])
    assert demand.cold() is None
    for demand.tasks in range(1, EXPECTED + 1):
        demand.learn([7])
    assert demand.cold() == EXPECTED - PATIENCE
    assert demand.wanted == (100, 7), "it came as many tasks ago as are waited for"
    demand.tasks += EXPECTED
    assert demand.cold() == 2 * EXPECTED - PATIENCE
    assert demand.wanted == (7,)
    assert demand.cold() is None, "it is asked again after some more tasks"
    demand.tasks += EXPECTED
    demand.cold()
    assert (demand.wanted, demand.batch_bytes) == ((), 0)


def test_the_oldest_of_many_kinds_gives_way() -> None:
    demand = Demand()
    for kind in range(KINDS + 1):
        demand.learn([10**kind, 3 * 10**kind])
    wanted = [size * 10**kind for kind in range(1, KINDS + 1) for size in (1, 3)]
    assert demand.wanted == tuple(reversed(wanted))


def test_the_bytes_of_a_batch_fade_slowly_from_their_maximum() -> None:
    demand = Demand()
    for kind, expected in (([600, 400], 1000), ([100], 990), ([200], 980.1), ([980, 1], 981)):
        demand.learn(kind)
        assert demand.batch_bytes == pytest.approx(expected)
