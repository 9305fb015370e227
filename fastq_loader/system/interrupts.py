"""Calls that no signal handler may interrupt. Runs in every process."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # unlike `signal` it makes no enums: 0.1 ms for all numbers
import contextlib
import ctypes
import signal
from collections.abc import Callable, Iterator
from functools import partial
from threading import get_ident, main_thread
from types import FrameType
from typing import Any

from fastq_loader.system import process_id

_Handlers = dict[int, Callable[[int, FrameType | None], Any]]

#: Bytes of a sigset_t.
_SIGSET = 128
#: The masks of threads that block all signals now, as they were before.
_before: dict[int, set[int]] = {}
#: The handlers that the main thread defers now, by signal; an outer block's first.
_deferred: list[_Handlers] = []


@contextlib.contextmanager
def without_signals(*numbers: int) -> Iterator[dict[int, FrameType | None]]:
    """Block these signals (default: all) for this thread inside the `with` block; they arrive after it.
    Yields the signals that came, with their frames.

    A process may be forked inside: a handler would raise in Python's own hooks after the fork, where its
    exception is printed and lost. The child has the mask of before, if all signals are blocked.

    A mask is not enough: the kernel gives a signal of the process, as Ctrl-C, to another thread that does not
    block it, as one of numpy's, and Python runs the handler in the main thread all the same. So handlers in
    Python are deferred there, too.
    """
    masked = _signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers: _Handlers = {}
    came: dict[int, FrameType | None] = {}
    blocked = numbers or _signal.valid_signals()
    try:
        if not numbers:
            _before.setdefault(get_ident(), masked)
        # Runs the handler of a signal that came just before, which may raise.
        _signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        if get_ident() == main_thread().ident:
            _deferred.append(handlers)
            for number in blocked:
                if callable(handler := _signal.getsignal(number)):
                    handlers[number] = handler
                    _signal.signal(number, came.__setitem__)
        yield came
    finally:
        if _before.get(get_ident()) is masked:
            del _before[get_ident()]
        _deferred[:] = [each for each in _deferred if each is not handlers]
        try:
            _restore(handlers)
        finally:
            try:
                _signal.pthread_sigmask(signal.SIG_SETMASK, masked)
            finally:
                _call(handlers, came)


def _restore(handlers: _Handlers) -> None:
    try:
        for number, handler in handlers.items():
            _signal.signal(number, handler)
    except BaseException:  # of a handler that was restored
        _restore(handlers)
        raise


def _call(handlers: _Handlers, came: dict[int, FrameType | None]) -> None:
    """Call the handlers whose signals came. Each of them may raise."""
    try:
        while came:
            number, frame = came.popitem()
            handlers[number](number, frame)
    except BaseException:
        _call(handlers, came)
        raise


class _Blocked:
    """Unblocks signals when it dies, by C code."""

    __slots__ = ("__del__",)


def finish(function: Callable[[], object]) -> object:
    """Call a function in a finalizer, without signals. The finalizer returns what this returns: signals are
    blocked until that dies, after the finalizer's end. In it the exception of a handler would be lost."""
    sigmask, before = ctypes.CDLL(None).pthread_sigmask, ctypes.create_string_buffer(_SIGSET)
    sigmask(signal.SIG_BLOCK, None, before)
    blocked: Any = _Blocked()
    blocked.__del__ = partial(sigmask, signal.SIG_SETMASK, before, None)
    try:
        sigmask(signal.SIG_BLOCK, b"\xff" * _SIGSET, None)
    finally:  # also after the handler of a signal that came just before
        with without_signals() as came:
            function()
            later = list(came)
            came.clear()
        for number in later:
            _signal.pthread_kill(get_ident(), number)
    return blocked


def _restore_in_child() -> None:
    for handlers in reversed(_deferred):
        _restore(handlers)
    _deferred.clear()
    before = _before.get(get_ident())
    _before.clear()
    if before is not None:
        _signal.pthread_sigmask(signal.SIG_SETMASK, before)


process_id.in_forked_children(_restore_in_child)
