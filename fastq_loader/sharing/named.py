"""Memory that processes find by a name, and that ends with the last of them, however that ends.

Runs in the program. The memory is a memfd, which has no name of its own: a small file in the temporary
folder, locked while it is read or written, says which processes hold one, and where /proc shows their
descriptor. Of a process that was killed nothing is left but its line, which the next one drops.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import urllib.parse
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from fastq_loader.memory import mapped


def once(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` gives, made by the first process that asks for it by this name.

    Args:
        name: of up to 100 characters.
        make: gives containers by name.

    Raises:
        PermissionError: the file of this name is another user's.
    """
    with _registry(name) as file:
        holders = [(opened, *holder) for holder in _read(file) if (opened := _open(*holder)) >= 0]
        fd = holders[0][0] if holders else mapped.write(make())
        for opened, *_ in holders[1:]:
            os.close(opened)
        shared: dict[str, Any] = mapped.read(fd)
        lines = [holder for _, *holder in holders] + [[os.getpid(), fd, os.fstat(fd).st_ino]]
        file.seek(0)
        file.truncate()
        json.dump(lines, file)
    source = _Source()
    weakref.finalize(source, os.close, fd)
    for container in shared.values():
        container.source = source
    return shared


class _Source:
    """Keeps a descriptor open for others, in this process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> Any:
        return self


@contextlib.contextmanager
def _registry(name: str) -> Iterator[Any]:
    quoted = urllib.parse.quote(name, safe="")
    path = os.path.join(tempfile.gettempdir(), f"fastq_loader-{os.getuid()}-{quoted[:100]}.shared")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "r+") as file:
        if os.fstat(fd).st_uid != os.getuid():  # what it says is opened and unpickled
            raise PermissionError(f"share(name={name!r}): {path} is another user's; use another name")
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield file


def _read(file: Any) -> list[list[int]]:
    try:
        return [list(map(int, holder)) for holder in json.load(file)]
    except (ValueError, TypeError):  # new, or its writer was killed
        return []


def _open(pid: int, fd: int, inode: int) -> int:
    """The memfd that another process holds; -1: it does not any more."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    if os.fstat(opened).st_ino == inode:
        return opened
    os.close(opened)
    return -1
