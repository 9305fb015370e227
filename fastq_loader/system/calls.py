"""System calls that not every Python, kernel or system has, with fallbacks where possible.

Runs in every process. Linux has every call that workers need. But a Python that was built with old headers,
as conda's is, lacks the names of newer calls. So these go through the C library, or straight to the kernel.
On other systems this module can be imported, but only `AVAILABLE` and `missing` are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import select
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from fastq_loader.system import pages

try:
    import fcntl
    import resource
except ImportError:  # on another system
    pass

# Numbers of <linux/memfd.h>, <linux/fcntl.h>, <asm-generic/fcntl.h> and <sys/eventfd.h>: not every Python has
# names for them.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 0x1, 0x2
_F_ADD_SEALS, _SEALS, _SEAL_WRITE = 1033, 0x1 | 0x2 | 0x4, 0x8  # SEAL, SHRINK, GROW
_EFD_CLOEXEC, _EFD_NONBLOCK = 0o2000000, 0o4000
_PR_SET_NAME = 15  # <linux/prctl.h>
_SCM_MAX_FD = 253  # <net/scm.h>: descriptors with one message
_HEAD = struct.Struct("=QI")  # of a message: its bytes, its descriptors

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x1, 0x2
# Not every Python knows these; numbers from <asm-generic/mman-common.h>.
_MADV_REMOVE, _MADV_DONTDUMP, _MADV_POPULATE_WRITE = 9, 16, 23
_FAILED = ctypes.c_void_p(-1).value
_PYBUF_WRITE = 0x200
#: Errors of a call that this kernel lacks, or that a sandbox refuses.
_REFUSED = errno.EPERM, errno.EACCES, errno.ENOSYS

#: Bytes of shared memory for the workers of one loader: four times the machine's memory, so that all of the
#: memory can be in batches that a user keeps, even if some workers make more of them than others. At most 4
#: TiB: x86-64 gives a process 128 TiB for all the loaders that are open at a time.
_OVERCOMMIT, _LARGEST = 4, 4 << 40
#: It takes at most this part of a limit of the address space, which also has to cover everything else.
_SHARE = 4

#: Numbers of calls, for a C library that is as old as the headers. From 424 on they are the same everywhere.
_NUMBERS = {"pidfd_send_signal": 424, "pidfd_open": 434}


@functools.cache
def _library() -> Any:
    """Load the C library, and declare the argument types of its calls for memory."""
    library = ctypes.CDLL(None, use_errno=True)
    address, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = (address, length, number, number, number, ctypes.c_long)
    library.mmap.restype = address
    library.munmap.argtypes = (address, length)
    library.madvise.argtypes = (address, length, number)
    return library


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library, or the kernel if the library lacks the function.

    Raises:
        OSError: the call failed, or does not exist (ENOSYS).
    """
    library = _library()
    function = getattr(library, name, None)
    typed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    if function is None:
        function = library.syscall
        typed.insert(0, ctypes.c_long(_NUMBERS.get(name, -1)))
    result: int = function(*typed)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _needed(name: str, *arguments: int | bytes) -> int:
    """Make a call that has no fallback."""
    try:
        return _call(name, *arguments)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        advice = "workers need this call: allow it in this sandbox, or use num_workers=0"
        raise OSError(error.errno, f"{error.strerror}; {advice}") from error


#: Whether this system can have shared memory for workers. Other systems that have memfds lack two more things
#: that workers need: holes and /proc.
AVAILABLE = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "memfd_create")


#: Things that some systems or sandboxes lack; each function opens a descriptor to try one. Memory that
#: processes share needs these.
_SHARED: dict[str, Callable[[], int]] = {
    "memfd_create": lambda: memfd_create("fastq_loader"),
    "eventfd": lambda: wake_up(),
    "/proc": lambda: os.open("/proc/self/fd", os.O_RDONLY | os.O_CLOEXEC),
}
#: The things that workers need.
NEEDED: dict[str, Callable[[], int]] = {**_SHARED, "pidfd_open": lambda: pidfd_open(os.getpid())}


def missing(for_workers: bool = True) -> str:
    """Name of something that workers need and this system or sandbox lacks; "" if it lacks nothing.

    Is found out once in a process, and again in a forked child, which may have entered a sandbox.

    Args:
        for_workers: else look only at what memory needs that processes share.
    """
    return _missing(for_workers, os.getpid()) if AVAILABLE else "memfd_create"


@functools.lru_cache(maxsize=2)
def _missing(for_workers: bool, process: int) -> str:
    for name, attempt in (NEEDED if for_workers else _SHARED).items():
        try:
            os.close(attempt())
        except OSError as error:  # other errors are raised where the call is needed
            if error.errno in (*_REFUSED, errno.ENOENT):
                return name
    wanted, allowed = arena_room() if for_workers else (0, 0)
    return "address space (ulimit -v)" if allowed < wanted else ""


# ---- memory -----------------------------------------------------------------------------------------


def arena_room() -> tuple[int, int]:
    """Bytes of address space for the shared memory of a loader's workers: as many as it needs, and as many as
    the limit of the address space (`ulimit -v`) leaves for it. A limit of file sizes limits the need."""
    needed = min(pages.installed() * _OVERCOMMIT, _LARGEST, limit_of("FSIZE") or _LARGEST)
    limit = limit_of("AS")
    return needed, needed if limit is None else limit // _SHARE


def memfd_create(name: str) -> int:
    """Create an empty file in memory that can be sealed; new programs do not inherit it.

    Raises:
        OSError: this kernel or sandbox has no memfds, or descriptors are used up.
    """
    return _needed("memfd_create", name.encode(), _MFD_CLOEXEC | _MFD_ALLOW_SEALING)


def _whole_pages(address: int, length: int, page: int = mmap.PAGESIZE) -> tuple[int, int]:
    """Start and end of the pages that lie wholly in a range: some systems have larger pages than blocks."""
    return -(-address // page) * page, (address + length) // page * page


class MmapRegion:
    """A memfd, or a part of it, that is mapped into this process and writable, as long as this object lives.

    Args:
        fd: the memfd.
        nbytes: its length in bytes, or that of the part.
        offset: where the part begins, at a page.
        private: whether writes stay in this mapping.

    Attributes:
        address: address of its first byte.
        parts: the mapped parts: offset → bytes.

    Raises:
        MemoryError: there is not enough address space.
    """

    __slots__ = ("_library", "_nbytes", "address", "parts")

    def __init__(self, fd: int, nbytes: int, offset: int = 0, private: bool = False) -> None:
        self._library = _library()
        self._nbytes = nbytes
        self.parts: dict[int, int] = {}
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        start = self._library.mmap(None, nbytes, access, kind, fd, offset)
        if start == _FAILED:
            reason = os.strerror(ctypes.get_errno())
            raise MemoryError(f"no address space for {nbytes} bytes of shared memory: {reason}")
        self.address, self.parts = start, {0: nbytes}
        self._library.madvise(start, nbytes, _MADV_DONTDUMP)  # if a sandbox refuses, core dumps are larger

    def populate(self, offset: int, nbytes: int) -> None:
        """Put pages into memory, and into this process's page table. Before Linux 5.14 this has no effect:
        pages come when they are touched."""
        self._library.madvise(self.address + offset, nbytes, _MADV_POPULATE_WRITE)

    def cut(self, parts: Iterable[tuple[int, int]]) -> None:
        """Divide the mapping into these parts (offset, nbytes) and the ranges between them, for `unmap`."""
        edges = {edge for start, nbytes in parts for edge in (start, start + nbytes)} | {0, self._nbytes}
        self.parts = {at: until - at for at, until in pairwise(sorted(edges))}

    def unmap(self, offset: int, pages: bool = True) -> None:
        """Release the addresses of a part, and its pages. May be called on any thread, and more than once."""
        length = self.parts.pop(offset, 0)
        start, end = _whole_pages(self.address + offset, length)
        if pages and end > start:  # if a sandbox refuses, the memfd keeps the pages until its end
            self._library.madvise(start, end - start, _MADV_REMOVE)
        if end > start and self._library.munmap(start, end - start):
            self.parts[offset] = length  # it would split a mapping, and there may be no more

    def __del__(self, whole_pages: Any = _whole_pages) -> None:  # at exit globals may be gone
        for offset, nbytes in self.parts.items():
            start, end = whole_pages(self.address + offset, nbytes)
            self._library.munmap(start, end - start)


def view(address: int, nbytes: int) -> memoryview:
    """Return a writable view of the bytes at an address; it does not keep the address valid."""
    make = ctypes.pythonapi.PyMemoryView_FromMemory
    make.argtypes, make.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object
    made: memoryview = make(address, nbytes, _PYBUF_WRITE)
    return made


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Return pages of a memfd to the system; they read as zeros, and can be written again. If a sandbox
    refuses, the memfd keeps them until its end."""
    with contextlib.suppress(OSError):
        _call("fallocate", fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, nbytes)


def seal_length(fd: int, contents: bool = False) -> None:
    """Forbid all processes to change the length of a memfd, and with `contents` its bytes. Has no effect if a
    sandbox refuses."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS | (_SEAL_WRITE if contents else 0))


def limit_of(name: str) -> int | None:
    """Limit of a resource of this process, such as "AS" (bytes of address space); None if unlimited."""
    limit, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    return None if limit == resource.RLIM_INFINITY else limit


# ---- descriptors ------------------------------------------------------------------------------------


def readable(descriptors: Collection[int], seconds: float | None) -> list[int]:
    """Wait until one of these descriptors is readable, or its other end is closed.

    Args:
        descriptors: any descriptors (select() takes only numbers below 1024); negative ones are ignored.
        seconds: longest time to wait; None, or infinity, waits for ever.

    Returns:
        The readable descriptors.
    """
    poller = select.poll()
    for descriptor in descriptors:
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
    milliseconds = None if seconds is None or seconds == math.inf else math.ceil(seconds * 1000)
    return [descriptor for descriptor, _ in poller.poll(milliseconds)]


def wake_up() -> int:
    """Open a descriptor that becomes readable, and stays so, when `wake` is called with it.

    Raises:
        OSError: descriptors are used up.
    """
    return _needed("eventfd", 0, _EFD_CLOEXEC | _EFD_NONBLOCK)


def wake(descriptor: int) -> None:
    os.write(descriptor, (1).to_bytes(8, sys.byteorder))


# ---- processes --------------------------------------------------------------------------------------


def name_process(name: str) -> None:
    """Set the name of this process in `ps` and `top`, of at most 15 bytes. Called on the main thread."""
    with contextlib.suppress(OSError):  # a sandbox refuses
        _call("prctl", _PR_SET_NAME, name.encode())


def pidfd_open(pid: int) -> int:
    """Open a descriptor that becomes readable when a process has ended.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: this kernel or sandbox has no pidfds, or descriptors are used up.
    """
    return _call("pidfd_open", pid, 0)


def pidfd_send_signal(descriptor: int, number: int) -> None:
    """Send a signal to the process behind a `pidfd_open` descriptor.

    Raises:
        OSError: the process has ended, or may not be sent a signal.
    """
    _call("pidfd_send_signal", descriptor, number, None, 0)


def occupy_standard_streams() -> None:
    """Open /dev/null as each of the descriptors 0 to 2 that is free: for good, and for children too."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened > descriptor:  # another thread was faster
                os.close(opened)
            else:
                os.set_inheritable(opened, True)


# multiprocessing's own two functions wait for an answer from Python 3.14 on, and take any data for it.
def send_message(to: int, message: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message and descriptors over the Unix socket `to`, the first 253 in the same call: a
    signal handler that raises leaves no half of it there, nor does a descriptor that cannot be sent."""
    head = _HEAD.pack(len(message), len(descriptors))
    with socket.fromfd(to, socket.AF_UNIX, socket.SOCK_STREAM) as end:
        socket.send_fds(end, [head, message], descriptors[:_SCM_MAX_FD])
        for first in range(_SCM_MAX_FD, len(descriptors), _SCM_MAX_FD):
            socket.send_fds(end, [b"\0"], descriptors[first : first + _SCM_MAX_FD])


def receive_message(source: int) -> tuple[bytes, list[int]]:
    """Receive a message and its descriptors over the Unix socket `source`.

    Raises:
        EOFError: the other end is closed.
    """
    with socket.fromfd(source, socket.AF_UNIX, socket.SOCK_STREAM) as end:
        head, descriptors, *_ = socket.recv_fds(end, _HEAD.size, _SCM_MAX_FD)
        if len(head) < _HEAD.size:
            raise EOFError
        size, count = _HEAD.unpack(head)
        message = b""
        while len(message) < size:
            message += end.recv(size - len(message)) or _closed()
        while len(descriptors) < count:
            descriptors += socket.recv_fds(end, 1, _SCM_MAX_FD)[1] or _closed()
    return message, descriptors


def _closed() -> NoReturn:
    raise EOFError
