"""Reading /proc (Linux): which processes belong to a tree, their CPU time, memory and descriptors.

A process may end between two reads; it then counts as nothing.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Usage:
    """What processes have used since they started.

    Attributes:
        consumer_cpu: seconds of CPU, user and system, of all threads of this process.
        worker_cpu: the same of the processes below it.
        switches: context switches of both, wanted and not.
    """

    consumer_cpu: float
    worker_cpu: float
    switches: int

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.consumer_cpu + other.consumer_cpu,
            self.worker_cpu + other.worker_cpu,
            self.switches + other.switches,
        )

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(
            self.consumer_cpu - earlier.consumer_cpu,
            self.worker_cpu - earlier.worker_cpu,
            self.switches - earlier.switches,
        )


def usage(workers: Iterable[int]) -> Usage:
    """What this process, these others, and children that ended and were waited for have used up to now."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    switches = own.ru_nvcsw + own.ru_nivcsw + ended.ru_nvcsw + ended.ru_nivcsw
    cpu = ended.ru_utime + ended.ru_stime
    for pid in workers:
        # The clock of another process (clock_getcpuclockid(3)) has nanoseconds and knows threads that ended;
        # /proc/<pid>/stat has ticks of 10 ms. EINVAL: the process is gone.
        with contextlib.suppress(OSError):
            cpu += time.clock_gettime(~pid << 3 | 2)
        switches += _switches(pid)
    return Usage(time.process_time(), cpu, switches)


def _switches(pid: int) -> int:
    """Context switches of the process's living threads."""
    total = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for line in (thread / "status").read_text().splitlines():
                if "ctxt_switches" in line:
                    total += int(line.split()[1])
    return total


def descriptors(pid: int) -> int:
    """How many descriptors the process has open."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


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


def pss(pids: Iterable[int]) -> Counter[str]:
    """Proportional set size of these processes in bytes: in all, and of anonymous, file and shared memory.

    A page that several processes map is divided among them, so the sum counts shared memory (memfd too) once.
    The keys are the kernel's: Pss, Pss_Anon, Pss_File, Pss_Shmem.
    """
    total: Counter[str] = Counter()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                key, _, value = line.partition(":")
                if key in ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem"):
                    total[key] += int(value.split()[0]) * 1024  # "  1234 kB", in the kernel's kB
    return total
