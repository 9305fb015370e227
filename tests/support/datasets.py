"""Datasets, samplers and collates that tests share, and a plain description of what comes out of a loader.

All of it stands at module level, so that it reaches a worker under any start method. A sample is computed
from its index and made afresh at every access: a block reused too early, a batch out of its place or one
random number too many shows up as a wrong value.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import hashlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

# Containers that samples and batches are made of


class Point(NamedTuple):
    x: Any
    y: Any


class Keyed(dict):
    """A dict subclass with an attribute, and keys of any type."""

    def __init__(self, *args: Any, tag: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tag = tag


class Tagged(list):
    """A list subclass with an attribute."""

    tag = "class"


@dataclasses.dataclass
class Record:
    name: str
    value: Any


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    name: str
    value: Any = dataclasses.field(default_factory=list)


class Slotted:
    """An object without `__dict__`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Opaque:
    """An object that nothing but pickle knows how to carry."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Name(str):
    """A str subclass: a wire format that knows only str would lose its type."""

    __slots__ = ()


class Count(int):
    """An int subclass."""


# Samples: functions of the index


def tensor_sample(index: int) -> Any:
    return torch.arange(15, dtype=torch.float32).reshape(3, 5) + 1000 * index, index


def numpy_sample(index: int) -> Any:
    return [
        np.full((2, 3), index, dtype=np.float64),
        np.arange(4, dtype=np.int16) * index,
        np.array([True, index % 2 == 0]),
        np.float32(index / 3),
        np.int64(index),
        np.uint8(index % 256),
    ]


def dict_sample(index: int) -> Any:
    return {
        "image": torch.full((2, 4), index, dtype=torch.uint8),
        "name": f"sample {index}",
        "nested": {"score": index / 7, "flags": [index, index + 1]},
        3: torch.tensor(index, dtype=torch.bfloat16),
    }


def namedtuple_sample(index: int) -> Any:
    return Point(torch.tensor(index, dtype=torch.int32), Point(float(index), str(index)))


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensors": tensor_sample,
    "numpy": numpy_sample,
    "dict": dict_sample,
    "tuple": lambda i: (torch.tensor([i, -i]), (i / 3, b"%d" % i), torch.tensor(complex(i, 0.5))),
    "namedtuple": namedtuple_sample,
    "text": lambda i: ("ä" * (i % 5), b"\x00\xff" * i),
    "objects": lambda i: (Opaque({"index": i, "big": 2**70 + i, "set": {i}}), None, Record("r", i)),
    # 72 KiB for one sample: its batches lie in shared memory of their own.
    "large": lambda i: (torch.full((3, 64, 96), i, dtype=torch.float32), i),
    # Sizes from nothing to 160 KiB; the default collate refuses them.
    "ragged": lambda i: torch.full((i * 7919 % 41, 1000), i, dtype=torch.float32),
    # From the three global generators.
    "drawn": lambda i: (i, torch.rand(2), random.random(), np.random.rand(3)),
}


class Sized:
    """Has a length, which is a field of the class."""

    length: int

    def __len__(self) -> int:
        return self.length


# Map-style datasets


@dataclasses.dataclass(eq=False)
class MapDataset(Sized, Dataset):
    """Samples of one kind."""

    kind: str
    length: int

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return SAMPLES[self.kind](index)


class BatchedDataset(MapDataset):
    """Knows how to fetch a whole batch, and says so in the samples."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [("together", len(indices), self[index]) for index in indices]


class UnbatchedDataset(MapDataset):
    """Its `__getitems__` is None, which means that it has none."""

    __getitems__ = None


@dataclasses.dataclass(eq=False)
class FaultyDataset(MapDataset):
    """Raises at some indices."""

    bad: frozenset[int]
    error: type[Exception]

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise self.error(f"broken sample {index}")
        return super().__getitem__(index)


class Echo(Sized, Dataset):
    """Returns what it was asked for, with what is left of its type."""

    length = 1

    def __getitem__(self, key: Any) -> Any:
        return Record(f"{type(key).__module__}.{type(key).__qualname__}", key)


class BatchEcho(Echo):
    """Returns the batch of keys in the container in which it came."""

    def __getitems__(self, keys: Any) -> list[Any]:
        return [type(keys), keys]


@dataclasses.dataclass(eq=False)
class Made(Sized, Dataset):
    """Samples from a function of the index."""

    make: Callable[[int], Any]
    length: int

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


# Iterable datasets


@dataclasses.dataclass(eq=False)
class Stream(IterableDataset):
    """Worker k yields `lengths[k]` samples, numbered 1000 k + 0, 1, …; one process alone yields them all."""

    kind: str
    lengths: Sequence[int]

    def numbers(self) -> Iterator[int]:
        info = get_worker_info()
        for worker, length in enumerate(self.lengths):
            if info is None or worker % info.num_workers == info.id:
                yield from range(1000 * worker, 1000 * worker + length)

    def __iter__(self) -> Iterator[Any]:
        return map(SAMPLES[self.kind], self.numbers())


@dataclasses.dataclass(eq=False)
class SizedStream(Stream):
    """A stream that tells its length, which need not be true."""

    told: int

    def __len__(self) -> int:
        return self.told


class FaultyStream(Stream):
    """Every third sample is broken; its iterator goes on after that."""

    def __iter__(self) -> Iterator[Any]:
        return map(self._sample, self.numbers())

    def _sample(self, number: int) -> Any:
        if number % 3 == 2:
            raise ValueError(f"broken sample {number}")
        return SAMPLES[self.kind](number)


# Samplers


@dataclasses.dataclass(eq=False)
class Backwards(Sized, Sampler[int]):
    """From the last index to the first."""

    length: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length - 1, -1, -1))


@dataclasses.dataclass(eq=False)
class Drawing(Sized, Sampler[int]):
    """Draws each index when it is asked for, from the three global generators in turn.

    How far a loader runs ahead of the training step can be read from their states.
    """

    length: int

    def __iter__(self) -> Iterator[int]:
        draws = (
            lambda: int(torch.randint(self.length, ()).item()),
            lambda: random.randrange(self.length),
            lambda: int(np.random.randint(self.length)),
        )
        return (draws[position % 3]() for position in range(self.length))


@dataclasses.dataclass(eq=False)
class UnevenBatches(Sampler[list[int]]):
    """Batches of 1, 2, 3, 4, 1, 2, … indices."""

    indices: int

    def __iter__(self) -> Iterator[list[int]]:
        left, lengths = iter(range(self.indices)), itertools.cycle((1, 2, 3, 4))
        while batch := list(itertools.islice(left, next(lengths))):
            yield batch

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclasses.dataclass(eq=False)
class FailingSampler(Sampler[Any]):
    """Hands out its keys and then raises."""

    keys: Sequence[Any]

    def __iter__(self) -> Iterator[Any]:
        yield from self.keys
        raise LookupError(f"no key after {len(self.keys)}")

    def __len__(self) -> int:
        return len(self.keys) + 5


# Collates


def identity(batch: Any) -> Any:
    return batch


def wrap(batch: Any) -> Any:
    """A collate for batches and single samples alike."""
    return {"batch": batch, "type": type(batch).__name__}


def wrap_and_draw(batch: Any) -> Any:
    return {"batch": batch, "drawn": (torch.rand(1).item(), random.random(), np.random.rand())}


def alias(batch: Any) -> Any:
    """Several views of one tensor, and one tensor under two keys."""
    whole = torch.arange(24, dtype=torch.float64).reshape(4, 6) + len(batch)
    return {"a": whole, "b": whole, "t": whole.t(), "row": whole[1], "batch": list(batch)}


def storages(batch: Any) -> Any:
    """A tensor, its storage, and a typed one of another tensor."""
    whole = torch.arange(60, dtype=torch.float32) + len(batch)
    typed = torch.arange(len(batch), dtype=torch.int16)._typed_storage()
    return [whole, whole.untyped_storage(), whole[3:9], {"typed": typed, "batch": list(batch)}]


# What came out of a loader, in plain values that can be compared and printed

ATOMS = str | bytes | bytearray | bool | int | float | complex | np.generic | type | enum.Enum | range | None
ROWS, COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ROWS,
    torch.sparse_bsr: ROWS,
    torch.sparse_csc: COLUMNS,
    torch.sparse_bsc: COLUMNS,
}
QUANTISATION = ("q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis")


def is_storage_backed(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and tensor.device.type != "meta"


def _content(array: np.ndarray) -> str | list[Any]:
    """The bytes, or their digest and the first values where there are many."""
    raw = array.tobytes()
    if len(raw) <= 256:
        return raw.hex()
    return f"{hashlib.blake2b(raw, digest_size=16).hexdigest()} {array.reshape(-1)[:4].tolist()}…"


def _tensor_content(tensor: torch.Tensor) -> Any:
    plain = tensor.detach()
    if plain.is_nested:
        return [_tensor_content(part) for part in plain.unbind()]
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    if plain.layout in SPARSE_PARTS:
        return [_tensor_content(getattr(plain, part)()) for part in SPARSE_PARTS[plain.layout]]
    if plain.device.type == "meta":
        return "meta"
    if plain.is_quantized:
        per_tensor = plain.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        accessors = ("q_scale", "q_zero_point") if per_tensor else QUANTISATION
        quantiser = [np.asarray(getattr(plain, accessor)()).tolist() for accessor in accessors]
        return (str(plain.qscheme()), quantiser, _tensor_content(plain.int_repr()))
    # resolve_*: torch drops the lazy conjugation and negation on its way out of a worker; the value counts.
    flat = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return _content(flat.view(torch.uint8).numpy()) if flat.numel() else ""


class _Describer:
    """One walk over one batch; remembers tensors for their overlaps and containers for cycles."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.open: list[int] = []

    def walk(self, value: Any) -> Any:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, torch.Tensor):
            return self.tensor(kind, value)
        if isinstance(value, np.ndarray):
            content = [self.walk(item) for item in value.flat] if value.dtype.hasobject else _content(value)
            return (kind, value.dtype.str, value.shape, value.strides, value.flags.writeable, content)
        if isinstance(value, torch.UntypedStorage):
            return (kind, self.walk(torch.empty(0, dtype=torch.uint8).set_(value)))
        if isinstance(value, torch.TypedStorage):
            return (kind, str(value.dtype), self.walk(value._untyped_storage))
        if isinstance(value, ATOMS):
            return (kind, repr(value))
        if id(value) in self.open:
            return (kind, f"the container {len(self.open) - self.open.index(id(value))} levels up")
        self.open.append(id(value))
        try:
            return (kind, *self.inside(value))
        finally:
            self.open.pop()

    def inside(self, value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            yield [(self.walk(key), self.walk(item)) for key, item in value.items()]
            if isinstance(value, collections.defaultdict):
                yield repr(value.default_factory)
        elif isinstance(value, list | tuple | collections.deque):
            yield [self.walk(item) for item in value]
        elif isinstance(value, set | frozenset):
            yield sorted((self.walk(item) for item in value), key=repr)
        elif not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
            yield repr(value)
        if isinstance(slots := getattr(type(value), "__slots__", ()), tuple) and slots:
            yield {name: self.walk(getattr(value, name, None)) for name in slots}
        if attributes := getattr(value, "__dict__", None):
            yield {name: self.walk(item) for name, item in attributes.items()}

    def tensor(self, kind: str, tensor: torch.Tensor) -> Any:
        shape: Any = "nested" if tensor.is_nested else tuple(tensor.shape)
        strides = tensor.stride() if is_storage_backed(tensor) else None
        if is_storage_backed(tensor) and tensor.numel():
            self.tensors.append(tensor)
        coalesced = tensor.layout == torch.sparse_coo and tensor.is_coalesced()
        flags = (tensor.requires_grad, tensor.is_leaf, coalesced)
        return (kind, str(tensor.dtype), shape, strides, str(tensor.layout), flags, _tensor_content(tensor))

    def overlaps(self) -> list[tuple[int, int]]:
        """Pairs of tensors, by their order in the batch, that look at the same memory."""
        extents = enumerate(map(extent, self.tensors))
        return [
            (i, j)
            for (i, (start, end)), (j, (other_start, other_end)) in itertools.combinations(extents, 2)
            if other_start < end and start < other_end
        ]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the byte after the last one, that a strided tensor looks at."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def describe(batch: Any) -> Any:
    """Exact types, dtypes, shapes, strides and values of a batch, and which tensors share memory."""
    walk = _Describer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking into prototype tensors (nested, sparse CSR) warns
        described = walk.walk(batch)
    return (described, {"overlaps": overlaps}) if (overlaps := walk.overlaps()) else described


def difference(expected: Any, actual: Any, path: str = "batch") -> str | None:
    """Where two descriptions part, in words; None when they are equal."""
    if expected == actual:
        return None
    if type(expected) is type(actual) and isinstance(expected, list | tuple):
        if len(expected) != len(actual):
            return f"{path}: {len(expected)} entries expected, got {len(actual)}:\n  {expected}\n  {actual}"
        expected, actual = dict(enumerate(expected)), dict(enumerate(actual))
    if isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        parts = (difference(one, actual[key], f"{path}[{key!r}]") for key, one in expected.items())
        return next(found for found in parts if found is not None)
    return f"{path}:\n  expected {expected}\n  got      {actual}"


def assert_same(expected: Any, actual: Any, what: str = "batch") -> None:
    """Fail, naming the place, unless two batches are equal to the bit."""
    found = difference(describe(expected), describe(actual), what)
    assert found is None, found
