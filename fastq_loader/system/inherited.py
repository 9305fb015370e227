"""State of this process that a new program inherits, besides folder and descriptors.

Runs in the consumer, and in children of an interpreter that was started before. Some of it belongs to the
thread that starts the program.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Hashable
from pathlib import Path
from typing import Any

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def rights() -> Hashable:
    """The ids, groups and namespaces, which a process cannot take from another one."""
    folder = Path("/proc/thread-self/ns")
    spaces = frozenset((name, os.readlink(folder / name)) for name in os.listdir(folder))
    return os.getresuid(), os.getresgid(), frozenset(os.getgroups()), spaces


def now() -> dict[str, Any]:
    """The environment, umask, CPUs, nice value and limits at this moment."""
    [umask] = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask")
    ]
    return {
        "environment": dict(os.environ),
        "umask": int(umask.split()[1], 8),
        "cpus": os.sched_getaffinity(0),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": {limit: resource.getrlimit(limit) for limit in _LIMITS},
    }


def apply(state: dict[str, Any]) -> None:
    """Put the result of another process's `now` into effect here, as far as that is allowed."""
    os.environ.clear()
    os.environ.update(state["environment"])
    os.umask(state["umask"])
    for limit, values in state["limits"].items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, values)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, state["cpus"])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, state["nice"])
