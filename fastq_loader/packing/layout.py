"""Layouts: what batches have in common, their tree, dtypes and shapes; and how a batch is built from them.

A worker describes the layout of a batch as a tuple, the plain layout, sends it once, and refers to it by a
number after that. The consumer compiles it to a `BatchLayout` when it arrives. A plain layout is

    (tree, leaves, sizes) or, for a device, (tree, leaves, sizes, device_offsets)
    tree    ('L', number) leaf | 'V' plain value | 'v' list of plain values | 'O' pickled object
            | ('d', keys, trees) | ('l', trees) | ('t', trees)
    leaves  (kind, dtype, shape, strides or None, segment, bytes into the segment), kind 'T' or 'A'; strides
            in elements for tensors, in bytes for arrays
    sizes   bytes of each segment; a segment of SMALLEST bytes or more is a large one
    device_offsets  start of each segment in the part of the batch for the device; -1: it stays on the host

It is refused if its leaves do not cover exactly the bytes of their segments. Beyond that, the worker is
trusted. Both sides remember a worker's first `REMEMBERED` layouts; any later one is sent with each of its
batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fastq_loader.errors import ProtocolError
from fastq_loader.memory.allocator import TYPESTR
from fastq_loader.memory.blocks import SMALLEST
from fastq_loader.packing.device_views import DeviceLeaf, DeviceViews

#: Number of layouts that are remembered for a worker. One of 50 fields takes 26 kB in the consumer.
REMEMBERED = 256
#: Largest depth of a tree; a deeper one is pickled whole. Building a tree takes some Python frames for each
#: level, and msgpack has its own limit.
DEEPEST = 100
#: Alignment in bytes of the segments in a packet: no element straddles a cache line.
ALIGNMENT = 64

#: Limit for arrays, and for tensors made from arrays; 32 in numpy 1. Torch has no limit.
_MOST_DIMENSIONS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32


def aligned(nbytes: int) -> int:
    """Bytes that a small segment takes in a packet, alignment included; both sides rely on it."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a new tensor of this shape, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


class Leaf:
    """One leaf of a layout.

    Attributes:
        array: whether it is a numpy array.
        start: bytes from the start of its segment.
        reach: bytes from its first element to the end of its last one.
        described: numpy dtype; None for a tensor without one, or that is empty or has strides.
    """

    __slots__ = ("array", "count", "described", "dtype", "reach", "segment", "shape", "start", "strides")

    def __init__(self, meta: tuple[Any, ...]) -> None:
        kind, dtype, self.shape, self.strides, self.segment, self.start = meta
        self.array = kind == "A"
        self.dtype: Any = np.dtype(dtype) if self.array else getattr(torch, dtype)
        itemsize = self.dtype.itemsize
        self.count = math.prod(self.shape)
        self.reach = self.count * itemsize
        if self.count and self.strides is not None:
            last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
            self.reach = last * (1 if self.array else itemsize) + itemsize
        typestr = dtype if self.array else TYPESTR.get(self.dtype)
        plain = self.count and self.strides is None and len(self.shape) <= _MOST_DIMENSIONS
        self.described = np.dtype(typestr) if typestr and (plain or self.array) else None

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides of a tensor, in elements."""
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    def over(self, buffer: Any) -> Any:
        """The leaf as a view of a buffer with the bytes of its segment, which has no other leaves."""
        if self.described is not None:
            made = np.ndarray(self.shape, self.described, buffer, 0, self.strides)
            return made if self.array else torch.from_numpy(made)
        if not self.count:
            return torch.empty_strided(self.shape, self.steps, dtype=self.dtype, device="cpu")
        if self.strides is None:
            return torch.frombuffer(buffer, dtype=self.dtype).view(self.shape)
        return self.within(torch.frombuffer(buffer, dtype=torch.uint8))

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """The leaf as a tensor that shares the storage of a segment's bytes."""
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        return tensor.set_(whole.untyped_storage(), self.start // tensor.itemsize, self.shape, self.steps)


#: The view of a segment with a single leaf that has a numpy dtype: leaf, whether it is an array, shape, numpy
#: dtype, strides. None for any other segment: `BatchLayout.fill` makes its leaves.
View = tuple[int, bool, Any, Any, Any] | None


class BatchLayout:
    """A compiled layout. Divides segments into leaves, and builds the tree.

    Attributes:
        sizes: bytes of each segment.
        leaves, members: the leaves, and the numbers of those in each segment.
        packet: the segments in the packet: (segment, start in the packet, end, view).
        large: the segments that each lie in a block: (segment, bytes, view).
        first_large: the (negative) index of the first of these in a handle's segments; None without any.
        on_device: the leaves of the part that goes to a device.
        packet_bytes, device_bytes, nbytes: size of the packet, of that part, and of all segments.
        tails: for each of a handle's segments but the packet, the bytes that follow its start.
        values, objects: number of plain values and of objects in the tree.
        needs_blocks: no batch of this layout lies in its handle as a whole.
        blank: list with a None for each leaf, to be copied and filled.
        build: function of (leaves, iterator of plain values, unpickled objects) that builds the tree.
    """

    def __init__(self, plain_layout: tuple[Any, ...]) -> None:
        try:
            tree, metas, self.sizes, *others = plain_layout
            self._read_leaves(metas)
            (offsets,) = others or [(-1,) * len(self.sizes)]
            self._lay_out_device(offsets)
            self._lay_out_host(offsets)
            self.nbytes: int = sum(self.sizes)
            self.objects = self.values = 0
            self.build = self._compile(tree)
            self.needs_blocks = bool(self.tails or self.objects)
        except ProtocolError:
            raise
        except Exception as error:  # any result of a malformed layout
            raise ProtocolError(f"malformed spec: {error!r}") from error

    def _read_leaves(self, metas: Any) -> None:
        self.leaves = [Leaf(meta) for meta in metas]
        self.blank = [None] * len(self.leaves)
        self.members: list[list[int]] = [[] for _ in self.sizes]
        for number, leaf in enumerate(self.leaves):
            self.members[leaf.segment].append(number)
        for size, members in zip(self.sizes, self.members, strict=True):
            reach = max([self.leaves[number].start + self.leaves[number].reach for number in members])
            if reach != size:
                raise ProtocolError(f"leaves of {reach} bytes in a segment of {size}")

    def _lay_out_device(self, offsets: Any) -> None:
        leaves: list[DeviceLeaf] = []
        self.device_bytes = 0
        for offset, size, members in zip(offsets, self.sizes, self.members, strict=True):
            if offset < 0:
                continue
            self.device_bytes = max(self.device_bytes, offset + size)
            for number in members:
                leaf = self.leaves[number]
                at = (offset + leaf.start) // leaf.dtype.itemsize
                plain = bool(leaf.count and leaf.shape and leaf.strides is None and len(members) == 1)
                leaves.append(DeviceLeaf(number, leaf.dtype, leaf.shape, leaf.steps, at, plain))
        self.on_device = DeviceViews(leaves)

    def _lay_out_host(self, offsets: Any) -> None:
        self.packet: list[tuple[int, int, int, View]] = []
        self.large: list[tuple[int, int, View]] = []
        self.tails = [self.device_bytes] * bool(self.on_device.leaves)
        self.packet_bytes = 0
        for segment, (size, offset) in enumerate(zip(self.sizes, offsets, strict=True)):
            if offset >= 0:
                continue
            if size >= SMALLEST:
                self.large.append((segment, size, self._view(segment)))
                self.tails.append(size)
            else:
                end = self.packet_bytes + size
                self.packet.append((segment, self.packet_bytes, end, self._view(segment)))
                self.packet_bytes += aligned(size)
        self.first_large = -len(self.large) or None

    def _view(self, segment: int) -> View:
        first, *more = self.members[segment]
        leaf = self.leaves[first]
        if more or leaf.described is None:
            return None
        return first, leaf.array, leaf.shape, leaf.described, leaf.strides

    # ---- leaves -------------------------------------------------------------------------------

    def fill(self, segment: int, buffer: Any, leaves: list[Any]) -> None:
        """Make the leaves of a segment as views of a buffer with its bytes, which they keep alive."""
        members = self.members[segment]
        if len(members) == 1:
            leaves[members[0]] = self.leaves[members[0]].over(buffer)
            return
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
        for number in members:
            leaves[number] = self.leaves[number].within(whole)

    # ---- the tree -----------------------------------------------------------------------------

    def _compile(self, tree: Any) -> Callable[[list[Any], Any, Any], Any]:
        """A function that builds a part of the tree, see `BatchLayout.build`."""
        if tree == "V":
            self.values += 1
            return lambda leaves, values, objects: next(values)
        if tree == "v":
            self.values += 1
            return lambda leaves, values, objects: list(next(values))
        if tree == "O":
            at = self.objects
            self.objects += 1
            return lambda leaves, values, objects: objects[at]
        kind, content = tree[0], tree[-1]
        if kind == "L":
            return lambda leaves, values, objects: leaves[content]
        parts = [self._compile(part) for part in content]
        count = len(parts)
        first = content[0][1] if content and content[0][0] == "L" else 0
        take: Callable[..., list[Any]]
        if content and all(part == ("L", first + at) for at, part in enumerate(map(tuple, content))):
            # One slice for 50 fields, not 50 calls.
            take = lambda leaves, values, objects: leaves[first : first + count]  # noqa: E731
        else:
            take = lambda leaves, values, objects: [part(leaves, values, objects) for part in parts]  # noqa: E731
        if kind == "l":
            return take
        if kind == "t":
            return lambda leaves, values, objects: tuple(take(leaves, values, objects))
        keys = tree[1]
        return lambda leaves, values, objects: dict(zip(keys, take(leaves, values, objects), strict=True))
