"""Whose an exception is that came out of user code: the code's, or a signal handler's."""

from __future__ import annotations

import functools
import signal
import threading
from typing import Any

import pytest

from fastq_loader.system import interrupts
from fastq_loader.system.interrupts import raised_by_handler, refuse_interrupt, without_signals
from tests.support.alarms import Alarm, alarm_after, ring


class Handler:
    def method(self, signum: int, frame: Any) -> None:
        raise Alarm

    __call__ = method


HANDLERS = [ring, functools.partial(ring), functools.lru_cache(ring), Handler().method, Handler()]


@pytest.mark.parametrize("handler", HANDLERS)
def test_what_a_handler_raised_is_not_the_codes_that_it_came_through(handler: Any) -> None:
    with alarm_after(60, handler):
        with pytest.raises(Alarm) as caught:
            signal.raise_signal(signal.SIGALRM)
        assert raised_by_handler(caught.value)
        with pytest.raises(Alarm):
            refuse_interrupt(caught.value)
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(raised_by_handler(caught.value)))
        thread.start()
        thread.join()
        assert answers == [False], "handlers run on the main thread alone"
    assert not raised_by_handler(caught.value), "it is no handler any more"


def test_what_code_raises_itself_is_its_own() -> None:
    with alarm_after(60, ring), pytest.raises(ZeroDivisionError) as own:
        _ = 1 / 0
    assert not raised_by_handler(own.value)
    refuse_interrupt(own.value)


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


@pytest.mark.parametrize(("name", "interrupt"), [("fastq_loader.reading", True), ("their.dataset", False)])
def test_an_alarm_within_the_loaders_own_code_is_an_interrupt(name: str, interrupt: bool) -> None:
    with alarm_after(60, ring):
        with pytest.raises(Alarm) as caught:
            exec("signal.raise_signal(signal.SIGALRM)", {"__name__": name, "signal": interrupts._signal})
        assert raised_by_handler(caught.value, own_alarm=True) == interrupt
