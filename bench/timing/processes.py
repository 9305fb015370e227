"""Processes as the bench sees them: whose they are, what they have used, and whether they rest (Linux).

A process may end between two looks at it; it then counts as nothing.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

USAGE = ("consumer_cpu", "worker_cpu", "switches")
"""What `usage` counts: seconds of CPU of this process and of others, and context switches of all of them."""

# A worker at work fills the whole window, and idle threads of a tree that rests use a tenth of it.
_WINDOW_S, _QUIET_S = 0.05, 0.01
_LONGEST_S = 10.0  # some loaders never rest; workers that are spawned import torch first


def descendants(pid: int | None = None) -> list[int]:
    """The processes below this one, or below that one."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


class Owners:
    """Which lane each process below this one belongs to."""

    def __init__(self) -> None:
        self._pids: dict[str, list[int]] = {}

    def of(self, name: str) -> list[int]:
        """The processes that are no other lane's; from now on they are this one's."""
        others = {pid for other, pids in self._pids.items() if other != name for pid in pids}
        self._pids[name] = [pid for pid in descendants() if pid not in others]
        return self._pids[name]

    def forget(self, name: str) -> None:
        self._pids.pop(name, None)


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU of all threads of a process, also of those that ended."""
    with suppress(OSError):  # EINVAL: the process is gone
        # The clock of another process (clock_getcpuclockid(3)) has nanoseconds; /proc has ticks of 10 ms.
        return time.clock_gettime(~pid << 3 | 2)
    return 0.0


def usage(workers: Iterable[int]) -> npt.NDArray[np.float64]:
    """`USAGE` up to now, of this process, of these, and of children that ended and were waited for."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    pids = list(workers)
    switches = own.ru_nvcsw + own.ru_nivcsw + ended.ru_nvcsw + ended.ru_nivcsw
    cpu = ended.ru_utime + ended.ru_stime + sum(map(cpu_seconds, pids))
    return np.array((time.process_time(), cpu, switches + sum(map(_switches, pids))))


def named(used: npt.NDArray[np.float64]) -> dict[str, Any]:
    """A difference of two `usage`, as fields of a row."""
    return dict(zip(USAGE, (*used[:2].tolist(), int(used[2])), strict=True))


def _switches(pid: int) -> int:
    """Context switches of the living threads of a process; psutil has those of its main thread only."""
    total = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for line in (thread / "status").read_text().splitlines():
                if "ctxt_switches" in line:
                    total += int(line.split()[1])
    return total


def wait_until_quiet() -> None:
    """Return when this process and those below it have stopped computing, or after a limit."""
    pids = [os.getpid(), *descendants()]
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        before = sum(map(cpu_seconds, pids))
        time.sleep(_WINDOW_S)
        if sum(map(cpu_seconds, pids)) - before <= _QUIET_S:
            return
