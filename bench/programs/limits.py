"""Runs a command with little memory: each process under RLIMIT_DATA (Linux).

The limit follows from the machine: the command is run on a few rows first, without a limit, and its
processes are looked at while it runs. RLIMIT_DATA counts the private, writable memory of one process, and
neither shared memory nor the page cache.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bench.timing.processes import descendants

_LOOK_S = 0.002


def run(command: Sequence[str], nbytes: int) -> int:
    """The exit status of a command of which each process may have that many bytes of data; 0: any number."""
    if not nbytes:
        return subprocess.call(command)
    return subprocess.call(["sh", "-c", f'ulimit -d {nbytes // 1024} && exec "$@"', "sh", *command])


def needed(command: Sequence[str]) -> int:
    """The most bytes of data that any process of a command has had, or 0 where it failed.

    It is looked at every few milliseconds, so what a process has for less than that may be missed.
    """
    most = 0
    process = subprocess.Popen(command)
    while process.poll() is None:
        for pid in (process.pid, *descendants(process.pid)):
            most = max(most, _data(pid))
        time.sleep(_LOOK_S)
    return 0 if process.returncode else most


def _data(pid: int) -> int:
    """Bytes that RLIMIT_DATA counts of a process; 0 when it has ended."""
    with suppress(OSError):
        found = re.search(r"^VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0
