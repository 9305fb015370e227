"""Every way in which a call of `next()` can end, as a value."""

from __future__ import annotations

import typing

from fastq_loader.consumer.delivery import CLOSED, ENDED, Delivered, Outcome, Raised


def test_each_outcome_says_what_to_raise_and_whether_the_iteration_is_over() -> None:
    error = ValueError("the user's")
    outcomes = [Delivered("batch"), ENDED, Raised(error), Raised(error, "it is over")]
    assert [(outcome.error, outcome.fatal) for outcome in outcomes] == [
        (None, None),
        (StopIteration, None),
        (error, None),
        (error, "it is over"),
    ]
    assert Delivered("batch").batch == "batch"
    assert CLOSED.fatal is None
    assert not isinstance(CLOSED, typing.get_args(Outcome))


def test_they_have_no_room_for_references_that_would_keep_the_loop() -> None:
    for outcome in (Delivered(1), Raised(ValueError()), ENDED, CLOSED):
        assert not hasattr(outcome, "__dict__")
