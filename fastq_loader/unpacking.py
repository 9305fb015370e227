"""A handle becomes a batch again: views with leases on blocks, copies of what is small.

Runs in the consumer, on the thread that calls `next()`; `packing` is the other side and describes the
spec. A spec is compiled once, when a worker first names it, so that the cost of a batch is the cost of its
leaves. Sizes and offsets are checked against the block before anything is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch

from fastq_loader import pickling
from fastq_loader.allocator import TYPESTR
from fastq_loader.arena import Arena
from fastq_loader.blocks import SMALLEST
from fastq_loader.errors import ProtocolError
from fastq_loader.messages import Handle
from fastq_loader.packing import SPECS, aligned, contiguous_strides

_from_numpy, _ndarray = torch.from_numpy, np.ndarray


class _Leaf:
    """One leaf of a spec, ready to be put on a place."""

    __slots__ = ("array", "count", "dtype", "into", "kind", "place", "shape", "strides")

    def __init__(self, meta: tuple[Any, ...]) -> None:
        self.kind, dtype, self.shape, self.strides, self.place, self.into = meta
        self.array = self.kind == "A"
        self.dtype: Any = np.dtype(dtype) if self.array else getattr(torch, dtype)
        if self.array and self.dtype.hasobject:
            raise ProtocolError(f"an array of {dtype} cannot lie in shared memory")
        if not self.array and not isinstance(self.dtype, torch.dtype):
            raise ProtocolError(f"{dtype!r} is no dtype")
        self.count = math.prod(self.shape)

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
            raise ProtocolError(f"malformed spec: {error!r}") from error

    def _read(self, spec: tuple[Any, ...]) -> None:
        tree, metas, self.sizes = spec
        self.leaves = [_Leaf(meta) for meta in metas]
        self.members: list[list[int]] = [[] for _ in self.sizes]  # place → its leaves
        for number, leaf in enumerate(self.leaves):
            self.members[leaf.place].append(number)
            self._check(leaf)
        self.large = [place for place, size in enumerate(self.sizes) if size >= SMALLEST]
        self.small: list[tuple[int, int, int]] = []  # (place, start in the parcel, its end)
        # Of these the ones that are one dense array or tensor each: (leaf, start, end, shape, numpy's dtype).
        self.tensors: list[tuple[int, int, int, Any, Any]] = []
        self.arrays: list[tuple[int, int, int, Any, Any]] = []
        self.parcel_bytes = 0
        for place, size in enumerate(self.sizes):
            if size < SMALLEST:
                self._cut(place, self.parcel_bytes, self.parcel_bytes + size)
                self.parcel_bytes += aligned(size)
        self.nbytes: int = sum(self.sizes)
        self.objects = self.values = 0
        self.build = self._compile(tree)

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

    def _check(self, leaf: _Leaf) -> None:
        itemsize = leaf.dtype.itemsize
        if not leaf.count:
            reach = 0
        elif leaf.strides is None:
            reach = leaf.count * itemsize
        else:
            unit = 1 if leaf.array else itemsize
            steps = sum((n - 1) * step for n, step in zip(leaf.shape, leaf.strides, strict=True))
            reach = steps * unit + itemsize
        numbers = (*leaf.shape, *(leaf.strides or ()), leaf.into, leaf.place)
        if any(number < 0 for number in numbers) or leaf.kind not in "TA":
            raise ProtocolError(f"a leaf with negative numbers, or of an unknown kind: {numbers}")
        if leaf.into + reach > self.sizes[leaf.place]:
            raise ProtocolError(f"a leaf of {reach} bytes does not fit its place of {self.sizes[leaf.place]}")

    def _compile(self, tree: Any) -> Callable[[list[Any], Any, list[Any]], Any]:
        """A function of (leaves, iterator of plain values, unpickled objects) that builds the tree."""
        if tree == "V":
            self.values += 1
            return lambda leaves, values, objects: next(values)
        if tree == "O":
            at = self.objects
            self.objects += 1
            return lambda leaves, values, objects: objects[at]
        kind = tree[0]
        if kind == "L":
            number = tree[1]
            self.leaves[number]  # raises IndexError
            return lambda leaves, values, objects: leaves[number]
        if kind == "v":
            length = int(tree[1])
            if length < 0:
                raise ProtocolError(f"a list of {length} values")
            self.values += length
            return lambda leaves, values, objects: list(islice(values, length))
        parts = [self._compile(part) for part in tree[-1]]
        count = len(parts)
        first = _first_of_run(tree[-1])
        take: Callable[..., list[Any]]
        if first is not None:  # 50 fields: one slice, not that many calls
            take = lambda leaves, values, objects: leaves[first : first + count]  # noqa: E731
        else:
            take = lambda leaves, values, objects: [part(leaves, values, objects) for part in parts]  # noqa: E731
        if kind == "l":
            return take
        if kind == "t":
            return lambda leaves, values, objects: tuple(take(leaves, values, objects))
        if kind == "d":
            keys = tree[1]
            return lambda leaves, values, objects: dict(zip(keys, take(leaves, values, objects), strict=True))
        raise ProtocolError(f"unknown kind of tree {kind!r}")


def _first_of_run(trees: Any) -> int | None:
    """The number of the first leaf, if `trees` are leaves with consecutive numbers."""
    if not trees or trees[0][0] != "L":
        return None
    first: int = trees[0][1]
    same = all(tree[0] == "L" and tree[1] == first + at for at, tree in enumerate(trees))
    return first if same else None


class Unpacker:
    """Rebuilds the batches of one pool of workers.

    Args:
        arena: where their blocks lie.
        workers: number of workers.
    """

    def __init__(self, arena: Arena, workers: int) -> None:
        self._arena = arena
        self._specs: list[dict[int, Spec]] = [{} for _ in range(workers)]

    def learn(self, worker: int, handle: Handle) -> Handle:
        """The handle with its spec compiled, whether it brings the spec or only names it.

        Called for every handle in the order of arrival, also for those that will be dropped: the worker
        sends a spec once. From here on the handle stands for itself, however long it waits.

        Raises:
            ProtocolError: the handle names a spec that the worker has not sent.
        """
        specs = self._specs[worker]
        if handle.spec is None:
            spec = specs.get(handle.spec_id)
            if spec is None:
                raise ProtocolError(f"worker {worker} names spec {handle.spec_id}, which it has not sent")
        else:
            spec = specs[handle.spec_id] = Spec(handle.spec)
            if len(specs) > SPECS:
                del specs[next(iter(specs))]
        return Handle(handle.spec_id, spec, handle.values, handle.parcel, handle.places)

    def blocks(self, handle: Handle) -> tuple[list[int], list[int]]:
        """Offsets of the blocks that the batch will have leases on, and of those that are copied out.

        Raises:
            ProtocolError: the handle does not fit its spec, or the arena.
        """
        self._check(handle.spec, handle)
        offsets = [offset for offset, _, _ in handle.places]
        copied = len(offsets) - len(handle.spec.large)
        return offsets[copied:], offsets[:copied]

    def unpack(self, handle: Handle) -> Any:
        """Put a batch together, whose handle has passed `blocks`.

        Raises:
            ProtocolError: the handle does not fit its spec.
            Exception: whatever unpickling a part of the batch raises.
        """
        spec: Spec = handle.spec
        places = handle.places
        leaves: list[Any] = [None] * len(spec.leaves)
        pickled = b""
        if len(places) == len(spec.large):
            parcel: Any = handle.parcel or b""
        else:
            offset, size, total = places[0]
            places = places[1:]
            if not spec.parcel_bytes <= total <= size:
                raise ProtocolError(f"a parcel of {total} bytes in a block of {size}")
            parcel = self._arena.mapping.memory[offset : offset + total]
            pickled = bytes(parcel[spec.parcel_bytes :])
        if len(parcel) < spec.parcel_bytes:
            raise ProtocolError(f"a parcel of {len(parcel)} bytes for a spec of {spec.parcel_bytes}")
        # Each in memory of its own: who keeps the labels does not keep the rest.
        for number, start, end, shape, dtype in spec.tensors:
            leaves[number] = _from_numpy(_ndarray(shape, dtype, bytearray(parcel[start:end])))
        for number, start, end, shape, dtype in spec.arrays:
            leaves[number] = _ndarray(shape, dtype, bytearray(parcel[start:end]))
        for place, start, end in spec.small:
            _cut(spec, place, bytearray(parcel[start:end]), leaves)
        for place, (offset, size, delta) in zip(spec.large, places, strict=True):
            if not 0 <= delta <= size - spec.sizes[place]:
                raise ProtocolError(f"{spec.sizes[place]} bytes at {delta} do not fit a block of {size}")
            self._look(spec, place, (offset, size), delta, leaves)
        objects: Any = ()
        if spec.objects:
            loaded = pickling.load(pickled, leaves)
            objects = (loaded,) if spec.objects == 1 else loaded
        return spec.build(leaves, iter(handle.values), objects)

    def _check(self, spec: Spec, handle: Handle) -> None:
        expected = len(spec.large) + bool(spec.objects or (handle.parcel is None and spec.parcel_bytes))
        if len(handle.places) != expected or len(handle.values) != spec.values:
            raise ProtocolError(
                f"{len(handle.places)} places and {len(handle.values)} values for a spec of {expected} and "
                f"{spec.values}"
            )
        for offset, size, _ in handle.places:
            if offset < 0 or size < 0 or offset + size > self._arena.mapping.length:
                raise ProtocolError(f"a block of {size} bytes at {offset} lies outside the arena")

    def exception(self, handle: Handle) -> BaseException:
        """The exception in a handle."""
        offset, size, total = handle.places[0]
        if not 0 <= offset <= self._arena.mapping.length - size or not 0 <= total <= size:
            raise ProtocolError(f"a parcel of {total} bytes in a block of {size}")
        return pickling.load_exception(bytes(self._arena.mapping.memory[offset : offset + total]))

    def _look(self, spec: Spec, place: int, block: tuple[int, int], delta: int, leaves: list[Any]) -> None:
        """Leaves over a block. One lease serves all leaves of the place."""
        members = spec.members[place]
        leaf = spec.leaves[members[0]]
        lease = self._arena.lease
        if len(members) == 1 and leaf.array:
            leaves[members[0]] = lease(block, delta, leaf.shape, leaf.dtype.str, leaf.strides)
        elif len(members) == 1 and leaf.strides is None and leaf.dtype in TYPESTR:
            array = lease(block, delta, leaf.shape, TYPESTR[leaf.dtype])
            leaves[members[0]] = torch.from_numpy(array)
        else:
            whole = torch.from_numpy(lease(block, delta, (spec.sizes[place],), "|u1"))
            for number in members:
                leaves[number] = spec.leaves[number].within(whole)


def _cut(spec: Spec, place: int, buffer: bytearray, leaves: list[Any]) -> None:
    members = spec.members[place]
    if len(members) == 1:
        leaves[members[0]] = spec.leaves[members[0]].over(buffer)
        return
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    for number in members:
        leaves[number] = spec.leaves[number].within(whole)
