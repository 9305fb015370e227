"""Locks on files, shared between processes.

Runs in every process. A lock on bytes is an open-file-description lock: it belongs to an open file, and the
kernel releases it when the last process that has the file open dies. Processes that share a descriptor share
its locks, so each opens the file anew. A lock on a whole file is an advisory `flock`.
"""

from __future__ import annotations

import errno
import os
import struct

from fastq_loader.system.unpatched import time

try:
    import fcntl
except ImportError:  # on another system
    fcntl = None  # type: ignore[assignment]

#: `struct flock`: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_WRITE, _UNLOCK = 1, 2
# Numbers of <asm-generic/fcntl.h>: not every Python has names for them.
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37
#: Seconds between two attempts to lock a file: a process that stores a value has it for some 100 us.
_GLANCE = 50e-6


def open_anew(fd: int) -> int:
    """Open the file behind a descriptor once more, as the owner of locks.

    Raises:
        OSError: descriptors are used up.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def try_lock(fd: int, start: int, length: int) -> bool:
    """Lock bytes of a file, without waiting. Returns False if another owner has a lock there.

    Args:
        fd: descriptor from `open_anew`.
        start, length: the bytes; they need not exist.

    Raises:
        OSError: the file cannot be locked.
    """
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(_WRITE, 0, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, start: int, length: int) -> None:
    """Release a lock of this owner."""
    fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(_UNLOCK, 0, start, length, 0))


def locked_length(fd: int, start: int) -> int:
    """Length of the lock that another owner has on a byte; 0 without a lock."""
    found = fcntl.fcntl(fd, _F_OFD_GETLK, _FLOCK.pack(_WRITE, 0, start, 1, 0))
    kind, _, _, length, _ = _FLOCK.unpack(found)
    return 0 if kind == _UNLOCK else length


def lock_file(fd: int, seconds: float = 0.0) -> None:
    """Lock a whole file until it is unlocked; a child of a fork keeps it locked after it is closed. Has no
    effect on systems without such locks.

    Args:
        fd: its descriptor.
        seconds: how long to wait for another process that has it locked.

    Raises:
        BlockingIOError: another process has it locked.
        OSError: the file system has no locks.
    """
    until = time.monotonic() + seconds
    while fcntl is not None:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
        time.sleep(_GLANCE)


def unlock_file(fd: int) -> None:
    """Release the lock of `lock_file`, also for children that have the file open."""
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)
