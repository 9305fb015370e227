"""What both iterators have in common: the base seed, the lines that warnings name, and what they refuse."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from fastq_loader import DataLoader
from fastq_loader.iterators import base
from tests.conftest import of_kind
from tests.support.datasets import FaultyDataset, SizedStream
from tests.support.loaders import torch_has

pytestmark = pytest.mark.processes


def make(kind: Any, **arguments: Any) -> Any:
    return kind(arguments.pop("dataset", range(4)), **arguments)


def iterate(loader: Any) -> int:
    return sum(1 for _ in loader)


def warned(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[tuple[str, str, int]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*arguments, **keywords)
    return [
        (str(warning.message), warning.filename, warning.lineno) for warning in of_kind(caught, UserWarning)
    ]


def texts(found: list[tuple[str, str, int]]) -> list[str]:
    return [text for text, _, _ in found]


@pytest.mark.parametrize("workers", [0, 2])
def test_i9b_the_length_of_a_stream_warns_in_torchs_words_at_the_users_line(workers: int) -> None:
    """The line that calls `next()`; older versions of torch name a line of their own."""
    found = []
    for kind in (TorchDataLoader, DataLoader):
        loader = make(kind, dataset=SizedStream("tensors", [3], told=2), num_workers=workers)
        assert len(loader) == 2
        found.append(warned(iterate, loader))
    assert texts(found[0]) == texts(found[1])
    assert {(file, line) for _, file, line in found[1]} == {(__file__, iterate.__code__.co_firstlineno + 1)}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the warning is about having no accelerator")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", ["", "cuda"])
def test_i9b_pinning_without_an_accelerator_warns_in_torchs_words(workers: int, device: str) -> None:
    """torch names a line of its own."""
    given = {"pin_memory": True, "pin_memory_device": device, "num_workers": workers}
    ours = warned(iterate, make(DataLoader, **given))
    if torch_has("no accelerator is found"):  # older versions say nothing, or fail
        assert texts(ours) == texts(warned(iterate, make(TorchDataLoader, **given)))
    assert len(ours) == (2 if device else 1)
    assert {(file, line) for _, file, line in ours} == {(__file__, iterate.__code__.co_firstlineno + 1)}


def test_i9b_more_workers_than_cpus_warn_at_construction_as_torch_does() -> None:
    """It is torch's own check, and names a line of torch's constructor."""
    workers = len(os.sched_getaffinity(0)) + 1
    torchs, ours = (warned(make, kind, num_workers=workers) for kind in (TorchDataLoader, DataLoader))
    assert len(ours) == 1
    assert ours == torchs


def test_a_warning_that_was_made_an_error_loses_its_batch_as_with_torch() -> None:
    for kind in (TorchDataLoader, DataLoader):
        loader = make(kind, dataset=SizedStream("tensors", [4], told=2), batch_size=None)
        assert len(loader) == 2
        iterator = iter(loader)
        assert [next(iterator)[1] for _ in range(2)] == [0, 1]
        for number in (2, 3):
            with pytest.raises(UserWarning, match=f"{number + 1} samples have been fetched"):
                next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)


def test_a_batch_whose_warning_was_interrupted_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(text: str, category: type[Warning]) -> None:
        raise KeyboardInterrupt

    iterator = iter(DataLoader(SizedStream("tensors", [4], told=2), batch_size=None))
    iterator._IterableDataset_len_called = 0
    monkeypatch.setattr(base, "warn_user", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    monkeypatch.setattr(base, "warn_user", lambda text, category: None)
    assert [label for _, label in iterator] == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_is_not_kept_alive_by_an_error_that_it_raised(workers: int) -> None:
    """It would keep its workers until the garbage collector comes."""
    iterator = iter(DataLoader(FaultyDataset("tensors", 1, frozenset({0}), LookupError), num_workers=workers))
    gc.disable()
    try:
        with suppress(LookupError):
            next(iterator)
        watched = weakref.ref(iterator)
        del iterator
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_outcome_that_another_thread_has_not_taken_yet_is_not_overwritten(workers: int) -> None:
    iterator = iter(DataLoader(range(3), num_workers=workers))
    for expected in range(3):
        iterator._advance()  # of a thread that the system has stopped right after it
        assert next(iterator).item() == expected
        iterator._advance()
        iterator._advance()
        if expected < 2:
            assert iterator.outcome.batch.item() == expected + 1
    with pytest.raises(StopIteration):
        next(iterator)
