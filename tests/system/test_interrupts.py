"""Calls that no signal handler interrupts."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from fastq_loader.system import interrupts
from fastq_loader.system.calls import readable
from fastq_loader.system.interrupts import without_signals
from tests.support.alarms import Alarm
from tests.support.gates import LIMIT


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


def test_a_signal_that_another_thread_gets_comes_after_it_too() -> None:
    """As threads of numpy's get a Ctrl-C that the main thread blocks. A forked child has the handlers."""

    def handler(number: int, frame: Any) -> None:
        came.append(number)
        raise Alarm

    def in_the_block() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
            assert readable([written], LIMIT)
            assert os.read(written, 9) == bytes([number])
        if (child := os.fork()) == 0:
            os._exit([signal.getsignal(number) for number in numbers] == [handler] * 2)
        assert os.waitpid(child, 0)[1] == 1 << 8
        assert came == []

    came: list[int] = []
    numbers = signal.SIGUSR1, signal.SIGUSR2
    over, (written, told) = threading.Event(), os.pipe2(os.O_NONBLOCK)
    threading.Thread(target=over.wait).start()
    before, descriptor = [signal.signal(number, handler) for number in numbers], signal.set_wakeup_fd(told)
    try:
        with pytest.raises(Alarm), without_signals(), without_signals(signal.SIGUSR1):
            in_the_block()
        assert sorted(came) == [*numbers]
        assert [signal.getsignal(number) for number in numbers] == [handler] * 2
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
        over.set()
        os.close(written)
        os.close(told)


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
