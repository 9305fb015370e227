"""A cache for one process, on systems without memory that processes can share.

Runs in the process that calls a cached function. See `memory.Memory`, which has the same methods.
"""

from __future__ import annotations

from fastq_loader.extras.cached import values
from fastq_loader.extras.cached.memory import FULL, STORED


class ProcessMemory:
    """Stores records in a dict.

    Args:
        limit: largest total size of the records, in bytes.

    Attributes:
        limit: the same.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self._used = limit, 0
        self._records: dict[bytes, bytes] = {}

    def get(self, key: bytes, copy: bool) -> values.Found | None:
        found = self._records.get(key)
        return None if found is None else values.read(memoryview(found), 0, key, copy)

    def add(self, key: bytes, encoded: values.Encoded, replace: bool = False) -> str:
        pieces, nbytes = values.record(key, encoded)
        if self._used + nbytes > self.limit:
            return FULL
        if self._records.setdefault(key, data := b"".join(pieces)) is data:
            self._used += nbytes
        return STORED

    def usage(self) -> tuple[int, int, int]:
        return self._used, len(self._records), self.limit
