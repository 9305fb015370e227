"""The memory of processes, shared or private, as the kernel reports it in /proc.

Runs in the consumer. Without such a file (another system, another user's process, a process that has ended)
the values are unknown.
"""

from __future__ import annotations

import contextlib
import os
from os import PathLike


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
