"""Runs a command with little memory: in a cgroup, or else under RLIMIT_DATA (Linux).

A cgroup counts everything: the processes together, shared memory, the page cache. It is made below one that
the user names and may write to: under version 2 no process may sit in that one, so the caller's own will not
do. RLIMIT_DATA limits each process alone, and counts neither shared memory nor the page cache.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_LEAVING_S = 10.0


class Files(NamedTuple):
    """Names of a cgroup's files: `swap` has the most of memory and swap, or of swap alone."""

    limit: str
    swap: str
    peak: str
    events: str


VERSION_1 = Files(
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
)
VERSION_2 = Files("memory.max", "memory.swap.max", "memory.peak", "memory.events")


class Used(NamedTuple):
    """What a cgroup says at the end: the most bytes at any time, and processes killed for want of memory."""

    peak: int
    killed: int


class Group:
    """A cgroup of one's own.

    Raises:
        ValueError: no cgroup with the memory controller can be made there.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._files = files = VERSION_2 if (folder / "cgroup.controllers").exists() else VERSION_1
        self.folder = folder / f"fastq-bench-{os.getpid()}"
        try:
            self.folder.mkdir()
            (self.folder / files.limit).write_text(str(nbytes))
            if (self.folder / files.swap).exists():  # not where the kernel was told not to count it
                (self.folder / files.swap).write_text("0" if files is VERSION_2 else str(nbytes))
        except OSError as error:
            self.remove()
            raise ValueError(
                f"--cgroup {folder}: no cgroup with a memory limit can be made in it ({error}); name "
                "one that you may write to, or leave --cgroup out for RLIMIT_DATA"
            ) from error

    def used(self) -> Used:
        events = dict(re.findall(r"(\w+) (\d+)", (self.folder / self._files.events).read_text()))
        return Used(int((self.folder / self._files.peak).read_text()), int(events.get("oom_kill", 0)))

    def remove(self) -> None:
        """When the last process has left it, which a killed program's workers do within a second."""
        deadline = time.monotonic() + _LEAVING_S
        members = self.folder / "cgroup.procs"
        while members.exists() and members.read_text().strip() and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.folder.exists():
            self.folder.rmdir()


class Limited:
    """Runs commands under a limit.

    Args:
        nbytes: of memory. 0 is no limit.
        folder: of cgroups; None: RLIMIT_DATA.

    Attributes:
        said: how the last command was limited, and what it used.
    """

    said = ""

    def __init__(self, nbytes: int, folder: Path | None) -> None:
        self._nbytes, self._folder = nbytes, folder

    def run(self, command: Sequence[str]) -> int:
        """The exit status of the command."""
        if not self._nbytes:
            return subprocess.call(command)
        if self._folder is None:
            self.said = f"each process may have {self._nbytes / 1e6:,.0f} MB of data (RLIMIT_DATA)"
            return subprocess.call(
                ["sh", "-c", f'ulimit -d {self._nbytes // 1024} && exec "$@"', "sh", *command]
            )
        with self._group() as group:
            enter = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group.folder), *command]
            status = subprocess.call(enter)
            used = group.used()
        self.said = (
            f"in a cgroup of {self._nbytes / 1e6:,.0f} MB without swap; the most it held, "
            f"page cache included: {used.peak / 1e6:,.0f} MB; killed for want of memory: {used.killed}"
        )
        return status

    @contextmanager
    def _group(self) -> Iterator[Group]:
        assert self._folder is not None
        group = Group(self._folder, self._nbytes)
        try:
            yield group
        finally:
            group.remove()
