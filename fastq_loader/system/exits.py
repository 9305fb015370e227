"""Functions that run when this process ends, whoever started it. Runs in any process, on its main thread.

A program calls the functions of `atexit` at its end. A process that multiprocessing started calls
multiprocessing's finalizers, and does not call `atexit` before Python 3.13. After the finalizers it sends
SIGTERM to its daemons and joins them, which takes for ever if one outlives SIGTERM.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable
from multiprocessing import util
from pkgutil import resolve_name

from fastq_loader.system import process_id

#: Finalizers run in the order of falling priority; multiprocessing's own pools have priority 15.
_FIRST = 100

_registered: dict[Callable[[], None], tuple[int, util.Finalize]] = {}  # function → process, its finalizer


def register(function: Callable[[], None]) -> None:
    """Call a function when this process ends. It may be registered, and may be called, more than once.

    It has to be registered again in a forked process, which inherits its parent's finalizers but does not run
    them, and in a child of multiprocessing, which clears finalizers registered while it was unpickled.
    """
    process, finalizer = _registered.get(function, (0, None))
    if process != process_id.current() or finalizer is None or not finalizer.still_active():
        atexit.register(function)
        finalizer = util.Finalize(None, function, exitpriority=_FIRST)
        _registered[function] = process_id.current(), finalizer


def forget() -> None:
    """Drop the exit handlers of an interpreter that only forks. They clean up what it has made (a folder, a
    measurement), which its children share; these call the handlers that they register themselves."""
    finalizers, clear = map(resolve_name, ("weakref:finalize._registry", "atexit:_clear"))
    for finalizer in finalizers:
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # the next one registers
    clear()
    atexit.register(logging.shutdown)  # flushes handlers that a child adds
