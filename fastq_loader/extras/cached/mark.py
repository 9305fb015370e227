"""The mark of a folder of values: whose they are, and whether they survived. Read before LMDB is opened.

Runs in the processes that open or remove a folder, and before a value is stored, under the folder's lock. The
mark is JSON, in the file that is locked; a process that opened and closed this file once more would lose its
locks, so these functions get its descriptor. Values are not synced when they are stored; so the mark says
first, by this boot of the machine and the file of the values, that there are such ones. The last process that
closes the folder syncs them, and marks it with the number of the last transaction and the size of the file. A
folder whose mark has something else may have lost values, or be a copy of some of them, and begins empty.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from pathlib import Path
from typing import Any

FORMAT = 6
VALUES, MARK = "fastq_loader.values", "fastq_loader.mark"
_FIELDS = {"format", "function", "version", "limit", "state"}
_BOOT = Path("/proc/sys/kernel/random/boot_id")
#: File systems of networks, beside those in user space.
_REMOTE = " nfs nfs4 cifs smb3 smbfs 9p ceph lustre beegfs gpfs afs glusterfs "


def absolute(path: str | os.PathLike[str]) -> str:
    """The path of a folder that a user named, from the root on."""
    return os.path.abspath(os.path.expanduser(os.fsdecode(path)))


def read(file: int) -> Any:
    """Read a mark; None if it is absent or damaged."""
    try:
        mark = json.loads(os.pread(file, os.fstat(file).st_size, 0))
        return mark if mark.keys() >= _FIELDS and isinstance(mark["limit"], int) else None
    except (ValueError, AttributeError):
        return None


def write(file: int, mark: dict[str, Any]) -> None:
    """Write a mark, and sync it. Whole pages: a process that is killed has written all of one, or nothing."""
    data = json.dumps(mark).encode()
    data += b" " * (-len(data) % mmap.PAGESIZE)
    os.pwrite(file, data, 0)
    os.ftruncate(file, len(data))
    os.fsync(file)


def using(values: int | str) -> list[Any]:
    """What a folder with values that are not synced is marked with: this boot, and the file of the values."""
    return [_BOOT.read_text().strip() if _BOOT.exists() else "", *identity(values)]


def compare(path: str, mark: dict[str, Any], about: dict[str, Any]) -> None:
    """Compare a mark with this function. Raises ValueError: it is of another function or version."""
    for name, here in {"format": FORMAT, **about}.items():
        if mark[name] != here:
            raise ValueError(
                f"cached: path={path!r} holds something else: its {name} is {mark[name]!r}, and here it is "
                f"{here!r}. Use another path, or remove the folder with cached.clear(path)"
            )


def identity(file: int | str) -> tuple[int, ...]:
    """Device and inode of a file; nothing if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(file)
        return found.st_dev, found.st_ino
    return ()


def refuse_others(path: str) -> None:
    """Refuse a folder that has something else, or that somebody else may write to, whose pickles would be
    read; and one on a network."""
    found = os.stat(path)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        text = f"cached: path={path!r} is another user's, or others may write to it: chmod go-w"
        raise PermissionError(f"{text}, or use another folder")
    if others := set(os.listdir(path)) - {VALUES, MARK}:
        text = f"cached: path={path!r} is not a cache of this library, and has a {min(others)!r}"
        raise ValueError(f"{text}: use another path")
    device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as file:
        for line in file:
            mount, _, system = line.partition(" - ")
            kind = system.split(" ")[0]
            if mount.split(" ")[2] == device and (f" {kind} " in _REMOTE or kind.startswith("fuse")):
                raise ValueError(f"cached: path={path!r} is on {kind}; use a disk of this machine")


def remove(path: str) -> None:
    """Remove a folder. Processes that have it open can use it until they end.

    Raises:
        FileNotFoundError: there is no such folder, or it is not a cache.
    """
    mark = os.path.join(path, MARK)
    os.stat(mark)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, VALUES))
    os.unlink(mark)  # in this order: after a kill, the rest is recognised
    with contextlib.suppress(OSError):  # something else is in it, or it is a mount
        os.rmdir(path)
