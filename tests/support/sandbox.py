"""A sandbox that refuses system calls, as containers and services have it: a seccomp filter.

It holds for the process that installs it, and for all that it starts from then on.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import shutil
import struct
import subprocess
from functools import cache

import pytest

#: Call → its number on x86-64 and on arm64, whether there is a way around it, and the argument that must have
#: which value; else every call of it is meant.
_CALLS: dict[str, tuple[int, int, bool, tuple[int, int] | None]] = {
    "memfd_create": (319, 279, False, None),
    "eventfd": (290, 19, False, None),
    "fallocate": (285, 47, False, None),
    "pidfd_open": (434, 434, False, None),
    "MADV_REMOVE": (28, 233, True, (2, 9)),
    "MADV_DONTDUMP": (28, 233, True, (2, 16)),
    "MADV_POPULATE_WRITE": (28, 233, True, (2, 23)),
    "F_ADD_SEALS": (72, 25, True, (1, 1033)),
}
CALLS = list(_CALLS)
#: Which of the numbers are this machine's.
_COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
NEEDED = pytest.mark.skipif(_COLUMN is None, reason="the numbers of this machine's calls are not known here")

_LOAD, _SKIP_UNLESS, _RETURN = 0x20, 0x15, 0x06  # BPF: a word of seccomp_data, a comparison, a verdict
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_SET_SECCOMP, _FILTER, _SET_NO_NEW_PRIVILEGES = 22, 2, 38


def _step(code: int, value: int, unless: int = 0) -> bytes:
    return struct.pack("HBBI", code, 0, unless, value)


def optional() -> list[str]:
    """The calls that there is a way around."""
    return [name for name, (*_, around, _) in _CALLS.items() if around]


def refuse(*names: str) -> None:
    """From here on these calls fail with EPERM."""
    steps = []
    for name in names:
        *numbers, _, argument = _CALLS[name]
        number = numbers[_COLUMN or 0]
        checks = [(0, number)] if argument is None else [(0, number), (16 + 8 * argument[0], argument[1])]
        left = 2 * len(checks)
        for offset, value in checks:
            left -= 2
            steps += [_step(_LOAD, offset), _step(_SKIP_UNLESS, value, left + 1)]
        steps.append(_step(_RETURN, _ERRNO | errno.EPERM))
    steps.append(_step(_RETURN, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    library = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, program, 0, 0)):
        if library.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


def mounted(folder: str, options: str = "", remount: bool = False) -> bool:
    """Whether this process, and those that it starts from now on, see an empty tmpfs in place of a folder; or
    can only read the one that they have seen there."""
    library = ctypes.CDLL(None)
    new_namespace, recursive_and_private, read_only = 0x20000, 0x4000 | 1 << 18, 32 | 1
    if remount:
        return not library.mount(None, folder.encode(), None, read_only, None)
    return not (
        library.unshare(new_namespace)
        or library.mount(None, b"/", None, recursive_and_private, None)
        or library.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, options.encode())
    )


@cache
def private_mounts() -> list[str]:
    """A command that runs another with 8 MB in /dev/shm; nothing where that is not permitted."""
    for unshare in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        mount = [*unshare, "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh"]
        if shutil.which("unshare") and subprocess.run([*mount, "true"], capture_output=True).returncode == 0:
            return mount
    return []
