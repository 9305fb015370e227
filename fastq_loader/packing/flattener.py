"""Splits a batch into its tree, values, objects and leaves, and finds the memory of the leaves.

Runs in workers, and in the consumer where it packs batches itself. The walk checks exact types: dict, list
and tuple are described in the layout, plain values (int, float, str, bytes, bool, None) are sent in the
message, strided CPU tensors and numpy arrays are *leaves*, and everything else is an object, which is pickled
without the leaves in it.

A tree that contains an object is pickled as a whole, unless the batch goes to a device: this preserves the
object's references to the containers around it. A tree of more than `PARTS` parts is a single object, too:
pickle processes it in C, and parts that vary (the number of annotations, the keys of a dict) need no new
layout. So is a tree with more plain values than fit into one message: a longer message would need new memory
for each batch. Arrays inside a pickled object that need no block of their own stay in the pickle.

A *segment* is the memory of one leaf, or of several tensors that overlap in one storage, and then also
overlap in the consumer. Its *span* is its start and end address in this process.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Any

import numpy as np
import torch

from fastq_loader.ipc.messages import fits_64_bits
from fastq_loader.memory.blocks import SMALLEST
from fastq_loader.memory.nontemporal import address_of
from fastq_loader.packing.layout import DEEPEST, contiguous_strides

#: Largest number of parts of a tree that is walked. Parts are the members of its containers, except tensors,
#: which cost the same either way. Above 100 parts (tuples of numbers) to 300 (fields of a dict), pickling the
#: tree is faster than walking, sending and rebuilding it. If each batch has a new layout, pickling is faster
#: above 30 parts, and 10 times as fast at 2,000.
PARTS = 128
#: Number of batches of a worker that are pickled whole after one that was too large: without it, a worker
#: takes 1.4 times the CPU for annotations of images (bench, objects).
BATCHES_UNWALKED = 15
#: Most bytes of texts and long lists that are sent in the message, and of a packet: the extra copies are
#: cheaper than a block's bookkeeping and page faults.
INLINE = 16 * 1024

_NUMBER = 9  # bytes of a long number in a message
_TEXTS = frozenset((str, bytes))
_PLAIN = frozenset((str, bytes, float, bool, type(None)))
_STRINGS, _INTEGERS = frozenset((str,)), frozenset((int,))
_CONTAINERS = frozenset((dict, list, tuple))
_TENSOR, _ARRAY, _STRIDED = torch.Tensor, np.ndarray, torch.strided

#: The dtypes, with their names, whose tensors consist of nothing but bytes, a shape and strides. Torch ends
#: the process if a tensor of another dtype (qint8, …) is made from these alone.
PLAIN_DTYPES = {
    it: name
    for it, name in (
        (it, str(it).removeprefix("torch.")) for it in vars(torch).values() if type(it) is torch.dtype
    )
    if name.startswith(("bool", "uint", "int", "float", "bfloat", "complex", "bits"))
}

COWARDLY = (  # torch/multiprocessing/reductions.py, reduce_tensor
    "Cowardly refusing to serialize non-leaf tensor which requires_grad, "
    "since autograd does not support crossing process boundaries.  "
    "If you just want to transfer the data, call detach() on the tensor "
    "before serializing (e.g., putting it on the queue)."
)

#: Bytes of the largest element. A segment of several leaves starts at a multiple of this from the start of
#: the storage, so that the start of each leaf is a multiple of its own element size.
_LARGEST_ELEMENT = 16

Span = tuple[int, int]
Metas = tuple[tuple[Any, ...], ...]


def is_leaf(value: Any) -> bool:
    """Whether a tensor or array is packed as a leaf: strided, on the CPU, of exactly that type.

    Raises:
        RuntimeError: a tensor that requires grad and is not a leaf of its graph (torch's own text).
    """
    if type(value) is _TENSOR:
        if value.requires_grad:
            if not value.is_leaf:
                raise RuntimeError(COWARDLY)
            return False
        return (
            value.is_cpu
            and value.layout is _STRIDED
            and value.dtype in PLAIN_DTYPES
            and not value.is_nested
            and not value.is_conj()
            and not value.is_neg()
        )
    if type(value) is not _ARRAY:
        return False
    dtype = value.dtype
    return (
        dtype.kind in "biufcSUmM" and (dtype.isnative, dtype.metadata) == (True, None) and dtype.itemsize > 0
    )


class _Unwalkable(Exception):
    """The tree is too deep, or has a cycle or a shared list or dict: it must be pickled whole."""


class _TooLarge(_Unwalkable):
    """The tree has too many parts, or plain values for more than a message, to be worth a walk."""


class TreeFlattener:
    """Splits batches into their parts, one batch after the other.

    Attributes:
        leaves, values, objects: parts of the current batch, in the order of its tree.
        containers: ids of the lists and dicts of the current batch.
    """

    is_leaf = staticmethod(is_leaf)

    def __init__(self) -> None:
        self._unwalked = 0  # number of the next batches to be pickled without a walk
        self.clear()

    def clear(self) -> None:
        """Drop all parts of the batch."""
        self.leaves: list[Any] = []
        self._leaf_of: dict[int, int] = {}  # id of a tensor or array → leaf
        self.values: list[Any] = []
        self.objects: list[Any] = []
        self.containers: set[int] = set()
        self._depth = 0
        self._parts = self._nbytes = 0

    def flatten(self, batch: Any) -> Any:
        """The tree of a batch; a single object if it cannot be walked or is not worth a walk."""
        if self._unwalked:
            self._unwalked -= 1
            return self.whole(batch)
        try:
            return self._walk(batch)
        except (_Unwalkable, RecursionError) as error:
            self._unwalked = BATCHES_UNWALKED if isinstance(error, _TooLarge) else 0
            return self.whole(batch)

    def whole(self, batch: Any) -> Any:
        """The tree of a batch as a single object."""
        self.clear()
        self.objects.append(batch)
        return "O"

    def _walk(self, value: Any) -> Any:
        kind = type(value)
        if kind is _TENSOR or kind is _ARRAY:
            if self.is_leaf(value):
                return "L", self.add_leaf(value)
        elif kind in _CONTAINERS:
            if (tree := self._walk_container(value, kind)) is not None:
                return tree
        elif kind in _PLAIN or (kind is int and fits_64_bits(value)):
            if kind in _TEXTS:
                self._add_bytes(len(value))
            self.values.append(value)
            return "V"
        self.objects.append(value)
        return "O"

    def _walk_container(self, value: Any, kind: type) -> Any:
        """The tree of a dict, list or tuple; None for a dict with keys that a layout cannot contain."""
        if kind is tuple:
            return "t", self._walk_all(value)
        if id(value) in self.containers:
            raise _Unwalkable
        self.containers.add(id(value))
        if kind is list:
            if len(value) <= INLINE and self._is_flat(value):
                self.values.append(tuple(value))
                return "v"
            return "l", self._walk_all(value)
        keys = tuple(value)
        # Specs are compared, so keys of other types cannot be allowed: True, 1 and 1.0 are equal.
        if _STRINGS.issuperset(map(type, keys)) or all(
            type(key) is str or (type(key) is int and fits_64_bits(key)) for key in keys
        ):
            return "d", keys, self._walk_all(value.values())
        return None

    def _walk_all(self, parts: Collection[Any]) -> tuple[Any, ...]:
        if self._depth == DEEPEST:
            raise _Unwalkable
        self._parts += len(parts) - list(map(type, parts)).count(_TENSOR)
        if self._parts > PARTS:
            raise _TooLarge
        self._depth += 1
        trees: list[Any] = []
        leaf_of, leaves, is_leaf = self._leaf_of, self.leaves, self.is_leaf
        for part in parts:
            kind = type(part)
            if (kind is _TENSOR or kind is _ARRAY) and is_leaf(part):  # as `_walk` and `add_leaf`
                number = leaf_of.setdefault(id(part), len(leaves))
                if number == len(leaves):
                    leaves.append(part)
                trees.append(("L", number))
            else:
                trees.append(self._walk(part))
        self._depth -= 1
        return tuple(trees)

    def _is_flat(self, values: list[Any]) -> bool:
        """Whether a list contains only plain values."""
        kinds = set(map(type, values))
        if kinds == _INTEGERS and fits_64_bits(min(values)) and fits_64_bits(max(values)):
            self._add_bytes(_NUMBER * len(values))
            return True
        if not kinds or not kinds <= _PLAIN:
            return False
        self._add_bytes(sum([len(value) if type(value) in _TEXTS else _NUMBER for value in values]))
        return True

    def _add_bytes(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes > INLINE:
            raise _TooLarge

    def add_leaf(self, leaf: Any) -> int:
        """Add a leaf, and return its number; the same object gets the same number."""
        number = self._leaf_of.setdefault(id(leaf), len(self.leaves))
        if number == len(self.leaves):
            self.leaves.append(leaf)
        return number

    def leaf_in_pickle(self, leaf: Any) -> int | None:
        """Add a leaf of an object, and return its number; None if it stays in the pickle."""
        if type(leaf) is _ARRAY and leaf.nbytes < SMALLEST and id(leaf) not in self._leaf_of:
            return None
        return self.add_leaf(leaf)


# ---- the memory of leaves ---------------------------------------------------------------------------


def segments_of(leaves: list[Any]) -> tuple[Metas, list[Span]]:
    """The `leaves` field of the layout, and the spans of the segments.

    A non-contiguous array in `leaves` is replaced by a contiguous copy.
    """
    metas: list[tuple[Any, ...]] = []
    spans: list[Span] = []
    for number, leaf in enumerate(leaves):
        if type(leaf) is _TENSOR:
            start = leaf.data_ptr()
            shape = leaf.shape
            if leaf.is_contiguous():
                spans.append((start, start + leaf.nbytes))
                plain = (1 not in shape and 0 not in shape) or leaf.stride() == contiguous_strides(shape)
                strides = None if plain else leaf.stride()
            else:
                # Up to the end of the last element.
                steps = ((size - 1) * step for size, step in zip(leaf.shape, leaf.stride(), strict=True))
                spans.append((start, start + (sum(steps) + 1) * leaf.itemsize * (leaf.numel() > 0)))
                strides = leaf.stride()
            metas.append(("T", PLAIN_DTYPES[leaf.dtype], shape, strides, number, 0))
            continue
        flags = leaf.flags
        if not (flags.c_contiguous or flags.f_contiguous):
            leaf = leaves[number] = np.ascontiguousarray(leaf)
            flags = leaf.flags
        start = address_of(leaf)
        spans.append((start, start + leaf.nbytes))
        strides = None if flags.c_contiguous else leaf.strides
        metas.append(("A", leaf.dtype.str, leaf.shape, strides, number, 0))
    bounds = list(chain.from_iterable(sorted(spans)))
    if bounds == sorted(bounds):
        return tuple(metas), spans  # nothing overlaps, as in nearly every batch
    return _merge(leaves, metas, spans)


def _merge(leaves: list[Any], metas: list[tuple[Any, ...]], spans: list[Span]) -> tuple[Metas, list[Span]]:
    """`segments_of` for leaves that overlap: overlapping tensors of one storage share a segment."""
    storages: dict[int, list[int]] = {}
    for number, leaf in enumerate(leaves):  # each array counts as a storage of its own
        storage = leaf.untyped_storage().data_ptr() if type(leaf) is _TENSOR else -1 - number
        storages.setdefault(storage, []).append(number)
    merged: list[Span] = []
    segment_of = [0] * len(leaves)
    for storage, members in storages.items():
        end = -1
        for number in sorted(members, key=spans.__getitem__):
            start, last = spans[number]
            if start < end:
                first, end = merged[-1][0], max(end, last)
                merged[-1] = first - (first - storage) % _LARGEST_ELEMENT, end
            else:
                merged.append((start, last))
                end = last
            segment_of[number] = len(merged) - 1
    placed = [
        (*meta[:4], segment, start - merged[segment][0])
        for meta, segment, (start, _) in zip(metas, segment_of, spans, strict=True)
    ]
    return tuple(placed), merged


def device_segments(metas: Metas) -> list[int]:
    """The segments of tensors, which go to a device, in ascending order."""
    return sorted({meta[4] for meta in metas if meta[0] == "T"})
