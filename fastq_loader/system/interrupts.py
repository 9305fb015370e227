"""Signals: exceptions that handlers raise in the middle of user code, and calls that must not be interrupted.

Runs in the consumer; `without_signals` in other processes, too. A watchdog's TimeoutError that comes while a
sampler draws is not the sampler's error: it must not be delivered in place of a batch.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # unlike `signal` it makes no enums: 0.1 ms for all numbers
import _thread
import contextlib
import functools
import inspect
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

_ALARM = getattr(signal, "SIGALRM", None)  # Windows has none


def refuse_interrupt(error: Exception, own_alarm: bool = False) -> None:
    """Raise an exception that came out of user code if a signal handler raised it.

    Args:
        error: the exception.
        own_alarm: whether no alarm was set when that code began. If SIGALRM comes during the code, the code
            has set the alarm itself, and the handler's exception is its own error.
    """
    if raised_by_handler(error, own_alarm):
        raise error


def raised_by_handler(error: BaseException, own_alarm: bool = False) -> bool:
    """Whether a signal handler raised an exception, and not the code that was interrupted."""
    if threading.current_thread() is not threading.main_thread():  # handlers run on no other
        return False
    numbers = signal.valid_signals()
    codes = _codes_of(numbers)
    alarms = codes - _codes_of(numbers - {_ALARM}) if own_alarm else set()
    inside = False  # whether the last frame is not ours; else a call of the loader was interrupted
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in codes:
            return not (inside and frame.f_code in alarms)
        inside = frame.f_globals.get("__name__", "").partition(".")[0] != "fastq_loader"
    return False


def come_again(error: BaseException) -> None:
    """Send a signal again whose handler raised this exception; it arrives when the caller has returned.

    For finalizers: Python prints what they raise, and goes on. A Ctrl-C would be lost.

    Raises:
        BaseException: the exception, if no signal handler raised it.
    """
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    for number, handler in handlers.items():
        default = handler is signal.default_int_handler and isinstance(error, KeyboardInterrupt)  # no frame
        if (default or frames & _codes_of({number})) and not sys.is_finalizing():
            # The new thread gets the GIL when this one has left this function and, almost always, its caller.
            _thread.start_new_thread(_send, (number, threading.get_ident()))
            return
    raise error


def _send(number: int, thread: int) -> None:
    if callable(signal.getsignal(number)):  # else the handler is gone, and the signal may end the process
        signal.pthread_kill(thread, number)


def alarm_is_set() -> bool:
    """Whether a timer will send SIGALRM."""
    return _ALARM is not None and signal.getitimer(signal.ITIMER_REAL)[0] > 0


def _codes_of(numbers: set[Any]) -> set[Any]:
    handlers = map(signal.getsignal, numbers)
    return {code for handler in handlers if callable(handler) for code in _codes(handler)}


def _codes(handler: Any) -> list[Any]:
    """Code objects of a handler: of a function, a method, a partial, or a callable object."""
    handler = inspect.unwrap(handler)
    while isinstance(handler, functools.partial):
        handler = handler.func
    called = vars(type(handler)).get("__call__")
    found = [getattr(getattr(what, "__func__", what), "__code__", None) for what in (handler, called)]
    return [code for code in found if code is not None]


@contextlib.contextmanager
def without_signals(*numbers: int) -> Iterator[None]:
    """Block these signals (default: all) for this thread inside the `with` block; they arrive after it."""
    masked = _signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # Runs the handler of a signal that came just before, which may raise.
        _signal.pthread_sigmask(signal.SIG_BLOCK, numbers or _signal.valid_signals())
        yield
    finally:
        _signal.pthread_sigmask(signal.SIG_SETMASK, masked)
