"""The folder of a cache, which outlives the program: values in LMDB, and a mark.

Runs in every process that calls a cached function, on any of its threads. One process opens a folder once.
Imported when a folder is opened: LMDB is an extra.

    fastq_loader.mark    see `mark`; its bytes are locked: for an operation, while open, while opening
    fastq_loader.values  LMDB's: key, or its hash → number of a transaction, checksum, and `values.record`

LMDB's own locks are not used: a stopped writer would hold everybody up, and a forked child that closes LMDB
releases the readers of its parent. Here readers share a lock for microseconds, and a writer has it alone
until its commit; without it in time, nothing is read or stored. The locks are POSIX locks, which a forked
child does not inherit. Writes are not synced; so the mark says that the folder is open before the first one.
The limit is LMDB's: the largest size of its file.
"""

from __future__ import annotations

import contextlib
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
from fastq_loader.system import process_id

#: Bytes of the mark that are locked.
_OPERATION, _OPEN, _OPENING = range(3)
#: Seconds to wait for another process that opens the folder.
_OPENING_PATIENCE = 30.0
#: Before a record: number of its transaction, and checksum of the record.
_PREFIX = struct.Struct("<QQ")
_LONGEST_KEY = 511  # of LMDB
#: Errors of opening a file whose values are as they were: no memory or addresses, no room, no rights.
_NO_DAMAGE = lmdb.MemoryError, lmdb.DiskError, lmdb.LockError, lmdb.ReadonlyError
#: Errors of a damaged file; a full disk has others.
_DAMAGE = lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PageFullError, lmdb.PanicError
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

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
        self._seen = bytearray()  # by the number of a transaction: whether its checksum was compared
        self._env: Any = None
        self._pid = 0  # the process that has LMDB open; negative: it is opened anew at the next use
        self._is_busy = False  # in this process; a forked child has its parent's
        self._is_damaged = False  # LMDB said so: the next process that opens it begins anew
        self._thread = threading.RLock()
        self._lock = os.open(os.path.join(path, marks.MARK), _FLAGS, 0o600)

    # ---- opening and closing --------------------------------------------------------------------------

    def use(self, about: dict[str, Any], limit: int) -> bool:
        """Open the folder for a first or a further cache of this process, and mark it. No other process opens
        it meanwhile. Returns False if it was removed. See `open_at`."""
        if not _wait_for(self._lock, _OPENING, fcntl.LOCK_EX, _OPENING_PATIENCE):
            text = f"another process has been opening {self._path!r} for {_OPENING_PATIENCE} s"
            raise TimeoutError(f"cached: {text}")
        try:
            if not os.fstat(self._lock).st_nlink:
                return False
            mark = marks.read(self._lock)
            marks.compare(self._path, mark, about)
            if self._env is None:
                try:
                    if why := marks.lost(self._path, mark):
                        raise ValueError(why)
                    self._begin(mark, about, limit)
                except ValueError as error:
                    warn_user(f"cached: the folder {self._path!r} is begun anew: {error}", UserWarning)
                    os.unlink(os.path.join(self._path, marks.VALUES))  # who has it open goes on with it
                    self._begin(mark, about, limit)
            return True
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, _OPENING)

    def _begin(self, mark: Any, about: dict[str, Any], limit: int) -> None:
        """Mark the folder, before the first commit, and open it."""
        _close(self._data)
        self._data = os.open(os.path.join(self._path, marks.VALUES), _FLAGS, 0o600)
        self.limit = limit if mark is None else mark["limit"]  # the first limit stays
        self._mark({"format": marks.FORMAT, **about, "limit": self.limit})
        self._open()
        if not _opened:  # after the loaders are closed, whose workers have it open
            util.Finalize(None, _finish_all, exitpriority=0)
        _opened[marks.identity(self._lock)] = self

    def _mark(self, about: dict[str, Any]) -> None:
        using = [] if self._is_damaged else marks.using(self._data)
        marks.write(self._lock, {**about, "using": using})

    def _open(self) -> None:
        """Open LMDB in this process, which has locked the opening."""
        fcntl.lockf(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _OPEN)
        options: Any = {"subdir": False, "lock": False, "sync": False, "metasync": False}
        try:
            env = lmdb.open(f"/proc/self/fd/{self._data}", map_size=self.limit, **options)
            self._page = env.stat()["psize"]
            if os.fstat(self._data).st_size < self._size(env):
                env.close()
                raise ValueError("the file ends before its last page")
        except _NO_DAMAGE as error:
            raise OSError(f"cached: path={self._path!r} cannot be opened: {error}") from None
        except lmdb.Error as error:
            raise ValueError(f"LMDB: {error}") from None
        self._env, self._pid = env, process_id.pid

    def finish(self) -> None:
        """Close the folder; the last process that has it open syncs it, and marks it clean."""
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        _opened.pop(marks.identity(lock), None)
        if self._pid == process_id.pid and not self._is_busy:
            with contextlib.suppress(OSError, lmdb.Error):
                if _wait_for(lock, _OPENING, fcntl.LOCK_EX, 0) and _wait_for(lock, _OPEN, fcntl.LOCK_EX, 0):
                    self._env.sync(True)
                    mark = marks.read(lock)
                    if mark is not None and mark["using"] == marks.using(self._data):
                        marks.write(lock, {**mark, "using": None})
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
                    if not _wait_for(self._lock, _OPENING, fcntl.LOCK_EX, PATIENCE):
                        return False
                    if (mark := marks.read(self._lock)) is not None:  # the parent may have closed it
                        self._mark(mark)
                    self._open()
                finally:
                    self._is_busy = False
                    fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, _OPENING)
        return True

    def _run(self, kind: int, work: Callable[..., Any], *args: Any) -> Any:
        """Call `work` with a transaction, under the lock. None if the lock is not free in time, and to a
        signal handler inside of another operation.

        Raises:
            ValueError: the folder is damaged, or the disk is full.
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
                self._is_damaged |= isinstance(error, _DAMAGE)
                raise ValueError(f"LMDB: {error}") from None
            finally:
                self._is_busy = False
                # A call in C, which no interrupt keeps from its work.
                fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, _OPERATION)

    # ---- reading and writing ------------------------------------------------------------------------

    def get(self, key: bytes, copy: bool) -> values.EncodedValue | None:
        """Look up the value of a key, in new memory.

        Raises:
            ValueError: the value is damaged.
        """
        found: values.EncodedValue | None = self._run(fcntl.LOCK_SH, self._read, key, copy)
        return found

    def _read(self, txn: Any, key: bytes, copy: bool) -> values.EncodedValue | None:
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

    def add(self, key: bytes, encoded: values.EncodedValue, replace: bool = False) -> str:
        """Store a value; `replace` one that cannot be read. Returns as `Memory.add` does.

        Raises:
            ValueError: the folder is damaged, or the disk is full.
        """
        pieces, _ = values.record(key, encoded)
        data = bytearray().join([bytes(_PREFIX.size), *pieces])
        checksum = values.checksum(memoryview(data)[_PREFIX.size :])
        return self._run(fcntl.LOCK_EX, self._write, key, data, checksum, replace) or BUSY

    def _write(self, txn: Any, key: bytes, data: bytearray, checksum: int, replace: bool) -> str:
        name = _name(key)
        if not replace and txn.get(name) is not None:
            return BUSY
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
        OSError: it cannot be opened, or the disk is full; or ValueError, from LMDB.
        TimeoutError: another process keeps opening it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        marks.refuse_others(path)
        with memory.entering:
            while True:
                at = marks.identity(os.path.join(path, marks.MARK))
                if (folder := _opened.get(at) or Folder(path)).use(about, limit):
                    return folder
    except OSError as error:
        if error.errno is None:
            raise
        raise type(error)(error.errno, f"cached: path={path!r} cannot be opened: {error.strerror}") from error


def _finish_all() -> None:
    for folder in list(_opened.values()):
        folder.finish()
