"""The server that workers are forked from under forkserver, with all imports done.

Runs in the consumer; the server is a process of its own, and ends with the consumer. It is not Python's own:
that may be up already, started by others and without torch, and then every worker imports for itself, which
takes seconds and 90 MB each. Nor is it one for others: what its children would inherit of numpy's global
generator is the same for all, and workers are seeded.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from multiprocessing import forkserver, resource_tracker
from types import SimpleNamespace
from typing import Any

from fastq_loader.system import process_id
from fastq_loader.system.interrupts import without_signals

_WARM = ["torch", "fastq_loader.workers.warm"]

_server: Any = None
_owner = 0  # the process that has started it: a child of it needs one of its own


def names(modules: Iterable[str]) -> SimpleNamespace:
    """What `multiprocessing.forkserver` has, for this server, which is started where it is not up.

    Args:
        modules: to import, besides those that the user has chosen for Python's own server.
    """
    global _server, _owner
    if _server is None or _owner != process_id.current():
        own: Any = forkserver._forkserver
        _server, _owner = forkserver.ForkServer(), process_id.current()
        _server.set_forkserver_preload([*own._preload_modules, *modules, *_WARM])
    return SimpleNamespace(**{**vars(forkserver), "connect_to_new_process": _connect})


def _connect(descriptors: Sequence[int]) -> tuple[int, int]:
    resource_tracker.ensure_running()  # which lets signals through that are kept out here
    with without_signals(signal.SIGINT, signal.SIGTERM):  # until the server ignores them
        found: tuple[int, int] = _server.connect_to_new_process(descriptors)
    return found


def without_the_users() -> bool:
    """Import none of the user's modules from here on: one raised. Whether that is news."""
    if _server is None or _server._preload_modules == _WARM:
        return False
    _server.set_forkserver_preload(_WARM)
    return True
