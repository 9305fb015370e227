"""Where the leaves of a batch lie in memory: which bytes have to travel, and which leaves share them.

Runs in workers, and in the consumer where it packs batches itself. Tensors of one storage whose bytes overlap
share a *place*, so that they alias on the other side as well.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fastq_loader.memory.allocator import address_of
from fastq_loader.memory.ledger import device_aligned

_TENSOR = torch.Tensor


class _DtypeNames(dict[torch.dtype, str]):
    """The name by which `torch` knows a dtype."""

    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_NAMES = _DtypeNames()


def extents_of(leaves: list[Any]) -> tuple[tuple[Any, ...], list[tuple[int, int]]]:
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
    """`extents_of` where leaves overlap: those of one storage share a place."""
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


def bound_places(metas: tuple[tuple[Any, ...], ...]) -> list[int]:
    """The places that go to a device: those of tensors, ascending."""
    return sorted({meta[4] for meta in metas if meta[0] == "T"})


def total_bytes(extents: list[tuple[int, int]], places: list[int]) -> int:
    """What `places` take up one behind the other."""
    return sum([device_aligned(extents[place][1] - extents[place][0]) for place in places])
