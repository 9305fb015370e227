"""Hints: each kind comes once, at the user's line, costs no batch, and does not come in near misses."""

from __future__ import annotations

import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from fastq_loader import (
    DataLoader,
    DuplicateData,
    IdleWorker,
    LoaderHint,
    MemoryPressure,
    PinnedCopies,
    PrivateGenerators,
    SameOrder,
    StatefulDataLoader,
    TinyBatches,
    options,
)
from fastq_loader.extras.insight import hints
from tests.support.datasets import Stream
from tests.support.loaders import WORKERS
from tests.support.thorough import thorough

pytestmark = pytest.mark.processes

NUMBERS = range(64)
MIB = torch.zeros(1 << 20, dtype=torch.uint8)


class Whole(IterableDataset):
    def __init__(self, length: int, make: Callable[[int], Any] = torch.tensor) -> None:
        self.length, self.make = length, make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(self.length))


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return count(1)


def distributed(workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        NUMBERS,
        1,
        sampler=DistributedSampler(NUMBERS, 2, 0, **options),
        num_workers=workers,  # type: ignore[arg-type]
    )


def large() -> DataLoader[Any]:
    return DataLoader([MIB] * 8, num_workers=2, prefetch_factor=3)  # type: ignore[arg-type]


class Draws:
    """A dataset with a generator of its own: from the beginning, or from the start of a worker on."""

    def __init__(self, rng: Any = None) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> float:
        return float(self.rng.random())


def give_generator(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.rng = np.random.default_rng(worker)  # type: ignore[attr-defined]


def noise(schedule: Any = "dynamic", workers: int = 2) -> DataLoader[Any]:
    dataset: Any = Draws(None if workers else random.Random(0))
    return DataLoader(dataset, 4, num_workers=workers, worker_init_fn=give_generator, schedule=schedule)


def slowly(batch: Any, device: str | None) -> Any:
    time.sleep(0.01)
    return batch


@pytest.fixture
def easily_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small runs matter, there is no memory, and batches are page-locked without an accelerator."""
    monkeypatch.setattr(options, "pinning", lambda loader: (loader.pin_memory, None))
    monkeypatch.setattr("fastq_loader.epoch.base.page_locked", slowly)
    monkeypatch.setattr(hints, "_LEAST_PINNING", 0.0)
    monkeypatch.setattr(hints, "_LEAST_BATCHES", 1)
    monkeypatch.setattr(hints, "_LEAST_TIMES", 0.0)
    monkeypatch.setattr(hints, "_LEAST_SECONDS", float("-inf"))
    monkeypatch.setattr(hints, "_LEAST_WINDOW", 1 << 20)
    monkeypatch.setattr(hints, "memory_bytes", lambda: 0)


#: Of each kind: a loader, its epochs up to the one that tells, and what the text says.
CASES: dict[type[LoaderHint], tuple[Callable[[], DataLoader[Any]], int, str]] = {
    SameOrder: (lambda: distributed(2), 2, "DistributedSampler gives the same order in epochs 0 and 1"),
    DuplicateData: (lambda: DataLoader(Whole(16), 2, num_workers=2), 1, "every sample of Whole comes more"),
    IdleWorker: (
        lambda: DataLoader(Stream("drawn", [9]), num_workers=2),
        1,
        r"no batch .* \(worker 1\): Stream",
    ),
    TinyBatches: (lambda: DataLoader(range(4), num_workers=2), 1, "4 batches would have taken about "),
    PrivateGenerators: (lambda: noise(), 1, r"^dataset\.rng: each worker has its own copy"),
    PinnedCopies: (
        lambda: DataLoader(range(32), num_workers=2, pin_memory=True),  # type: ignore[arg-type]
        1,
        r"takes [\d.]+ ms, \d+% of the time: device='cuda' instead of pin_memory=True: up to about .* ×",
    ),
    MemoryPressure: (large, 1, "6 batches of 1.0 MB may be loaded ahead: 6 MB"),
}
KINDS = pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)


def iterate(loader: Any) -> int:
    return sum(1 for _ in loader)


def told(call: Callable[..., Any], *arguments: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", LoaderHint)
        call(*arguments)
    return caught


@pytest.mark.usefixtures("easily_told")
@KINDS
def test_each_kind_comes_once_at_the_users_line_and_says_what_was_seen(kind: type[LoaderHint]) -> None:
    make, epochs, text = CASES[kind]
    loader = make()
    found: list[Any] = []
    for epoch in range(epochs + 1):
        found += [(epoch + 1, warning) for warning in told(iterate, loader) if warning.category is kind]
    assert [epoch for epoch, _ in found] == [epochs]
    [(_, warning)] = found
    assert (warning.filename, warning.lineno) == (__file__, iterate.__code__.co_firstlineno + 1)
    assert re.search(text, str(warning.message))


@pytest.mark.usefixtures("easily_told")
def test_auto_is_not_told_of_tiny_batches() -> None:
    loader: Any = DataLoader(range(4), num_workers="auto", schedule="dynamic")  # type: ignore[arg-type]
    assert TinyBatches not in [warning.category for warning in told(iterate, loader)]


def only(kind: type[LoaderHint]) -> None:
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", kind)


@thorough(but={"kind": DuplicateData})
@pytest.mark.usefixtures("easily_told")
@KINDS
def test_as_an_error_it_costs_no_batch_and_the_epoch_ends_with_the_next_call(kind: type[LoaderHint]) -> None:
    make, epochs, _ = CASES[kind]
    loader = make()
    with warnings.catch_warnings():
        only(kind)
        for _ in range(epochs - 1):
            iterate(loader)
        iterator, raised, batches = iter(loader), [], 0
        while True:
            try:
                next(iterator)
            except kind:
                raised.append(batches)
            except StopIteration:
                break
            else:
                batches += 1
        with pytest.raises(StopIteration):
            next(iterator)
        iterate(loader)  # it does not come again
        warnings.simplefilter("ignore")
        assert (len(raised), batches) == (1, iterate(make()))


def twice(loader: DataLoader[Any]) -> None:
    assert iterate(loader) == iterate(loader) > 0


def tell_epochs(loader: DataLoader[Any]) -> None:
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        assert iterate(loader) == 32


def break_off(loader: DataLoader[Any]) -> None:
    assert len(list(islice(loader, 31))) == 31
    assert iterate(loader) == 32


def side_by_side(loader: DataLoader[Any]) -> None:
    assert len(list(zip(loader, loader, strict=True))) == len(loader)


def resume(loader: Any) -> None:
    list(islice(loader, 2))
    loader.load_state_dict(loader.state_dict())
    assert iterate(loader) == len(loader) - 2


def given(workers: int, sampler: Any, size: int | None = 4) -> DataLoader[Any]:
    return DataLoader(NUMBERS, size, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]


SHUFFLES: dict[str, Callable[[int], Any]] = {
    "DistributedSampler": lambda workers: distributed(workers),
    "in a batch sampler": lambda workers: DataLoader(
        NUMBERS,  # type: ignore[arg-type]
        batch_sampler=BatchSampler(DistributedSampler(NUMBERS, 2, 0), 1, False),  # type: ignore[arg-type]
        num_workers=workers,
    ),
}


@thorough(but={"workers": 0})
@WORKERS
@pytest.mark.parametrize("name", SHUFFLES)
def test_samplers_that_nobody_told_the_epoch(name: str, workers: int) -> None:
    loader = SHUFFLES[name](workers)
    assert [warning.category for warning in told(twice, loader)] == [SameOrder]


ORDERS: dict[str, tuple[Callable[[int], DataLoader[Any]], Callable[[DataLoader[Any]], object]]] = {
    "told": (distributed, tell_epochs),
    "no shuffle": (lambda workers: distributed(workers, shuffle=False), twice),
    "broken off": (distributed, break_off),
    "two at once": (distributed, side_by_side),
    "resumed": (
        lambda workers: StatefulDataLoader(
            NUMBERS,  # type: ignore[arg-type]
            sampler=DistributedSampler(NUMBERS, 2, 0),
            num_workers=workers,
        ),
        resume,
    ),
}


@thorough(but={"workers": 0})
@WORKERS
@pytest.mark.parametrize("name", ORDERS)
def test_orders_that_nobody_is_told_of(name: str, workers: int) -> None:
    make, use = ORDERS[name]
    use(make(workers))


@thorough(after=1)
@pytest.mark.parametrize("arguments", [("round_robin",), ("dynamic", 0)], ids=["torch's order", "no workers"])
def test_own_generators_that_nobody_is_told_of(arguments: tuple[Any, ...]) -> None:
    assert not told(twice, noise(*arguments))


def next_only(loader: DataLoader[Any]) -> None:
    """torch's own tests: no call that gives a batch of what every worker repeats warns."""
    iterator = iter(loader)
    for _ in range(16):
        next(iterator)


def test_the_end_of_an_endless_stream_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hints._MOMENTS, DuplicateData, 20)
    iterator = iter(DataLoader(Endless(), num_workers=2))
    assert len(list(islice(iterator, 20))) == 20
    with pytest.raises(DuplicateData):
        next(iterator)
    assert next(iterator).item() == 11


#: `extras/insight/test_advice.py` has more of them.
STREAMS: dict[str, tuple[Callable[[], DataLoader[Any]], Callable[[DataLoader[Any]], object]]] = {
    "no worker": (lambda: DataLoader(Whole(16)), twice),
    "broken off": (lambda: DataLoader(Whole(16), 2, num_workers=2), next_only),
    "parts": (lambda: DataLoader(Stream("tensors", [9, 9]), num_workers=2), twice),
    "ten batches": (lambda: DataLoader(range(10), num_workers=2), twice),  # type: ignore[arg-type]
}


@thorough(after=3)
@pytest.mark.parametrize("name", STREAMS)
def test_streams_that_nobody_is_told_of(name: str) -> None:
    make, use = STREAMS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", LoaderHint)
        use(make())


def test_memory_that_the_loader_has_already_counts_as_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "_LEAST_WINDOW", 1 << 20)
    monkeypatch.setattr(hints, "memory_bytes", lambda: 11 << 20)  # less than two windows
    assert iterate(large()) == 8
