"""CPUs and memory that this process may use.

Runs in the consumer. Nothing is cached: limits change while a job runs, so files are read anew each time. The
limits of a container are in its cgroup and the parents of that, in files of version 1 or 2, or of both, below
`/sys/fs/cgroup`.

    sched_getaffinity            CPUs on which the scheduler may run this process
    cpu.max, cpu.cfs_quota_us    CPU time for each period, for all processes of a cgroup together
    MemAvailable                 memory that the machine can provide without swapping
    memory.max, memory.limit_in_bytes    maximum for a cgroup, from which its use is subtracted
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from fastq_loader.extras.insight import processes
from fastq_loader.extras.insight.chooser import Limits
from fastq_loader.extras.insight.model import Setting
from fastq_loader.system import pages

_ROOT = Path("/")
#: The part of the memory that workers and batches may take.
_MEMORY_SHARE = 0.8


def limits(own: Setting) -> Limits:
    """Limits of the machine for a loader with this setting."""
    memory = memory_bytes() * _MEMORY_SHARE / local_ranks()
    return Limits(own, cpus(), memory, machine_bytes=pages.installed())


def cpus(root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> float:
    """CPUs that this process and its workers may use, on average; 0.5 is half the time of one.

    The least of the affinity and the quotas of its cgroups, divided by the ranks of this machine
    (`LOCAL_WORLD_SIZE`, which torchrun sets), because each of them has a loader.

    Args:
        root: of the file system.
        environ: the environment.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_quota(folder) for folder in _cgroups(root, "cpu"))
    return min([float(affinity), *(quota for quota in quotas if quota)]) / local_ranks(environ)


def memory_bytes(root: Path = _ROOT) -> int:
    """Bytes of memory that are still available in the machine and in every cgroup of this process.

    The page cache that a cgroup has not used lately counts as free, because the kernel reclaims it. If no
    file has a value, the result is `sys.maxsize`.

    Args:
        root: of the file system.
    """
    available = processes.fields(root / "proc/meminfo").get("MemAvailable:", sys.maxsize // 1024) * 1024
    return max(0, min([available, *(_left(folder) for folder in _cgroups(root, "memory"))]))


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Number of processes of this training on this machine, each with a loader."""
    told = environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the cgroups that limit this process, from its own up to the highest visible one: in a
    container that is often its own, whatever its path outside."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, member = line.split(":", 2)
        if controllers and controller not in controllers.split(","):  # version 2 names no controller
            continue
        for name in {controllers, controller if controllers else ""}:
            top = root / "sys/fs/cgroup" / name
            folder = top.joinpath(*(part for part in member.split("/") if part and part != ".."))
            yield from (folder, *folder.parents[: len(folder.parts) - len(top.parts)])


def _quota(folder: Path) -> float | None:
    """CPUs on average; None if unlimited."""
    words = _read(folder / "cpu.max").split() or [
        *_read(folder / "cpu.cfs_quota_us").split(),
        *_read(folder / "cpu.cfs_period_us").split(),
    ]
    if len(words) == 2 and all(word.isdecimal() for word in words):  # no limit is "max" or -1
        return int(words[0]) / int(words[1])
    return None


def _left(folder: Path) -> int:
    """Bytes that a cgroup may still take."""
    for limit, used, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, now = _read(folder / limit).strip(), _read(folder / used).strip()
        if most.isdecimal() and now.isdecimal():
            return int(most) - int(now) + processes.fields(folder / "memory.stat").get(reclaimable, 0)
    return sys.maxsize


def _read(file: Path) -> str:
    """Text of a file; empty if it does not exist, or may not be read."""
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


def contention(file: Path = Path("/proc/pressure/cpu")) -> float:
    """Share of the last ten seconds in which some process waited for a CPU; 0.0 if unknown to the kernel."""
    try:
        return float(file.read_text().split("avg10=")[1].split()[0]) / 100
    except (OSError, IndexError, ValueError):
        return 0.0
