"""Memory that processes share by name, and that is freed when the last of them ends, even if that is killed.

Runs in the program. The memory is a memfd, which has no name of its own: a small file in the temporary
folder, locked while it is read or written, lists the processes that have it open, and their descriptors in
/proc. A killed process leaves only its line, which the next process removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from fastq_loader.memory import mapped
from fastq_loader.system import locks

#: Seconds to wait for another process that opens a name: it may be stopped.
PATIENCE = 30.0


class NameInUse(ValueError):
    """Other processes share something else under this name.

    Args:
        about: description of what they share.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        super().__init__(about)
        self.about = about


def once(name: str, about: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `make` in the first process that used this name.

    Args:
        name: any text.
        about: description of the contents, of JSON types; the same in all processes.
        make: returns containers by name.

    Raises:
        NameInUse: other processes share something else under this name.
        PermissionError: the file of this name belongs to another user.
        TimeoutError: another process keeps opening this name.
    """
    fd, source = descriptor(name, about, lambda: mapped.write(make()))
    shared: dict[str, Any] = mapped.read(fd)
    for container in shared.values():
        container.source = source
    return shared


def descriptor(name: str, about: dict[str, Any], make: Callable[[], int]) -> tuple[int, Any]:
    """Like `once`, for a descriptor of memory.

    Returns:
        The descriptor, and an object that keeps it open, in this process and for others.
    """
    with _registry(path := _path(name)) as file:
        known, lines = _read(file)
        holders = [(opened, *holder) for holder in lines if (opened := _open(*holder)) >= 0]
        try:
            if holders and known != about:
                raise NameInUse(known)
            fd = os.dup(holders[0][0]) if holders else make()
        finally:
            for opened, *_ in holders:
                os.close(opened)
        own = [os.getpid(), fd, os.fstat(fd).st_ino]
        _write(file, about, [*(holder for _, *holder in holders), own])
    source = _Source()
    weakref.finalize(source, _release, path, *own)
    return fd, source


def _release(path: str, pid: int, fd: int, inode: int) -> None:
    """Close the descriptor after the last container of this process; the last process removes the file. If
    another thread or process has it locked, the line stays for the next one to remove."""
    if os.getpid() != pid:
        return
    os.close(fd)
    with contextlib.suppress(OSError), _registry(path, wait=False) as file:
        about, lines = _read(file)
        if others := [line for line in lines if line != [pid, fd, inode]]:
            _write(file, about, others)
        else:
            os.unlink(path)


class _Source:
    """Keeps a descriptor of this process open for others."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def _path(name: str) -> str:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return os.path.join(tempfile.gettempdir(), f"fastq_loader-{os.getuid()}-{digest}.shared")


@contextlib.contextmanager
def _registry(path: str, wait: bool = True) -> Iterator[Any]:
    there = False
    while not there:  # once, unless the last holder removes the file meanwhile
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "r+") as file:
            if os.fstat(fd).st_uid != os.getuid():  # the memory it names is unpickled
                raise PermissionError(f"share(): {path} is another user's; use another name")
            try:
                locks.lock_file(fd, PATIENCE if wait else 0.0)
            except BlockingIOError:
                raise TimeoutError(f"another process has had {path} locked for {PATIENCE:g} s") from None
            try:
                if there := os.fstat(fd).st_nlink > 0:
                    yield file
            finally:
                locks.unlock_file(fd)  # a child that another thread forks meanwhile has the file open, too


def _read(file: Any) -> tuple[dict[str, Any], list[list[int]]]:
    try:
        about, lines = json.load(file)
        return about, [list(map(int, holder)) for holder in lines]
    except (ValueError, TypeError):  # new, or its writer was killed
        return {}, []


def _write(file: Any, about: dict[str, Any], lines: list[list[int]]) -> None:
    file.seek(0)
    file.truncate()
    json.dump([about, lines], file)
    file.flush()


def _open(pid: int, fd: int, inode: int) -> int:
    """Open a memfd of another process; -1 if the process no longer has it."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    if os.fstat(opened).st_ino == inode:
        return opened
    os.close(opened)
    return -1
