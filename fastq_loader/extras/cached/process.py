"""A cache for one process, on systems without memory that processes can share.

Runs in the process that calls a cached function, on any of its threads. See `store.Store`, which has the same
methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class ProcessStore:
    """Stores values in a dict.

    Args:
        limit: largest total size of the values, in bytes.

    Attributes:
        fd: always -1: no descriptor to send to other processes.
    """

    fd = -1

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._values: dict[bytes, tuple[bytes, np.ndarray]] = {}

    def find(self, digest: bytes) -> Any:
        return self._values.get(digest)

    def head(self, found: Any) -> bytes:
        head: bytes = found[0]
        return head

    def read(self, found: Any, at: int, nbytes: int) -> np.ndarray:
        copied: np.ndarray = self.view(found, at, nbytes).copy()
        return copied

    def view(self, found: Any, at: int, nbytes: int) -> np.ndarray:
        data: np.ndarray = found[1]
        return data[at : at + nbytes]

    def add(self, digest: bytes, head: bytes, parts: Sequence[tuple[int, memoryview]], nbytes: int) -> bool:
        if self._used + len(head) + nbytes > self._limit:
            return False
        data = np.zeros(nbytes, np.uint8)
        for at, part in parts:
            data[at : at + part.nbytes] = np.frombuffer(part, np.uint8)
        data.flags.writeable = False
        if self._values.setdefault(digest, (head, data))[1] is data:
            self._used += len(head) + nbytes
        return True

    def used(self) -> int:
        return self._used
