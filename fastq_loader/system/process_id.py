"""The id of this process, without a system call.

Leases and engines ask on every batch whether they are in the process that made them; a fork of the user's is
the only way that they are not. Runs in every process.
"""

from __future__ import annotations

import os

_pid = os.getpid()


def current() -> int:
    """What `os.getpid()` gives."""
    return _pid


def stay_in(pid: int) -> None:
    """Leave quietly unless this is process `pid`: a child that user code forked in a worker has come back
    from that code, and is in the middle of our loop. (torch's watchdog finds another parent, and leaves.)

    Raises:
        SystemExit: it is another one.
    """
    if _pid != pid:
        raise SystemExit(0)


def _after_fork_in_child() -> None:
    global _pid
    _pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
