"""The memory of a cache, which all processes share that inherit its descriptor: a memfd.

Runs in every process that calls a cached function, on any of its threads. Freed with its last process.

    header      one page of 64-bit words: end of the data, levels of the index, limit, number of values
    index       levels of buckets of eight words; level k has twice as many as level k - 1
    data        records (`values.record`), one after the other

A word of the index is 24 bits of the key's hash and the place of a record; the record has the whole key. A
key lies in the first level whose bucket had a free word, so the index grows with the number of values.
Readers take no lock, because a word is written after its record, and the kernel writes it at once. A writer
first locks its key, so that processes in step store no copies; then the header, for microseconds, to reserve
room, and again to write the word. The kernel releases the locks of a process that dies. A writer that does
not get a lock soon stores nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fastq_loader.api import calls, locks, process_id
from fastq_loader.extras.cached import values

#: What became of a value.
STORED, FULL, BUSY = "stored", "full", "busy"
#: Head and buffers of a value: the arguments of `values.decode`.
Found = tuple[bytes, list[np.ndarray]]

_PAGE, _WORD, _ALIGNMENT = 4096, 8, 64
_DATA, _END, _LEVELS, _LIMIT, _COUNT = range(0, 5 * _WORD, _WORD)  # offsets of the header's words
_BUCKET, _BUCKETS = 64, 64  # bytes of a bucket, and buckets of level 0
_WORDS = struct.Struct("<8Q")
_PLACE_BITS = 40
_PLACE_MASK = (1 << _PLACE_BITS) - 1
#: The index may take this part of the limit, of addresses; of memory it takes some 16 bytes for a value.
_INDEX_SHARE = 4
#: Seconds that a writer waits for another one, which may be off the CPU, and seconds between two attempts.
PATIENCE, GLANCE = 0.1, 50e-6
#: Offsets of locks: of the header, and of the first key. No bytes are there.
_HEADER_LOCK, _KEY_LOCKS = 0, 1 << 62


class Memory:
    """One process's access to the memory of a cache.

    Args:
        fd: descriptor from `create`, which this object will close.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: memoryview | None = None
        self._data = self._word(_DATA)
        with contextlib.suppress(OSError, ValueError):  # the address space, or the size of files, is limited
            self._map = memoryview(mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ))
        self._thread = threading.RLock()
        self._pid, self._is_storing = process_id.current(), False

    # ---- reading ----------------------------------------------------------------------------------

    def get(self, key: bytes, copy: bool) -> Found | None:
        """Look up the value of a key, in new memory or in a read-only view of the memory."""
        hashed, mapped = _hash(key), self._map
        tag = hashed >> _PLACE_BITS
        for level in range(self._word(_LEVELS), -1, -1):
            at = _bucket(level, hashed)
            words = self._bucket_at(at) if mapped is None else _WORDS.unpack_from(mapped, at)
            for word in words:
                if word >> _PLACE_BITS == tag and word:
                    found = self._value(key, (word & _PLACE_MASK) * _ALIGNMENT, copy)
                    if found is not None:
                        return found
        return None

    def _value(self, key: bytes, place: int, copy: bool) -> Found | None:
        if self._map is not None:
            try:
                return values.read(self._map[place:], key, copy, check=False)
            except ValueError:  # beyond the map: another process has a larger limit
                pass
        nbytes = values.length_of(os.pread(self.fd, values.HEADER_BYTES, place))
        return values.read(memoryview(os.pread(self.fd, nbytes, place)), key, copy, check=False)

    def _bucket_at(self, at: int) -> tuple[int, ...]:
        return _WORDS.unpack(os.pread(self.fd, _BUCKET, at))

    def _word(self, at: int) -> int:
        word = os.pread(self.fd, _WORD, at) if self._map is None else self._map[at : at + _WORD]
        return int.from_bytes(word, "little")

    def usage(self) -> tuple[int, int, int]:
        """Bytes of the records, their number, and the limit."""
        return self._word(_END), self._word(_COUNT), self._word(_LIMIT)

    def set_limit(self, limit: int, is_literal: bool) -> int:
        """Set the limit, if there is none yet or this is a larger number of bytes. Returns the limit."""
        before = self._word(_LIMIT)
        if not before or (is_literal and limit > before):
            self._set(_LIMIT, limit)
        return self._word(_LIMIT)

    # ---- writing ----------------------------------------------------------------------------------

    def add(self, key: bytes, encoded: values.Encoded, replace: bool = False) -> str:
        """Store a value, unless another process or thread stores this key.

        Returns:
            STORED; FULL: no room; BUSY: it is there already, or a lock was not free in time.

        Raises:
            OSError: memory is used up.
        """
        if self._pid != process_id.current():  # another thread may have had the lock during the fork
            self._thread, self._pid, self._is_storing = threading.RLock(), process_id.current(), False
        with self._thread:
            if self._is_storing:  # a signal handler, inside of `add`
                return BUSY
            self._is_storing = True
            try:
                # Opened and closed by `with`, in C: no interrupt leaves a lock.
                with open(f"/proc/self/fd/{self.fd}", "r+b", buffering=0) as owner:
                    return self._add(owner.fileno(), key, encoded)
            finally:
                self._is_storing = False

    def _add(self, owner: int, key: bytes, encoded: values.Encoded) -> str:
        hashed = _hash(key)
        try:
            if not locks.try_lock(owner, _KEY_LOCKS + (hashed >> 2), 1) or self.get(key, copy=False):
                return BUSY
            pieces, nbytes = values.record(key, encoded, checked=False)
            nbytes += -nbytes % _ALIGNMENT
            if not self._lock_header(owner):
                return BUSY
            at = self._word(_END)
            if at + nbytes > self._word(_LIMIT):
                return FULL
            self._set(_END, at + nbytes)
            locks.unlock(owner, _HEADER_LOCK, 1)
            stored = False
            try:
                write_all(self.fd, pieces, self._data + at)
                stored = self._lock_header(owner) and self._enter(hashed, self._data + at)
            finally:
                if not stored:
                    self._give_back(owner, at, nbytes)
            return STORED if stored else FULL
        finally:
            locks.unlock(owner, 0, 0)  # all: a child of a fork may have the descriptor

    def _enter(self, hashed: int, place: int) -> bool:
        levels = self._word(_LEVELS)
        for level in range(levels + 2):
            at = _bucket(level, hashed)
            if at + _BUCKET > self._data:
                return False
            words = self._bucket_at(at)
            if 0 in words:
                word = hashed >> _PLACE_BITS << _PLACE_BITS | place // _ALIGNMENT
                if level > levels:
                    self._set(_LEVELS, level)
                self._set(_COUNT, self._word(_COUNT) + 1)
                self._set(at + words.index(0) * _WORD, word)
                return True
        return False

    def _give_back(self, owner: int, at: int, nbytes: int) -> None:
        """Give room back to the system; and to the cache, if it is the last."""
        calls.punch_hole(self.fd, self._data + at, nbytes)
        if self._lock_header(owner) and self._word(_END) == at + nbytes:
            self._set(_END, at)

    def _set(self, at: int, word: int) -> None:
        os.pwrite(self.fd, word.to_bytes(_WORD, "little"), at)

    def _lock_header(self, owner: int) -> bool:
        return in_time(partial(locks.try_lock, owner, _HEADER_LOCK, 1), PATIENCE)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        self._map = None  # unmapped with the last array that views it
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if "fd" in vars(self):
            self.close()


def create(limit: int) -> int:
    """Make memory for so many bytes of records. Returns a descriptor."""
    fd = calls.memfd_create("fastq_loader.cache")
    levels = max(2, (limit // _INDEX_SHARE // _PAGE).bit_length())
    data = _PAGE << levels
    os.pwrite(fd, data.to_bytes(_WORD, "little"), _DATA)
    with contextlib.suppress(OSError):  # under `ulimit -f` it grows, and is not mapped
        os.ftruncate(fd, data + limit)  # so that it can be mapped; only written pages take memory
    return fd


def in_time(attempt: Callable[[], bool], seconds: float) -> bool:
    """Repeat an attempt until it succeeds; False if it does not for so long."""
    until = time.monotonic() + seconds
    while not attempt():
        if time.monotonic() >= until:
            return False
        time.sleep(GLANCE)
    return True


def _hash(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _bucket(level: int, hashed: int) -> int:
    """Offset of the bucket for a key in a level."""
    buckets = _BUCKETS << level
    return _PAGE + (buckets - _BUCKETS + hashed % buckets) * _BUCKET


def write_all(fd: int, pieces: list[Any], at: int) -> None:
    for piece in pieces:
        data = memoryview(piece).cast("B")
        while data:
            written = os.pwrite(fd, data, at)
            data, at = data[written:], at + written
