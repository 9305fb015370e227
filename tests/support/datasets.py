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
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, Subset, get_worker_info

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


def tuple_sample(index: int) -> Any:
    return torch.tensor([index, -index]), (index / 3, b"%d" % index), complex_sample(index)


def complex_sample(index: int) -> torch.Tensor:
    return torch.complex(torch.tensor(float(index)), torch.tensor(0.5))


def namedtuple_sample(index: int) -> Any:
    return Point(torch.tensor(index, dtype=torch.int32), Point(float(index), str(index)))


def text_sample(index: int) -> Any:
    return "ä" * (index % 5), b"\x00\xff" * index


def object_sample(index: int) -> Any:
    return Opaque({"index": index, "big": 2**70 + index, "set": {index}}), None, Record("r", index)


def large_sample(index: int) -> Any:
    """72 KiB for one sample: its batches lie in shared memory of their own."""
    return torch.full((3, 64, 96), index, dtype=torch.float32), index


def ragged_sample(index: int) -> Any:
    """Sizes from nothing to 160 KiB; the default collate refuses them."""
    return torch.full((index * 7919 % 41, 1000), index, dtype=torch.float32)


def drawn_sample(index: int) -> Any:
    """Draw from the three global generators."""
    return index, torch.rand(2), random.random(), np.random.rand(3)


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensors": tensor_sample,
    "numpy": numpy_sample,
    "dict": dict_sample,
    "tuple": tuple_sample,
    "namedtuple": namedtuple_sample,
    "text": text_sample,
    "objects": object_sample,
    "large": large_sample,
    "ragged": ragged_sample,
    "drawn": drawn_sample,
}


# Map-style datasets


@dataclasses.dataclass(eq=False)
class MapDataset(Dataset):
    """`size` samples of one kind."""

    kind: str
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
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


class DoublingSubset(Subset):
    """Overrides `__getitem__` and not `__getitems__`, past the check in torch's own constructor."""

    def __init__(self, dataset: Dataset, indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.indices = indices

    def __getitem__(self, index: int) -> Any:
        return 2 * super().__getitem__(index)


@dataclasses.dataclass(eq=False)
class Echo(Dataset):
    """Returns what it was asked for, with what is left of its type."""

    size: int = 1

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> Any:
        return Record(f"{type(key).__module__}.{type(key).__qualname__}", key)


class BatchEcho(Echo):
    """Returns the batch of keys in the container in which it came."""

    def __getitems__(self, keys: Any) -> list[Any]:
        return [type(keys), keys]


@dataclasses.dataclass(eq=False)
class Made(Dataset):
    """`size` samples from a function of the index."""

    make: Callable[[int], Any]
    size: int

    def __len__(self) -> int:
        return self.size

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
        return (SAMPLES[self.kind](number) for number in self.numbers())


@dataclasses.dataclass(eq=False)
class SizedStream(Stream):
    """A stream that tells its length, which need not be true."""

    told: int

    def __len__(self) -> int:
        return self.told


@dataclasses.dataclass(eq=False)
class FaultyNumbers:
    """An iterator that raises at every third number and then goes on."""

    kind: str
    numbers: Iterator[int]

    def __iter__(self) -> FaultyNumbers:
        return self

    def __next__(self) -> Any:
        number = next(self.numbers)
        if number % 3 == 2:
            raise ValueError(f"broken sample {number}")
        return SAMPLES[self.kind](number)


class FaultyStream(Stream):
    """A stream with broken samples in it."""

    def __iter__(self) -> Iterator[Any]:
        return FaultyNumbers(self.kind, self.numbers())


# Samplers


@dataclasses.dataclass(eq=False)
class Backwards(Sampler[int]):
    """From the last index to the first."""

    size: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


@dataclasses.dataclass(eq=False)
class Drawing(Sampler[int]):
    """Draws each index when it is asked for, from the three global generators in turn.

    How far a loader runs ahead of the training step can be read from their states.
    """

    size: int

    def __iter__(self) -> Iterator[int]:
        for position in range(self.size):
            if position % 3 == 0:
                yield int(torch.randint(self.size, ()).item())
            elif position % 3 == 1:
                yield random.randrange(self.size)
            else:
                yield int(np.random.randint(self.size))

    def __len__(self) -> int:
        return self.size


@dataclasses.dataclass(eq=False)
class UnevenBatches(Sampler[list[int]]):
    """Batches of 1, 2, 3, 4, 1, 2, … indices."""

    size: int

    def batches(self) -> list[list[int]]:
        found: list[list[int]] = []
        start = 0
        while start < self.size:
            length = min(1 + len(found) % 4, self.size - start)
            found.append(list(range(start, start + length)))
            start += length
        return found

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())

    def __len__(self) -> int:
        return len(self.batches())


@dataclasses.dataclass(eq=False)
class CountingSampler(Sampler[Any]):
    """Counts the calls of `__iter__` (no generator, so each call counts) and the keys handed out."""

    keys: Sequence[Any]
    iterations: int = 0
    handed_out: int = 0

    def __iter__(self) -> Iterator[Any]:
        self.iterations += 1
        return self._hand_out()

    def _hand_out(self) -> Iterator[Any]:
        for key in self.keys:
            self.handed_out += 1
            yield key

    def __len__(self) -> int:
        return len(self.keys)


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
    if type(plain) is not torch.Tensor and not plain.is_nested:
        plain = plain.as_subclass(torch.Tensor)
    if plain.is_nested:
        return ("nested", [_tensor_content(part) for part in plain.unbind()])
    if plain.layout == torch.sparse_coo:
        indices, values = plain._indices(), plain._values()
        return ("coo", plain.is_coalesced(), _tensor_content(indices), _tensor_content(values))
    if plain.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (plain.crow_indices(), plain.col_indices(), plain.values())
        return ("compressed rows", [_tensor_content(part) for part in parts])
    if plain.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (plain.ccol_indices(), plain.row_indices(), plain.values())
        return ("compressed columns", [_tensor_content(part) for part in parts])
    if plain.device.type == "meta":
        return "meta"
    if plain.is_quantized:
        return (str(plain.qscheme()), _quantizer(plain), _tensor_content(plain.int_repr()))
    # resolve_*: torch drops the lazy conjugation and negation on its way out of a worker; the value counts.
    flat = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return ""
    return _content(flat.view(torch.uint8).numpy())


def _quantizer(tensor: torch.Tensor) -> Any:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.q_scale(), tensor.q_zero_point()
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return scales.tolist(), zeros.tolist(), tensor.q_per_channel_axis()


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
            return self.array(kind, value)
        if isinstance(value, torch.UntypedStorage):
            return (kind, self.walk(torch.empty(0, dtype=torch.uint8).set_(value)))
        if isinstance(value, torch.TypedStorage):
            return (kind, str(value.dtype), self.walk(value._untyped_storage))
        if value is None or isinstance(
            value,
            str | bytes | bytearray | bool | int | float | complex | np.generic | type | enum.Enum | range,
        ):
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
        flags = [name for name in ("requires_grad", "is_leaf", "is_coalesced") if _flag(tensor, name)]
        return (kind, str(tensor.dtype), shape, strides, str(tensor.layout), flags, _tensor_content(tensor))

    def array(self, kind: str, array: np.ndarray) -> Any:
        content = [self.walk(item) for item in array.flat] if array.dtype.hasobject else _content(array)
        return (kind, array.dtype.str, array.shape, array.strides, array.flags.writeable, content)

    def overlaps(self) -> list[tuple[int, int]]:
        """Pairs of tensors, by their order in the batch, that look at the same memory."""
        extents = [extent(tensor) for tensor in self.tensors]
        return [
            (i, j)
            for i, (start, end) in enumerate(extents)
            for j in range(i + 1, len(extents))
            if extents[j][0] < end and start < extents[j][1]
        ]


def _flag(tensor: torch.Tensor, name: str) -> bool:
    if name == "is_coalesced":
        return tensor.layout == torch.sparse_coo and tensor.is_coalesced()
    return bool(getattr(tensor, name))


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
        for position, (one, other) in enumerate(zip(expected, actual, strict=True)):
            if (found := difference(one, other, f"{path}[{position}]")) is not None:
                return found
    if isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        for key, one in expected.items():
            if (found := difference(one, actual[key], f"{path}[{key!r}]")) is not None:
                return found
    return f"{path}:\n  expected {expected}\n  got      {actual}"


def assert_same(expected: Any, actual: Any, what: str = "batch") -> None:
    """Fail, naming the place, unless two batches are equal to the bit."""
    found = difference(describe(expected), describe(actual), what)
    assert found is None, found
