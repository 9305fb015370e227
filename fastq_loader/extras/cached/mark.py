"""The mark of a folder of values: whose they are, and whether they survived. Read before LMDB is opened.

Runs in the processes that open or remove a folder, under its lock. The mark is JSON, in the file whose bytes
are locked; a process that opened and closed this file once more would lose its locks, so these functions get
its descriptor. While a folder is open, its mark has this boot of the machine and the file of the values,
because these are not synced; the last process that closes it syncs them, and removes both from the mark. A
folder whose mark has another boot or file may have lost values, and begins empty.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from typing import Any

FORMAT = 5
VALUES, MARK = "fastq_loader.values", "fastq_loader.mark"
_FIELDS = {"format", "function", "version", "limit", "using"}
#: File systems of networks, beside those in user space.
_REMOTE = " nfs nfs4 cifs smb3 smbfs 9p ceph lustre beegfs gpfs afs glusterfs "


class Differs(ValueError):
    """The folder belongs to another function or version, or is not ours; the text names the difference."""


def absolute(path: str | os.PathLike[str]) -> str:
    """The path of a folder that a user named, from the root on. Raises ValueError: it is empty."""
    text = os.fsdecode(path)
    if not text:
        raise ValueError(f"cached: path={path!r} names no folder")
    return os.path.abspath(os.path.expanduser(text))


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


def using(values: Any) -> list[Any]:
    """What an open folder is marked with: this boot of the machine, and the file of its values."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return [boot, *identity(values)]


def lost(path: str, mark: Any) -> str:
    """Why the values may not have survived; "" if they have, or there are none."""
    values = os.path.join(path, VALUES)
    if not os.path.exists(values):
        return ""
    if mark is None:
        return "its mark is damaged"
    is_whole = mark["using"] in (None, using(values))
    return "" if is_whole else "it was damaged; or copied, or the machine went down, while it was written to"


def compare(path: str, mark: Any, about: dict[str, Any]) -> None:
    """Compare the mark with this function.

    Raises:
        Differs: it belongs to another function or version.
    """
    for name, here in {"format": FORMAT, **about}.items():
        if mark is not None and mark[name] != here:
            raise Differs(
                f"cached: path={path!r} holds something else: its {name} is {mark[name]!r}, and here it is "
                f"{here!r}. Use another path, or remove the folder with cached.clear(path)"
            )


def identity(file: Any) -> tuple[int, ...]:
    """Device and inode of a file; nothing if it does not exist."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return ()
    return found.st_dev, found.st_ino


def refuse_others(path: str) -> None:
    """Refuse a folder that has something else, or that somebody else may write to, whose pickles would be
    read; and one on a network."""
    found = os.stat(path)
    if found.st_uid != os.geteuid():
        raise PermissionError(f"cached: path={path!r} is another user's; values are not shared between users")
    if found.st_mode & 0o022:
        raise PermissionError(f"cached: others may write to path={path!r}: chmod go-w, or use another folder")
    if others := set(os.listdir(path)) - {VALUES, MARK}:
        raise _foreign(path, min(others))
    device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as file:
        for line in file:
            mount, _, system = line.partition(" - ")
            kind = system.split(" ")[0]
            if mount.split(" ")[2] == device and (f" {kind} " in _REMOTE or kind.startswith("fuse")):
                raise ValueError(f"cached: path={path!r} is on {kind}; use a disk of this machine")


def _foreign(path: str, name: str) -> Differs:
    text = f"cached: path={path!r} is not a cache of this library, and has a {name!r}"
    return Differs(f"{text}: use another path, or remove its contents yourself")


def remove(path: str) -> None:
    """Remove a folder. Processes that have it open can use it until they end.

    Raises:
        FileNotFoundError: there is no such folder.
        Differs: it is not a cache.
    """
    there = os.listdir(path)
    if there and MARK not in there:
        raise _foreign(path, min(there))
    for name in (VALUES, MARK):  # in this order: after a kill, the rest is recognised
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))
    with contextlib.suppress(OSError):  # something else is in it, or it is a mount
        os.rmdir(path)
