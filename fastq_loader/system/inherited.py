"""State of this process that a new program inherits, besides folder and descriptors; to be compared.

Runs in the consumer. Much of it belongs to the thread that starts the program. What a system does not show
counts as equal.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable
from pathlib import Path

#: Lines of a file that has many, by their beginnings.
_RIGHTS = "Cap", "NoNewPrivs", "Seccomp"
_REST = "Umask", "NSpgid", "NSsid", "SigBlk", "SigIgn", "Cpus_allowed", "Mems_allowed", "THP_enabled"
#: Files and links of the thread. The last two files are the process's.
_FILES = "limits", "oom_score_adj", "cgroup", "../../timerslack_ns", "../../coredump_filter"
_NAMESPACES = "cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "time_for_children", "user", "uts"


def rights() -> Hashable:
    """Rights of the program: its ids, capabilities and filters, its namespaces and its root folder."""
    root = os.stat("/")
    return (
        (os.getresuid(), os.getresgid(), frozenset(os.getgroups()), root.st_dev, root.st_ino),
        _status(_RIGHTS),
        *(_shown(f"ns/{name}", os.readlink) for name in _NAMESPACES),
    )


def rest() -> Hashable:
    """Environment, standard streams, group and session, masks, limits, scheduling and memory policy."""
    streams = [os.fstat(descriptor) for descriptor in (0, 1, 2)]
    return (
        frozenset(os.environ.items()),
        tuple((stream.st_dev, stream.st_ino) for stream in streams),
        os.getpriority(os.PRIO_PROCESS, 0),
        (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
        _status(_REST),
        *map(_shown, _FILES),
    )


def _status(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(line for line in _shown("status").splitlines() if line.startswith(names))


def _shown(name: str, read: Callable[[str], str] = lambda path: Path(path).read_text()) -> str:
    with contextlib.suppress(OSError):
        return read(f"/proc/thread-self/{name}")
    return ""
