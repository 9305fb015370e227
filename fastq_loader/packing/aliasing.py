"""Where the leaves of a batch lie in memory: which bytes have to travel, and which leaves share them.

Runs in workers, and in the consumer where it packs batches itself. A *segment* is the memory of one leaf,
or of tensors of one storage whose bytes overlap: they alias on the other side as well. Its *span* is where
it starts and ends in this process.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch

from fastq_loader.memory.blocks import device_aligned
from fastq_loader.memory.nontemporal import address_of

_TENSOR = torch.Tensor
#: Bytes of the largest element. A segment of several leaves starts at a multiple of it from the start of the
#: storage, so that each leaf starts at a whole number of its own elements, whatever their size.
_LARGEST_ELEMENT = 16

Span = tuple[int, int]
Metas = tuple[tuple[Any, ...], ...]


#: The name by which `torch` knows a dtype.
_NAMES = {it: str(it).removeprefix("torch.") for it in vars(torch).values() if isinstance(it, torch.dtype)}


def segments_of(leaves: list[Any]) -> tuple[Metas, list[Span]]:
    """The `leaves` of the spec, and the spans of the segments.

    An array that is not contiguous is replaced in `leaves` by a copy that is.
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
    bounds = list(chain.from_iterable(sorted(spans)))
    if bounds == sorted(bounds):
        return tuple(metas), spans  # no two overlap, as in nearly every batch
    return _merge(leaves, metas, spans)


def _merge(leaves: list[Any], metas: list[tuple[Any, ...]], spans: list[Span]) -> tuple[Metas, list[Span]]:
    """`segments_of` where leaves overlap: tensors of one storage that do share a segment."""
    storages: dict[int, list[int]] = {}
    for number, leaf in enumerate(leaves):  # an array shares nothing: a storage of its own
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


def device_segments(metas: Metas) -> list[int]:
    """The segments that go to a device: those of tensors, ascending."""
    return sorted({meta[4] for meta in metas if meta[0] == "T"})


def device_bytes(spans: list[Span], segments: list[int]) -> int:
    """Bytes that segments take up in a batch for a device, one behind the other."""
    return sum([device_aligned(spans[segment][1] - spans[segment][0]) for segment in segments])
