"""Signals: what their handlers raised in the middle of user code, and calls that they must not interrupt.

Runs in the consumer. A watchdog's TimeoutError that comes while a sampler draws is not the sampler's error:
it must not take the place of a batch.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # whose functions make no enum of each number: 0.1 ms of all
import contextlib
import functools
import inspect
import signal
import threading
import traceback
from collections.abc import Iterator
from typing import Any

_ALARM = getattr(signal, "SIGALRM", None)  # Windows has none


def refuse_interrupt(error: Exception, own_alarm: bool = False) -> None:
    """Raise an exception that came out of user code if the handler of a signal raised it.

    Args:
        error: what came.
        own_alarm: no alarm was set when that code began. If SIGALRM came in the middle of it, the code has
            set it for itself, and what the handler raises is its own error.
    """
    if raised_by_handler(error, own_alarm):
        raise error


def raised_by_handler(error: BaseException, own_alarm: bool = False) -> bool:
    """Whether the handler of a signal raised an exception, and not the code that it came through."""
    if threading.current_thread() is not threading.main_thread():  # handlers run on no other
        return False
    numbers = signal.valid_signals()
    codes = _codes_of(numbers)
    alarms = codes - _codes_of(numbers - {_ALARM}) if own_alarm else set()
    inside = False  # of code that is not ours: else it is a call of the loader that was interrupted
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in codes:
            return not (inside and frame.f_code in alarms)
        inside = frame.f_globals.get("__name__", "").partition(".")[0] != "fastq_loader"
    return False


def alarm_is_set() -> bool:
    """Whether SIGALRM will come."""
    return _ALARM is not None and signal.getitimer(signal.ITIMER_REAL)[0] > 0


def _codes_of(numbers: set[Any]) -> set[Any]:
    handlers = map(signal.getsignal, numbers)
    return {code for handler in handlers if callable(handler) for code in _codes(handler)}


def _codes(handler: Any) -> list[Any]:
    """The code of a handler: a function, a method, a partial, or an object that can be called."""
    handler = inspect.unwrap(handler)
    while isinstance(handler, functools.partial):
        handler = handler.func
    called = vars(type(handler)).get("__call__")
    found = [getattr(getattr(what, "__func__", what), "__code__", None) for what in (handler, called)]
    return [code for code in found if code is not None]


@contextlib.contextmanager
def without_signals(*numbers: int) -> Iterator[None]:
    """These signals, or all, come to this thread after the block, and not in it."""
    masked = _signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # Runs the handler of one that came just before, which may raise.
        _signal.pthread_sigmask(signal.SIG_BLOCK, numbers or _signal.valid_signals())
        yield
    finally:
        _signal.pthread_sigmask(signal.SIG_SETMASK, masked)
