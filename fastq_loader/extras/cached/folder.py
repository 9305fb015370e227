"""The folder of a cache, which outlives the program: values in LMDB, a mark, and a file for locks.

Runs in every process that calls a cached function, on any of its threads. One process opens a folder once.

    fastq_loader.mark    JSON: whose values these are, and whether they survived. Read before LMDB is opened
    fastq_loader.lock    bytes that processes lock: for an operation, while open, while opening
    fastq_loader.values  LMDB's: hash of a key → number of its transaction, and a record (`values.record`)

LMDB's own locks are not used: a stopped writer would hold everybody up, and a forked child that closes LMDB
releases the readers of its parent. Here readers share a lock for microseconds, and a writer has it alone
until its commit; without it in time, nothing is read or stored. The locks are POSIX locks, which a forked
child does not inherit. Writes are not synced; so a mark that says "not clean" is written before the first
one. A folder that is not clean, of an earlier boot of the machine, begins empty.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import stat
import struct
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import util
from typing import Any

from fastq_loader.api import process_id
from fastq_loader.extras.cached import values
from fastq_loader.extras.cached.memory import BUSY, FULL, PATIENCE, STORED, Found, in_time

with contextlib.suppress(ImportError):  # on another system
    import fcntl

lmdb: Any = None  # imported when a folder is opened

_FORMAT = 1
_VALUES, _NEW_MARK, _MARK, _LOCK = (f"fastq_loader.{name}" for name in ("values", "new", "mark", "lock"))
#: Bytes of the file `lock`.
_OPERATION, _OPEN, _OPENING = range(3)
#: Seconds to wait for another process that opens the folder.
_OPENING_PATIENCE = 30.0
_NUMBER, _USAGE = struct.Struct("<Q"), struct.Struct("<QQ")
_USAGE_KEY = b"usage"
#: EIO is LMDB's own, of a write that was cut short.
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FIELDS = {"format", "function", "version", "file", "code", "boot", "data", "clean"}
#: Bytes of the map beside the values.
_SPARE = 64 << 20
#: File systems of networks, beside those in user space.
_REMOTE = " nfs nfs4 cifs smb3 smbfs 9p ceph lustre beegfs gpfs afs glusterfs "


class Differs(ValueError):
    """The folder belongs to another function or version, or is not ours; the text names the difference."""


class Folder:
    """One process's access to a folder. See `memory.Memory`, which has the same methods.

    Args:
        lock: descriptor of its file `lock`.
        data: descriptor of its file `values`; LMDB opens that one, even if it was removed meanwhile.
        path: the folder.
        size: largest size of the file.
    """

    def __init__(self, lock: int, data: int, path: str, size: int) -> None:
        self.path, self._lock, self._data, self._size = path, lock, data, size
        self._seen = bytearray()  # by the number of a transaction: whether its checksum was compared
        self._env: Any = None
        self._entering = self._depth = 0  # the process in which `_enter` runs; operations inside each other
        self._thread = threading.RLock()
        self._open()

    def _open(self) -> None:
        """Open LMDB in this process.

        Raises:
            ValueError: the file is damaged.
        """
        fcntl.lockf(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _OPEN)
        options: Any = {"subdir": False, "lock": False, "sync": False, "metasync": False}
        try:
            self._env = lmdb.open(f"/proc/self/fd/{self._data}", map_size=self._size, **options)
            try:
                pages = self._env.info()["last_pgno"] + 1
                if os.fstat(self._data).st_size < pages * self._env.stat()["psize"]:
                    raise ValueError("the file ends before its last page")
                with self._env.begin(buffers=True) as txn:
                    _usage(txn)
            except BaseException:
                self._env.close()
                raise
        except lmdb.Error as error:
            raise ValueError(f"LMDB: {error}") from None
        self._pid = process_id.current()

    def _enter(self) -> bool:
        """Whether LMDB can be used here: a forked child closes what it inherited, unless another thread of
        its parent was using it; then the child has no values."""
        if self._pid != process_id.current():
            with _opening:
                if self._pid != process_id.current():
                    if self._depth or self._entering == process_id.current():  # by a signal handler
                        return False
                    self._entering = process_id.current()
                    try:
                        if self._pid:  # a fork: another thread may have the lock, and is not here
                            self._thread = threading.RLock()
                        with self._thread:
                            self._env.close()
                            self._open()
                    finally:
                        self._entering = 0
        return True

    def _run(self, kind: int, work: Callable[[Any], Any]) -> Any:
        """Call `work` with a transaction, under the lock. None if the lock is not free in time. A signal
        handler may read inside of another operation.

        Raises:
            OSError: the disk is full.
            ValueError: the folder is damaged.
        """
        if not self._enter():
            return None
        with self._thread:
            self._depth += 1
            try:
                if self._depth > 1:
                    may = kind == fcntl.LOCK_SH
                else:
                    may = wait_for(self._lock, _OPERATION, kind, PATIENCE)
                return self._transact(kind == fcntl.LOCK_EX, work) if may else None
            finally:
                self._depth -= 1
                if not self._depth:  # a call in C, which no interrupt keeps from its work
                    fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, _OPERATION)

    def _transact(self, write: bool, work: Callable[[Any], Any]) -> Any:
        try:
            try:
                with self._env.begin(write=write, buffers=True) as txn:
                    return work(txn)
            except lmdb.MapResizedError:  # by a process with a larger limit
                if self._depth > 1:
                    return None
                self._env.set_mapsize(0)
                with self._env.begin(write=write, buffers=True) as txn:
                    return work(txn)
        except lmdb.MapFullError as error:
            raise OSError(errno.ENOSPC, str(error)) from None
        except lmdb.Error as error:
            self._pid = 0  # it is opened anew, at the next use
            if getattr(error, "code", 0) in _FULL_DISK:
                raise OSError(errno.ENOSPC, str(error)) from None
            raise ValueError(f"LMDB: {error}") from None

    # ---- reading and writing ------------------------------------------------------------------------

    def get(self, key: bytes, copy: bool) -> Found | None:
        """Look up the value of a key, in new memory.

        Raises:
            ValueError: the value is damaged.
        """
        data: Found | None = self._run(fcntl.LOCK_SH, lambda txn: self._read(txn, key))
        if data is not None and not copy:
            for buffer in data[1]:
                buffer.flags.writeable = False
        return data

    def _read(self, txn: Any, key: bytes) -> Found | None:
        data = txn.get(_hash(key))
        if data is None:
            return None
        number = _NUMBER.unpack_from(data)[0] if len(data) >= _NUMBER.size else 0
        seen = number < len(self._seen) and self._seen[number]
        found = values.read(data[_NUMBER.size :], key, copy=True, check=not seen)
        if not seen and found is not None and number <= self._env.info()["last_txnid"]:
            self._seen.extend(bytes(max(0, number + 1 - len(self._seen))))
            self._seen[number] = True
        return found

    def add(self, key: bytes, encoded: values.Encoded, replace: bool = False) -> str:
        """Store a value; `replace` one that cannot be read. Returns as `Memory.add` does.

        Raises:
            OSError: the disk is full.
            ValueError: the folder is damaged.
        """
        pieces, nbytes = values.record(key, encoded, checked=True)

        def write(txn: Any) -> str:
            if not replace and txn.get(_hash(key)) is not None:
                return BUSY
            used, limit = _usage(txn)
            if used + nbytes > limit:
                return FULL
            txn.put(_hash(key), b"".join([_NUMBER.pack(txn.id()), *pieces]))
            txn.put(_USAGE_KEY, _USAGE.pack(used + nbytes, limit))
            return STORED

        return self._run(fcntl.LOCK_EX, write) or BUSY

    def usage(self) -> tuple[int, int, int]:
        """Bytes of the records, their number, and the limit."""

        def read(txn: Any) -> tuple[int, int, int]:
            used, limit = _usage(txn)
            return used, txn.stat()["entries"] - 1, limit

        with contextlib.suppress(ValueError):
            found: tuple[int, int, int] | None = self._run(fcntl.LOCK_SH, read)
            return found or (0, 0, 0)
        return 0, 0, 0

    def set_limit(self, limit: int, is_literal: bool) -> int:
        """As `Memory.set_limit` does."""

        def write(txn: Any) -> int:
            used, before = _usage(txn)
            holds = max(before, limit) if is_literal or not before else before
            txn.put(_USAGE_KEY, _USAGE.pack(used, holds))
            return holds

        with contextlib.suppress(ValueError):  # it is damaged, as the next calls will find, too
            holds: int | None = self._run(fcntl.LOCK_EX, write)
            return holds or limit
        return limit

    def finish(self) -> None:
        """Close the folder; the last process that has it open syncs it, and marks it clean."""
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        _opened.pop(tuple(_identity(lock)), None)
        if self._pid == process_id.current() and not self._depth:
            with contextlib.suppress(OSError, lmdb.Error):
                if wait_for(lock, _OPENING, fcntl.LOCK_EX, 0) and wait_for(lock, _OPEN, fcntl.LOCK_EX, 0):
                    self._env.sync(True)
                    mark = _read_mark(self.path)
                    if mark is not None and mark["data"] == _identity(self._data):
                        _write_mark(self.path, {**mark, "clean": True})
        if not self._depth:
            self._env.close()
        os.close(lock)
        os.close(self._data)

    def __del__(self) -> None:
        if "_pid" in vars(self):
            self.finish()


def _usage(txn: Any) -> tuple[int, int]:
    """Bytes of the records, and the limit; zeros in a new folder."""
    data = txn.get(_USAGE_KEY)
    used, limit = _USAGE.unpack(data if data is not None and len(data) == _USAGE.size else bytes(_USAGE.size))
    return used, limit


def wait_for(lock: int, byte: int, kind: int, seconds: float) -> bool:
    """Lock a byte, shared or not; False if it is not free in time."""
    return in_time(partial(_try_lock, lock, byte, kind), seconds)


def _try_lock(lock: int, byte: int, kind: int) -> bool:
    try:
        fcntl.lockf(lock, kind | fcntl.LOCK_NB, 1, byte)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


# ---- opening -----------------------------------------------------------------------------------------------

_opening = threading.RLock()
#: The folders that are open in this process, by the device and inode of their file `lock`.
_opened: weakref.WeakValueDictionary[Any, Folder] = weakref.WeakValueDictionary()


def _forget() -> None:
    global _opening
    _opening = threading.RLock()


process_id.in_forked_children(_forget)


def _finish_all() -> None:
    for folder in list(_opened.values()):
        folder.finish()


def open_at(path: str, about: dict[str, Any], limit: int) -> Folder:
    """Open or make a folder.

    Args:
        path: the folder.
        about: "function", "version", and "file" and "code" of its source.
        limit: largest total size of the values, for the size of the map.

    Raises:
        Differs: it belongs to another function or version, or is not a cache.
        PermissionError: it is another user's, or others may write to it.
        ValueError: it is on a network.
        OSError: it cannot be opened.
        TimeoutError: another process keeps opening it.
    """
    global lmdb
    try:
        lmdb = importlib.import_module("lmdb")
    except ImportError:
        raise ImportError("cached: path= needs lmdb: pip install 'lmdb>=3', or the extra [cached]") from None
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    _refuse_others(path)
    with _opening:
        if os.path.exists(os.path.join(path, _LOCK)):
            known = _opened.get(tuple(_identity(os.path.join(path, _LOCK))))
            if known is not None:
                _compare(_read_mark(path), about)
                return known
        lock = _lock_of(path)
        try:
            folder = _opened_anew(path, lock, about, 2 * limit + _SPARE)
        except BaseException:
            os.close(lock)
            raise
        fcntl.lockf(lock, fcntl.LOCK_UN, 1, _OPENING)
        if not _opened:  # after the loaders are closed, whose workers have it open
            util.Finalize(None, _finish_all, exitpriority=0)
        _opened[tuple(_identity(lock))] = folder
        return folder


def _lock_of(path: str) -> int:
    """Open the file for locks, and lock it: no other process judges or begins the folder meanwhile."""
    while True:
        if others := set(os.listdir(path)) - {_LOCK, _NEW_MARK, _MARK, _VALUES}:
            raise Differs(f"it is not a cache of this library, and has a {min(others)!r}")
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
        try:
            if not wait_for(lock, _OPENING, fcntl.LOCK_EX, _OPENING_PATIENCE):
                raise TimeoutError(
                    f"cached: another process has been opening {path!r} for {_OPENING_PATIENCE} s"
                )
            if os.fstat(lock).st_nlink:  # else it was removed meanwhile
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _opened_anew(path: str, lock: int, about: dict[str, Any], size: int) -> Folder:
    """Open the folder; with new data, and a warning, if the data may not have survived."""
    mark = _read_mark(path)
    _compare(mark, about)
    if not (why := _lost(path, mark)):
        try:
            return _with_data(path, lock, about, size)
        except ValueError as error:
            why = str(error)
    warnings.warn(f"cached: the folder {path!r} is begun anew: {why}", stacklevel=6)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, _VALUES))  # who has it open goes on with it
    return _with_data(path, lock, about, size)


def _with_data(path: str, lock: int, about: dict[str, Any], size: int) -> Folder:
    data = os.open(os.path.join(path, _VALUES), os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
    try:
        mark = {"format": _FORMAT, **about, "boot": _boot(), "data": _identity(data), "clean": False}
        if _read_mark(path) != mark:
            _write_mark(path, mark)  # before the first commit
        return Folder(lock, data, path, size)
    except BaseException:
        os.close(data)
        raise


def _lost(path: str, mark: Any) -> str:
    """Why the data may not have survived; "" if they have."""
    file = os.path.join(path, _VALUES)
    if mark is None:
        there = any(os.path.exists(os.path.join(path, name)) for name in (_MARK, _VALUES))
        return "its mark is damaged" if there else ""
    if mark["clean"]:
        return ""
    if mark["boot"] != _boot():
        return "the machine went down while it was written to"
    if not os.path.exists(file) or mark["data"] != _identity(file):
        return "it was copied while it was written to"
    return ""


def _compare(mark: Any, about: dict[str, Any]) -> None:
    if mark is None:
        return
    for name, value in {"format": _FORMAT, **about}.items():
        if name not in ("file", "code") and mark.get(name) != value:
            raise Differs(f"its {name} is {mark.get(name)!r}, and here it is {value!r}")
    if about["version"] is None and mark["file"] != about["file"] and mark["code"] != about["code"]:
        raise Differs(f"its function is that of {mark['file']!r}, and here it is that of {about['file']!r}")


def _read_mark(path: str) -> Any:
    """Read the mark; None if it is missing or damaged."""
    try:
        with open(os.path.join(path, _MARK), encoding="utf-8") as file:
            mark = json.load(file)
        return mark if mark.keys() >= _FIELDS else None
    except (OSError, ValueError, AttributeError):
        return None


def _write_mark(path: str, mark: dict[str, Any]) -> None:
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


def _identity(file: Any) -> list[int]:
    found = os.stat(file)
    return [found.st_dev, found.st_ino]


def _boot() -> str:
    """The id of this boot of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _refuse_others(path: str) -> None:
    """Refuse a folder that somebody else may write to, whose pickles would be read; and one on a network."""
    found = os.stat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise Differs("it is a file, and no folder of this library")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"cached: path={path!r} is another user's; values are not shared between users")
    if found.st_mode & 0o022:
        raise PermissionError(f"cached: others may write to path={path!r}: chmod go-w, or use another folder")
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
        FileNotFoundError: there is no such folder.
        Differs: it is not a cache.
    """
    os.stat(path)
    if not os.path.exists(os.path.join(path, _MARK)):
        raise Differs("it is not a cache of this library")
    for name in (_VALUES, _NEW_MARK, _MARK, _LOCK):  # in this order: after a kill, the rest is recognised
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))
    with contextlib.suppress(OSError):  # something else is in it, or it is a mount
        os.rmdir(path)


def _hash(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()
