"""Calls that no signal handler interrupts."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from fastq_loader.system import interrupts
from fastq_loader.system.interrupts import without_signals
from tests.support.alarms import Alarm


@pytest.mark.parametrize("numbers", [(signal.SIGUSR1,), ()])
def test_a_signal_comes_after_what_it_must_not_interrupt(numbers: tuple[int, ...]) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with without_signals(*numbers):
            signal.raise_signal(signal.SIGUSR1)
            assert came == []
        assert came == [signal.SIGUSR1]
        with pytest.raises(ZeroDivisionError), without_signals(*numbers):
            _ = 1 / 0
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == masked
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_raises_at_the_begin_leaves_no_signal_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = interrupts._signal.pthread_sigmask

    def interrupted(how: int, numbers: Any) -> Any:
        before = mask(how, numbers)
        if numbers and how == signal.SIG_BLOCK:
            raise Alarm
        return before

    masked = mask(signal.SIG_BLOCK, ())
    monkeypatch.setattr(interrupts._signal, "pthread_sigmask", interrupted)
    with pytest.raises(Alarm), without_signals():
        pytest.fail("the block was entered")
    assert mask(signal.SIG_BLOCK, ()) == masked
