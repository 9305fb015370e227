"""What is done ahead: what it gave, once, and errors that keep nothing alive."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest

from fastq_loader.device.attempts import Attempt


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Owner:
    """Keeps what it attempts, and is in the frames of its error."""

    def __init__(self, error: Exception) -> None:
        self.attempt = Attempt(self.fail, error)

    def fail(self, error: Exception) -> None:
        try:
            raise ValueError("before it")
        except ValueError:
            raise error from None


def test_a_result_is_given_and_forgotten() -> None:
    attempt = Attempt(divmod, 7, 2)
    assert (attempt.result, attempt.outcome(), attempt.outcome()) == ((3, 1), (3, 1), None)


@pytest.mark.parametrize("error", [OSError(2, "gone"), Frozen(3)])
def test_an_error_is_raised_once_and_says_where_it_came_from(error: Exception) -> None:
    attempt = Owner(error).attempt
    with pytest.raises(type(error)) as raised:
        attempt.outcome()
    assert raised.value is error
    assert "in fail" in str(error.__cause__)
    assert attempt.outcome() is None


def test_an_error_that_waits_keeps_nothing_alive() -> None:
    gc.disable()
    try:
        owner = Owner(OSError())
        gone = weakref.ref(owner)
        del owner
        assert gone() is None
    finally:
        gc.enable()


def test_an_interrupt_is_raised_at_once() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Attempt(interrupt)


def test_an_outcome_can_be_asked_for_again_and_again() -> None:
    known = Attempt(lambda: {"inner": [1]})
    known.again()["inner"].append(2)
    assert known.again() == {"inner": [1]}
    failed = Attempt({}.__getitem__, "missing")
    for _ in range(2):
        with pytest.raises(KeyError, match="missing"):
            failed.again()
