"""What a process's pages are: shared with others, or its own. The kernel tells it in /proc.

Runs in the consumer, and reads files of its workers. Where there are none (another system, another user's
process, a process that has ended) nothing is known.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Collection

_PAGE = mmap.PAGESIZE
#: Of the 64 bits that `pagemap` has for a page: it is in memory, and only one process maps it (Linux 4.2).
_PRESENT, _EXCLUSIVE = 1 << 63, 1 << 56


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


def share_alone(pid: int, addresses: Collection[int]) -> float:
    """Of the pages at these addresses the part that a process has alone, from 0 to 1; 0.0: not known."""
    try:
        descriptor = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0.0
    try:
        entries = [os.pread(descriptor, 8, address // _PAGE * 8) for address in addresses]
    except OSError:
        return 0.0
    finally:
        os.close(descriptor)
    alone = _PRESENT | _EXCLUSIVE
    found = sum(int.from_bytes(entry, "little") & alone == alone for entry in entries)
    return found / max(1, len(entries))
