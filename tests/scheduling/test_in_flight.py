"""The reorder ring against a dict, and the batches of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.ipc.messages import BATCH, ERROR, Answer
from fastq_loader.scheduling.in_flight import InFlight, ReorderRing
from fastq_loader.scheduling.states import Batch

STEPS = st.lists(
    st.tuples(st.just("push"), st.integers(-2, 12))  # relative to the head
    | st.tuples(st.sampled_from(("pop", "skip", "clear")), st.just(0)),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9), STEPS)
def test_the_ring_behaves_like_a_dict(capacity: int, steps: list[tuple[str, int]]) -> None:
    ring: ReorderRing[Any] = ReorderRing(capacity)
    model: dict[int, Any] = {}
    head = 0
    for number, (step, relative) in enumerate(steps):
        number %= 3  # items that count as false are items too
        seq = head + relative
        if step == "push" and (not 0 <= relative < capacity or seq in model):
            with pytest.raises(ValueError, match=f"seq={seq} "):
                ring.push(seq, -1)
        elif step == "push":
            ring.push(seq, number)
            model[seq] = number
        elif step == "pop":
            assert ring.pop() == model.get(head)
            head += model.pop(head, None) is not None
        elif step == "skip" and head in model:
            with pytest.raises(ValueError, match=f"seq={head} "):
                ring.skip()
        elif step == "skip":
            ring.skip()
            head += 1
        else:
            ring.clear()
            model.clear()
        assert (ring.head, ring.filled) == (head, len(model))
        assert sorted(ring.items()) == sorted(model.values())


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_ring_has_at_least_one_slot(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity={capacity} "):
        ReorderRing(capacity)


def answer(seq: int, outcome: int = BATCH) -> Answer:
    return Answer(1, seq, 0, outcome, 0, 0, (), (), None)


def sent(*workers: int | None) -> InFlight:
    """Batches 0, 1, …, each sent to its worker."""
    in_flight = InFlight(len(workers))
    for worker in workers:
        in_flight.new(worker, f"index {in_flight.drawn}").move("send")
    return in_flight


def ready(in_flight: InFlight, seqs: Sequence[int]) -> None:
    for seq in seqs:
        batch = in_flight[seq]
        batch.move("answer")
        batch.answer = answer(seq, ERROR if seq == 3 else BATCH)
        in_flight.ring.push(seq, batch)


def test_a_batch_is_in_flight_from_its_draw_until_it_leaves() -> None:
    in_flight = sent(0, 1)
    assert (len(in_flight), in_flight.drawn, in_flight.head, in_flight.waiting) == (2, 2, 0, 0)
    assert [(batch.seq, batch.worker, batch.index) for batch in in_flight] == [
        (0, 0, "index 0"),
        (1, 1, "index 1"),
    ]
    ready(in_flight, [1])
    assert in_flight.waiting == 1
    assert in_flight.ring.pop() is None
    ready(in_flight, [0])
    for seq in (0, 1):
        batch = in_flight.ring.pop()
        assert batch is in_flight[seq]
        in_flight.leave(batch, "deliver")
        assert in_flight.get(seq) is None
    assert in_flight.head_batch(bool) is None
    assert (len(in_flight), in_flight.head) == (0, 2), "the next batch is not passed over"


def test_batches_that_will_never_come_are_passed_over() -> None:
    in_flight = sent(0, 1, 0, None, 1)
    in_flight.leave(in_flight[0], "end")
    ready(in_flight, [1, 4])

    def head() -> Batch | None:
        return in_flight.head_batch(exhausted={0}.__contains__)

    assert head() is in_flight[1]
    assert in_flight.ring.pop() is not None
    in_flight.leave(in_flight[1], "deliver")
    assert head() is in_flight[3], "any worker may claim it"
    assert [batch.seq for batch in in_flight] == [3, 4]
    in_flight.leave(in_flight[3], "end")
    assert in_flight.head_batch({0, 1}.__contains__) is in_flight[4], "it came before its worker's part ended"


def test_the_lowest_batch_that_was_lost_with_a_worker() -> None:
    in_flight = sent(1, 0, 1, 0)
    for seq in (1, 3, 2):
        in_flight[seq].move("die")
    assert in_flight.lost_by(0) is in_flight[1]
    assert in_flight.lost_by(1) is in_flight[2]
    assert in_flight.lost_by(2) is None


def test_the_next_batches_that_have_come_are_known() -> None:
    in_flight = sent(*range(7))
    ready(in_flight, [0, 1, 2, 3, 5])
    in_flight.leave(in_flight[1], "deliver")  # there may be holes; batch 4 has not come
    arrivals: list[Any] = [Batch(6, 0, None), in_flight[3], object(), Batch(4, 0, None)]
    arrivals[0].answer, arrivals[3].answer = answer(6), answer(4)
    assert in_flight.upcoming(arrivals, 4, in_order=True) == [answer(0), answer(2)]
    assert in_flight.upcoming(arrivals, 2, in_order=True) == [answer(0)]
    assert in_flight.upcoming(arrivals, 9, in_order=True) == [answer(0), answer(2)]
    assert in_flight.upcoming(arrivals, 9, in_order=False) == [answer(6), answer(4)]
    assert in_flight.upcoming(arrivals, 1, in_order=False) == [answer(6)]


def test_the_answers_that_wait_are_known_until_it_is_cleared() -> None:
    in_flight = sent(0, 0, 0)
    ready(in_flight, [1])
    failed = in_flight[2]
    failed.move("fail")
    in_flight.ring.push(2, failed)
    assert in_flight.answers() == [answer(1)]
    in_flight.clear()
    assert (len(in_flight), in_flight.waiting, in_flight.answers()) == (0, 0, [])
