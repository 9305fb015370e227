"""The memory of a cache, which all processes share that inherit its descriptor: a memfd.

Runs in every process that calls a cached function, on any of its threads. Freed with its last process.

    counters    of `counters.CacheCounters`
    header      one page of 64-bit words: see `_DATA` and what follows it
    index       levels of buckets of eight words; level k has twice as many as level k - 1
    data        records (`values.record`), one after the other

A word of the index is 24 bits of the key's hash and the offset of a record; the record has the whole key. A
key lies in the first level whose bucket had a free word, so the index grows with the number of values.
Readers take no lock, because a word is written after its record, and the kernel writes it at once. A writer
first locks its key, so that processes in step store no copies; then the header, for microseconds, to reserve
room, and again to write the word. The kernel releases the locks of a process that dies. A writer that does
not get a lock soon stores nothing.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fastq_loader.extras.cached import counters, values
from fastq_loader.system import calls, locks, process_id

#: What became of a value.
STORED, FULL, BUSY = "stored", "full", "busy"

_PAGE, _WORD, _ALIGNMENT = 4096, 8, 16
_HEADER, _INDEX = counters.NBYTES, counters.NBYTES + _PAGE
#: Words of the header: where the data begin, their bytes, the levels of the index beyond the first, the
#: limit, and the number of values.
_DATA, _END, _LEVELS, _LIMIT, _COUNT = range(5)
_BUCKET, _BUCKETS = struct.Struct("<8Q"), 64  # a bucket, and how many are in level 0
_OFFSET_BITS = 40
_PLACE_MASK = (1 << _OFFSET_BITS) - 1
#: The index may take this part of the limit, of addresses; of memory it takes some 16 bytes for a value. The
#: memory may take this part of the limits of the system on addresses of a process and bytes of a file.
_SHARE = 4
#: Seconds that a writer waits for another one, which may be off the CPU, and seconds between two attempts.
PATIENCE, GLANCE = 0.1, 50e-6
#: Offsets of locks: of the header, and of the first key. No bytes are there.
_HEADER_LOCK, _KEY_LOCKS = 0, 1 << 62

#: Held while this process opens a cache, or begins to use one.
entering = threading.RLock()


def _forget() -> None:
    global entering
    entering = threading.RLock()  # another thread of the parent may have it


process_id.in_forked_children(_forget)


class Memory:
    """One process's access to the memory of a cache.

    Args:
        fd: descriptor from `create`, closed with this object.
        source: keeps named memory open for other processes.

    Attributes:
        fd: the same.
        counters: counts of calls.

    Raises:
        MemoryError: the address space is used up.
    """

    def __init__(self, fd: int, source: Any = None) -> None:
        self.fd, self._source = fd, source
        nbytes = os.fstat(fd).st_size
        self._region = calls.MmapRegion(fd, nbytes)  # Python's own has a descriptor more
        self._map = calls.view(self._region.address, nbytes)
        self._words = self._map[_HEADER:_INDEX].cast("Q")
        self.counters = counters.CacheCounters.from_buffer(self._map)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    # ---- reading ----------------------------------------------------------------------------------

    def get(self, key: bytes, copy: bool) -> values.EncodedValue | None:
        """Look up the value of a key: in memory of its own, or without a copy in pages of its own, which are
        the pages of the cache until somebody writes to them."""
        hashed = zlib.crc32(key)
        tag = _tag(hashed)
        for level in range(self._words[_LEVELS], -1, -1):
            for word in _BUCKET.unpack_from(self._map, _bucket(level, hashed)):
                if word >> _OFFSET_BITS == tag:
                    at = (word & _PLACE_MASK) * _ALIGNMENT
                    found = values.read(self._map, at, key, copy, self._private)
                    if found is not None:
                        return found
        return None

    def _private(self, begin: int, end: int) -> Any:
        """An array of these bytes in pages of its own; None if there are no addresses for them."""
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = end - start + (start - end) % mmap.PAGESIZE  # whole pages, which alone are unmapped
        try:
            region = calls.MmapRegion(self.fd, nbytes, start, private=True)
        except MemoryError:
            return None
        # The last view unmaps the pages.
        return np.asarray(values.Writable(region, region.address + begin - start, end - begin))

    @property
    def limit(self) -> int:
        """Largest total size of the records, in bytes."""
        return self._words[_LIMIT]

    def usage(self) -> tuple[int, int, int]:
        """Bytes of the records, their number, and the limit."""
        return self._words[_END], self._words[_COUNT], self.limit

    # ---- writing ----------------------------------------------------------------------------------

    def add(self, key: bytes, encoded: values.EncodedValue, replace: bool = False) -> str:
        """Store a value, unless another process or thread stores this key.

        Returns:
            STORED; FULL: no room; BUSY: it is there already, or a lock was not free in time, which another
            thread has, or the code that a signal handler interrupted.

        Raises:
            OSError: memory is used up.
        """
        # Opened and closed by `with`, in C: no interrupt leaves a lock.
        with io.FileIO(f"/proc/self/fd/{self.fd}", "r+") as file:
            owner = file.fileno()
            try:
                if not locks.try_lock(owner, _KEY_LOCKS + zlib.crc32(key), 1) or self.get(key, copy=False):
                    return BUSY
                return self._store(owner, key, *values.record(key, encoded))
            finally:
                locks.unlock(owner, 0, 0)  # all: a child of a fork may have the descriptor

    def _store(self, owner: int, key: bytes, pieces: list[Any], nbytes: int) -> str:
        nbytes += -nbytes % _ALIGNMENT
        if not _lock_header(owner):
            return BUSY
        at = self._words[_END]
        if at + nbytes > self.limit:
            return FULL
        self._set(_END, at + nbytes)
        locks.unlock(owner, _HEADER_LOCK, 1)
        offset, became = self._words[_DATA] + at, BUSY
        try:
            write_all(self.fd, pieces, offset)
            if _lock_header(owner):
                became = self._enter(zlib.crc32(key), offset)
            return became
        finally:
            # Room goes back to the system; and to the cache, if it is the last. Not if an interrupt came
            # after the word was written, because others may read the value.
            if became != STORED and self.get(key, copy=False) is None:
                calls.punch_hole(self.fd, offset, nbytes)
                if _lock_header(owner) and self._words[_END] == at + nbytes:
                    self._set(_END, at)

    def _enter(self, hashed: int, offset: int) -> str:
        """Write the word of a record into the index."""
        levels = self._words[_LEVELS]
        for level in range(levels + 2):
            at = _bucket(level, hashed)
            if at + _BUCKET.size > self._words[_DATA]:
                break
            words = _BUCKET.unpack_from(self._map, at)
            if 0 in words:
                if level > levels:
                    self._set(_LEVELS, level)
                self._set(_COUNT, self._words[_COUNT] + 1)
                word = _tag(hashed) << _OFFSET_BITS | offset // _ALIGNMENT
                self._write_word(at + words.index(0) * _WORD, word)
                return STORED
        return FULL

    def _set(self, which: int, word: int) -> None:
        self._write_word(_HEADER + which * _WORD, word)

    def _write_word(self, at: int, word: int) -> None:
        os.pwrite(self.fd, word.to_bytes(_WORD, "little"), at)


def create(limit: int) -> int:
    """Make memory for counters, and for so many bytes of records. Returns a descriptor."""
    allowed = [most // _SHARE for name in ("AS", "FSIZE") if (most := calls.limit_of(name)) is not None]
    limit = min(limit, *allowed, 1 << 43)  # so far a word of the index reaches
    fd = calls.memfd_create("fastq_loader.cache")
    data = _INDEX + (_PAGE << max(2, (limit // _SHARE // _PAGE).bit_length()))
    os.ftruncate(fd, data + limit)  # so that it can be mapped; only written pages take memory
    os.pwrite(fd, struct.pack("<5Q", data, 0, 0, limit, 0), _HEADER)  # as `_DATA`, ... say
    return fd


def in_time(attempt: Callable[[], bool], seconds: float) -> bool:
    """Repeat an attempt until it succeeds; False if it does not for so long."""
    until = time.monotonic() + seconds
    while not attempt():
        if time.monotonic() >= until:
            return False
        time.sleep(GLANCE)
    return True


def _lock_header(owner: int) -> bool:
    return in_time(partial(locks.try_lock, owner, _HEADER_LOCK, 1), PATIENCE)


def _tag(hashed: int) -> int:
    """The part of a hash that the index has. Never 0, which is a free word."""
    return (hashed >> 8) | 1


def _bucket(level: int, hashed: int) -> int:
    """Offset of the bucket for a key in a level."""
    buckets = _BUCKETS << level
    return _INDEX + (buckets - _BUCKETS + hashed % buckets) * _BUCKET.size


def write_all(fd: int, pieces: list[Any], at: int) -> None:
    for piece in pieces:
        data = memoryview(piece).cast("B")
        while data:
            written = os.pwrite(fd, data, at)
            data, at = data[written:], at + written
