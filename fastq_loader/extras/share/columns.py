"""Values as columns: values of one type in Arrow's layout, tuples and dicts as one column per field.

Pure. Processes cannot share Python objects: reading one writes its reference count, which copies its page. A
column contains no objects. `column[i]` creates a plain one each time.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

#: Only exactly these types, and None: a subclass would be read back as its base.
_ARROW = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.large_string(),
    bytes: pa.large_binary(),
}
#: Limits: fields of a tuple or dict that get a column each, and levels of nested containers with columns.
_WIDEST, _DEEPEST = 64, 8

Column = Any  # one of the classes below, with `len`, `[i]` and `nbytes`


class Plain:
    """Strings, bytes or bools; numbers mixed with None: an array of Arrow."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.nbytes = array.nbytes

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, at: int) -> Any:
        return self._array[at].as_py()


class Numbers(Plain):
    """64-bit integers, or floats: an array of numpy."""

    def __getitem__(self, at: int) -> Any:
        return self._array.item(at)


class PickledValues(Plain):
    """All other values, each pickled separately."""

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__(pa.array([pickle.dumps(value, 5) for value in values], pa.large_binary()))

    def __getitem__(self, at: int) -> Any:
        return pickle.loads(self._array[at].as_buffer())


class Fields:
    """Tuples or lists of one length, or dicts with the same keys."""

    def __init__(self, length: int, columns: list[Column], kind: type, keys: tuple[Any, ...]) -> None:
        self._length, self._columns, self._kind, self._keys = length, columns, kind, keys
        self.nbytes = sum(column.nbytes for column in columns)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int) -> Any:
        values = [column[at] for column in self._columns]
        if self._kind is dict:
            return dict(zip(self._keys, values, strict=True))
        return values if self._kind is list else tuple(values)


class Ragged:
    """Tuples or lists of different lengths."""

    def __init__(self, values: Sequence[Any], kind: type, depth: int) -> None:
        self._ends = np.cumsum([0, *map(len, values)])
        self._items = column_of(list(chain.from_iterable(values)), depth)
        self._kind = kind
        self.nbytes = self._ends.nbytes + self._items.nbytes

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, at: int) -> Any:
        items = self._items
        return self._kind([items[number] for number in range(self._ends[at], self._ends[at + 1])])


def column_of(values: Sequence[Any], depth: int = 0) -> Column:
    """Convert values to a column."""
    kinds = set(map(type, values))
    kind = next(iter(kinds - {type(None)}), type(None))
    try:
        if kinds == {kind} and kind in (int, float):
            return Numbers(np.array(values, np.int64 if kind is int else np.float64))
        if kinds <= {kind, type(None)} and kind in _ARROW:
            return Plain(pa.array(values, _ARROW[kind]))
        if kinds == {kind} and depth < _DEEPEST and (kind in (tuple, list) or kind is dict):
            return _of_containers(values, kind, depth + 1)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):  # values that Arrow cannot store
        return PickledValues(values)
    return PickledValues(values)


def _of_containers(values: Sequence[Any], kind: type, depth: int) -> Column:
    first = values[0]
    keys: Sequence[Any] = tuple(first) if kind is dict else range(len(first))
    if kind is dict:
        alike = set(map(type, keys)) == {str} and all(tuple(value) == keys for value in values)
    else:
        alike = set(map(len, values)) == {len(first)}
    if not alike or len(keys) > _WIDEST:
        return PickledValues(values) if kind is dict else Ragged(values, kind, depth)
    columns = [column_of([value[key] for value in values], depth) for key in keys]
    return Fields(len(values), columns, kind, tuple(keys))
