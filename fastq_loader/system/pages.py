"""The memory of the machine, and of a process: shared with others, or its own. The kernel says it in /proc.

Runs in the consumer, and reads files of its workers. Where there are none (another system, another user's
process, a process that has ended) nothing is known.
"""

from __future__ import annotations

import contextlib
import os
import sys


def installed() -> int:
    """The bytes of memory of this machine; `sys.maxsize` where the system does not say."""
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def shared_and_private(pid: int) -> tuple[int, int] | None:
    """The bytes of memory that a process shares with others, and those that it has alone; None: not known.

    The kernel walks its page tables for that, which takes some milliseconds for each GB.
    """
    if not (sizes := _rollup(pid)):
        return None
    shared, private = (
        sum(sizes.get(f"{kind}_{state}:", 0) for state in ("Clean", "Dirty"))
        for kind in ("Shared", "Private")
    )
    return shared, private


def proportional(pid: int) -> int:
    """The bytes of memory of a process and of all below it: a page that several processes map is divided
    among them, so shared memory counts once. 0: not known."""
    below = 0
    with contextlib.suppress(OSError, ValueError):  # they end meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                below += sum(proportional(int(child)) for child in file.read().split())
    return _rollup(pid).get("Pss:", 0) + below


def _rollup(pid: int) -> dict[str, int]:
    """The bytes of each kind; nothing where they are not known."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            lines = [line.split() for line in file.readlines()[1:]]
    except OSError:
        return {}
    return {name: int(size) << 10 for name, size, _ in lines}
