"""The folder of a cache, which outlives the program: values in LMDB, and a mark.

Runs in every process that calls a cached function, on any of its threads. One process opens a folder once.
Imported when a folder is opened: LMDB is an extra.

    fastq_loader.mark    see `mark`; its bytes are locked: for an operation, while open, while opening
    fastq_loader.values  LMDB's: key, or its hash → number of a transaction, checksum, and `values.record`

LMDB's own locks are not used: a stopped writer would hold everybody up, and a forked child that closes LMDB
releases the readers of its parent. Here readers share a lock for microseconds, and a writer has it alone
until its commit; without it in time, nothing is read or stored. The locks are POSIX locks, which a forked
child does not inherit. Writes are not synced; so a mark that says "not clean" is written before the first
one. The limit is LMDB's: the largest size of its file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import threading
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import util
from typing import Any

import lmdb

from fastq_loader.errors import warn_user
from fastq_loader.extras.cached import mark as marks
from fastq_loader.extras.cached import memory, values
from fastq_loader.extras.cached.memory import BUSY, FULL, PATIENCE, STORED, in_time
from fastq_loader.system import locks, process_id

#: Bytes of the mark that are locked.
_OPERATION, _OPEN, _OPENING = range(3)
#: Seconds to wait for another process that opens the folder.
_OPENING_PATIENCE = 30.0
#: Before a record: number of its transaction, and checksum of the record.
_PREFIX = struct.Struct("<QQ")
_LONGEST_KEY = 511  # of LMDB
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
#: EIO is LMDB's own, of a write that was cut short.
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: The folders that are open in this process, by the device and inode of their mark.
_opened: weakref.WeakValueDictionary[Any, Folder] = weakref.WeakValueDictionary()


class Folder:
    """One process's access to a folder. See `memory.Memory`, which has the same methods.

    Args:
        path: the folder.

    Attributes:
        limit: largest size of the file of the values.

    Raises:
        OSError: its mark cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path, self._lock, self._data, self.limit = path, -1, -1, 0
        file = os.path.join(path, marks.MARK)
        self._can_write = os.access(path, os.W_OK) or not os.path.exists(file)  # else it can be read only
        self._flags = (os.O_RDWR | os.O_CREAT if self._can_write else os.O_RDONLY) | _SAFELY
        self._seen = bytearray()  # by the number of a transaction: whether its checksum was compared
        self._env: Any = None
        self._pid = 0  # the process that has LMDB open; negative: it is opened anew at the next use
        self._is_busy = False  # in this process; a forked child has its parent's
        self._thread = threading.RLock()
        self._lock = os.open(file, self._flags, 0o600)

    # ---- opening and closing --------------------------------------------------------------------------

    def use(self, about: dict[str, Any], limit: int) -> bool:
        """Open the folder for a first or a further cache of this process, and mark it. No other process opens
        it meanwhile. Returns False if it was removed. See `open_at`."""
        if not self._lock_opening(_OPENING_PATIENCE):
            text = f"another process has been opening {self._path!r} for {_OPENING_PATIENCE} s"
            raise TimeoutError(f"cached: {text}")
        try:
            if not os.fstat(self._lock).st_nlink:
                return False
            mark, is_open = marks.read(self._lock), self._env is not None
            is_used = is_open or locks.locked_length(self._lock, _OPEN) > 0
            if not is_used and marks.is_empty(self._path):
                mark = None  # it belongs to nobody
            marks.compare(self._path, mark, about)
            try:
                if not is_open and (why := marks.lost(self._path, mark)):
                    raise ValueError(why)
                self._begin(mark, about, limit)
            except ValueError as error:
                if not self._can_write:
                    raise OSError(errno.EROFS, f"it cannot be written to, and {error}") from None
                warn_user(f"cached: the folder {self._path!r} is begun anew: {error}", UserWarning)
                os.unlink(os.path.join(self._path, marks.VALUES))  # who has it open goes on with it
                self._begin(mark, about, limit)
            return True
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, _OPENING)

    def _lock_opening(self, seconds: float) -> bool:
        return _wait_for(self._lock, _OPENING, fcntl.LOCK_EX if self._can_write else fcntl.LOCK_SH, seconds)

    def _begin(self, mark: Any, about: dict[str, Any], limit: int) -> None:
        """Mark the folder, before the first commit, and open it."""
        is_open = self._env is not None
        if not is_open:
            _close(self._data)
            self._data = os.open(os.path.join(self._path, marks.VALUES), self._flags, 0o600)
        limit = limit if mark is None else mark["limit"]  # the first limit stays
        uses = {"limit": limit, "boot": marks.boot(), "data": [*marks.identity(self._data)], "clean": False}
        new = {"format": marks.FORMAT, **about, **uses}
        if self._can_write and new != mark:
            marks.write(self._lock, new)
        if not is_open:
            self.limit = limit
            self._open()

    def _open(self) -> None:
        """Open LMDB in this process, which has locked the opening."""
        fcntl.lockf(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _OPEN)
        options: Any = {"subdir": False, "lock": False, "sync": False, "metasync": False}
        options |= {"map_size": self.limit, "readonly": not self._can_write}
        try:
            env = lmdb.open(f"/proc/self/fd/{self._data}", **options)
            self._page = env.stat()["psize"]
            if os.fstat(self._data).st_size < self._size(env):
                env.close()
                raise ValueError("the file ends before its last page")
        except lmdb.Error as error:
            raise _plain(error) from None
        self._env, self._pid = env, process_id.pid

    def finish(self) -> None:
        """Close the folder; the last process that has it open syncs it, and marks it clean."""
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        _opened.pop(marks.identity(lock), None)
        if self._pid == process_id.pid and self._can_write and not self._is_busy:
            with contextlib.suppress(OSError, lmdb.Error):
                if _wait_for(lock, _OPENING, fcntl.LOCK_EX, 0) and _wait_for(lock, _OPEN, fcntl.LOCK_EX, 0):
                    self._env.sync(True)
                    mark = marks.read(lock)
                    if mark is not None and mark["data"] == list(marks.identity(self._data)):
                        marks.write(lock, {**mark, "clean": True})
        if self._env is not None and not self._is_busy:
            self._env.close()
        os.close(lock)
        _close(self._data)

    __del__ = finish

    def _size(self, env: Any) -> int:
        """Bytes up to the last page that LMDB uses."""
        size: int = (env.info()["last_pgno"] + 1) * self._page
        return size

    def _enter(self) -> bool:
        """Open LMDB anew: after an error, or in a forked child, which closes what it inherited. Returns
        False in a signal handler, and in the child of a process whose other thread was using LMDB."""
        with memory.entering:
            if self._pid == process_id.pid or self._is_busy:
                return self._pid == process_id.pid
            if self._pid != -process_id.pid:  # a fork: another thread may have the lock, and is not here
                self._thread = threading.RLock()
            with self._thread:
                self._is_busy = True
                try:
                    self._env.close()
                    if not self._lock_opening(PATIENCE):
                        return False
                    mark = marks.read(self._lock)
                    if self._can_write and mark is not None and mark["clean"]:  # the parent has closed it
                        marks.write(self._lock, {**mark, "clean": False})
                    self._open()
                finally:
                    self._is_busy = False
                    fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, _OPENING)
        return True

    def _run(self, kind: int, work: Callable[..., Any], *args: Any) -> Any:
        """Call `work` with a transaction, under the lock. None if the lock is not free in time, and to a
        signal handler inside of another operation.

        Raises:
            OSError: the disk is full.
            ValueError: the folder is damaged.
        """
        if self._pid != process_id.pid and not self._enter():
            return None
        with self._thread:
            if self._is_busy:
                return None
            self._is_busy = True
            try:
                if _wait_for(self._lock, _OPERATION, kind, PATIENCE):
                    with self._env.begin(write=kind == fcntl.LOCK_EX, buffers=True) as txn:
                        return work(txn, *args)
                return None
            except lmdb.MapFullError:
                return FULL
            except lmdb.Error as error:
                self._pid = -process_id.pid
                raise _plain(error) from None
            finally:
                self._is_busy = False
                # A call in C, which no interrupt keeps from its work.
                fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, _OPERATION)

    # ---- reading and writing ------------------------------------------------------------------------

    def get(self, key: bytes, copy: bool) -> values.Found | None:
        """Look up the value of a key, in new memory.

        Raises:
            ValueError: the value is damaged.
        """
        found: values.Found | None = self._run(fcntl.LOCK_SH, self._read, key, copy)
        return found

    def _read(self, txn: Any, key: bytes, copy: bool) -> values.Found | None:
        data = txn.get(_name(key))
        if data is None:
            return None
        if len(data) < _PREFIX.size:
            raise ValueError("a value is cut off")
        number, checksum = _PREFIX.unpack_from(data)
        seen = self._seen
        if not (number < len(seen) and seen[number]):
            if values.checksum(data[_PREFIX.size :]) != checksum:
                raise ValueError("the checksum of a value is wrong")
            if number <= txn.id():
                seen.extend(bytes(max(0, number + 1 - len(seen))))
                seen[number] = True
        return values.read(data, _PREFIX.size, key, copy)

    def add(self, key: bytes, encoded: values.Encoded, replace: bool = False) -> str:
        """Store a value; `replace` one that cannot be read. Returns as `Memory.add` does.

        Raises:
            OSError: the disk is full.
            ValueError: the folder is damaged.
        """
        if not self._can_write:
            return FULL
        pieces, _ = values.record(key, encoded)
        data = bytearray().join([bytes(_PREFIX.size), *pieces])
        checksum = values.checksum(memoryview(data)[_PREFIX.size :])
        return self._run(fcntl.LOCK_EX, self._write, key, data, checksum, replace) or BUSY

    def _write(self, txn: Any, key: bytes, data: bytearray, checksum: int, replace: bool) -> str:
        name = _name(key)
        if not replace and txn.get(name) is not None:
            return BUSY
        if self._size(self._env) + len(data) > self.limit:
            return FULL
        _PREFIX.pack_into(data, 0, txn.id(), checksum)
        txn.put(name, data)
        return STORED

    def usage(self) -> tuple[int, int, int]:
        """Bytes of the file, the number of values, and the limit."""

        def read(txn: Any) -> tuple[int, int, int]:
            return self._size(self._env), txn.stat()["entries"], self.limit

        with contextlib.suppress(ValueError):
            return self._run(fcntl.LOCK_SH, read) or (0, 0, self.limit)
        return 0, 0, self.limit


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _name(key: bytes) -> bytes:
    return key if len(key) <= _LONGEST_KEY else hashlib.blake2b(key).digest()


def _plain(error: Any) -> Exception:
    """An error of LMDB's as an OSError of the system, or a ValueError: the file is damaged."""
    code = getattr(error, "code", 0)
    if code in _FULL_DISK:
        return OSError(errno.ENOSPC, str(error))
    return OSError(code, str(error)) if code > 0 else ValueError(f"LMDB: {error}")


def _wait_for(lock: int, byte: int, kind: int, seconds: float) -> bool:
    """Lock a byte, shared or not; False if it is not free in time."""
    return in_time(partial(_try_lock, lock, byte, kind), seconds)


def _try_lock(lock: int, byte: int, kind: int) -> bool:
    try:
        fcntl.lockf(lock, kind | fcntl.LOCK_NB, 1, byte)
    except BlockingIOError:
        return False
    return True


def open_at(path: str, about: dict[str, Any], limit: int) -> Folder:
    """Open or make a folder.

    Args:
        path: the folder.
        about: "function" and "version".
        limit: largest size of the file of the values, in bytes; a folder that is there keeps its own.

    Raises:
        mark.Differs: it belongs to another function or version, or is not a cache.
        PermissionError: it is another user's, or others may write to it.
        ValueError: it is on a network.
        OSError: it cannot be opened, or the disk is full.
        TimeoutError: another process keeps opening it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        marks.refuse_others(path)
        with memory.entering:
            while (folder := _opened_at(path, about, limit)) is None:
                pass
            return folder
    except OSError as error:
        if error.errno is None:
            raise
        above, text = os.path.dirname(path), f" cannot be opened: {error.strerror}"
        if not os.path.exists(above):
            text = f": there is no folder {above!r}: make it, or use another path"
        raise type(error)(error.errno, f"cached: path={path!r}{text}") from error


def _opened_at(path: str, *wanted: Any) -> Folder | None:
    """Open a folder in this process; None if it was removed meanwhile."""
    folder, is_used = _opened.get(marks.identity(os.path.join(path, marks.MARK))) or Folder(path), False
    try:
        if is_used := folder.use(*wanted):
            if not _opened:  # after the loaders are closed, whose workers have it open
                util.Finalize(None, _finish_all, exitpriority=0)
            _opened[marks.identity(folder._lock)] = folder
    finally:
        if not is_used and folder not in _opened.values():
            folder.finish()
    return folder if is_used else None


def _finish_all() -> None:
    for folder in list(_opened.values()):
        folder.finish()
