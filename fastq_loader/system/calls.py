"""System calls that not every Python, kernel or system has, each with a way around.

Runs in every process. Linux has all that workers need. But a Python that was built with old headers, as
conda's is, lacks the names of newer calls. Those go through the C library, or straight to the kernel. On
another system this module is imported, and nothing in it but `AVAILABLE` is used.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import os
import platform
import select
import signal
import sys
from collections.abc import Callable, Collection
from typing import Any

try:
    import fcntl
    import resource
except ImportError:  # another system's
    pass

# Numbers of <linux/memfd.h>, <linux/fcntl.h>, <asm-generic/fcntl.h> and <sys/eventfd.h>: not every Python has
# names for them.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 0x1, 0x2
_F_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4  # SEAL, SHRINK, GROW
_F_OFD_SETLK = 37
_EFD_CLOEXEC, _EFD_NONBLOCK = 0o2000000, 0o4000

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x1, 0x2
_MADV_REMOVE = 9
_FAILED = ctypes.c_void_p(-1).value

#: Types of a lock in a `struct flock`.
WRITE_LOCK, UNLOCK = 1, 2

#: Numbers of calls for a C library that is as old as the headers. Those from 424 on are the same everywhere.
_NUMBERS = {"pidfd_send_signal": 424, "pidfd_open": 434}
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
if platform.machine() in _MEMFD_CREATE:
    _NUMBERS["memfd_create"] = _MEMFD_CREATE[platform.machine()]


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library, or the kernel where the library does not know it.

    Raises:
        OSError: it failed, or there is none (ENOSYS).
    """
    library = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, name, None)
    typed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    if function is None and name in _NUMBERS:
        function = library.syscall
        typed.insert(0, ctypes.c_long(_NUMBERS[name]))
    if function is None:
        raise OSError(errno.ENOSYS, f"{name}: {os.strerror(errno.ENOSYS)}")
    result: int = function(*typed)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _has_memfd() -> bool:
    if sys.platform != "linux":  # others that have it lack what else workers need: holes, /proc
        return False
    if hasattr(os, "memfd_create") or "memfd_create" in _NUMBERS:
        return True
    return hasattr(ctypes.CDLL(None), "memfd_create")


#: Whether there can be shared memory for workers.
AVAILABLE = _has_memfd()


# ---- memory -----------------------------------------------------------------------------------------


def memfd_create(name: str) -> int:
    """A file in memory, of no length, that can be sealed; programs that are started do not inherit it.

    Raises:
        OSError: there is none in this kernel or sandbox, or descriptors are used up.
    """
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _call("memfd_create", name.encode(), flags)


class Piece:
    """Part of a memfd, mapped into this process, shared and writable, for as long as this object lives.

    Args:
        fd: the memfd.
        offset: of its first byte; the mapping begins with its page.
        nbytes: from there on.

    Attributes:
        address: of the byte at `offset`.

    Raises:
        MemoryError: there is not enough address space.
    """

    __slots__ = ("_length", "_start", "address")

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        first = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._length = max(offset + nbytes - first, 1)
        access, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        start = _memory().mmap(None, self._length, access, shared, fd, first)
        self._start: int | None = None if start == _FAILED else start
        if self._start is None:
            reason = os.strerror(ctypes.get_errno())
            raise MemoryError(f"{nbytes} bytes of a batch find no address space in this process: {reason}")
        self.address = self._start + offset - first

    def punch(self) -> None:
        """Give its pages back to the system."""
        _memory().madvise(self._start, self._length, _MADV_REMOVE)

    def __del__(self, library: Callable[[], Any] | None = None) -> None:
        if getattr(self, "_start", None) is not None:
            (library or _memory)().munmap(self._start, self._length)


@functools.cache
def _memory() -> Any:
    """The C library, its calls for memory with their types."""
    library = ctypes.CDLL(None, use_errno=True)
    address, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = (address, length, number, number, number, ctypes.c_long)
    library.mmap.restype = address
    library.munmap.argtypes = (address, length)
    library.madvise.argtypes = (address, length, number)
    return library


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Give pages of a memfd back to the system; they read as zeros, and can be written again."""
    _call("fallocate", fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, nbytes)


def seal_length(fd: int) -> None:
    """No process can cut a memfd short, or make it longer, from here on."""
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)


def address_space_limit() -> int | None:
    """Bytes of address space that a process may have; None is any number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


# ---- descriptors ------------------------------------------------------------------------------------


def readable(descriptors: Collection[int], seconds: float | None) -> list[int]:
    """Wait until one of these is readable, or has no other end any more.

    Args:
        descriptors: any number of them, of any number (select() knows those below 1024); a negative one is
            passed over.
        seconds: to wait, at most; None, or infinity, waits for ever.

    Returns:
        Those that are.
    """
    poller = select.poll()
    for descriptor in descriptors:
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
    milliseconds = None if seconds is None or seconds == math.inf else math.ceil(seconds * 1000)
    return [descriptor for descriptor, _ in poller.poll(milliseconds)]


def wake_up() -> int:
    """A descriptor that becomes readable, and stays so, when `wake` is called with it.

    Raises:
        OSError: descriptors are used up.
    """
    if hasattr(os, "eventfd"):
        return os.eventfd(0, _EFD_CLOEXEC | _EFD_NONBLOCK)
    return _call("eventfd", 0, _EFD_CLOEXEC | _EFD_NONBLOCK)


def wake(descriptor: int) -> None:
    os.write(descriptor, (1).to_bytes(8, sys.byteorder))


def set_lock(fd: int, flock: bytes) -> None:
    """Set or lift a lock that belongs to the open file, and goes with it, without waiting.

    Args:
        fd: of the file.
        flock: a `struct flock`.

    Raises:
        OSError: EAGAIN or EACCES: somebody else has one there.
    """
    fcntl.fcntl(fd, _F_OFD_SETLK, flock)


# ---- processes --------------------------------------------------------------------------------------


def pidfd_open(pid: int) -> int:
    """A descriptor that becomes readable when a process has ended.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: there are none in this kernel or sandbox, or they are used up.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call("pidfd_open", pid, 0)


def has_pidfd() -> bool:
    """Whether this kernel or sandbox has `pidfd_open`."""
    try:
        os.close(pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def pidfd_send_signal(descriptor: int, number: int) -> None:
    """Send a signal to the process behind a `pidfd_open` descriptor.

    Raises:
        OSError: it has ended, or may not be sent one.
    """
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(descriptor, number)
    else:
        _call("pidfd_send_signal", descriptor, number, None, 0)
