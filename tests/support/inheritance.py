"""State that a child inherits: functions that change it, and what a worker reports of it."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: For tests that lower their rights.
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can do that: CI has a step that is root's")

_UNSHARE_HOSTNAME = 0x04000000
_KEEP_CAPABILITIES, _AMBIENT, _RAISE, _READ_ALL = 8, 47, 2, 2  # <linux/prctl.h>, <linux/capability.h>


def limit(name: int) -> None:
    _, most = resource.getrlimit(name)
    resource.setrlimit(name, (1000, most))


def unshare() -> None:
    assert ctypes.CDLL(None).unshare(_UNSHARE_HOSTNAME) == 0


def become_another_user(number: int = 62_139) -> None:
    """For good, and for all that this process starts. It may still read all files: Python and this repository
    may lie in root's folder."""
    library, read_all = ctypes.CDLL(None), 1 << _READ_ALL
    assert library.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0) == 0
    os.setgroups([number])
    os.setgid(number)
    os.setuid(number)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)(*[read_all] * 3)
    assert library.capset(header, sets) == 0
    assert library.prctl(_AMBIENT, _RAISE, _READ_ALL, 0, 0) == 0


#: Changes of the surroundings, which anybody may make.
SURROUNDINGS: dict[str, Callable[[], object]] = {
    "environment": lambda: os.environ.update(CHANGED="yes"),
    "umask": lambda: os.umask(0o027),
    "priority": lambda: os.nice(3),
    "CPUs": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "limit": lambda: limit(resource.RLIMIT_NOFILE),
    "standard output": lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 1),
}
#: Changes of the rights, most of which only root may make.
RIGHTS: dict[str, Callable[[], object]] = {
    "groups": lambda: os.setgroups([62_137]),
    "group id": lambda: os.setgid(62_138),
    "namespace": unshare,
    "user, groups and capabilities": become_another_user,
}


class Inherited:
    """One sample: what the process that reads it has inherited. It may be pickled."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        status = Path("/proc/self/status").read_text().splitlines()
        lines = [line for line in status if line.startswith(("Umask", "Cap"))]
        return {
            "ids": (os.getresuid(), os.getresgid(), os.getgroups()),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "CPUs": os.sched_getaffinity(0),
            "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
            "environment": os.environ.get("CHANGED"),
            "host name": os.readlink("/proc/self/ns/uts"),
            "folder": os.getcwd(),
            "standard output": os.readlink("/proc/self/fd/1"),
            "status": lines,
        }
