"""The folder of a cache, which outlives the program: the same as `memory`, in a file.

Runs in every process that calls a cached function, on any of its threads.

    fastq_loader.values    as `memory` has it; before each record its size and a checksum

Nothing is synced, and nothing is closed. After a power cut, or in a copy that was made while values were
stored, a word of the index may be of a record that is not there, or only in part. So each process compares
the checksum of a record when it first reads it; a value that is damaged is computed again, and stored once
more. The numbers by which a writer finds the index have checksums of their own; if one is wrong, the file is
begun anew.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from typing import Any

from fastq_loader.errors import warn_user
from fastq_loader.extras.cached import memory, values
from fastq_loader.extras.cached.memory import Memory
from fastq_loader.system import locks

_VALUES, _FORMAT = "fastq_loader.values", 7
#: Before a record: its size, and its checksum.
_PREFIX = struct.Struct("<QQ")
#: So many words of the index can be noted, one in each place; a prime number.
_SEEN = (1 << 22) - 3
#: Seconds to wait for the lock when a folder is opened.
_PATIENCE = 30.0
#: File systems of networks, beside those in user space.
_REMOTE = " nfs nfs4 cifs smb3 smbfs 9p ceph lustre beegfs gpfs afs glusterfs "


class Folder(Memory):
    """One process's access to the file of a folder.

    Args:
        fd: its descriptor, closed with this object.

    Attributes:
        about: whose it is.

    Raises:
        ValueError: the file is damaged.
    """

    _begin = 0

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.about = json.loads(bytes(self._map[memory.HEADER : self._levels[-1][0]]).rstrip(b"\0"))
        # Words whose records were compared, also by forked children; untouched pages take no memory.
        self._seen = memoryview(mmap.mmap(-1, 8 * _SEEN)).cast("Q")

    def _read(self, word: int, key: bytes, copy: bool) -> values.EncodedValue | None:
        at = (word & memory.PLACE_MASK) * memory.ALIGNMENT + _PREFIX.size
        if self._seen[word % _SEEN] != word:
            self._compare_checksum(at)
            self._seen[word % _SEEN] = word
        return values.read(self._map, at, key, copy, self._private)

    def _compare_checksum(self, at: int) -> None:
        size = min(self._size(), len(self._map))
        nbytes, checksum = _PREFIX.unpack_from(self._map, at - _PREFIX.size) if at <= size else (size, 0)
        if not nbytes or at + nbytes > size:  # pages that were lost are read as zeros
            raise ValueError("a value is missing in the file")
        if values.checksum(self._map[at : at + nbytes]) != checksum:
            raise ValueError("the checksum of a value is wrong")

    def _record(self, key: bytes, encoded: values.EncodedValue) -> tuple[list[Any], int]:
        data = bytearray().join([bytes(_PREFIX.size), *super()._record(key, encoded)[0]])
        record = memoryview(data)[_PREFIX.size :]
        _PREFIX.pack_into(data, 0, len(record), values.checksum(record))
        return [data], len(data)


def open_at(path: str, about: dict[str, Any], limit: int) -> Folder:
    """Open or make a folder.

    Args:
        path: the folder.
        about: "function" and "version".
        limit: largest size of the values, in bytes; a folder that is there keeps its own.

    Raises:
        ValueError: it belongs to another function or version, or is on a network.
        PermissionError: it is another user's, or others may write to it.
        OSError: it cannot be opened, or the disk is full.
        TimeoutError: another process is stopped while it uses it.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    _refuse_others(path)
    about = {"format": _FORMAT, **about}
    while (folder := _opened(path, about, limit)) is None:
        pass
    for name, here in about.items():
        if folder.about.get(name) != here:
            raise ValueError(
                f"cached: path={path!r} holds something else: its {name} is {folder.about.get(name)!r}, and "
                f"here it is {here!r}. Use another path, or remove the folder with cached.clear(path)"
            )
    return folder


def _opened(path: str, about: dict[str, Any], limit: int) -> Folder | None:
    """Open the file, or make it; None if it was removed meanwhile, or is damaged, and is removed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(file := os.path.join(path, _VALUES), flags, 0o600)
    try:
        locks.lock_file(fd, _PATIENCE)
        if not os.fstat(fd).st_nlink:
            return None
        if not os.fstat(fd).st_size:
            memory.write_header(fd, 0, limit, json.dumps(about).encode())
        return Folder(os.dup(fd))
    except BlockingIOError:
        raise TimeoutError(f"cached: another process is stopped while it uses path={path!r}") from None
    except ValueError as error:
        warn_user(f"cached: the folder {path!r} is begun anew: {error}", UserWarning)
        os.unlink(file)  # who has it open goes on with it
        return None
    finally:
        locks.unlock_file(fd)
        os.close(fd)


def _refuse_others(path: str) -> None:
    """Refuse a folder that somebody else may write to, whose pickles would be read; and one on a network."""
    found = os.stat(path)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        text = f"cached: path={path!r} is another user's, or others may write to it: chmod go-w"
        raise PermissionError(f"{text}, or use another folder")
    device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as file:
        for line in file:
            mount, _, system = line.partition(" - ")
            kind = system.split(" ")[0]
            if mount.split(" ")[2] == device and (f" {kind} " in _REMOTE or kind.startswith("fuse")):
                raise ValueError(f"cached: path={path!r} is on {kind}; use a disk of this machine")


def absolute(path: str | os.PathLike[str]) -> str:
    """The path of a folder that a user named, from the root on. Raises ValueError: it is empty."""
    if not os.fspath(path):
        raise ValueError("cached: path='' is no folder: give one, or None for memory")
    return os.path.abspath(os.path.expanduser(os.fsdecode(path)))


def remove(path: str) -> None:
    """Remove a folder. Processes that have it open can use it until they end.

    Raises:
        FileNotFoundError: there is no such folder, or it is not a cache.
    """
    os.unlink(os.path.join(path, _VALUES))
    with contextlib.suppress(OSError):  # something else is in it, or it is a mount
        os.rmdir(path)
