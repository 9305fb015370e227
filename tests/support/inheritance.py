"""State that a child inherits: functions that change it, and what a worker reports of it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: For tests that lower their rights.
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can do that: CI has a step that is root's")

_UNSHARE_HOSTNAME, _NO_NEW_PRIVILEGES = 0x04000000, 38
_KEEP_CAPABILITIES, _AMBIENT, _RAISE, _READ_ALL = 8, 47, 2, 2  # <linux/prctl.h>, <linux/capability.h>


def limit(name: int) -> None:
    _, most = resource.getrlimit(name)
    resource.setrlimit(name, (1000, most))


def unshare() -> None:
    assert ctypes.CDLL(None).unshare(_UNSHARE_HOSTNAME) == 0


def forgo_privileges() -> None:
    assert ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0


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


def lead_a_group() -> None:
    """Leave the group of the process that started this one; the leader of a session cannot."""
    os.setpgid(0, 0)


#: Changes of the surroundings, which anybody may make.
SURROUNDINGS: dict[str, Callable[[], object]] = {
    "environment": lambda: os.environ.update(CHANGED="yes"),
    "umask": lambda: os.umask(0o027),
    "priority": lambda: os.nice(3),
    "scheduling": lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
    "CPUs": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "limit": lambda: limit(resource.RLIMIT_NOFILE),
    "blocked signal": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}),
    "ignored signal": lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
    "out-of-memory score": lambda: Path("/proc/self/oom_score_adj").write_text("500"),
    "process group": lead_a_group,
    "session": os.setsid,
}
#: Changes of the rights, most of which only root may make.
RIGHTS: dict[str, Callable[[], object]] = {
    "groups": lambda: os.setgroups([62_137]),
    "group id": lambda: os.setgid(62_138),
    "effective group id": lambda: os.setegid(62_138),
    "user id": lambda: os.setuid(62_139),
    "effective user id": lambda: os.seteuid(62_139),
    "namespace": unshare,
    "no new privileges": forgo_privileges,
    "root folder": lambda: os.chroot("/proc"),
    "user, groups and capabilities": become_another_user,
}


class Inherited:
    """One sample: what the process that reads it has inherited. It may be pickled."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        status = Path("/proc/self/status").read_text().splitlines()
        lines = [line for line in status if line.startswith(("Umask", "SigBlk", "SigIgn", "Cap", "NoNew"))]
        return {
            "ids": (os.getresuid(), os.getresgid(), os.getgroups()),
            "group and session": (os.getpgid(0), os.getsid(0)),
            "scheduling": (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)),
            "CPUs": os.sched_getaffinity(0),
            "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
            "out-of-memory score": Path("/proc/self/oom_score_adj").read_text(),
            "environment": os.environ.get("CHANGED"),
            "host name": os.readlink("/proc/self/ns/uts"),
            "folder": os.getcwd(),
            "status": lines,
        }
