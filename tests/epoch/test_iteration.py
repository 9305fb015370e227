"""Both iterators: seeds, generators, interrupts, the lines that warnings name, and what they refuse."""

from __future__ import annotations

import gc
import inspect
import os
import random
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from fastq_loader import DataLoader, IteratorInvalid, StatefulDataLoader, options
from tests.conftest import acquired, belongings, descendants, of_kind, wait_until
from tests.support.datasets import FaultyDataset, Made, SizedStream, Stream
from tests.support.loaders import WORKERS, collector_off, torch_has
from tests.support.samplers import Says
from tests.support.thorough import thorough

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


@thorough(but={"workers": 2})
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


@thorough(but={"workers": 0})
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the warning is about having no accelerator")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", ["", "cuda"])
def test_i9b_pinning_without_an_accelerator_warns_in_torchs_words(workers: int, device: str) -> None:
    given = {"pin_memory": True, "pin_memory_device": device, "num_workers": workers}
    ours = warned(iterate, make(DataLoader, **given))
    if torch_has("no accelerator is found"):  # older versions say nothing, or fail
        assert texts(ours) == texts(warned(iterate, make(TorchDataLoader, **given)))
    assert len(ours) == (2 if device else 1)
    assert {(file, line) for _, file, line in ours} == {(__file__, iterate.__code__.co_firstlineno + 1)}


@WORKERS
def test_batches_are_page_locked_where_there_is_an_accelerator(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "pinning", lambda loader: (True, None))
    monkeypatch.setattr("fastq_loader.epoch.base.page_locked", lambda batch, device: (batch.tolist(), device))
    assert list(make(DataLoader, pin_memory=True, batch_size=2, num_workers=workers)) == [
        ([0, 1], None),
        ([2, 3], None),
    ]


@WORKERS
def test_an_interrupt_in_the_warning_about_a_length_costs_no_batch(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    loader = make(DataLoader, dataset=SizedStream("tensors", [4], told=2), num_workers=workers)
    expected = [str(batch) for batch in make(DataLoader, dataset=Stream("tensors", [4]))]
    assert len(loader) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        iterator = iter(loader)
        found = [next(iterator), next(iterator)]
        monkeypatch.setattr(warnings, "showwarning", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        warnings.simplefilter("ignore")
        found += iterator
    assert list(map(str, found)) == expected


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


class DrawsAtOnce(Sampler[int]):
    """Draws when it is iterated, and not for its first index."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(4).tolist())


def test_r1_the_sampler_draws_before_the_seed_of_the_iteration_is_drawn() -> None:
    found = []
    for kind in (TorchDataLoader, DataLoader):
        torch.manual_seed(1)
        found.append([*make(kind, batch_size=None, sampler=DrawsAtOnce()), torch.rand(1).item()])
    assert found[0] == found[1]


@thorough(but={"workers": 1})
@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_is_not_kept_alive_by_an_error_that_it_raised(workers: int) -> None:
    iterator = iter(DataLoader(FaultyDataset("tensors", 1, frozenset({0}), LookupError), num_workers=workers))
    with collector_off():
        with suppress(LookupError):
            next(iterator)
        watched = weakref.ref(iterator)
        del iterator
        assert watched() is None


def draw(index: int) -> Any:
    return torch.rand(()), random.random(), np.random.rand()


def draw_and_fail(index: int) -> None:
    draw(index)
    raise LookupError(index)


@pytest.mark.parametrize("make", [draw, draw_and_fail])
def test_with_dynamic_the_consumers_generators_stay_as_they_were(make: Callable[[int], Any]) -> None:
    iterator = iter(DataLoader(Made(make, 4), schedule="dynamic"))  # draws the base seed

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())

    before = states()
    for _ in range(4):
        try:
            next(iterator)
        except LookupError:
            assert make is draw_and_fail
        assert states() == before


def test_i9_a_timeout_without_workers_is_refused() -> None:
    with pytest.raises(AssertionError, match="timeout"):
        iter(DataLoader(range(4), timeout=1))


class Interrupt(BaseException):
    pass


class Interrupted(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise Interrupt


def test_a_stream_that_an_interrupt_cut_short_cannot_go_on() -> None:
    iterator = iter(DataLoader(Interrupted()))
    assert next(iterator).item() == 0
    with pytest.raises(Interrupt):
        next(iterator)
    with pytest.raises(IteratorInvalid, match="an interrupt cut a call"):
        next(iterator)
    iterator._reset(DataLoader(Interrupted()))
    assert not iterator._busy


def persistent(**arguments: Any) -> DataLoader[int]:
    return DataLoader(range(4), 2, num_workers=1, persistent_workers=True, **arguments)


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_a_pool_ends_with_the_last_iterator_that_refers_to_it() -> None:
    loader, before = persistent(), descendants().keys()
    iterator = iter(loader)
    iterator.__del__()  # as torch_geometric's wrapper calls it
    assert numbers(iterator) == [[0, 1], [2, 3]]
    vars(loader)["_iterator"] = None
    assert descendants().keys() - before
    del iterator
    assert wait_until(lambda: descendants().keys() <= before, 30)


def test_an_exhausted_iterator_that_is_kept_holds_no_process_descriptor_or_memory() -> None:
    before = belongings()
    iterator = iter(make(DataLoader, num_workers=1))
    assert iterate(iterator) == 4
    assert wait_until(lambda: not acquired(before), 30)
    assert next(iterator, None) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_no_method_of_torchs_iterators_runs_in_ours(workers: int) -> None:
    iterator = iter(DataLoader(range(2), num_workers=workers))
    ours, theirs = type(iterator), _MultiProcessingDataLoaderIter if workers else _SingleProcessDataLoaderIter
    methods = {name for name, _ in inspect.getmembers(theirs, inspect.isfunction)}
    inherited = {name for name in methods if getattr(ours, name) is getattr(theirs, name)}
    # For torch's own iterators that keep workers, at the exit; the second is that of older versions.
    assert inherited <= {"_clean_up_persistent_workers_atexit", "_clean_up_worker"}
    for name in methods & {"_try_put_index", "_get_data", "_try_get_data", "_process_data"}:
        with pytest.raises(NotImplementedError, match="no code of torch's iterators runs"):
            getattr(iterator, name)()
    with pytest.raises(AttributeError, match="has no attribute '_data_queue'"):
        _ = iterator._data_queue


def draw_slowly(index: int) -> float:
    time.sleep(0.4)
    return torch.rand(()).item()


@pytest.mark.parametrize("schedule", ["round_robin", "dynamic"])
def test_i4_workers_that_load_what_nobody_will_get_can_be_closed_and_with_dynamic_there_are_none(
    schedule: str,
) -> None:
    options: dict[str, Any] = {"prefetch_factor": 512, "persistent_workers": True, "schedule": schedule}
    loader = DataLoader(Made(draw_slowly, 2048), 1, num_workers=2, **options)
    next(iter(loader))
    start = time.monotonic()
    iterator = iter(loader)
    if schedule == "dynamic":
        next(iterator)
    loader.close()
    assert time.monotonic() - start < 100, "512 samples of 0.4 s were waited for"


class Endless(Sampler[int]):
    """As mmengine's InfiniteSampler: the iterators of all epochs draw from one generator, and end it."""

    def __init__(self) -> None:
        self.indices, self.left = self._indices(), 0

    def _indices(self) -> Iterator[int]:
        while True:
            yield from range(8)

    def __iter__(self) -> Iterator[int]:
        try:
            yield from self.indices
        finally:
            self.left += 1


@pytest.mark.parametrize("workers", [0, 2])
def test_the_iterator_of_a_sampler_is_closed_with_that_of_the_loader(workers: int) -> None:
    """And not kept for `replay`."""
    found = []
    for kind in (TorchDataLoader, DataLoader, StatefulDataLoader):
        sampler = Endless()
        loader = make(kind, sampler=sampler, num_workers=workers, dataset=range(8))
        batches = [next(iter(loader), None) for _ in range(2)]
        assert wait_until(lambda sampler=sampler: sampler.left == 2, 30)
        found.append([batch if batch is None else batch.tolist() for batch in batches])
    assert found[0] == found[1] == found[2]


class Order(list[int]):
    """As large as an epoch."""


class KeepsItsOrder(Says):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "order": Order(range(8))}


def test_the_states_of_a_sampler_are_kept_for_the_newest_epoch_alone() -> None:
    with make(StatefulDataLoader, sampler=KeepsItsOrder(80), dataset=range(80)) as loader:
        for _ in range(9):
            next(iter(loader))
        assert sum(type(each) is Order for each in gc.get_objects()) < 6
        assert loader.state_dict()["_index_sampler_state"]["order"] == [*range(8)]
