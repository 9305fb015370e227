"""The memory of the machine, and the CPU time of processes, as the kernel reports them.

Runs in the consumer, which reads the files of its workers.
"""

from __future__ import annotations

import os
import sys


def installed() -> int:
    """Bytes of memory of this machine; `sys.maxsize` if the system does not report it."""
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu(pid: int) -> int:
    """Nanoseconds in which the first thread of a process had a CPU, or waited for one; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return sum(map(int, file.read().split()[:2]))
    except (OSError, ValueError):
        return 0
