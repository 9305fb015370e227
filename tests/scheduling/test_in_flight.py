"""The reorder ring, against a dict that does the same without a bound."""

from __future__ import annotations

from typing import Any

import pytest
from fastq_loader.scheduling.ring import ReorderRing
from hypothesis import given, settings
from hypothesis import strategies as st

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(-2, 12)),  # relative to the head
        st.tuples(st.sampled_from(("pop", "skip", "drain")), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9), STEPS)
def test_it_behaves_like_a_dict(capacity: int, steps: list[tuple[str, int]]) -> None:
    ring: ReorderRing[Any] = ReorderRing(capacity)
    model: dict[int, Any] = {}
    head = 0
    for number, (step, relative) in enumerate(steps):
        if step == "push":
            seq = head + relative
            if 0 <= relative < capacity and seq not in model:
                ring.push(seq, number)
                model[seq] = number
            else:
                with pytest.raises(ValueError, match=f"seq={seq}"):
                    ring.push(seq, -1)
        elif step == "pop":
            if head in model:
                assert ring.pop_ready() == model.pop(head)
                head += 1
            else:
                with pytest.raises(LookupError, match=f"seq={head}"):
                    ring.pop_ready()
        elif step == "skip":
            if head in model:
                with pytest.raises(ValueError, match=f"seq={head}"):
                    ring.skip()
            else:
                ring.skip()
                head += 1
        else:
            assert sorted(ring.drain()) == sorted(model.values())
            model.clear()
        assert ring.head == head
        assert len(ring) == len(model)
        assert ring.ready() == (head in model)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 6), st.integers(0, 30))
def test_any_order_within_the_window_leaves_in_order(data: st.DataObject, capacity: int, total: int) -> None:
    ring: ReorderRing[int] = ReorderRing(capacity)
    waiting: list[int] = []
    asked = 0
    left: list[int] = []
    while len(left) < total:
        while asked < min(total, ring.head + capacity):
            waiting.append(asked)
            asked += 1
        seq = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        ring.push(seq, seq)
        while ring.ready():
            left.append(ring.pop_ready())
    assert left == list(range(total))
    assert len(ring) == 0


@pytest.mark.parametrize("item", [None, False, 0, (), ""])
def test_items_that_count_as_false_are_items(item: Any) -> None:
    ring: ReorderRing[Any] = ReorderRing(2)
    ring.push(0, item)
    assert ring.ready()
    with pytest.raises(ValueError, match="in the ring"):
        ring.push(0, item)
    assert ring.pop_ready() is item
    assert ring.drain() == []


def test_draining_keeps_the_head_and_frees_the_slots() -> None:
    ring: ReorderRing[str] = ReorderRing(3)
    ring.push(0, "zero")
    ring.pop_ready()
    ring.push(2, "two")
    ring.push(3, "three")
    assert set(ring.drain()) == {"two", "three"}
    assert (ring.head, len(ring), ring.ready()) == (1, 0, False)
    for seq in (1, 2, 3):
        ring.push(seq, str(seq))
    assert [ring.pop_ready() for _ in range(3)] == ["1", "2", "3"]


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_ring_has_a_slot_at_least(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity={capacity}"):
        ReorderRing(capacity)
