"""Read-only replacements of lists, tuples and dicts, stored as columns.

Runs in every process that reads a dataset. The replacements are immutable, so a copy is the same object. With
pickle protocol 5 their buffers are sent out of band.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any

import numpy as np
import pyarrow as pa

from fastq_loader.extras.share.columns import Column, column_of


class Shared:
    """Base class of both replacements.

    Attributes:
        before: approximate bytes of the original container.
        nbytes: bytes of the columns.
        source: keeps named memory available to other processes; None: the memory has no name.
    """

    kind: type
    before: int
    nbytes: int
    source: Any = None

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __repr__(self) -> str:
        return f"<shared {self.kind.__name__} of {len(self):,} items, {self.nbytes / 1e6:,.1f} MB>"  # type: ignore[arg-type]


def _comparison(compare: Callable[[Any, Any], bool]) -> Any:
    """A method that compares a sequence like the list or tuple that it replaces."""

    def compared(self: Any, other: Any) -> Any:
        if isinstance(other, SharedSequence):
            other = other[:]
        return compare(self[:], other) if type(other) is self.kind else NotImplemented

    return compared


class SharedSequence(Shared, Sequence[Any]):
    """Replacement of a list or tuple. Slices and sums are plain ones, with which it can be compared."""

    def __init__(self, values: Sequence[Any], before: int) -> None:
        self.kind, self.before = type(values), before
        self._column: Column = column_of(values)
        self.nbytes = self._column.nbytes
        self._length = len(self._column)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: Any) -> Any:
        if type(at) is int and 0 <= at < self._length:
            return self._column[at]
        if isinstance(at, slice):
            return self.kind([self._column[number] for number in range(*at.indices(self._length))])
        number = operator.index(at)
        if not -self._length <= number < self._length:
            raise IndexError(f"{self.kind.__name__} index out of range")
        return self._column[number % self._length]

    def __iter__(self) -> Iterator[Any]:
        return map(self._column.__getitem__, range(self._length))

    def __hash__(self) -> int:
        return hash(self[:])

    __eq__, __lt__, __le__, __gt__, __ge__ = map(
        _comparison, (operator.eq, operator.lt, operator.le, operator.gt, operator.ge)
    )

    def __add__(self, other: Any) -> Any:
        return self[:] + (other[:] if isinstance(other, SharedSequence) else other)


class SharedMapping(Shared, Mapping[Any, Any]):
    """Replacement of a dict. Keys are looked up by their sorted digests; there is no Python dict."""

    kind = dict

    def __init__(self, values: dict[Any, Any], before: int) -> None:
        self.before = before
        self._keys, self._values = column_of(list(values)), column_of(list(values.values()))
        digests = np.array([_digest(key) for key in values], np.uint64)
        self._order = np.argsort(digests, kind="stable")
        self._digests = digests[self._order]
        self.nbytes = self._keys.nbytes + self._values.nbytes + self._order.nbytes + digests.nbytes

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        return map(self._keys.__getitem__, range(len(self._keys)))

    def items(self) -> Any:
        return _Items(self)

    def values(self) -> Any:
        return _Values(self)

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        return zip(self, map(self._values.__getitem__, range(len(self))), strict=True)

    def __getitem__(self, key: Any) -> Any:
        hash(key)  # raises dict's own error for a list
        digest = np.uint64(_digest(key))
        at = int(np.searchsorted(self._digests, digest))
        while at < len(self) and self._digests[at] == digest:
            number = int(self._order[at])
            if self._keys[number] == key:
                return self._values[number]
            at += 1
        raise KeyError(key)


class _Items(ItemsView[Any, Any]):
    """Items without looking up the keys: NaN as a key is not equal to itself."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self._mapping._pairs()  # type: ignore[attr-defined,no-any-return]


class _Values(ValuesView[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in self._mapping._pairs())  # type: ignore[attr-defined]


def _digest(key: Any) -> int:
    """64 bits that are the same in every process, and for equal keys."""
    if isinstance(key, tuple):
        data = b"".join(_digest(each).to_bytes(8, "little") for each in key)
    elif isinstance(key, (str, bytes)):
        data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    else:  # the hash of a number does not depend on the process
        return 0 if key is None or key != key else hash(key) & ((1 << 64) - 1)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def shared(values: Any, before: int) -> SharedSequence | SharedMapping:
    """Create the replacement of a list, tuple or dict that takes about `before` bytes."""
    made = SharedMapping(values, before) if type(values) is dict else SharedSequence(values, before)
    pa.default_memory_pool().release_unused()  # memory that building the columns took
    return made
