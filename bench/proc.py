"""Reading /proc (Linux): which processes belong to a tree, their CPU time and their memory.

A process may end between two reads; it then counts as nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, defaultdict
from pathlib import Path

# CPU time is counted in ticks of 10 ms (USER_HZ = 100), so a window has to span several, and one tick may be
# left over from before it: fewer than two of five are an idle tree, a worker at work fills all five.
_QUIET_WINDOW_S = 0.05
_QUIET_TICKS = 1
# Some loaders never come to rest. Long enough for workers that are spawned and import torch first.
_QUIET_LIMIT_S = 10.0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat after the command, which may itself hold spaces and brackets."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def process_tree(root: int) -> list[int]:
    """The process and all its descendants."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        if fields := _stat(pid):
            children[int(fields[1])].append(pid)
    tree = [root]
    for pid in tree:  # grows while it is walked
        tree.extend(children[pid])
    return tree


def _cpu_ticks(pids: list[int]) -> int:
    """User and system time of these processes, all threads."""
    return sum(int(ticks) for pid in pids for ticks in _stat(pid)[11:13])


def wait_until_quiet() -> None:
    """Return when this process and its descendants have stopped computing, or after a limit."""
    pids = process_tree(os.getpid())
    deadline = time.monotonic() + _QUIET_LIMIT_S
    while time.monotonic() < deadline:
        before = _cpu_ticks(pids)
        time.sleep(_QUIET_WINDOW_S)
        if _cpu_ticks(pids) - before <= _QUIET_TICKS:
            return


def machine_shmem() -> int:
    """Bytes of shared memory (tmpfs, memfd) on this machine, mapped or not."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no Shmem line")


def tree_pss(root: int) -> Counter[str]:
    """Proportional set size of the whole tree in bytes: in all, and of anonymous, file and shared memory.

    A page that several processes map is divided among them, so the sum counts shared memory (memfd too) once.
    The keys are the kernel's: Pss, Pss_Anon, Pss_File, Pss_Shmem.
    """
    total: Counter[str] = Counter()
    for pid in process_tree(root):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                key, _, value = line.partition(":")
                if key in ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem"):
                    total[key] += int(value.split()[0]) * 1024  # "  1234 kB", in the kernel's kB
    return total
