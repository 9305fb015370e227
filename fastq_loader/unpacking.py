"""A handle becomes a batch again: views with leases on blocks, copies of what is small.

Runs in the consumer, on the thread that calls `next()`; `packing` is the other side and describes the
spec. A spec is compiled once, when a worker first names it, so that the cost of a batch is the cost of its
leaves. Nothing that a spec or a handle says is believed: whatever could reach outside of its block, or make
torch or numpy raise, is refused when it arrives.
"""

from __future__ import annotations

import math
import re
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
from fastq_loader.messages import Handle, unseal
from fastq_loader.packing import DEEPEST, SPECS, aligned, contiguous_strides

_from_numpy, _ndarray = torch.from_numpy, np.ndarray


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


class _Leaf:
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
            raise ProtocolError(f"malformed spec: {error!r}") from error

    def _read(self, spec: tuple[Any, ...]) -> None:
        tree, metas, self.sizes = spec
        if not all(type(size) is int and size >= 0 for size in self.sizes):
            raise ProtocolError("a place whose size is no number")
        self.leaves = [_Leaf(meta) for meta in metas]
        self.members: list[list[int]] = [[] for _ in self.sizes]  # place → its leaves
        for number, leaf in enumerate(self.leaves):
            self.members[leaf.place].append(number)
        for size, members in zip(self.sizes, self.members, strict=True):
            self._check_place(size, [self.leaves[number] for number in members])
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
        self.build = self._compile(tree, 0)

    def _check_place(self, size: int, leaves: list[_Leaf]) -> None:
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


class Unpacker:
    """Rebuilds the batches of one pool of workers.

    Args:
        arena: where their blocks lie.
        workers: number of workers.
        token: the pool's; nothing is unpickled that it does not stand before.
    """

    def __init__(self, arena: Arena, workers: int, token: bytes) -> None:
        self._token = token
        self._arena = arena
        _, self._end = arena.mapping.region(workers - 1)  # tables lie behind it
        self._specs: list[dict[int, Spec]] = [{} for _ in range(workers)]

    def learn(self, worker: int, handle: Handle) -> Handle:
        """The handle with its spec compiled, whether it brings the spec or only names it.

        Called for every handle in the order of arrival, also for those that will be dropped: the worker
        sends a spec once. From here on the handle stands for itself, however long it waits.

        Raises:
            ProtocolError: the handle names a spec that the worker has not sent, or one that is none, or does
                not fit it.
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
        self._check(spec, handle)
        return Handle(handle.spec_id, spec, handle.values, handle.parcel, handle.places)

    def forget(self, worker: int) -> None:
        """Another process has this number from here on: it numbers its specs anew."""
        self._specs[worker] = {}

    def _check(self, spec: Spec, handle: Handle) -> None:
        places, parcel = handle.places, handle.parcel or b""
        boxed = bool(spec.objects or (handle.parcel is None and spec.parcel_bytes))  # it lies in a block
        if len(places) != len(spec.large) + boxed or len(handle.values) != spec.values:
            raise ProtocolError(
                f"{len(places)} places and {len(handle.values)} values for a spec of "
                f"{len(spec.large) + boxed} and {spec.values}"
            )
        if not boxed and len(parcel) < spec.parcel_bytes:
            raise ProtocolError(f"a parcel of {len(parcel)} bytes for a spec of {spec.parcel_bytes}")
        for number, (offset, size, into) in enumerate(places, -boxed):
            if offset < 0 or size < 0 or offset + size > self._end:
                raise ProtocolError(f"{size} bytes at {offset} lie outside the workers' parts of the arena")
            if number < 0:
                if not spec.parcel_bytes <= into <= size:
                    raise ProtocolError(f"a parcel of {into} bytes in a block of {size}")
            elif not 0 <= into <= size - spec.sizes[spec.large[number]]:
                raise ProtocolError(f"a leaf {into} bytes into a block of {size} does not fit")

    def used(self, handle: Handle) -> tuple[tuple[int, int], ...]:
        """The blocks (offset, bytes needed) that a handle lies in. It was learnt."""
        spec: Spec = handle.spec
        places = handle.places
        boxed = len(places) - len(spec.large)
        parcels = [(offset, max(total, 1)) for offset, _, total in places[:boxed]]
        large = zip(places[boxed:], spec.large, strict=True)
        return (*parcels, *[(offset, into + spec.sizes[place]) for (offset, _, into), place in large])

    def open(self, handle: Handle) -> tuple[list[int], list[int], bytes]:
        """What has to be known before a batch is put together. The handle was learnt.

        Returns:
            Offsets of the blocks that the batch will have leases on, offsets of those that are copied out,
            and what `unpack` will unpickle.

        Raises:
            ProtocolError: what should be unpickled is none of this pool's pickles.
        """
        spec: Spec = handle.spec
        pickled = b""
        if spec.objects:
            offset, _, total = handle.places[0]
            sealed = self._arena.mapping.memory[offset + spec.parcel_bytes : offset + total]
            pickled = unseal(bytes(sealed), self._token)
        offsets = [offset for offset, _, _ in handle.places]
        copied = len(offsets) - len(spec.large)
        return offsets[copied:], offsets[:copied], pickled

    def unpack(self, handle: Handle, pickled: bytes) -> Any:
        """Put a batch together, with what `open` found.

        Raises:
            ProtocolError: what was unpickled is not what the spec speaks of.
            Exception: whatever unpickling a part of the batch raises.
        """
        spec: Spec = handle.spec
        places = handle.places
        leaves: list[Any] = [None] * len(spec.leaves)
        if len(places) == len(spec.large):
            parcel: Any = handle.parcel or b""
        else:
            offset = places[0][0]
            places = places[1:]
            parcel = self._arena.mapping.memory[offset : offset + spec.parcel_bytes]
        # Each in memory of its own: who keeps the labels does not keep the rest.
        for number, start, end, shape, dtype in spec.tensors:
            leaves[number] = _from_numpy(_ndarray(shape, dtype, bytearray(parcel[start:end])))
        for number, start, end, shape, dtype in spec.arrays:
            leaves[number] = _ndarray(shape, dtype, bytearray(parcel[start:end]))
        for place, start, end in spec.small:
            _cut(spec, place, bytearray(parcel[start:end]), leaves)
        for place, (offset, size, delta) in zip(spec.large, places, strict=True):
            self._look(spec, place, (offset, size), delta, leaves)
        objects: Any = ()
        if spec.objects:
            loaded = pickling.load(pickled, leaves)
            objects = (loaded,) if spec.objects == 1 else loaded
            if type(objects) is not tuple or len(objects) != spec.objects:
                raise ProtocolError(f"{spec.objects} objects were announced, and are not there")
        return spec.build(leaves, iter(handle.values), objects)

    def exception(self, handle: Handle) -> BaseException:
        """The exception in a handle that was learnt.

        Raises:
            ProtocolError: there is none of this pool's.
        """
        spec: Spec = handle.spec
        if spec.leaves or spec.values or spec.objects != 1:
            raise ProtocolError("a batch where an exception should be")
        return pickling.load_exception(self.open(handle)[2])

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
