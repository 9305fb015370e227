"""Rows B5, B7 and B8: whatever tensors and objects a batch is made of, they arrive as they are with torch.

Tables of cases, each a function that makes a sample in the worker. One loader carries a whole table. What
packing does to each kind of leaf and container is in `packing/test_pack.py`.
"""

from __future__ import annotations

import array
import datetime
import decimal
import fractions
import functools
import pathlib
import pickle
import uuid
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from fastq_loader import DataLoader
from tests.support.datasets import (
    Colour,
    Count,
    Level,
    Made,
    Opaque,
    assert_same,
    describe,
    dict_sample,
    difference,
    identity,
    namedtuple_sample,
)
from tests.support.loaders import WORKERS, exactly, image, image_and_label
from tests.support.thorough import thorough

pytestmark = [
    pytest.mark.processes,
    # torch warns that quantized, nested and sparse tensors are unfinished, unchecked or on their way out.
    pytest.mark.filterwarnings(
        "ignore:.*(prototype stage|beta state|Sparse invariant checks|TypedStorage).*:UserWarning",
        "ignore:.*(quantized dtypes|torch.ao.quantization).*:UserWarning",
        "ignore:.*(quantiz|TypedStorage).*:DeprecationWarning",
    ),
]


class Cases:
    """A dataset of the cases of a table."""

    def __init__(self, table: Callable[[], Mapping[Any, Callable[..., Any]]]) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table())

    def __getitem__(self, index: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # prototype kinds of tensors warn where they are made
            return list(self.table().values())[index]()


def outcomes(
    kind: Any, cases: Cases, workers: int, describe: Callable[[Any], Any] = describe
) -> dict[str, Any]:
    """Of each case its batch, described, or the type of the error."""
    ahead = 20 if workers else None  # errors and batches are received many at once
    loader = kind(cases, None, num_workers=workers, collate_fn=identity, prefetch_factor=ahead)
    iterator = iter(loader)
    found = {}
    for name in cases.table():
        try:
            found[name] = describe(next(iterator))
        except Exception as error:
            error.with_traceback(None)  # it leads to the iterator
            found[name] = type(error)
    return found


class Marked(torch.Tensor):
    """A tensor subclass."""


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape)


@functools.cache
def tensor_cases() -> dict[str, Callable[[], torch.Tensor]]:
    """Name → a function that makes the tensor."""
    base = numbers(3, 4)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    parts = [numbers(2, 3), numbers(4, 3)]
    return {
        "channels_last and large": lambda: numbers(2, 3, 90, 90).to(memory_format=torch.channels_last),
        "overlapping itself": lambda: numbers(12).as_strided((5, 4), (2, 1)),
        "sparse COO, uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (4,)),
        "sparse COO, large": lambda: numbers(200, 200).to_sparse(),
        "sparse CSR, large": lambda: numbers(200, 200).to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor(parts),
        "nested, jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
        "quantized per channel": lambda: torch.quantize_per_channel(base, scales, zeros, 0, torch.qint8),
        "large subclass": lambda: numbers(300, 400).as_subclass(Marked),
        "conjugated lazily": lambda: torch.complex(base, base + 1).conj(),
        "negated lazily": lambda: torch.complex(base, base + 1).conj().imag,
        "meta": lambda: torch.empty(3, 4, device="meta"),
    }


@pytest.fixture(scope="module", autouse=True)
def _prototypes_made_once() -> None:
    """The first jagged tensor of a process makes torch create a folder, which is no leak of a loader."""
    list(map(Cases(tensor_cases).__getitem__, range(len(tensor_cases()))))


def test_b5_tensors_of_a_users_collate_arrive_as_they_are_without_workers() -> None:
    """torch's own workers lose lazy conjugation and quantizers."""
    expected = outcomes(TorchDataLoader, Cases(tensor_cases), 0)
    for workers in (0, 2):
        for name, found in outcomes(DataLoader, Cases(tensor_cases), workers).items():
            assert difference(expected[name], found, f"{workers} workers: {name}") is None


def recursive_object() -> Opaque:
    outer = Opaque(None)
    outer.value = {"self": outer, "t": torch.ones(2)}
    return outer


def structured() -> np.ndarray:
    return np.array([(1, 2.5, "x"), (3, 4.5, "yz")], dtype=[("i", "i4"), ("f", "f8"), ("s", "U3")])


def many_dimensions() -> list[torch.Tensor]:
    tensor = numbers(6).view([1] * 63 + [2, 3])
    return [tensor, tensor.transpose(-1, 0), tensor.expand([2] + [1] * 62 + [2, 3])]


def read_only(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


@functools.cache
def object_cases() -> dict[str, Callable[[], Any]]:
    """Name → a function that makes the batch."""
    return {
        "object with large arrays": lambda: Opaque([numbers(200, 200), np.ones((200, 200))]),
        "recursive object": recursive_object,
        "packed sequence": lambda: pack_sequence([torch.arange(3), torch.arange(2)]),
        "text": lambda: ["ä\U0001f600", "\ud800", "\0", "x" * 200_000, bytes(200_000), bytearray(b"abc")],
        "sets and enums": lambda: [{1, 2}, frozenset({"a", (1, 2)}), Level.HIGH, {Colour.BLUE: Count(3)}],
        "library types": lambda: [
            *(datetime.datetime(2024, 2, 29, 12), decimal.Decimal("1.10"), fractions.Fraction(1, 3)),
            *(uuid.UUID(int=5), pathlib.PurePosixPath("/a"), array.array("i", [1, 2])),
        ],
        "numpy, read-only": lambda: [read_only(np.ones(3)), read_only(np.ones((200, 200)))],
        "numpy, foreign byte order": lambda: [np.full(3, 5, dtype=">i4"), np.full(100_000, 5, dtype=">i4")],
        "numpy, large": lambda: [np.asfortranarray(np.ones((300, 100))), structured().repeat(20_000)],
        "more dimensions than numpy has": many_dimensions,
        "annotations": lambda: [{"box": numbers(4), "area": number / 3} for number in range(500)],
    }


def object_cases_beside(large: bool) -> dict[str, Callable[[], Any]]:
    if not large:
        return object_cases()
    return {name: lambda make=make: [make(), image(3)] for name, make in object_cases().items()}


@thorough(after=1)
@pytest.mark.parametrize("large", [True, False], ids=["beside a large tensor", "small"])
def test_b7_a_batch_of_any_python_objects_equals_torchs(large: bool) -> None:
    cases = functools.partial(object_cases_beside, large)
    for workers in (0, 2):
        torchs, ours = (outcomes(kind, Cases(cases), workers) for kind in (TorchDataLoader, DataLoader))
        for name, expected in torchs.items():
            if "read-only" in name and workers and pickle.DEFAULT_PROTOCOL > 4:
                continue  # with Python 3.14's pickle torch's arrays stay so; ours may be written
            assert difference(expected, ours[name], f"{workers} workers: {name}") is None


class PinCounter:
    """An object with a `pin_memory` of its own."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.pinned = 0

    def pin_memory(self) -> PinCounter:
        self.value = self.value.pin_memory()
        self.pinned += 1
        return self


@thorough(but={"workers": 0})
@WORKERS
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
def test_b7_pinned_batches_are_equal_and_pinned_where_there_is_an_accelerator(workers: int) -> None:
    pins = torch.accelerator.is_available()
    for make in (dict_sample, namedtuple_sample, image_and_label):
        plain = list(TorchDataLoader(Made(make, 8), 4, num_workers=workers))
        pinned = list(DataLoader(Made(make, 8), 4, num_workers=workers, pin_memory=True))
        assert_same(plain, pinned)
    assert [images.is_pinned() for images, _ in pinned] == [pins] * 2
    custom = DataLoader(Made(image, 2), None, collate_fn=PinCounter, num_workers=workers, pin_memory=True)
    assert [(one.pinned, one.value.is_pinned()) for one in custom] == [(pins, pins)] * 2


class Celsius:
    """A type that the default collate knows only when it is told."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees


def collate_celsius(batch: list[Celsius], *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.tensor([one.degrees for one in batch])


def collate_tensors_as_list(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
    return {"mine": list(batch)}


@thorough(but={"workers": 2})
@WORKERS
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("given", [None, default_collate], ids=["default", "given as collate_fn"])
def test_b8_torchs_collate_map_can_be_added_to_and_changed_and_is_left_alone(
    workers: int, given: Callable[[Any], Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_collate_fn_map, Celsius, collate_celsius)
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, collate_tensors_as_list)
    before = dict(default_collate_fn_map)
    inherited = "fork" if workers else None
    loader = DataLoader(
        Made(warm_image, 4), 2, None, None, None, workers, given, multiprocessing_context=inherited
    )
    for position, (images, degrees) in enumerate(exactly(2, loader)):
        assert degrees.tolist() == [2 * position, 2 * position + 1]
        assert_same({"mine": [image(2 * position), image(2 * position + 1)]}, images)
    assert default_collate_fn_map == before


def warm_image(index: int) -> tuple[torch.Tensor, Celsius]:
    return image(index), Celsius(index)


class Holder:
    """An object that refers to a list of its batch."""

    def __init__(self, held: list[int]) -> None:
        self.held = held


def shared_list(index: int) -> dict[str, Any]:
    held = [index] * 3
    return {"list": held, "holder": Holder(held), "large": torch.zeros(100_000)}


def test_b7_an_object_and_its_batch_share_a_list_as_with_torch() -> None:
    for kind in (TorchDataLoader, DataLoader):
        for batch in exactly(4, kind(Made(shared_list, 4), None, num_workers=1, collate_fn=identity)):
            assert batch["holder"].held is batch["list"]
