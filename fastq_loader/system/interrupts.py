"""Calls that no signal handler may interrupt. Runs in every process."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # unlike `signal` it makes no enums: 0.1 ms for all numbers
import contextlib
import signal
from collections.abc import Iterator
from threading import get_ident

from fastq_loader.system import process_id

#: The masks of threads that block all signals now, as they were before.
_before: dict[int, set[int]] = {}


@contextlib.contextmanager
def without_signals(*numbers: int) -> Iterator[None]:
    """Block these signals (default: all) for this thread inside the `with` block; they arrive after it.

    A process may be forked inside: a handler would raise in Python's own hooks after the fork, where its
    exception is printed and lost. The child has the mask of before, if all signals are blocked.
    """
    masked = _signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        if not numbers:
            _before.setdefault(get_ident(), masked)
        # Runs the handler of a signal that came just before, which may raise.
        _signal.pthread_sigmask(signal.SIG_BLOCK, numbers or _signal.valid_signals())
        yield
    finally:
        if _before.get(get_ident()) is masked:
            del _before[get_ident()]
        _signal.pthread_sigmask(signal.SIG_SETMASK, masked)


def _unblock_in_child() -> None:
    before = _before.get(get_ident())
    _before.clear()
    if before is not None:
        _signal.pthread_sigmask(signal.SIG_SETMASK, before)


process_id.in_forked_children(_unblock_in_child)
