"""The beginning of an epoch's order, to be compared with that of another epoch; and a digest of all of it.

Pure. The beginning is kept only for samplers that want to be told the epoch, as a digest: batches of
thousands of indices would take megabytes.
"""

from __future__ import annotations

import hashlib
import marshal
from array import array
from itertools import chain, pairwise
from typing import Any
from zlib import crc32

from fastq_loader.ipc.messages import decode_index

#: Batches that are looked at.
KEPT = 32
#: Indices of a batch that are digested, at either end of it.
_ENDS = 8


#: What is known after some batches: a digest of all their indices, how many samples these are, and how often
#: an index was less than the one before it.
_Mark = tuple[bytes, int, int]
_START: _Mark = b"", 0, 0


class FirstIndices:
    """The indices of the first batches of one epoch.

    Args:
        sampler: what the sampler is called that wants to be told the epoch.

    Attributes:
        complete: there is no use in adding more.
    """

    def __init__(self, sampler: str) -> None:
        self.sampler = sampler
        self.complete = False
        self._marks = [_START]
        self._last: list[Any] = []  # the last index, once there is one

    def add(self, index: Any) -> None:
        """A batch was drawn. One whose indices cannot be compared makes the whole of no use."""
        digest, samples, descents = self._marks[-1]
        try:
            index = decode_index(index)
            if _kind(index) in _ARRAYS:
                index = index.tolist()
            indices = index if type(index) is list else [index]
            # Version 2 writes the same bytes for the same values; later ones say where an object comes again.
            digest = hashlib.blake2b(digest + marshal.dumps(indices, 2), digest_size=16).digest()
            descents += sum(bool(after < before) for before, after in pairwise(chain(self._last, indices)))
        except (TypeError, ValueError):
            self._marks, self.complete = [_START], True
            return
        self._last = indices[-1:]
        self._marks.append((digest, samples + len(indices), descents))
        self.complete = len(self._marks) > KEPT

    def repeats(self, other: FirstIndices) -> int:
        """How many samples the shorter of the two has, if the other has begun with the same ones in the same
        order; else 0. Also 0 where there are not two batches, and where the order is no shuffle: it ascends,
        and may begin anew once, as the part of a rank does that is filled up from the beginning."""
        batches = min(len(self._marks), len(other._marks)) - 1
        _, samples, descents = mark = self._marks[batches]
        return samples if batches > 1 and mark == other._marks[batches] and descents > 1 else 0


def digested(digest: int, index: Any) -> int:
    """A digest with one more index, or batch of indices. Those that are neither integers nor values that
    `marshal` writes (strings, tuples, …) do not change it."""
    is_array = _kind(index) in _ARRAYS
    part: Any = index if type(index) is list else index.reshape(-1) if is_array else [index]
    both = part[:_ENDS], part[-_ENDS:]  # of an array at once: its items one by one take ten times as long
    ends = [item for end in both for item in (end.tolist() if is_array else end)]
    if not {kind.__module__ for kind in set(map(type, ends))} <= _NOT_THE_USERS:
        return digest
    try:
        return crc32(array("q", ends), digest)
    except (TypeError, OverflowError):  # no integers, or larger ones
        try:  # version 2 writes the same bytes for the same values
            return crc32(marshal.dumps(ends, 2), digest)
        except ValueError:
            return digest


def _kind(index: Any) -> tuple[str, str]:
    kind = type(index)
    return kind.__module__, kind.__qualname__


#: Arrays and tensors; and where classes come from that run no code of the user's when a number is wanted.
_ARRAYS = {("numpy", "ndarray"), ("torch", "Tensor")}
_NOT_THE_USERS = {"builtins", "numpy", "torch"}
