"""The folder of a cache, which outlives the program: values in LMDB, and a mark.

Runs in every process that calls a cached function, on any of its threads. One process opens a folder once.
Imported when a folder is opened: LMDB is an extra.

    fastq_loader.mark    see `mark`; its bytes are locked: for each operation, and while open
    fastq_loader.values  LMDB's: key, or its hash → number of a transaction, checksum, and `values.record`

LMDB's own locks are not used: a stopped writer would hold everybody up, and a forked child that closes LMDB
releases the readers of its parent. Here readers share a lock for microseconds, and a writer has it alone
until its commit; without it in time, nothing is read or stored. The locks are POSIX locks, which a forked
child does not inherit. Writes are not synced: see `mark`. The limit is LMDB's: the largest size of its file.
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
_OPERATION, _OPEN = range(2)
#: Seconds to wait for the lock when a folder is opened.
_OPENING_PATIENCE = 30.0
#: Before a record: number of its transaction, and checksum of the record.
_PREFIX = struct.Struct("<QQ")
_LONGEST_KEY = 511  # of LMDB
_MOST_SEEN = 1 << 26  # a damaged file has numbers of any size
#: Errors of a damaged file. Others are of the machine: no memory or addresses, no rights, a full disk.
_DAMAGE = (
    *(lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError),
    *(lmdb.PageNotFoundError, lmdb.PageFullError, lmdb.PanicError),
)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

#: The folders that are open in this process, by the device and inode of their mark.
_opened: weakref.WeakValueDictionary[Any, Folder] = weakref.WeakValueDictionary()


class Folder:
    """One process's access to a folder. See `memory.Memory`, which has the same methods.

    Args:
        path, about, limit: see `open_at`.

    Attributes:
        about: whose it is, and its limit.
        limit: largest size of the file of the values.
    """

    def __init__(self, path: str, about: dict[str, Any], limit: int) -> None:
        self._path, self._lock, self._data = path, -1, -1
        self._env: Any = None
        self._seen = bytearray()  # by the number of a transaction: whether its checksum was compared
        self._pid = process_id.pid  # the process that has LMDB open
        self._is_busy = False  # in this process; a forked child has its parent's
        self._thread = threading.RLock()
        try:
            # It may be removed while it is waited for.
            while self._lock < 0 or not os.fstat(self._lock).st_nlink:
                _close(self._lock)
                self._lock = os.open(os.path.join(path, marks.MARK), _FLAGS, 0o600)
                if not _wait_for(self._lock, _OPERATION, fcntl.LOCK_EX, _OPENING_PATIENCE):
                    raise TimeoutError(f"cached: another process is stopped while it uses path={path!r}")
            mark = marks.read(self._lock)
            self.about = mark or {"format": marks.FORMAT, "limit": limit, **about, "state": None}
            marks.compare(path, self.about, about)
            self.limit = self.about["limit"]  # the first one stays
            file = os.path.join(path, marks.VALUES)
            is_new = not os.path.exists(file)
            try:
                self._open(file)
                if not is_new and self.about["state"] not in (self._using, self._synced()):
                    text = "it was damaged; or copied, or the machine went down, while it was written to"
                    raise ValueError(text)
            except ValueError as error:
                warn_user(f"cached: the folder {path!r} is begun anew: {error}", UserWarning)
                is_new = True
                os.unlink(file)  # who has it open goes on with it
                self._open(file)
            if is_new:
                marks.write(self._lock, {**self.about, "state": self._using})
        finally:
            if self._lock >= 0:
                fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, _OPERATION)
        _opened[marks.identity(self._lock)] = self

    def _open(self, file: str | None = None) -> None:
        """Open LMDB, under the lock: on a file, or anew on its own. Raises ValueError: it is damaged."""
        fcntl.lockf(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _OPEN)
        self._close_values()
        if file is not None:
            before, self._data = self._data, os.open(file, _FLAGS, 0o600)
            _close(before)
        self._using = marks.using(self._data)
        options: Any = {"subdir": False, "lock": False, "sync": False, "metasync": False}
        try:
            env = lmdb.open(f"/proc/self/fd/{self._data}", map_size=self.limit, **options)
        except _DAMAGE as error:
            raise ValueError(f"LMDB: {error}") from None
        except lmdb.Error as error:
            raise OSError(f"cached: path={self._path!r} cannot be opened: {error}") from None
        if os.fstat(self._data).st_size < (env.info()["last_pgno"] + 1) * env.stat()["psize"]:
            env.close()
            raise ValueError("the file ends before its last page")
        self._env = env

    def _close_values(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _synced(self) -> list[Any]:
        """What a folder is marked with whose values are synced. A copy that was begun then, and ended after
        further values were stored, has another one."""
        return [self._env.info()["last_txnid"], os.fstat(self._data).st_size]

    def finish(self) -> None:
        """Close the folder; the last process that has it open syncs it, and marks it so."""
        if self._lock < 0:
            return
        with memory.entering:
            _opened.pop(marks.identity(self._lock), None)
            if self._pid == process_id.pid and self._env is not None and not self._is_busy:
                with contextlib.suppress(OSError, lmdb.Error):
                    if self._is_last():
                        os.fsync(self._data)
                        mark = marks.read(self._lock)
                        if mark is not None and mark["state"] == self._using:
                            marks.write(self._lock, {**mark, "state": self._synced()})
            if not self._is_busy:
                self._close_values()
            os.close(self._lock)
            _close(self._data)
            self._lock = self._data = -1

    def _is_last(self) -> bool:
        """Lock the folder if no other process has it open."""
        is_locked = _wait_for(self._lock, _OPERATION, fcntl.LOCK_EX, PATIENCE)
        return is_locked and _try_lock(self._lock, _OPEN, fcntl.LOCK_EX)

    __del__ = finish

    def _enter(self) -> bool:
        """Close, in a forked child, what it inherited. Returns False in the child of a process whose other
        thread was using LMDB."""
        with memory.entering:
            if self._pid != process_id.pid and not self._is_busy:
                self._close_values()
                self._pid = process_id.pid
                self._thread = threading.RLock()  # another thread may have the lock, and is not here
        return self._pid == process_id.pid

    def _run(self, kind: int, work: Callable[..., Any], *args: Any) -> Any:
        """Call `work` with a transaction, under the lock. None if the lock is not free in time, and to a
        signal handler inside of another operation.

        Raises:
            OSError: the folder is damaged, or the disk is full.
        """
        if self._pid != process_id.pid and not self._enter():
            return None
        with self._thread:
            if self._is_busy:
                return None
            self._is_busy = True
            try:
                if not _wait_for(self._lock, _OPERATION, kind, PATIENCE):
                    return None
                if self._env is None:
                    self._open()
                with self._env.begin(write=kind == fcntl.LOCK_EX, buffers=True) as txn:
                    return work(txn, *args)
            except lmdb.MapFullError:
                return FULL
            except lmdb.Error as error:
                self._close_values()  # it may refuse all further use
                file = os.path.join(self._path, marks.VALUES)
                if isinstance(error, _DAMAGE) and marks.identity(file) == marks.identity(self._data):
                    os.unlink(file)  # the next process that opens the folder begins it anew
                raise OSError(f"LMDB: {error}") from None
            finally:
                self._is_busy = False
                # A call in C, which no interrupt keeps from its work.
                fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, _OPERATION)

    # ---- reading and writing ------------------------------------------------------------------------

    def get(self, key: bytes, copy: bool) -> values.EncodedValue | None:
        """Look up the value of a key, in new memory. Raises Exception: it is damaged."""
        found: values.EncodedValue | None = self._run(fcntl.LOCK_SH, self._read, key, copy)
        return found

    def _read(self, txn: Any, key: bytes, copy: bool) -> values.EncodedValue | None:
        data = txn.get(_name(key))
        if data is None:
            return None
        number, checksum = _PREFIX.unpack_from(data)
        seen = self._seen
        if not (number < len(seen) and seen[number]):
            if values.checksum(data[_PREFIX.size :]) != checksum:
                raise ValueError("the checksum of a value is wrong")
            if number <= min(txn.id(), _MOST_SEEN):
                seen.extend(bytes(max(0, number + 1 - len(seen))))
                seen[number] = True
        return values.read(data, _PREFIX.size, key, copy)

    def add(self, key: bytes, encoded: values.EncodedValue, replace: bool = False) -> str:
        """Store a value; `replace` one that cannot be read. Returns as `Memory.add` does.

        Raises:
            OSError: the folder is damaged, or the disk is full.
        """
        pieces, _ = values.record(key, encoded)
        data = bytearray().join([bytes(_PREFIX.size), *pieces])
        checksum = values.checksum(memoryview(data)[_PREFIX.size :])
        return self._run(fcntl.LOCK_EX, self._write, key, data, checksum, replace) or BUSY

    def _write(self, txn: Any, key: bytes, data: bytearray, checksum: int, replace: bool) -> str:
        if os.fstat(self._data).st_nlink < os.fstat(self._lock).st_nlink:
            return BUSY  # the folder was begun anew
        name = _name(key)
        if not replace and txn.get(name) is not None:
            return BUSY
        used = {**self.about, "state": self._using}
        if marks.read(self._lock) != used:
            marks.write(self._lock, used)
        _PREFIX.pack_into(data, 0, txn.id(), checksum)
        txn.put(name, data)
        return STORED

    def usage(self) -> tuple[int, int, int]:
        """Bytes of the file, the number of values, and the limit."""
        number = self._run(fcntl.LOCK_SH, lambda txn: txn.stat()["entries"])
        return os.fstat(self._data).st_size, number or 0, self.limit


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
        ValueError: it belongs to another function or version, is not a cache, or on a network.
        PermissionError: it is another user's, or others may write to it.
        OSError: it cannot be opened, or the disk is full.
        TimeoutError: another process is stopped while it uses it.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    marks.refuse_others(path)
    with memory.entering:
        folder = _opened.get(marks.identity(os.path.join(path, marks.MARK)))
        if folder is None:
            return Folder(path, about, limit)
        marks.compare(path, folder.about, about)
        return folder


def _finish_all() -> None:
    for folder in list(_opened.values()):
        folder.finish()


# After the loaders are closed, whose workers have folders open.
util.Finalize(None, _finish_all, exitpriority=0)
