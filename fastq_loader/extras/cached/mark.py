"""The mark of a folder of values: whose they are, and whether they survived. Read before LMDB is opened.

Runs in the processes that open or remove a folder, under its lock. The mark is a small JSON file. "Not clean"
is written and synced before the first value, because values are not synced; "clean" when the last process
closes the folder. A folder that is not clean, of an earlier boot of the machine, begins empty.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import stat
from typing import Any, NamedTuple

FORMAT = 3
VALUES, _NEW_MARK, _MARK, LOCK = (f"fastq_loader.{name}" for name in ("values", "new", "mark", "lock"))
_FIELDS = {"format", "function", "version", "file", "code", "limit", "boot", "data", "clean"}
#: File systems of networks, beside those in user space.
_REMOTE = " nfs nfs4 cifs smb3 smbfs 9p ceph lustre beegfs gpfs afs glusterfs "


class Differs(ValueError):
    """The folder belongs to another function or version, or is not ours; the text names the difference."""


class Wanted(NamedTuple):
    """A cache that opens a folder.

    Attributes:
        about: "function", "version", and "file" and "code" of its source.
        limit: largest size of the file of the values, in bytes.
        is_literal: whether it is no part of the free space: a folder with a smaller one adopts it.
    """

    about: dict[str, Any]
    limit: int
    is_literal: bool


def read(path: str) -> Any:
    """Read the mark of a folder; None if it is missing or damaged."""
    try:
        with open(os.path.join(path, _MARK), encoding="utf-8") as file:
            mark = json.load(file)
        return mark if mark.keys() >= _FIELDS and isinstance(mark["limit"], int) else None
    except (OSError, ValueError, AttributeError):
        return None


def write(path: str, mark: dict[str, Any]) -> None:
    """Write the mark of a folder, whole or not at all, and sync it."""
    new = os.path.join(path, _NEW_MARK)
    with open(new, "w", encoding="utf-8") as file:
        json.dump(mark, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, os.path.join(path, _MARK))
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def update(path: str, wanted: Wanted, data: int, can_write: bool) -> int:
    """Mark a folder that is in use, if the mark can be written. Returns its limit: the first one, or a larger
    number of bytes. `data` is the descriptor of the file of the values."""
    mark = read(path)
    limit = 0 if mark is None else mark["limit"]
    if not limit or (wanted.is_literal and wanted.limit > limit):
        limit = wanted.limit
    uses = {"limit": limit, "boot": _boot(), "data": list(identity(data)), "clean": False}
    if can_write and mark != (new := {"format": FORMAT, **wanted.about, **uses}):
        write(path, new)
    return limit


def lost(path: str, mark: Any) -> str:
    """Why the values may not have survived; "" if they have, or there are none."""
    if is_empty(path):
        return ""
    if mark is None:
        return "its mark is damaged"
    if mark["clean"]:
        return ""
    if mark["boot"] != _boot():
        return "the machine went down while it was written to"
    if mark["data"] != list(identity(os.path.join(path, VALUES)) or ()):
        return "it was copied while it was written to"
    return ""


def is_empty(path: str) -> bool:
    """Whether a folder has no values: LMDB begins with two pages."""
    values = os.path.join(path, VALUES)
    return not os.path.exists(values) or os.stat(values).st_size <= 2 * mmap.PAGESIZE


def compare(path: str, mark: Any, about: dict[str, Any], is_used: bool) -> None:
    """Compare the mark with this function. A folder without values belongs to nobody, if no cache uses it.

    Raises:
        Differs: it belongs to another function or version.
    """
    if mark is None or (is_empty(path) and not is_used):
        return
    here = {"format": FORMAT, **about}
    differ = [name for name in here if mark[name] != here[name]]
    if set(differ) <= {"file", "code"} and (about["version"] is not None or len(differ) < 2):
        return  # the file was moved, or its code changed
    name = differ[0]
    raise Differs(
        f"cached: path={path!r} holds something else: its {name} is {mark[name]!r}, and here it is "
        f"{here[name]!r}. Use another path, or remove the folder with cached.clear(path)"
    )


def identity(file: Any) -> tuple[int, ...]:
    """Device and inode of a file; nothing if it does not exist."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return ()
    return found.st_dev, found.st_ino


def _boot() -> str:
    """The id of this boot of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def refuse_others(path: str) -> None:
    """Refuse a folder that has something else, or that somebody else may write to, whose pickles would be
    read; and one on a network."""
    found = os.stat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise Differs(f"cached: path={path!r} is a file, and no folder: use another path")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"cached: path={path!r} is another user's; values are not shared between users")
    if found.st_mode & 0o022:
        raise PermissionError(f"cached: others may write to path={path!r}: chmod go-w, or use another folder")
    if others := set(os.listdir(path)) - {LOCK, _NEW_MARK, _MARK, VALUES}:
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
    return Differs(f"{text}: use another path, or remove what is there yourself")


def remove(path: str) -> None:
    """Remove a folder. Processes that have it open can use it until they end.

    Raises:
        FileNotFoundError: there is no such folder.
        Differs: it is not a cache.
    """
    there = os.listdir(path)
    if there and _MARK not in there:
        raise _foreign(path, min(there))
    for name in (VALUES, _NEW_MARK, _MARK, LOCK):  # in this order: after a kill, the rest is recognised
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))
    with contextlib.suppress(OSError):  # something else is in it, or it is a mount
        os.rmdir(path)
