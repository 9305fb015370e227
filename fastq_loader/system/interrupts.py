"""Calls that no signal handler may interrupt. Runs in every process."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # unlike `signal` it makes no enums: 0.1 ms for all numbers
import contextlib
import signal
from collections.abc import Iterator


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
