"""Digests of an epoch's order: of its beginning, for comparison with other epochs, and of all of it.

Pure. The beginning is recorded only for samplers that need `set_epoch`, and as a digest: batches of thousands
of indices would take megabytes.
"""

from __future__ import annotations

import hashlib
import marshal
from array import array
from itertools import chain, pairwise
from typing import Any
from zlib import crc32

from fastq_loader.ipc.messages import decode_index

#: Batches that are recorded.
KEPT = 32
#: Indices that are digested at each end of a batch.
_ENDS = 8


#: Summary of the batches so far: a digest of their indices, the number of samples, and how often an index was
#: less than the one before it.
_Mark = tuple[bytes, int, int]
_START: _Mark = b"", 0, 0


class FirstIndices:
    """The indices of the first batches of one epoch.

    Args:
        sampler: class name of the sampler that needs `set_epoch`.

    Attributes:
        complete: enough batches are recorded, or their indices cannot be compared.
    """

    def __init__(self, sampler: str) -> None:
        self.sampler = sampler
        self.complete = False
        self._marks = [_START]
        self._last: list[Any] = []  # the last index, if any

    def add(self, index: Any) -> None:
        """Record the indices of a batch. Indices that cannot be compared disable the comparison."""
        digest, samples, descents = self._marks[-1]
        try:
            index = decode_index(index)
            if _kind(index) in _ARRAYS:
                index = index.tolist()
            indices = index if type(index) is list else [index]
            # Version 2 writes the same bytes for the same values; later ones refer to repeated objects.
            digest = hashlib.blake2b(digest + marshal.dumps(indices, 2), digest_size=16).digest()
            descents += sum(bool(after < before) for before, after in pairwise(chain(self._last, indices)))
        except (TypeError, ValueError):
            self._marks, self.complete = [_START], True
            return
        self._last = indices[-1:]
        self._marks.append((digest, samples + len(indices), descents))
        self.complete = len(self._marks) > KEPT

    def repeats(self, other: FirstIndices) -> int:
        """Number of samples in the shorter of the two, if the other begins with the same ones in the same
        order; else 0. Also 0 for fewer than two batches, and for an order that is not a shuffle: one that
        ascends, with at most one restart, as in a rank's share that is padded from the beginning."""
        batches = min(len(self._marks), len(other._marks)) - 1
        _, samples, descents = mark = self._marks[batches]
        return samples if batches > 1 and mark == other._marks[batches] and descents > 1 else 0


def digested(digest: int, index: Any) -> int:
    """Update a digest with an index, or a batch of indices. Indices that are neither integers nor values that
    `marshal` writes (strings, tuples, …) do not change it."""
    if type(index) is not list and _kind(index) in _ARRAYS:
        part = index.reshape(-1)  # converted by slices: ten times as fast as by items
        ends = [*part[:_ENDS].tolist(), *part[-_ENDS:].tolist()]
    else:
        part = index if type(index) is list else [index]
        ends = [*part[:_ENDS], *part[-_ENDS:]]
    kinds = set(map(type, ends))
    if kinds != {int} and not {kind.__module__ for kind in kinds} <= _NOT_THE_USERS:
        return digest
    try:
        return crc32(array("q", ends), digest)
    except (TypeError, OverflowError):  # not integers, or too large ones
        try:  # version 2 writes the same bytes for the same values
            return crc32(marshal.dumps(ends, 2), digest)
        except ValueError:
            return digest


def _kind(index: Any) -> tuple[str, str]:
    kind = type(index)
    return kind.__module__, kind.__qualname__


#: Arrays and tensors; and modules whose classes run no user code when they are converted to an integer.
_ARRAYS = {("numpy", "ndarray"), ("torch", "Tensor")}
_NOT_THE_USERS = {"builtins", "numpy", "torch"}
