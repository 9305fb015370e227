"""The id of this process, without a system call.

`pid` is it, and `current` gives it where a function is wanted. Leases and engines ask on every batch whether
they are in the process that made them; a fork of the user's is the only way that they are not. Runs in every
process.
"""

from __future__ import annotations

import os

pid = os.getpid()


def current() -> int:
    """Return what `os.getpid()` does."""
    return pid


def stay_in(process: int) -> None:
    """Leave quietly unless this is `process`: a child that user code forked in a worker has come back
    from that code, and is in the middle of our loop. (torch's watchdog finds another parent, and leaves.)

    Raises:
        SystemExit: it is another one.
    """
    if pid != process:
        raise SystemExit(0)


def _after_fork_in_child() -> None:
    global pid
    pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
