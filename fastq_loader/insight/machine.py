"""What this process may use of the machine: CPUs and memory.

Runs in the consumer. Nothing is kept: limits change while a job runs, so files are read anew each time. A
container's limits stand in its cgroup and in those above it, in files of version 1 or 2, or of both.

    sched_getaffinity            the CPUs that the scheduler may put this process on
    cpu.max, cpu.cfs_quota_us    CPU time for each period, for all processes of a cgroup together
    MemAvailable                 memory that the machine can give without swapping
    memory.max, memory.limit_in_bytes    the most that a cgroup may have, less what it has
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def cpus(root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> float:
    """The CPUs that this process and its workers may use, on average; 0.5 is half the time of one.

    The least of the affinity and the quotas of its cgroups, divided by the ranks of this machine
    (`LOCAL_WORLD_SIZE`, which torchrun sets), because each of them has a loader.

    Args:
        root: of the file system.
        environ: the environment.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_quota(folder) for folder in _cgroups(root, "cpu"))
    return min([float(affinity), *(quota for quota in quotas if quota)]) / ranks(environ)


def memory_bytes(root: Path = _ROOT) -> int:
    """The bytes of memory that the machine, and every cgroup of this process, can still give now.

    The page cache that a cgroup has not used lately counts as free, because the kernel takes it back. Where
    no file says anything, it is `sys.maxsize`.

    Args:
        root: of the file system.
    """
    available = _fields(root / "proc/meminfo").get("MemAvailable:", sys.maxsize // 1024) * 1024
    return max(0, min([available, *(_left(folder) for folder in _cgroups(root, "memory"))]))


def ranks(environ: Mapping[str, str] = os.environ) -> int:
    """The processes of this training that share the machine, each with a loader."""
    told = environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the cgroups that limit this process, from its own up to the highest that it sees."""
    memberships = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        memberships.update(dict.fromkeys(controllers.split(","), path))  # version 2 names no controller
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, options = after.split()[0], after.split()[-1].split(",")
        if kind == "cgroup2" or (kind == "cgroup" and controller in options):
            member = memberships.get("" if kind == "cgroup2" else controller, "/")
            mounted, point = before.split()[3:5]
            yield from _upwards(root / point.lstrip("/"), mounted, member)


def _upwards(point: Path, mounted: str, member: str) -> Iterator[Path]:
    """The folders of a cgroup and of those above it.

    Args:
        point: where a hierarchy is mounted.
        mounted: the cgroup that lies there: in a container often not the highest.
        member: the name of the cgroup in the hierarchy. One that lies outside of what is mounted cannot be
            seen; what is mounted then stands for it.
    """
    name = PurePosixPath(member)
    visible = name.is_relative_to(mounted) and ".." not in name.parts
    folder = point / name.relative_to(mounted) if visible else point
    yield folder
    while folder != point:
        folder = folder.parent
        yield folder


def _quota(folder: Path) -> float | None:
    """CPUs on average; None without a limit."""
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
            return int(most) - int(now) + _fields(folder / "memory.stat").get(reclaimable, 0)
    return sys.maxsize


def _fields(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    lines = (line.split() for line in _read(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _read(file: Path) -> str:
    """A file's text; empty where it is not there, or not for us."""
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""
