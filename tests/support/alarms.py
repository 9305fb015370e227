"""Alarms whose handler raises after some time, or while `next()` waits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter as TorchIterator

from fastq_loader.consumer.event_loop import EventLoop
from fastq_loader.consumer.gate import WAITING
from tests.support.gates import Gates


class Alarm(BaseException):
    """Raised by the handler; not a type that anything else raises, and no Exception, as KeyboardInterrupt."""


def ring(signum: int, frame: FrameType | None) -> None:
    raise Alarm


@contextmanager
def alarm_after(seconds: float, handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """SIGALRM goes to `handler` in here, and comes once after some time."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_WAITS = [each.__code__ for each in (Future.result, TorchIterator.__next__, Gates.wait_at)]


def next_waits(frame: FrameType | None) -> bool:
    """Whether a loader's `next()` sleeps, or waits for its thread, or torch's is anywhere."""
    while frame is not None:
        if isinstance(loop := frame.f_locals.get("self"), EventLoop):
            return loop._gate.phase == WAITING
        if frame.f_code in _WAITS:
            return True
        frame = frame.f_back
    return False


@contextmanager
def alarm_while_next_waits(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """The handler is called once, as soon as `next()` waits for a batch."""

    def look(signum: int, frame: FrameType | None) -> None:
        if not over.is_set() and next_waits(frame):
            over.set()
            handler(signum, frame)

    def knock() -> None:
        while not over.wait(0.01):
            signal.pthread_kill(main, signal.SIGALRM)

    main, over, before = threading.get_ident(), threading.Event(), signal.signal(signal.SIGALRM, look)
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGALRM, before)
