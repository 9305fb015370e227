"""A batch becomes a handle: the tree into a spec, the leaves into blocks, the rest into a parcel.

Runs in workers; `unpacking` is the other side. The tree is walked by exact type. dict, list and tuple are
described in the spec, plain values (int, float, str, bytes, bool, None) travel in the message, dense CPU
tensors and numpy arrays are *leaves*, and everything else is pickled with its leaves left out.

Leaves are grouped into *places*. Tensors of one storage whose bytes overlap share a place, so they alias
on the other side as well; a place covers the bytes that are looked at and not the storage behind them. A
place of 64 KiB or more lies in a block of its own, so that whoever keeps the labels does not keep the
images; smaller ones, and the pickled bytes, are put together in a parcel that the consumer copies out.

The spec is everything that stays the same from batch to batch: tree, dtypes, shapes, strides, sizes. It is
sent once and named by a number after that:

    (tree, leaves, sizes)
    tree    ('L', number) leaf | 'V' plain value | 'O' pickled object | ('v', n) list of n plain values
            | ('d', keys, trees) | ('l', trees) | ('t', trees)
    leaves  (kind, dtype, shape, strides or None, place, bytes into the place), kind 'T' or 'A'; strides in
            elements for tensors, in bytes for arrays
    sizes   bytes of each place; the large ones are those of SMALLEST bytes or more
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fastq_loader import pickling
from fastq_loader.allocator import Allocator, address_of
from fastq_loader.blocks import SMALLEST
from fastq_loader.messages import Handle, packs, seal

#: A parcel up to this many bytes travels inside the message: zmq copies it twice, which is cheaper than
#: a block's bookkeeping and page faults.
INLINE = 16 * 1024
#: Specs that a worker and the consumer remember; both forget the oldest beyond it.
SPECS = 256
#: Lists and dicts up to which a tree is walked here. Beyond it pickling the whole tree in C is faster than
#: this walk, its spec and the way back: 3 times for the annotations of 32 images.
CONTAINERS = 64
#: Levels of a tree; a deeper one is pickled whole. Building it takes some Python frames for each level, and
#: msgpack has bounds of its own.
DEEPEST = 100
#: Batches of a worker that are pickled whole after one that had more.
BATCHES_UNWALKED = 15
ALIGNMENT = 64  # bytes between the starts of places in a parcel: no element straddles a cache line

_SCALARS = frozenset((float, str, bytes, bool, type(None)))
_STRINGS, _INTEGERS = frozenset((str,)), frozenset((int,))
_TENSOR, _ARRAY = torch.Tensor, np.ndarray


class _DtypeNames(dict[torch.dtype, str]):
    """The name by which `torch` knows a dtype."""

    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_NAMES = _DtypeNames()


class _Unwalkable(Exception):
    """The tree is too deep, or has a cycle or a shared list or dict: pickle the whole of it."""


class _Sprawling(_Unwalkable):
    """The tree has more lists and dicts than are worth a walk."""


class Packer:
    """Packs the batches of one worker.

    Args:
        allocator: where blocks come from.
        token: the pool's; it stands before what is pickled.
    """

    def __init__(self, allocator: Allocator, token: bytes) -> None:
        self._token = token
        self._allocator = allocator
        self._specs: dict[Any, int] = {}
        self._next_id = 0
        self._sprawling = 0  # so many batches are not walked any more
        self._clear()

    def _clear(self) -> None:
        self._leaves: list[Any] = []
        self._leaf_of: dict[int, int] = {}  # id of a tensor or array → leaf
        self._values: list[Any] = []
        self._objects: list[Any] = []
        self._containers: set[int] = set()
        self._depth = 0

    # ---- the tree -----------------------------------------------------------------------------

    def _walk(self, value: Any) -> Any:
        kind = type(value)
        if kind is _TENSOR or kind is _ARRAY:
            if pickling.is_leaf(value):
                return "L", self.add_leaf(value)
        elif kind is int:
            if packs(value):
                self._values.append(value)
                return "V"
        elif kind in _SCALARS:
            self._values.append(value)
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
                self._values += value
                return "v", len(value)
            return "l", self._walk_all(value)
        elif kind is tuple:
            return "t", self._walk_all(value)
        self._objects.append(value)
        return "O"

    def _walk_all(self, parts: Iterable[Any]) -> tuple[Any, ...]:
        if self._depth == DEEPEST:
            raise _Unwalkable
        self._depth += 1
        trees = tuple([self._walk(part) for part in parts])
        self._depth -= 1
        return trees

    def _enter(self, container: Any) -> None:
        if id(container) in self._containers:
            raise _Unwalkable
        if len(self._containers) == CONTAINERS:
            raise _Sprawling
        self._containers.add(id(container))

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
            number = self._leaf_of[id(leaf)] = len(self._leaves)
            self._leaves.append(leaf)
        return number

    # ---- the handle ---------------------------------------------------------------------------

    def pack(self, batch: Any) -> tuple[Handle, list[tuple[int, int]]]:
        """Put a batch into blocks.

        Returns:
            The handle, and the blocks (offset, bytes needed) that it uses, in the order of its places.

        Raises:
            UnpicklableError: part of the batch cannot be pickled.
            RuntimeError: a non-leaf tensor that requires grad.
            MemoryError: the arena is used up.
        """
        try:
            return self._place(*self._describe(batch))
        finally:
            self._clear()

    def _describe(self, batch: Any) -> tuple[Any, bytes | None]:
        """The tree, and the bytes of what is pickled in it."""
        if not self._sprawling:
            try:
                tree = self._walk(batch)
                return tree, self._pickle(batch) if self._objects else None
            except _Sprawling:
                self._sprawling = BATCHES_UNWALKED
            except (_Unwalkable, RecursionError, pickling.SharedContainer):
                pass
            self._clear()
        else:
            self._sprawling -= 1
        self._objects.append(batch)
        return "O", self._pickle(batch)

    def pack_exception(self, data: bytes) -> tuple[Handle, list[tuple[int, int]]]:
        """Put a pickled exception where pickled objects lie."""
        return self._place("O", data)

    def _pickle(self, batch: Any) -> bytes:
        objects = self._objects
        value = objects[0] if len(objects) == 1 else tuple(objects)
        return pickling.dump(value, self.add_leaf, batch, self._containers)

    def _place(self, tree: Any, pickled: bytes | None) -> tuple[Handle, list[tuple[int, int]]]:
        metas, extents = _extents(self._leaves)
        sizes = tuple([end - start for start, end in extents])
        places: list[tuple[int, int, int]] = []
        used: list[tuple[int, int]] = []
        small: list[tuple[int, int]] = []
        parcel_bytes = 0
        for (start, end), size in zip(extents, sizes, strict=True):
            if size >= SMALLEST:
                places.append(self._place_large(start, end, used))
            else:
                small.append((start, size))
                parcel_bytes += aligned(size)
        parcel = None
        if pickled is not None or parcel_bytes > INLINE:
            # Pickled bytes never travel through a socket, however few they are (design, rule 10).
            places.insert(0, self._fill_block(small, parcel_bytes, pickled, used))
        elif small:
            parcel = _gather(small)
        key = (tree, metas, sizes)
        spec_id = self._specs.get(key)
        spec = None
        if spec_id is None:
            spec_id = self._remember(key)
            spec = key
        return Handle(spec_id, spec, tuple(self._values), parcel, tuple(places)), used

    def _remember(self, key: Any) -> int:
        spec_id = self._specs[key] = self._next_id
        self._next_id += 1
        if len(self._specs) > SPECS:
            del self._specs[next(iter(self._specs))]
        return spec_id

    def _place_large(self, start: int, end: int, used: list[tuple[int, int]]) -> tuple[int, int, int]:
        block = self._allocator.block_at(start)
        if block is not None and all(offset != block[0] for offset, _ in used):
            offset, size = block
            delta = start - self._allocator.mapping.base - offset
            # It lies in a block of this task already: no copy. But a small part of a block is not worth
            # keeping the whole of it (design, rule 2).
            if size // 4 <= end - start <= size - delta:
                used.append((offset, delta + end - start))
                return offset, size, delta
        offset, size = self._allocator.take(end - start)
        self._allocator.write(offset, start, end - start)
        used.append((offset, end - start))
        return offset, size, 0

    def _fill_block(
        self,
        small: list[tuple[int, int]],
        parcel_bytes: int,
        pickled: bytes | None,
        used: list[tuple[int, int]],
    ) -> tuple[int, int, int]:
        data = b"" if pickled is None else seal(pickled, self._token)
        total = parcel_bytes + len(data)
        offset, size = self._allocator.take(max(total, 1))
        at = offset
        for start, nbytes in small:
            self._allocator.write(at, start, nbytes)
            at += aligned(nbytes)
        self._allocator.mapping.memory[at : at + len(data)] = data
        used.insert(0, (offset, max(total, 1)))
        return offset, size, total


def aligned(nbytes: int) -> int:
    """Bytes that a small place takes up in a parcel; both sides count with it."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _gather(small: list[tuple[int, int]]) -> bytes:
    copy = ctypes.string_at
    return b"".join([copy(start, size).ljust(aligned(size), b"\0") for start, size in small])


# ---- extents ----------------------------------------------------------------------------------------


def _extents(leaves: list[Any]) -> tuple[tuple[Any, ...], list[tuple[int, int]]]:
    """The spec's `leaves`, and the places as address ranges [start, end)."""
    metas: list[tuple[Any, ...]] = []
    spans: list[tuple[int, int]] = []
    for number, leaf in enumerate(leaves):
        if type(leaf) is _TENSOR:
            start = leaf.data_ptr()
            shape = leaf.shape
            if leaf.is_contiguous():
                spans.append((start, start + leaf.nbytes))
                plain = (1 not in shape and 0 not in shape) or leaf.stride() == contiguous_strides(shape)
                strides = None if plain else leaf.stride()
            else:
                spans.append((start, start + _reach(leaf)))
                strides = leaf.stride()
            metas.append(("T", _NAMES[leaf.dtype], shape, strides, number, 0))
            continue
        flags = leaf.flags
        if not (flags.c_contiguous or flags.f_contiguous):
            leaf = leaves[number] = np.ascontiguousarray(leaf)
            flags = leaf.flags
        start = address_of(leaf)
        spans.append((start, start + leaf.nbytes))
        strides = None if flags.c_contiguous else leaf.strides
        metas.append(("A", leaf.dtype.str, leaf.shape, strides, number, 0))
    if _apart(spans):
        return tuple(metas), spans
    return _shared(leaves, metas, spans)


def _apart(spans: list[tuple[int, int]]) -> bool:
    """Whether no two leaves overlap: each is a place of its own, as in nearly every batch."""
    return all(left[1] <= right[0] for left, right in pairwise(sorted(spans)))


def _shared(
    leaves: list[Any], metas: list[tuple[Any, ...]], spans: list[tuple[int, int]]
) -> tuple[tuple[Any, ...], list[tuple[int, int]]]:
    """`_extents` where leaves overlap: those of one storage share a place."""
    storages: dict[int, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if type(leaf) is _TENSOR:
            storages.setdefault(leaf.untyped_storage().data_ptr(), []).append(number)
    place_of, extents = _group(spans, storages)
    for place, members in _members(place_of).items():
        # Views of other element sizes count in elements from the start of the place.
        if len(members) > 1 and len({leaves[number].itemsize for number in members}) > 1:
            start, end = extents[place]
            extents[place] = (start - (start - leaves[members[0]].untyped_storage().data_ptr()) % 16, end)
    placed = [
        (*meta[:4], place, span[0] - extents[place][0])
        for meta, place, span in zip(metas, place_of, spans, strict=True)
    ]
    return tuple(placed), extents


def _members(place_of: list[int]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for number, place in enumerate(place_of):
        members.setdefault(place, []).append(number)
    return members


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """What torch gives a new tensor of this shape, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor that is not contiguous to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def _group(
    spans: list[tuple[int, int]], storages: dict[int, list[int]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Merge the spans of tensors that overlap within one storage; every other span is its own place."""
    place_of = [-1] * len(spans)
    extents: list[tuple[int, int]] = []
    for members in storages.values():
        open_end = -1
        for number in sorted(members, key=spans.__getitem__):
            start, end = spans[number]
            if start < open_end:
                extents[-1] = (extents[-1][0], max(open_end, end))
            else:
                extents.append((start, end))
            open_end = extents[-1][1]
            place_of[number] = len(extents) - 1
    for number, span in enumerate(spans):
        if place_of[number] < 0:
            extents.append(span)
            place_of[number] = len(extents) - 1
    return place_of, extents
