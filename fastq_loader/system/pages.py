"""The memory of the machine and of processes, shared or private, as the kernel reports it in /proc.

Runs in the consumer, and reads the files of its workers. Without such a file (another system, another user's
process, a process that has ended) the values are unknown.
"""

from __future__ import annotations

import contextlib
import os
import sys
from os import PathLike


def installed() -> int:
    """Bytes of memory of this machine; `sys.maxsize` if the system does not report it."""
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def shared_and_private(pid: int) -> tuple[int, int] | None:
    """Bytes of memory that a process shares with others, and bytes of its private memory; None if unknown.

    The kernel walks the process's page tables for that, which takes some milliseconds for each GB.
    """
    if not (sizes := _rollup(pid)):
        return None
    shared, private = (
        sum(sizes.get(f"{kind}_{state}:", 0) for state in ("Clean", "Dirty"))
        for kind in ("Shared", "Private")
    )
    return shared, private


def proportional(pid: int) -> int:
    """Bytes of memory of a process and all its descendants. A page that several processes map is divided
    among them, so shared memory counts once. 0 if unknown."""
    below = 0
    with contextlib.suppress(OSError, ValueError):  # a process may end meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                below += sum(proportional(int(child)) for child in file.read().split())
    return _rollup(pid).get("Pss:", 0) + below


def _rollup(pid: int) -> dict[str, int]:
    """Bytes of each kind of memory; empty if unknown."""
    return {name: size << 10 for name, size in fields(f"/proc/{pid}/smaps_rollup").items()}


def fields(path: str | PathLike[str]) -> dict[str, int]:
    """The numbers in a file of the kernel that has a name and a number in each line; empty if it cannot be
    read."""
    try:
        with open(path) as file:
            lines = [line.split() for line in file]
    except (OSError, ValueError):
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def cpu(pid: int) -> int:
    """Nanoseconds in which the first thread of a process had a CPU, or waited for one; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return sum(map(int, file.read().split()[:2]))
    except (OSError, ValueError):
        return 0
