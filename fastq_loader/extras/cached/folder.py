"""The folder of a cache, which outlives the program: values in LMDB, a mark, and a file for locks.

Runs in every process that calls a cached function, on any of its threads. One process opens a folder once.

    fastq_loader.mark    JSON: whose values these are, and whether they survived. Read before LMDB is opened
    fastq_loader.lock    bytes that processes lock: for an operation, while open, while opening
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
import hashlib
import importlib
import os
import struct
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import util
from typing import Any

from fastq_loader.api import process_id
from fastq_loader.extras.cached import mark as marks
from fastq_loader.extras.cached import memory, values
from fastq_loader.extras.cached.memory import BUSY, FULL, PATIENCE, STORED, in_time

with contextlib.suppress(ImportError):  # on another system
    import fcntl

lmdb: Any = None  # imported when a folder is opened

#: Bytes of the file `lock`.
_OPERATION, _OPEN, _OPENING = range(3)
#: Seconds to wait for another process that opens the folder.
_OPENING_PATIENCE = 30.0
#: Before a record: number of its transaction, and checksum of the record.
_PREFIX = struct.Struct("<QQ")
_LONGEST_KEY = 511  # of LMDB
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
#: EIO is LMDB's own, of a write that was cut short.
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: The folders that are open in this process, by the device and inode of their file `lock`.
_opened: weakref.WeakValueDictionary[Any, Folder] = weakref.WeakValueDictionary()


class Folder:
    """One process's access to a folder. See `memory.Memory`, which has the same methods.

    Args:
        path: the folder.
        lock: descriptor of its file `lock`.
        data: descriptor of its file `values`; LMDB opens that one, even if it was removed meanwhile.
        limit: largest size of the file.
        can_write: whether the disk can be written to.

    Raises:
        OSError: LMDB cannot be opened.
        ValueError: the file is damaged.
    """

    def __init__(self, path: str, lock: int, data: int, limit: int, can_write: bool) -> None:
        self._path, self._lock, self._data = path, lock, data
        self.limit, self._can_write = limit, can_write
        self._seen = bytearray()  # by the number of a transaction: whether its checksum was compared
        self._env: Any = None
        self._pid = 0  # the process that has LMDB open; negative: it is opened anew at the next use
        self._is_busy = False  # in this process; a forked child has its parent's
        self._thread = threading.RLock()
        self._open()

    def _open(self) -> None:
        """Open LMDB in this process."""
        fcntl.lockf(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _OPEN)
        options: Any = {"subdir": False, "lock": False, "sync": False, "metasync": False}
        options |= {"map_size": self.limit, "readonly": not self._can_write}
        try:
            self._env = lmdb.open(f"/proc/self/fd/{self._data}", **options)
            self.limit = self.limit or self._env.info()["map_size"]
            self._page = self._env.stat()["psize"]
            if os.fstat(self._data).st_size < self._size():
                self._env.close()
                raise ValueError("the file ends before its last page")
        except lmdb.Error as error:
            raise _plain(error) from None
        self._pid = process_id.pid

    def _size(self) -> int:
        """Bytes up to the last page that LMDB uses."""
        size: int = (self._env.info()["last_pgno"] + 1) * self._page
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
                    self._open()
                finally:
                    self._is_busy = False
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
                if isinstance(error, lmdb.MapResizedError):  # by a process with a larger limit
                    self.limit = 0  # it is opened anew, with the size of that one
                    return None
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
        found: values.Found | None = self._run(fcntl.LOCK_SH, self._read, key)
        if found is not None and not copy:
            for part in found[1]:
                part.flags.writeable = False
        return found

    def _read(self, txn: Any, key: bytes) -> values.Found | None:
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
        return values.read(data, _PREFIX.size, key, copy=True)

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
        if self._size() + len(data) > self.limit:
            return FULL
        _PREFIX.pack_into(data, 0, txn.id(), checksum)
        txn.put(name, data)
        return STORED

    def usage(self) -> tuple[int, int, int]:
        """Bytes of the file, the number of values, and the limit."""

        def read(txn: Any) -> tuple[int, int, int]:
            return self._size(), txn.stat()["entries"], self.limit

        with contextlib.suppress(ValueError):
            return self._run(fcntl.LOCK_SH, read) or (0, 0, self.limit)
        return 0, 0, self.limit

    def adopt(self, wanted: marks.Wanted) -> None:
        """Check and mark the folder for another cache of this process; see `open_at`."""
        _lock_opening(self._path, self._lock, self._can_write)
        try:
            marks.compare(self._path, marks.read(self._path), wanted.about, is_used=True)
            holds = marks.update(self._path, wanted, self._data, self._can_write)
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, _OPENING)
        if holds > self.limit:
            self.limit, self._pid = holds, -process_id.pid

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
                    mark = marks.read(self._path)
                    if mark is not None and mark["data"] == list(marks.identity(self._data)):
                        marks.write(self._path, {**mark, "clean": True})
        if not self._is_busy:
            self._env.close()
        os.close(lock)
        os.close(self._data)

    def __del__(self) -> None:
        if "_pid" in vars(self):
            self.finish()


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
    return _try_lock(lock, byte, kind) or in_time(partial(_try_lock, lock, byte, kind), seconds)


def _try_lock(lock: int, byte: int, kind: int) -> bool:
    try:
        fcntl.lockf(lock, kind | fcntl.LOCK_NB, 1, byte)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


# ---- opening -----------------------------------------------------------------------------------------------


def open_at(path: str, wanted: marks.Wanted) -> Folder:
    """Open or make a folder.

    Raises:
        mark.Differs: it belongs to another function or version, or is not a cache.
        PermissionError: it is another user's, or others may write to it.
        ValueError: it is on a network.
        OSError: it cannot be opened, or the disk is full.
        TimeoutError: another process keeps opening it.
    """
    global lmdb
    try:
        lmdb = importlib.import_module("lmdb")
    except ImportError:
        raise ImportError("cached: path= needs lmdb: pip install 'lmdb>=3', or the extra [cached]") from None
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except OSError as error:
        raise _explained(path, error) from error
    marks.refuse_others(path)
    with memory.entering:
        known = _opened.get(marks.identity(os.path.join(path, marks.LOCK)))
        if known is not None:
            known.adopt(wanted)
            return known
        try:
            folder = _opened_here(path, wanted)
        except OSError as error:
            if error.errno is None:
                raise
            raise _explained(path, error) from error
        if not _opened:  # after the loaders are closed, whose workers have it open
            util.Finalize(None, _finish_all, exitpriority=0)
        _opened[marks.identity(folder._lock)] = folder
        return folder


def _explained(path: str, error: OSError) -> OSError:
    return type(error)(error.errno, f"cached: path={path!r} cannot be opened: {error.strerror}")


def _finish_all() -> None:
    for folder in list(_opened.values()):
        folder.finish()


def _opened_here(path: str, wanted: marks.Wanted) -> Folder:
    """Open the folder in this process; with new data, and a warning, if the data may not have survived."""
    lock, can_write = _lock_of(path)
    make = partial(_with_data, path, wanted, lock, can_write)
    try:
        mark = marks.read(path)
        is_used = can_write and marks.is_empty(path) and not _try_lock(lock, _OPEN, fcntl.LOCK_EX)
        marks.compare(path, mark, wanted.about, is_used)
        if not (why := marks.lost(path, mark)):
            try:
                return make()
            except ValueError as error:
                why = str(error)
        if not can_write:
            raise OSError(errno.EROFS, f"its disk is read-only, and {why}")
        warnings.warn(f"cached: the folder {path!r} is begun anew: {why}", stacklevel=5)
        os.unlink(os.path.join(path, marks.VALUES))  # who has it open goes on with it
        return make()
    except BaseException:
        os.close(lock)
        raise


def _with_data(path: str, wanted: marks.Wanted, lock: int, can_write: bool) -> Folder:
    flags = os.O_RDWR | os.O_CREAT if can_write else os.O_RDONLY
    data = os.open(os.path.join(path, marks.VALUES), flags | _SAFELY, 0o600)
    try:
        holds = marks.update(path, wanted, data, can_write)  # before the first commit
        folder = Folder(path, lock, data, holds, can_write)
    except BaseException:
        os.close(data)
        raise
    fcntl.lockf(lock, fcntl.LOCK_UN, 1, _OPENING)
    return folder


def _lock_of(path: str) -> tuple[int, bool]:
    """Open the file for locks, and lock it: no other process judges or begins the folder meanwhile. Returns
    it, and whether the disk can be written to."""
    while True:
        file, can_write = os.path.join(path, marks.LOCK), True
        try:
            lock = os.open(file, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            lock, can_write = os.open(file, os.O_RDONLY | _SAFELY), False
        try:
            _lock_opening(path, lock, can_write)
            if os.fstat(lock).st_nlink:  # else it was removed meanwhile
                return lock, can_write
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _lock_opening(path: str, lock: int, can_write: bool) -> None:
    kind = fcntl.LOCK_EX if can_write else fcntl.LOCK_SH
    if not _wait_for(lock, _OPENING, kind, _OPENING_PATIENCE):
        raise TimeoutError(f"cached: another process has been opening {path!r} for {_OPENING_PATIENCE} s")
