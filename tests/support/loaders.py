"""Samples, marks and short forms that the tests of whole loaders share."""

from __future__ import annotations

import gc
import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch.utils.data import dataloader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fastq_loader.extras.resume.text import dump
from fastq_loader.reading import generators
from tests.support.datasets import describe

T = TypeVar("T")

WORKERS = pytest.mark.parametrize("workers", [0, 2])
PERSISTENT = pytest.mark.parametrize("persistent", [False, True])
#: Some tests have more workers than a machine of two cores has room for, and the loader rightly warns.
MANY_WORKERS = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

#: 196,608 bytes in float32: more than the 64 KiB from which a tensor has shared memory of its own.
IMAGE = (3, 128, 128)
#: The batches of `range(8)` in twos.
EIGHT = [[0, 1], [2, 3], [4, 5], [6, 7]]


def image(index: int) -> torch.Tensor:
    return torch.full(IMAGE, float(index))


def image_and_label(index: int) -> tuple[torch.Tensor, int]:
    return image(index), index


def numbers(batches: Iterable[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def seed_all(torch_seed: int, *others: Any) -> None:
    """Seed torch, `random` and numpy: each with its own seed, or all with the same."""
    random_seed, numpy_seed = others or (torch_seed, torch_seed)
    torch.manual_seed(torch_seed)
    random.seed(random_seed)
    np.random.seed(numpy_seed)


def exactly(count: int, batches: Iterable[T]) -> Iterator[T]:
    """These batches, of which there are so many: a loop over none would assert nothing. It holds none."""
    iterator = iter(batches)
    for number in range(count):
        try:
            yield next(iterator)
        except StopIteration:
            raise AssertionError(f"{number} batches in place of {count}") from None
    assert next(iterator, iterator) is iterator, f"more than {count} batches"


def distinct(batches: Iterable[T], count: int | None = None) -> list[T]:
    """These batches, of which there are so many, or some, and no two are equal. If a loader gave nothing, or
    its first batch again and again, it would still equal itself."""
    found = list(batches)
    assert len(found) == (count or max(2, len(found)))
    assert len({repr(describe(batch)) for batch in found}) == len(found)
    return found


@contextmanager
def collector_off() -> Iterator[None]:
    """Objects end by their reference count alone, or not at all."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def generator_states(*roots: Any) -> list[str]:
    """States of the three shared generators, and of those that the objects hold, to be compared."""
    own, _ = generators.find({str(number): root for number, root in enumerate(roots)})
    return [dump(generators.state_of(each)) for each in (*generators.GLOBAL.values(), *own.values())]


class Wrapped:
    """torch_geometric's DataLoaderIterator (loader/base.py): it forwards, and changes the batch."""

    def __init__(self, iterator: Any, transform: Callable[[Any], Any]) -> None:
        self.iterator = iterator
        self.transform = transform

    def __iter__(self) -> Any:
        return self

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.iterator._reset(loader, first_iter)

    def __len__(self) -> int:
        return len(self.iterator)

    def __next__(self) -> Any:
        return self.transform(next(self.iterator))

    def __del__(self) -> None:
        if isinstance(self.iterator, _MultiProcessingDataLoaderIter):
            self.iterator.__del__()


def torch_has(text: str) -> bool:
    """Whether torch's loader has this in its code: what it says and does changes from version to version."""
    return text in inspect.getsource(dataloader)


class Trainer:
    """Is part of a cycle with its loader, as the loader's collate function is one of its methods."""

    def __init__(self, kind: Any, **options: Any) -> None:
        self.loader = kind(range(40), num_workers=2, collate_fn=self.collate, **options)
        self.batches = iter(self.loader)
        next(self.batches)

    def collate(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples)

    def __getstate__(self) -> dict[str, Any]:
        return {}
