"""The memory of a cache, which all processes share that inherit its descriptor: a memfd.

Runs in every process that calls a cached function, on any of its threads. Freed with its last process.

    counters    of `counters.CacheCounters`
    header      one page of 64-bit words: see `_DATA` and what follows it
    index       levels of buckets of eight words; level k has twice as many as level k - 1
    data        records (`values.record`), one after the other

A word of the index is 24 bits of the key's hash and the offset of a record; the record has the whole key. A
key lies in the first level whose bucket had a free word, so the index grows with the number of values.
Readers take no lock, because a word is written after its record, and the kernel writes it at once. A writer
locks the memory until its word is written: the kernel, too, lets one process at a time write to a file. It
releases the lock of a process that dies, and the next writer uses that one's room. A writer that does not get
the lock soon stores nothing.
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
#: Offset of the byte that a writer locks.
_LOCK = 0

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
        """Store a value.

        Returns:
            STORED; FULL: no room; BUSY: it is there already, or the lock was not free in time, which another
            thread has, or the code that a signal handler interrupted.

        Raises:
            OSError: memory is used up.
        """
        pieces, nbytes = values.record(key, encoded)
        # Opened and closed by `with`, in C: no interrupt leaves a lock.
        with io.FileIO(f"/proc/self/fd/{self.fd}", "r+") as file:
            attempt = partial(locks.try_lock, file.fileno(), _LOCK, 1)
            try:
                # As long as computing took it is worth to wait.
                if not in_time(attempt, max(PATIENCE, encoded.seconds)) or self.get(key, copy=False):
                    return BUSY
                return self._store(zlib.crc32(key), pieces, nbytes)
            finally:
                locks.unlock(file.fileno(), _LOCK, 1)  # a child of a fork may have the descriptor

    def _store(self, hashed: int, pieces: list[Any], nbytes: int) -> str:
        """Write a record, and then its word into the index."""
        words, at = self._words, self._words[_END]
        end = at + nbytes + -nbytes % _ALIGNMENT
        for level in range(words[_LEVELS] + 2):
            bucket = _bucket(level, hashed)
            if end > self.limit or bucket + _BUCKET.size > words[_DATA]:
                break
            free = _BUCKET.unpack_from(self._map, bucket)
            if 0 in free:
                offset = words[_DATA] + at
                write_all(self.fd, pieces, offset)
                words[_END], words[_COUNT] = end, words[_COUNT] + 1
                words[_LEVELS] = max(words[_LEVELS], level)
                word = _tag(hashed) << _OFFSET_BITS | offset // _ALIGNMENT
                os.pwrite(self.fd, word.to_bytes(_WORD, "little"), bucket + free.index(0) * _WORD)
                return STORED
        return FULL


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
