"""The file of a cache: a table of slots, and data that only grows.

Runs in every process that calls a cached function, on any of its threads. The file is a memfd, which is freed
with its last process, or it has a path. It is written by system calls. A memfd is mapped for reading if the
address space allows it. A file with a path is only read by system calls: if it is truncated, reads are short,
and no process counts the values as its own memory. A full disk is an error of a write.

    header      one page: the cached function and its version, and the layout
    cursor      one page: end of the data; written under a lock
    slots       64 bytes each: hash of the key, place, lengths and checksum of the value, check of the slot
    data        values, each after its head

A value is written first, into space reserved for it, and then its slot: a valid slot refers to a complete
value. Readers take no lock. Writers lock bytes of the file for microseconds; the kernel releases the lock of
a process that dies. A writer that does not get the lock soon, because the lock's owner is stopped, stores
nothing. Space that a killed writer had reserved stays unused. In a file with a path, the checksum of a value
is verified at its first read in a process: after a power cut the disk may have a slot without its data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastq_loader.api import calls, locks, process_id

#: Version of the layout. A file of another version is refused.
LAYOUT = 1
_MAGIC = b"fastq_loader.cache\0"
_PAGE = 4096
_CURSOR, _SLOTS = _PAGE, 2 * _PAGE
_SLOT = struct.Struct("<16sQIIII")  # hash of the key, place, head, data, checksum of both, check of the slot
_SLOT_BYTES = 64
#: Alignment in bytes of heads and data.
_ALIGNMENT = 64
#: Number of slots per read.
_RUN = 8
#: Bytes of values per slot of the table: with smaller values the slots may run out before the space.
_BYTES_PER_SLOT = 4096
_LEAST_SLOTS = 1 << 12
#: Largest distance in slots of a key from its first slot; beyond that the table counts as full.
_FURTHEST = 512
#: Seconds that a writer waits for another one, which may be off the CPU, and seconds between two attempts.
_PATIENCE, _GLANCE = 0.1, 50e-6


_first_use = threading.Lock()


def first_use() -> threading.Lock:
    """The lock for the first use of a file in a process, during which a thread opens its descriptors."""
    return _first_use


def _forget() -> None:
    global _first_use
    _first_use = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread may hold the lock during a fork
    os.register_at_fork(after_in_child=_forget)


class Found(NamedTuple):
    """Location of a value in the file."""

    place: int
    head: int
    nbytes: int
    checksum: int


class Differs(ValueError):
    """The file belongs to another function, version or layout; the text names the difference."""


class Store:
    """One process's access to the file.

    Args:
        fd: descriptor of the file; this object will close it. Each process that writes opens the file again,
            because a lock belongs to an open file.
        limit: largest total size of the values, in bytes.
        checks: whether checksums are written and verified.
    """

    def __init__(self, fd: int, limit: int, checks: bool) -> None:
        self.fd = fd
        self._limit = limit
        self._checks = checks
        header = os.pread(fd, _PAGE, 0)
        self._slots: int = json.loads(header[len(_MAGIC) :].rstrip(b"\0"))["slots"]
        self._data: int = _SLOTS + self._slots * _SLOT_BYTES
        # Memory, which nobody truncates, is mapped whole if the address space allows it: a copy from there
        # takes a third of the time of a system call.
        self._map: Any = None  # a memoryview
        if not checks:
            with contextlib.suppress(OSError, ValueError):
                whole = mmap.mmap(fd, self._data + self._limit, mmap.MAP_SHARED, mmap.PROT_READ)
                self._map = memoryview(whole)
        self._verified: set[int] = set()  # places of values verified or written here
        self._pid = 0
        self._lock = threading.Lock()
        self._own = -1

    # ---- reading --------------------------------------------------------------------------------

    def find(self, digest: bytes) -> Found | None:
        """Look up the value for the digest of a key; None if it is not stored."""
        at = int.from_bytes(digest[:8], "little") % self._slots
        for start in range(at, at + _FURTHEST, _RUN):
            run = self._read_slots(start % self._slots)
            for slot in range(0, len(run) - _SLOT_BYTES + 1, _SLOT_BYTES):
                key, place, head, nbytes, checksum, check = _SLOT.unpack_from(run, slot)
                if not place:
                    return None
                if key == digest:
                    whole = check == zlib.crc32(run[slot : slot + _SLOT.size - 4])
                    return Found(place, head, nbytes, checksum) if whole else None
            if len(run) < _RUN * _SLOT_BYTES:  # end of the table, or a truncated file
                return None
        return None

    def _read_slots(self, start: int) -> bytes:
        return self._read(_SLOTS + start * _SLOT_BYTES, min(_RUN, self._slots - start) * _SLOT_BYTES)

    def _read(self, at: int, nbytes: int) -> bytes:
        if self._map is not None:
            data: bytes = self._map[at : at + nbytes].tobytes()
            return data
        return os.pread(self.fd, nbytes, at)

    def head(self, found: Found) -> bytes:
        """The head of a value.

        Raises:
            ValueError: the file is damaged.
        """
        head = self._read(found.place, found.head)
        if len(head) != found.head:
            raise ValueError("the file ends before the value does")
        if self._checks and found.place not in self._verified:
            data = os.pread(self.fd, found.nbytes, found.place + _aligned(found.head))
            if len(data) != found.nbytes or zlib.crc32(data, zlib.crc32(head)) != found.checksum:
                raise ValueError("the checksum of a value is wrong")
            self._verified.add(found.place)
        return head

    def read(self, found: Found, at: int, nbytes: int) -> np.ndarray:
        """Read `nbytes` of a value from `at` on, into new memory.

        Raises:
            ValueError: the file is too short.
        """
        place = found.place + _aligned(found.head) + at
        if self._map is not None:
            copied: np.ndarray = np.frombuffer(self._map, np.uint8, nbytes, place).copy()
            return copied
        data = np.empty(nbytes, np.uint8)
        into, got = _memory_of(data), 0
        while got < nbytes:
            count = os.preadv(self.fd, [into[got:]], place + got)
            if not count:
                raise ValueError("the file ends before the value does")
            got += count
        return data

    def view(self, found: Found, at: int, nbytes: int) -> np.ndarray:
        """Like `read`, but read-only, and without a copy if the file is mapped."""
        if self._map is None:
            data = self.read(found, at, nbytes)
            data.flags.writeable = False
            return data
        return np.frombuffer(self._map, np.uint8, nbytes, found.place + _aligned(found.head) + at)

    # ---- writing --------------------------------------------------------------------------------

    def add(self, digest: bytes, head: bytes, parts: Sequence[tuple[int, memoryview]], nbytes: int) -> bool:
        """Store a value under the digest of its key. Returns False without space, or if the lock is taken.

        Raises:
            OSError: the file cannot be written; ENOSPC if the disk is full.
        """
        with self._writing() as may:
            place = self._reserve(_aligned(len(head)) + nbytes) if may else 0
        if not place:
            return False
        checksum = self._write(place, head, parts)
        with self._writing() as may:
            if may and (slot := self._free_slot(digest)) is not None:
                packed = _SLOT.pack(digest, place, len(head), nbytes, checksum, 0)[:-4]
                os.pwrite(self.fd, packed + struct.pack("<I", zlib.crc32(packed)), slot)
                self._verified.add(place)
                return True
        return False

    def used(self) -> int:
        """Bytes of the data, including space that killed writers have left unused."""
        return self._end() - self._data

    def _end(self) -> int:
        word = os.pread(self.fd, 8, _CURSOR)
        return max(self._data, int.from_bytes(word, "little")) if len(word) == 8 else self._data

    def _reserve(self, nbytes: int) -> int:
        place = self._end()
        end = place + _aligned(nbytes)
        if end - self._data > self._limit:
            return 0
        os.pwrite(self.fd, end.to_bytes(8, "little"), _CURSOR)
        return place

    def _write(self, place: int, head: bytes, parts: Sequence[tuple[int, memoryview]]) -> int:
        _write_all(self.fd, memoryview(head), place)
        checksum, at, start = zlib.crc32(head) if self._checks else 0, 0, place + _aligned(len(head))
        for offset, data in parts:
            _write_all(self.fd, data, start + offset)
            if self._checks:
                checksum = zlib.crc32(data, zlib.crc32(bytes(offset - at), checksum))
                at = offset + data.nbytes
        return checksum

    def _free_slot(self, digest: bytes) -> int | None:
        """Offset in the file for the slot of a key. None if the table is full there, or another process has
        stored the key meanwhile."""
        at = int.from_bytes(digest[:8], "little") % self._slots
        for start in range(at, at + _FURTHEST, _RUN):
            run = self._read_slots(start % self._slots)
            for slot in range(0, len(run) - _SLOT_BYTES + 1, _SLOT_BYTES):
                key, place, *_, check = _SLOT.unpack_from(run, slot)
                whole = place and check == zlib.crc32(run[slot : slot + _SLOT.size - 4])
                if whole and key == digest and self._intact(place):
                    return None
                if not whole or key == digest:
                    return _SLOTS + (start % self._slots) * _SLOT_BYTES + slot
            if len(run) < _RUN * _SLOT_BYTES:
                return None
        return None

    def _intact(self, place: int) -> bool:
        """Whether a stored value is known to be readable; if not, its slot is overwritten."""
        return not self._checks or place in self._verified

    # ---- the lock of writers --------------------------------------------------------------------

    @contextlib.contextmanager
    def _writing(self) -> Iterator[bool]:
        """Take the lock for table and cursor; yields False if it could not be had in time."""
        if self._pid != process_id.current():  # a fork has its parent's open file and lock
            self._begin_writing()
        lock = self._lock
        if not lock.acquire(timeout=_PATIENCE):
            yield False
            return
        try:
            held = self._try_lock(time.monotonic() + _PATIENCE)
            try:
                yield held
            finally:
                if held:
                    locks.unlock(self._own, _CURSOR, 8)
        finally:
            lock.release()

    def _begin_writing(self) -> None:
        with first_use():
            if self._pid == process_id.current():  # another thread was faster
                return
            before, self._own = self._own, locks.open_anew(self.fd)
            if before >= 0:
                os.close(before)
            self._lock = threading.Lock()
            self._pid = process_id.current()

    def _try_lock(self, until: float) -> bool:
        while not locks.try_lock(self._own, _CURSOR, 8):
            if time.monotonic() > until:
                return False
            time.sleep(_GLANCE)
        return True

    def close(self) -> None:
        """Close the file. A forked child closes only its own copies."""
        self._map = None  # unmapped with the last array that views it
        fd, self.fd, own, self._own = self.fd, -1, self._own, -1
        for descriptor in (fd, own):
            if descriptor >= 0:
                os.close(descriptor)

    def __del__(self) -> None:
        if "_own" in vars(self):
            self.close()


def digest_of(key: bytes) -> bytes:
    """Digest of a key: 128 bits, so that two keys never collide in practice."""
    return hashlib.blake2b(key, digest_size=16).digest()


def prepare(fd: int, about: dict[str, Any], limit: int) -> None:
    """Initialize an empty file, or check that an existing one has the same description.

    Args:
        fd: descriptor of the file; no other process may prepare it at the same time.
        about: function and version, as JSON values.
        limit: largest total size of the values, in bytes.

    Raises:
        Differs: the file has another description, or is not a cache.
        OSError: the file cannot be written.
        ValueError: `about` does not fit into the header.
    """
    header = os.pread(fd, _PAGE, 0)
    if header.startswith(_MAGIC):
        known = json.loads(header[len(_MAGIC) :].rstrip(b"\0"))
        theirs = {"layout": known.get("layout"), **known.get("about", {})}
        for name, value in {"layout": LAYOUT, **about}.items():
            if theirs.get(name) != value:
                raise Differs(f"its {name} is {theirs.get(name)!r}, and here it is {value!r}")
        return
    if header.strip(b"\0"):
        raise Differs("it is not a cache of this library")
    slots = max(_LEAST_SLOTS, limit // _BYTES_PER_SLOT)
    text = json.dumps({"layout": LAYOUT, "about": about, "slots": slots}).encode()
    if len(_MAGIC) + len(text) > _PAGE:
        raise ValueError(f"cached: name and version of the function take {len(text)} bytes; use shorter ones")
    os.ftruncate(fd, _SLOTS + slots * _SLOT_BYTES)
    os.pwrite(fd, _MAGIC + text, 0)  # last: without it the file counts as empty


def anonymous(about: dict[str, Any], limit: int) -> int:
    """Make a cache in memory, which is freed with its last descriptor. Returns a descriptor."""
    fd = calls.memfd_create("fastq_loader.cache")
    try:
        prepare(fd, about, limit)
        with contextlib.suppress(OSError):  # under `ulimit -f` it grows, and is not mapped
            os.ftruncate(
                fd, os.fstat(fd).st_size + limit
            )  # so that it can be mapped; only written pages take memory
    except BaseException:
        os.close(fd)
        raise
    return fd


def at_path(path: str, about: dict[str, Any], limit: int) -> int:
    """Open or make a file, which outlives the program. Returns a descriptor.

    Raises:
        Differs: the file has another description, or is not a cache.
        OSError: the file cannot be opened or written.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        locks.lock_file(fd)
        try:
            prepare(fd, about, limit)
        finally:
            locks.unlock_file(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _memory_of(array: Any) -> memoryview:
    return memoryview(array)


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT


def _write_all(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:], at + done)
