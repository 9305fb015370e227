"""Functions that run when this process ends, whoever started it. Runs in any process, on its main thread.

A program ends with the functions of `atexit`. A process that multiprocessing started ends with
multiprocessing's finalizers, and (before Python 3.13) without `atexit`. After the finalizers it sends
SIGTERM to the daemons and joins them, for ever where one outlives SIGTERM.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from multiprocessing import parent_process, util

from fastq_loader.system import process_id

#: Finalizers run from the highest priority on; those of multiprocessing's own pools have 15.
_FIRST = 100

_registered: dict[Callable[[], None], tuple[int, util.Finalize]] = {}  # function → process, its finalizer


def register(function: Callable[[], None]) -> None:
    """Call a function when this process ends. It may be registered, and may be called, more than once.

    A fork has its parent's finalizers, which are none of its own; and multiprocessing clears those that a
    child registers while its arguments are unpickled.
    """
    process, finalizer = _registered.get(function, (0, None))
    if process != process_id.current() or finalizer is None or not finalizer.still_active():
        atexit.register(function)
        finalizer = util.Finalize(None, function, exitpriority=_FIRST)
        _registered[function] = process_id.current(), finalizer


def is_program() -> bool:
    """Whether this is a program of its own, and not a process that multiprocessing started."""
    return parent_process() is None
