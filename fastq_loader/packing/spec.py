"""A spec, compiled: how the places of a batch are cut into leaves, and how its tree is built.

Runs in the consumer. `packing` describes what a spec says. Nothing in it is believed: whatever could reach
outside of its place, or make torch or numpy raise, is refused when it arrives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch

from fastq_loader.errors import ProtocolError
from fastq_loader.memory.allocator import TYPESTR
from fastq_loader.memory.ledger import SMALLEST
from fastq_loader.packing.aliasing import contiguous_strides
from fastq_loader.packing.pack import DEEPEST, aligned
from fastq_loader.system.interrupts import refuse_interrupt

#: The dtypes of dense tensors by name. A closed set: asking the module `torch` for a name may import things.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.quint"))
}
#: What numpy calls the dtypes of arrays that are leaves; see `pickling.is_leaf`.
_ARRAY_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,9}(\[[0-9A-Za-z]{1,20}\])?")
#: Of an array; numpy 1 has 32.
_MOST_DIMENSIONS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
#: Bytes that no size and no stride comes to. Beyond it torch's and numpy's own sums overflow.
_TOO_LARGE = 1 << 62


class Leaf:
    """One leaf of a spec, ready to be put on a place.

    Raises:
        ProtocolError: there is no such leaf.
        Exception: anything else, for what is not even described like one.
    """

    __slots__ = ("array", "count", "dtype", "into", "place", "reach", "shape", "strides")

    def __init__(self, meta: tuple[Any, ...]) -> None:
        kind, dtype, self.shape, self.strides, self.place, self.into = meta
        if kind not in ("T", "A"):
            raise ProtocolError(f"a leaf of an unknown kind {kind!r}")
        steps = self.shape if self.strides is None else self.strides
        if len(self.shape) > _MOST_DIMENSIONS or len(steps) != len(self.shape):
            raise ProtocolError(f"a leaf of {len(self.shape)} dimensions and {len(steps)} strides")
        numbers = (*self.shape, *steps, self.place, self.into)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ProtocolError(f"a leaf with what is no number, or a negative one: {numbers}")
        self.array = kind == "A"
        self.dtype: Any = _array_dtype(dtype) if self.array else _DTYPES[dtype]
        itemsize: int = self.dtype.itemsize
        self.count = math.prod(self.shape)
        unit = 1 if self.array else itemsize
        if max(math.prod(filter(None, self.shape)) * itemsize, *steps, 0) * unit >= _TOO_LARGE:
            raise ProtocolError(f"a leaf of shape {self.shape} and strides {self.strides}")
        #: Bytes from its first element to the end of its last one.
        self.reach = self.count * itemsize
        if self.count and self.strides is not None:
            last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
            self.reach = last * unit + itemsize
        if not self.array and self.into % itemsize:
            raise ProtocolError(f"a tensor that begins {self.into} bytes into its place")

    def over(self, buffer: Any) -> Any:
        """The leaf over a buffer of its own, which it keeps alive."""
        if self.array:
            return np.ndarray(self.shape, self.dtype, buffer, self.into, self.strides)
        if not self.count:
            return (
                torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")
                if self.strides
                else (torch.empty(self.shape, dtype=self.dtype, device="cpu"))
            )
        if self.strides is None:
            flat = torch.frombuffer(buffer, dtype=self.dtype, count=self.count, offset=self.into)
            return flat.view(self.shape)
        return self.within(torch.frombuffer(buffer, dtype=torch.uint8))

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """The leaf as a tensor that shares the storage of a place's bytes."""
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        strides = self.strides or contiguous_strides(self.shape)
        return tensor.set_(whole.untyped_storage(), self.into // tensor.itemsize, self.shape, strides)


class Spec:
    """A compiled spec: how the places are cut, and how the tree is built."""

    def __init__(self, spec: tuple[Any, ...]) -> None:
        try:
            self._read(spec)
        except ProtocolError:
            raise
        except Exception as error:  # whatever a malformed spec leads to
            refuse_interrupt(error)
            raise ProtocolError(f"malformed spec: {error!r}") from error

    def _read(self, spec: tuple[Any, ...]) -> None:
        tree, metas, self.sizes, self.starts = spec if len(spec) == 4 else (*spec, (-1,) * len(spec[2]))
        if not all(type(size) is int and size >= 0 for size in self.sizes):
            raise ProtocolError("a place whose size is no number")
        self.leaves = [Leaf(meta) for meta in metas]
        self.members: list[list[int]] = [[] for _ in self.sizes]  # place → its leaves
        for number, leaf in enumerate(self.leaves):
            self.members[leaf.place].append(number)
        for size, members in zip(self.sizes, self.members, strict=True):
            self._check_place(size, [self.leaves[number] for number in members])
        self._read_starts()
        on_host = [place for place, start in enumerate(self.starts) if start < 0]
        self.large = [place for place in on_host if self.sizes[place] >= SMALLEST]
        self.small: list[tuple[int, int, int]] = []  # (place, start in the parcel, its end)
        # Of these the ones that are one dense array or tensor each: (leaf, start, end, shape, numpy's dtype).
        self.tensors: list[tuple[int, int, int, Any, Any]] = []
        self.arrays: list[tuple[int, int, int, Any, Any]] = []
        self.parcel_bytes = 0
        for place in on_host:
            size = self.sizes[place]
            if size < SMALLEST:
                self._cut(place, self.parcel_bytes, self.parcel_bytes + size)
                self.parcel_bytes += aligned(size)
        self.nbytes: int = sum(self.sizes)
        self.objects = self.values = 0
        self.build = self._compile(tree, 0)

    def _read_starts(self) -> None:
        """What goes to a device: the bytes of it, and the leaves in it as (number, dtype, shape, strides and
        offset in elements)."""
        self.bound: list[tuple[int, torch.dtype, Any, Any, int]] = []
        self.device_bytes = 0
        for start, size, members in zip(self.starts, self.sizes, self.members, strict=True):
            if type(start) is not int or not -1 <= start < _TOO_LARGE or (start >= 0 and start % 16):
                raise ProtocolError(f"a place that begins {start!r} bytes into what goes to the device")
            if start < 0:
                continue
            self.device_bytes = max(self.device_bytes, start + size)
            for number in members:
                leaf = self.leaves[number]
                if leaf.array:
                    raise ProtocolError("an array that goes to the device")
                steps = contiguous_strides(leaf.shape) if leaf.strides is None else leaf.strides
                at = (start + leaf.into) // leaf.dtype.itemsize
                self.bound.append((number, leaf.dtype, leaf.shape, steps, at))

    def _check_place(self, size: int, leaves: list[Leaf]) -> None:
        if len(leaves) > 1 and (not size or any(leaf.array for leaf in leaves)):
            raise ProtocolError(f"a place of {size} bytes for {len(leaves)} leaves")
        if max([leaf.into + leaf.reach for leaf in leaves], default=-1) != size:
            raise ProtocolError(f"leaves that do not fit their place of {size} bytes")

    def _cut(self, place: int, start: int, end: int) -> None:
        members = self.members[place]
        leaf = self.leaves[members[0]] if len(members) == 1 else None
        if leaf is None or not leaf.count or leaf.strides is not None or leaf.into:
            self.small.append((place, start, end))
        elif leaf.array:
            self.arrays.append((members[0], start, end, leaf.shape, leaf.dtype))
        elif leaf.dtype in TYPESTR:
            self.tensors.append((members[0], start, end, leaf.shape, np.dtype(TYPESTR[leaf.dtype])))
        else:
            self.small.append((place, start, end))

    def look(self, memory: torch.Tensor, leaves: list[Any]) -> None:
        """Put the leaves that went to a device on their places in its `memory` (uint8, and `device_bytes`
        rounded up to a multiple of 16)."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        for number, dtype, shape, strides, at in self.bound:
            whole = typed.get(dtype)
            if whole is None:
                whole = typed[dtype] = memory.view(dtype)
            # `data`: a tensor of its own, so that writing to one field does not spoil what autograd saved of
            # another.
            leaves[number] = whole.as_strided(shape, strides, at).data

    def _compile(self, tree: Any, depth: int) -> Callable[[list[Any], Any, Any], Any]:
        """A function of (leaves, iterator of plain values, unpickled objects) that builds the tree."""
        if tree == "V":
            self.values += 1
            return lambda leaves, values, objects: next(values)
        if tree == "O":
            at = self.objects
            self.objects += 1
            return lambda leaves, values, objects: objects[at]
        kind, content = tree[0], tree[-1]
        if kind in ("L", "v"):
            if type(content) is not int or content < 0:
                raise ProtocolError(f"{content!r} where a number should be")
            if kind == "L":
                self.leaves[content]  # raises IndexError
                return lambda leaves, values, objects: leaves[content]
            self.values += content
            return lambda leaves, values, objects: list(islice(values, content))
        if kind not in ("l", "t", "d") or type(content) is not tuple or depth == DEEPEST:
            raise ProtocolError(f"a tree of an unknown kind {kind!r}, or deeper than {DEEPEST}")
        parts = [self._compile(part, depth + 1) for part in content]
        count = len(parts)
        first = _first_of_run(content)
        take: Callable[..., list[Any]]
        if first is not None:  # 50 fields: one slice, not that many calls
            take = lambda leaves, values, objects: leaves[first : first + count]  # noqa: E731
        else:
            take = lambda leaves, values, objects: [part(leaves, values, objects) for part in parts]  # noqa: E731
        if kind == "l":
            return take
        if kind == "t":
            return lambda leaves, values, objects: tuple(take(leaves, values, objects))
        keys = tree[1]
        if len(keys) != count or not _KEYS.issuperset(map(type, keys)):
            raise ProtocolError(f"a dict of {count} values with other keys")
        return lambda leaves, values, objects: dict(zip(keys, take(leaves, values, objects), strict=True))


_KEYS = frozenset((str, int))


def _array_dtype(name: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] | None = np.dtype(name) if _ARRAY_DTYPE.fullmatch(name) else None
    if dtype is None or not dtype.itemsize:
        raise ProtocolError(f"an array of {name!r} cannot lie in shared memory")
    return dtype


def _first_of_run(trees: Any) -> int | None:
    """The number of the first leaf, if `trees` are leaves with consecutive numbers."""
    if not trees or trees[0][0] != "L":
        return None
    first: int = trees[0][1]
    same = all(tree[0] == "L" and tree[1] == first + at for at, tree in enumerate(trees))
    return first if same else None


def cut(spec: Spec, place: int, buffer: bytearray, leaves: list[Any]) -> None:
    members = spec.members[place]
    if len(members) == 1:
        leaves[members[0]] = spec.leaves[members[0]].over(buffer)
        return
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    for number in members:
        leaves[number] = spec.leaves[number].within(whole)
