"""Taking a batch apart: its tree for the spec, and what hangs on it.

Runs in workers, and in the consumer where it packs batches itself. The tree is walked by exact type. dict,
list and tuple are described in the spec, plain values (int, float, str, bytes, bool, None) travel in the
message, dense CPU tensors and numpy arrays are *leaves*, and everything else is an object: it is pickled,
with the leaves in it left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from fastq_loader.ipc.messages import packs
from fastq_loader.packing.pickling import is_leaf
from fastq_loader.packing.spec import DEEPEST

#: Lists and dicts up to which a tree is walked here. Beyond it pickling the whole tree in C is faster than
#: this walk, its spec and the way back: 3 times for the annotations of 32 images.
CONTAINERS = 64
#: Batches of a worker that are pickled whole after one that had more.
BATCHES_UNWALKED = 15

_SCALARS = frozenset((float, str, bytes, bool, type(None)))
_STRINGS, _INTEGERS = frozenset((str,)), frozenset((int,))
_TENSOR, _ARRAY = torch.Tensor, np.ndarray


class _Unwalkable(Exception):
    """The tree is too deep, or has a cycle or a shared list or dict: pickle the whole of it."""


class _Sprawling(_Unwalkable):
    """The tree has more lists and dicts than are worth a walk."""


class Walker:
    """Takes batches apart, one after the other.

    Attributes:
        leaves, values, objects: of the batch that was walked last, in the order in which its tree names them.
        containers: ids of its lists and dicts.
    """

    is_leaf = staticmethod(is_leaf)

    def __init__(self) -> None:
        self._sprawling = 0  # so many batches are not walked any more
        self.clear()

    def clear(self) -> None:
        """Forget the batch."""
        self.leaves: list[Any] = []
        self._leaf_of: dict[int, int] = {}  # id of a tensor or array → leaf
        self.values: list[Any] = []
        self.objects: list[Any] = []
        self.containers: set[int] = set()
        self._depth = 0

    def walk(self, batch: Any) -> Any:
        """The tree of a batch; one that cannot be walked, or is not worth it, is a single object."""
        if self._sprawling:
            self._sprawling -= 1
            return self.whole(batch)
        try:
            return self._walk(batch)
        except (_Unwalkable, RecursionError) as error:
            self._sprawling = BATCHES_UNWALKED if isinstance(error, _Sprawling) else 0
        return self.whole(batch)

    def whole(self, batch: Any) -> Any:
        """The tree of a batch that is a single object."""
        self.clear()
        self.objects.append(batch)
        return "O"

    def _walk(self, value: Any) -> Any:
        kind = type(value)
        if kind is _TENSOR or kind is _ARRAY:
            if self.is_leaf(value):
                return "L", self.add_leaf(value)
        elif kind is int:
            if packs(value):
                self.values.append(value)
                return "V"
        elif kind in _SCALARS:
            self.values.append(value)
            return "V"
        elif kind is dict:
            self._enter(value)
            keys = tuple(value)
            # Keys are part of the spec's identity, where True, 1 and 1.0 would be the same.
            if _STRINGS.issuperset(map(type, keys)) or all(
                type(key) is str or (type(key) is int and packs(key)) for key in keys
            ):
                return "d", keys, self._walk_all(value.values())
        elif kind is list:
            self._enter(value)
            if self._is_flat(value):
                self.values += value
                return "v", len(value)
            return "l", self._walk_all(value)
        elif kind is tuple:
            return "t", self._walk_all(value)
        self.objects.append(value)
        return "O"

    def _walk_all(self, parts: Iterable[Any]) -> tuple[Any, ...]:
        if self._depth == DEEPEST:
            raise _Unwalkable
        self._depth += 1
        trees = tuple([self._walk(part) for part in parts])
        self._depth -= 1
        return trees

    def _enter(self, container: Any) -> None:
        if id(container) in self.containers:
            raise _Unwalkable
        if len(self.containers) == CONTAINERS:
            raise _Sprawling
        self.containers.add(id(container))

    def _is_flat(self, values: list[Any]) -> bool:
        """Whether a list holds nothing but plain values."""
        kinds = set(map(type, values))
        if kinds == _INTEGERS:
            return packs(min(values)) and packs(max(values))
        return bool(kinds) and kinds <= _SCALARS

    def add_leaf(self, leaf: Any) -> int:
        """The number of a leaf; the same object gets the same number."""
        number = self._leaf_of.get(id(leaf))
        if number is None:
            number = self._leaf_of[id(leaf)] = len(self.leaves)
            self.leaves.append(leaf)
        return number
