"""The values of a cache, in memory that all processes share that inherit its descriptor: a memfd.

Runs in every process that calls a cached function, on any of its threads. Freed with its last process. A
`folder` has the same in a file.

    counters    of `counters.CacheCounters`; a file has none
    header      64-bit words, see `_LIMIT` and what follows it; then whose it is, as JSON; whole pages
    then        levels of the index, and records (`values.record`), as they come

A word of the index is 24 bits of the key's hash and the offset of a record; the record has the whole key. A
key lies in the first level whose bucket of eight words had a free one. Level k has twice as many buckets as
level k - 1, and is made when it is needed. Readers take no lock, because a word is written after its record,
and the kernel writes it at once. Records are never overwritten. A writer locks the file until its word is
written: the kernel, too, lets one process at a time write to a file. It releases the lock of a process that
dies; what that one had written stays unused. A writer that does not get the lock soon stores nothing.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import zlib
from typing import Any

import numpy as np

from fastq_loader.extras.cached import counters, values
from fastq_loader.system import calls, locks

#: What became of a value.
STORED, FULL, BUSY = "stored", "full", "busy"

_PAGE, _WORD, ALIGNMENT = 4096, 8, 16
#: Words of the header: the limit, and from then on where each level lies.
_LIMIT, _LEVELS = range(2)
HEADER = 64 * _WORD
_BUCKET, _BYTES = struct.Struct("8Q"), struct.Struct("64s")  # of a bucket
_BUCKETS = 1024  # of level 0: few levels to look into
_LEVEL_0 = _BUCKETS * _BUCKET.size
_OFFSET_BITS, _TAG_BYTES = 40, 3
PLACE_MASK = (1 << _OFFSET_BITS) - 1
_CHECK_BITS = 20
_LARGEST = 1 << 43  # so far a word of the index reaches
#: The memory may take this part of the limit of the system on addresses of a process.
_SHARE = 4
#: Seconds that a writer waits for another one, which may be off the CPU.
PATIENCE = 0.1


class Memory:
    """One process's access to the memory of a cache.

    Args:
        fd: descriptor from `create`, closed with this object.
        source: keeps named memory open for other processes.

    Attributes:
        fd: the same.
        counters: counts of calls.
        limit: largest total size of the records and the levels of the index beyond the first.

    Raises:
        MemoryError: the address space is used up.
        ValueError: a file is damaged.
    """

    _begin = counters.NBYTES

    def __init__(self, fd: int, source: Any = None) -> None:
        self.fd, self._source = fd, source
        header = memoryview(os.pread(fd, HEADER, self._begin).ljust(HEADER, b"\0")).cast("Q")
        self.limit = _number_in(header[_LIMIT])
        self._first = _number_in(header[_LEVELS]) + _LEVEL_0  # where the first record lies
        nbytes = self._first + self.limit
        self._region = calls.MmapRegion(fd, nbytes)  # Python's own has a descriptor more
        self._map = calls.view(self._region.address, nbytes)
        self._words = self._map[self._begin : self._begin + HEADER].cast("Q")
        self._find_levels()
        if self._begin:
            self.counters = counters.CacheCounters.from_buffer(self._map)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def _find_levels(self) -> None:
        """Note where each level lies, the newest first, and how many buckets it has."""
        found: list[tuple[int, int]] = []
        while word := self._words[_LEVELS + len(found)]:
            begin, buckets = _number_in(word), _BUCKETS << len(found)
            if self._size() < begin + buckets * _BUCKET.size:
                raise ValueError("the file ends before its index")
            found.insert(0, (begin, buckets))
        self._levels, self._next = found, _LEVELS + len(found)

    def _size(self) -> int:
        return os.fstat(self.fd).st_size

    # ---- reading ------------------------------------------------------------------------------------

    def get(self, key: bytes, copy: bool) -> values.EncodedValue | None:
        """Look up the value of a key: in memory of its own, or without a copy in pages of its own, which are
        the pages of the cache until somebody writes to them.

        Raises:
            ValueError: the value is damaged. It is forgotten.
        """
        if self._words[self._next]:
            self._find_levels()
        hashed = zlib.crc32(key)
        tag = _tag(hashed)
        sought = tag.to_bytes(_TAG_BYTES, "little")
        for begin, buckets in self._levels:
            bucket = begin + hashed % buckets * _BUCKET.size
            (data,) = _BYTES.unpack_from(self._map, bucket)
            words = _BUCKET.unpack(data) if sought in data else ()
            for word in words:
                if word >> _OFFSET_BITS == tag:
                    try:
                        found = self._read(word, key, copy)
                    except ValueError:
                        self._write_word(bucket + words.index(word) * _WORD, 0)
                        raise
                    if found is not None:
                        return found
        return None

    def _read(self, word: int, key: bytes, copy: bool) -> values.EncodedValue | None:
        return values.read(self._map, (word & PLACE_MASK) * ALIGNMENT, key, copy, self._private)

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

    def usage(self) -> tuple[int, int, int]:
        """Bytes of the records and the index, the number of values, and the limit."""
        parts = [np.frombuffer(self._map, np.uint64, buckets * 8, begin) for begin, buckets in self._levels]
        return self._size() - self._first, int(sum(map(np.count_nonzero, parts))), self.limit

    # ---- writing ------------------------------------------------------------------------------------

    def add(self, key: bytes, encoded: values.EncodedValue) -> str:
        """Store a value.

        Returns:
            STORED; FULL: no room; BUSY: it is there already, or the lock was not free in time, which another
            thread has, or the code that a signal handler interrupted.

        Raises:
            OSError: memory is used up, or the disk is full.
        """
        pieces, nbytes = self._record(key, encoded)
        # Opened and closed by `with`, in C: no interrupt leaves a lock.
        with io.FileIO(f"/proc/self/fd/{self.fd}", "r+") as file:
            try:
                # As long as computing took it is worth to wait.
                locks.lock_file(file.fileno(), max(PATIENCE, encoded.seconds))
                return BUSY if self.get(key, copy=False) else self._store(zlib.crc32(key), pieces, nbytes)
            except BlockingIOError:
                return BUSY
            finally:
                locks.unlock_file(file.fileno())  # a child of a fork may have the descriptor

    def _record(self, key: bytes, encoded: values.EncodedValue) -> tuple[list[Any], int]:
        return values.record(key, encoded)

    def _store(self, hashed: int, pieces: list[Any], nbytes: int) -> str:
        """Write a record, and then its word into the index."""
        for begin, buckets in reversed(self._levels):
            bucket = begin + hashed % buckets * _BUCKET.size
            free = _BUCKET.unpack_from(self._map, bucket)
            if 0 in free:
                if (offset := self._append(pieces, nbytes)) is None:
                    return FULL
                word = _tag(hashed) << _OFFSET_BITS | offset // ALIGNMENT
                self._write_word(bucket + free.index(0) * _WORD, word)
                return STORED
        # No hole, for which a full disk may have no room when it is read.
        zeros = bytes(2 * buckets * _BUCKET.size)
        if (offset := self._append([zeros], len(zeros))) is None:
            return FULL
        self._write_word(self._begin + self._next * _WORD, _with_check(offset))
        self._find_levels()
        return self._store(hashed, pieces, nbytes)

    def _write_word(self, at: int, word: int) -> None:
        os.pwrite(self.fd, word.to_bytes(_WORD, "little"), at)

    def _append(self, pieces: list[Any], nbytes: int) -> int | None:
        """Write all of this at the end, or nothing. Returns where; None if the limit has no room for it."""
        size = self._size()
        at = size + -size % ALIGNMENT
        if at + nbytes > len(self._map):
            return None
        try:
            write_all(self.fd, pieces, at)
        except BaseException:
            os.ftruncate(self.fd, size)
            raise
        return at


def create(limit: int) -> int:
    """Make memory for counters, and for so many bytes of records. Returns a descriptor."""
    if (most := calls.limit_of("AS")) is not None:
        limit = min(limit, most // _SHARE)
    fd = calls.memfd_create("fastq_loader.cache")
    write_header(fd, counters.NBYTES, limit)
    return fd


def write_header(fd: int, begin: int, limit: int, about: bytes = b"") -> None:
    """Make an empty cache in an empty file, from an offset on."""
    nbytes = HEADER + len(about)
    nbytes += -nbytes % _PAGE
    header = struct.pack("2Q", _with_check(min(limit, _LARGEST)), _with_check(begin + nbytes))
    # Level 0 is zeros.
    write_all(fd, [(header.ljust(HEADER, b"\0") + about).ljust(nbytes + _LEVEL_0, b"\0")], begin)


def _with_check(number: int) -> int:
    """A number with some bits of its checksum: in a file it may be damaged, and then nobody writes there."""
    return number << _CHECK_BITS | zlib.crc32(b"%d" % number) >> 32 - _CHECK_BITS


def _number_in(word: int) -> int:
    number = word >> _CHECK_BITS
    if word != _with_check(number):
        raise ValueError("its first page is damaged")
    return number


def _tag(hashed: int) -> int:
    """The part of a hash that the index has. Never 0, which is a free word."""
    return (hashed >> 8) | 1


def write_all(fd: int, pieces: list[Any], at: int) -> None:
    left = sum(map(len, pieces))
    while left:
        written = os.pwritev(fd, pieces[:1000], at)  # of so many, Linux takes 1,024
        at, left = at + written, left - written
        while left and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if left:
            pieces[0] = memoryview(pieces[0])[written:]
