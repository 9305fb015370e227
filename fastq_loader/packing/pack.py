"""A batch becomes a handle: the tree into a spec, the leaves into blocks, the rest into a parcel.

Runs in workers; `unpacking` is the other side. The tree is walked by exact type. dict, list and tuple are
described in the spec, plain values (int, float, str, bytes, bool, None) travel in the message, dense CPU
tensors and numpy arrays are *leaves*, and everything else is pickled with its leaves left out.

Leaves are grouped into *places*. Tensors of one storage whose bytes overlap share a place, so they alias
on the other side as well; a place covers the bytes that are looked at and not the storage behind them. A
place of 64 KiB or more lies in a block of its own, so that whoever keeps the labels does not keep the
images; smaller ones, and the pickled bytes, are put together in a parcel that the consumer copies out.

A batch that goes on to a device is laid out for one copy instead: all places of tensors, small ones too, lie
in one block at multiples of 256 bytes. Arrays, plain values and objects stay on the host and are packed as
ever.

The spec is everything that stays the same from batch to batch: tree, dtypes, shapes, strides, sizes. It is
sent once and named by a number after that:

    (tree, leaves, sizes) or, for a device, (tree, leaves, sizes, starts)
    tree    ('L', number) leaf | 'V' plain value | 'O' pickled object | ('v', n) list of n plain values
            | ('d', keys, trees) | ('l', trees) | ('t', trees)
    leaves  (kind, dtype, shape, strides or None, place, bytes into the place), kind 'T' or 'A'; strides in
            elements for tensors, in bytes for arrays
    sizes   bytes of each place; the large ones are those of SMALLEST bytes or more
    starts  of each place: bytes into the part of the batch that goes to the device; -1: it stays on the host

A handle's places are those of the parcel, of the part for the device, and of the large ones, so far as there
are any.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from fastq_loader.ipc.messages import Handle, packs, seal
from fastq_loader.memory.allocator import Allocator
from fastq_loader.memory.ledger import DEVICE_ALIGNMENT, SMALLEST, device_aligned
from fastq_loader.packing import pickling
from fastq_loader.packing.aliasing import bound_places, extents_of, total_bytes

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

    is_leaf = staticmethod(pickling.is_leaf)

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
        if not self._sprawling:
            try:
                return self._walk(batch)
            except _Sprawling:
                self._sprawling = BATCHES_UNWALKED
            except (_Unwalkable, RecursionError):
                pass
        else:
            self._sprawling -= 1
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


class Packer:
    """Packs the batches of one worker.

    Args:
        allocator: where blocks come from. Batches go on to a device if it keeps them together.
        token: the pool's; it stands before what is pickled.
    """

    def __init__(self, allocator: Allocator, token: bytes) -> None:
        self._token = token
        self._allocator = allocator
        self._walker = Walker()
        self._specs: dict[Any, int] = {}
        self._next_id = 0

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
            self._walker.clear()

    def _describe(self, batch: Any) -> tuple[Any, bytes | None]:
        """The tree, and the bytes of what is pickled in it."""
        walker = self._walker
        tree = walker.walk(batch)
        try:
            return tree, self._pickle(batch) if walker.objects else None
        except (RecursionError, pickling.SharedContainer):
            return walker.whole(batch), self._pickle(batch)

    def pack_exception(self, data: bytes) -> tuple[Handle, list[tuple[int, int]]]:
        """Put a pickled exception where pickled objects lie, in whatever block there is.

        Raises:
            MemoryError: there is none.
        """
        return self._place("O", data, failed=True)

    def pack_words(self, text: str, out_of_memory: bool) -> Handle:
        """What there is to say about an exception that no block holds: it travels in the message."""
        self._walker.clear()
        self._walker.values += [out_of_memory, text]
        try:
            return self._place(("v", 2), None)[0]
        finally:
            self._walker.clear()

    def unsend(self, handle: Handle) -> None:
        """The consumer will never hear of this handle, nor of the spec in it."""
        if handle.spec is not None:
            self._specs.pop(handle.spec, None)

    def _pickle(self, batch: Any) -> bytes:
        objects = self._walker.objects
        value = objects[0] if len(objects) == 1 else tuple(objects)
        walker = self._walker
        return pickling.dump(value, walker.add_leaf, batch, walker.containers, self._allocator.together)

    def _place(
        self, tree: Any, pickled: bytes | None, failed: bool = False
    ) -> tuple[Handle, list[tuple[int, int]]]:
        metas, extents = extents_of(self._walker.leaves)
        sizes = tuple([end - start for start, end in extents])
        places: list[tuple[int, int, int]] = []
        used: list[tuple[int, int]] = []
        key: tuple[Any, ...] = (tree, metas, sizes)
        starts: tuple[int, ...] = ()
        if self._allocator.together and (bound := bound_places(metas)):
            starts = self._assemble(extents, bound, places, used)
            key = (*key, starts)
        small: list[tuple[int, int]] = []
        parcel_bytes = 0
        for at, ((start, end), size) in enumerate(zip(extents, sizes, strict=True)):
            if starts and starts[at] >= 0:
                continue
            if size >= SMALLEST:
                places.append(self._place_large(start, end, used))
            else:
                small.append((start, size))
                parcel_bytes += aligned(size)
        parcel = None
        if pickled is not None or parcel_bytes > INLINE:
            # Pickled bytes never travel through a socket, however few they are (design, rule 10).
            places.insert(0, self._fill_block(small, pickled, used, failed))
        elif small:
            parcel = _gather(small)
        spec_id = self._specs.get(key)
        spec = None
        if spec_id is None:
            spec_id = self._remember(key)
            spec = key
        return Handle(spec_id, spec, tuple(self._walker.values), parcel, tuple(places)), used

    def _assemble(
        self,
        extents: list[tuple[int, int]],
        bound: list[int],
        places: list[tuple[int, int, int]],
        used: list[tuple[int, int]],
    ) -> tuple[int, ...]:
        """Bring the places in `bound` together in one block, where most of them may lie already.

        Returns:
            The spec's `starts`.
        """
        allocator = self._allocator
        block, at = self._together(extents, bound)
        if block is None:
            block, at = allocator.take(max(total_bytes(extents, bound), 1)), {}
        offset, size = block
        begin = min(at.values(), default=0)
        end = max([at[place] + extents[place][1] - extents[place][0] for place in at], default=0)
        for place in bound:
            if place not in at:
                start, nbytes = extents[place][0], extents[place][1] - extents[place][0]
                at[place] = device_aligned(end)
                allocator.write(offset + at[place], start, nbytes)
                end = at[place] + nbytes
        places.append((offset, size, begin))
        used.append((offset, max(end, 1)))
        allocator.expected = max(end - begin, 1)
        return tuple([at[place] - begin if place in at else -1 for place in range(len(extents))])

    def _together(
        self, extents: list[tuple[int, int]], bound: list[int]
    ) -> tuple[tuple[int, int] | None, dict[int, int]]:
        """The block of the largest place, with where in it those places begin that may stay there; None if
        there is none, the others do not fit behind them, or too much would be copied that is not theirs."""
        start, _ = max([extents[place] for place in bound], key=lambda extent: extent[1] - extent[0])
        block = self._allocator.block_at(start)
        if block is None:
            return None, {}
        base = self._allocator.address(block[0])
        at: dict[int, int] = {}
        end = 0
        for place in bound:
            first, last = extents[place][0] - base, extents[place][1] - base
            if 0 <= first < last <= block[1] and first % DEVICE_ALIGNMENT == 0:
                at[place] = first
                end = max(end, last)
        others = total_bytes(extents, [place for place in bound if place not in at])
        if not at or device_aligned(end) + others > block[1]:
            return None, {}
        if end - min(at.values()) > 2 * total_bytes(extents, list(at)):
            return None, {}
        if others and self._allocator.cut(block[0]) > device_aligned(end):
            # Something else lies where they would go: an array, a view, what the dataset keeps.
            return None, {}
        return block, at

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
            delta = start - self._allocator.address(offset)
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
        pickled: bytes | None,
        used: list[tuple[int, int]],
        failed: bool,
    ) -> tuple[int, int, int]:
        data = _gather(small) + (b"" if pickled is None else seal(pickled, self._token))
        total = len(data)
        offset, size = self._allocator.take(max(total, 1), failed)
        self._allocator.mapping.write(offset, data)
        used.insert(0, (offset, max(total, 1)))
        return offset, size, total


def aligned(nbytes: int) -> int:
    """Bytes that a small place takes up in a parcel; both sides count with it."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _gather(small: list[tuple[int, int]]) -> bytes:
    copy = ctypes.string_at
    return b"".join([copy(start, size).ljust(aligned(size), b"\0") for start, size in small])
