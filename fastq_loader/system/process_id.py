"""The id of this process, without a system call.

`pid` is the id; `current` returns it where a function is needed. Leases and workers check on every batch that
they are in the process that made them, because user code may have forked. Runs in every process.
"""

from __future__ import annotations

import os
from collections.abc import Callable

pid = os.getpid()


def current() -> int:
    """Return the same as `os.getpid()`."""
    return pid


def stay_in(process: int) -> None:
    """Exit quietly unless this process is `process`. Otherwise it is a child that user code forked in a
    worker, returned from that code into our loop. (torch's watchdog finds another parent, and exits.)

    Raises:
        SystemExit: this is another process.
    """
    if pid != process:
        raise SystemExit(0)


def _after_fork_in_child() -> None:
    global pid
    pid = os.getpid()


def in_forked_children(function: Callable[[], object]) -> None:
    """Call a function in every child that this process forks, to reset state that is the parent's."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


in_forked_children(_after_fork_in_child)  # the first one: the others find the child's id
