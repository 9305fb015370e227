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
    folder, spaces = Path("/proc/thread-self/ns"), list[str]()
    with contextlib.suppress(OSError):  # a sandbox does not show them
        for name in sorted(os.listdir(folder)):
            spaces.append(os.readlink(folder / name))
    return os.getresuid(), os.getresgid(), frozenset(os.getgroups()), tuple(spaces)


def now() -> dict[str, Any]:
    """The environment, umask, CPUs, nice value and limits at this moment."""
    limits = {}
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # a sandbox does not have all
            limits[limit] = resource.getrlimit(limit)
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "environment": dict(os.environ),
        "umask": [int(line.split()[1], 8) for line in status if line.startswith("Umask")],
        "cpus": os.sched_getaffinity(0),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": limits,
    }


def apply(state: dict[str, Any]) -> None:
    """Put the result of another process's `now` into effect here, as far as the system allows it."""
    os.environ.clear()
    os.environ.update(state["environment"])
    for umask in state["umask"]:  # a sandbox does not show it
        os.umask(umask)
    for limit, values in state["limits"].items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, values)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, state["cpus"])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, state["nice"])
