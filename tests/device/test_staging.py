"""Staging: random runs over a simulated device; whole loaders over a late one."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader

from fastq_loader import DataLoader, Prefetcher, ToDevice
from fastq_loader.memory.arena import Mapping
from tests.conftest import descendants, wait_until
from tests.support import thorough
from tests.support.datasets import Made, MapDataset, assert_same, identity
from tests.support.late_device import Late, image_and_label
from tests.support.loaders import collector_off
from tests.support.staging_runs import choose, run, run_buffers
from tests.support.thorough import examples


@pytest.mark.filterwarnings("ignore::fastq_loader.PinFallback")
@examples(600)
@given(st.integers(0, 2**32))
def test_no_run_breaks_a_rule(seed: int) -> None:
    try:
        run(seed)
    except BaseException as error:
        raise AssertionError(f"seed={seed}: {choose(seed)}") from error


@pytest.mark.filterwarnings("ignore::fastq_loader.PinFallback")
@examples(100)
@given(st.integers(0, 2**32))
def test_no_run_of_buffers_breaks_a_rule(seed: int) -> None:
    run_buffers(seed)


WORKERS = pytest.mark.parametrize("workers", [0, 2])
IMAGES = functools.partial(Made, image_and_label)


def labels_of(batches: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


def ready(iterator: Any) -> int:
    """How many batches have come and were not given yet."""
    filled: int = iterator.pool._loop.scheduler.in_flight.filled
    return filled


def poll_until(iterator: Any, condition: Callable[[], Any]) -> None:
    assert wait_until(lambda: iterator.poll() or condition(), 30)


@pytest.mark.processes
@thorough.thorough(but={"ahead": 2})
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_the_next_batches_are_on_their_way_by_poll_and_by_next(ahead: int, late: Late) -> None:
    device = late()
    options: Any = {"num_workers": 2, "prefetch_factor": 6, "device": ToDevice("cuda", prefetch=ahead)}
    with DataLoader(IMAGES(24), 2, **options) as loader:
        iterator = iter(loader)
        next(iterator)
        poll_until(iterator, lambda: ready(iterator) == 11)
        for at in range(12):
            assert len(device.copies) == min(at + 1 + ahead, 12)
            assert at == 11 or next(iterator)
        iterator.poll()  # at the end there is nothing to do, and no error


def wait_at_1(late_batch: Any, index: int) -> Any:
    """Batch 1 is late; batch 5 is nothing for a device."""
    if index == 1:
        assert late_batch.wait(20)
    return "text" if index == 5 else torch.tensor(index)


@thorough.thorough(but={"schedule": "dynamic"})
@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["round_robin", "dynamic"])
def test_transforms_are_called_in_order_whatever_has_come(schedule: str, late: Late) -> None:
    late()
    late_batch = torch.multiprocessing.get_context("fork").Event()
    called: list[Any] = []

    def note(batch: Any) -> Any:
        called.append(5 if batch == "text" else batch.item())
        return batch

    device = ToDevice("cuda", 3, note, transform_stream="side")
    options: Any = {"num_workers": 2, "multiprocessing_context": "fork", "prefetch_factor": 4}
    dataset = Made(functools.partial(wait_at_1, late_batch), 10)
    with DataLoader(dataset, None, schedule=schedule, device=device, **options) as loader:
        iterator = iter(loader)
        next(iterator)
        poll_until(iterator, lambda: ready(iterator) >= 3)
        late_batch.set()
        list(iterator)
    assert called == list(range(10))


def shrinking(index: int) -> torch.Tensor:
    return torch.full((400_000 if index < 20 else 90_000,), index % 256, dtype=torch.uint8)


@pytest.mark.processes
def test_pages_go_back_only_when_they_are_not_locked(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the device would read the locked ones, and workers write to new ones."""
    device = late()
    punched: list[bool] = []
    punch = Mapping.punch

    def watch(self: Mapping, offset: int, size: int) -> None:
        punched.append(self.base + offset in device.registered)
        punch(self, offset, size)

    monkeypatch.setattr(Mapping, "punch", watch)
    with DataLoader(Made(shrinking, 300), 2, num_workers=2, device="cuda") as loader:
        for at, batch in enumerate(loader):
            assert batch[:, 0].tolist() == [2 * at % 256, (2 * at + 1) % 256]
        assert punched, "blocks of the large batches: neighbours may go back as one"
        assert not any(punched)


@pytest.mark.processes
@thorough.thorough(but={"beside": "side", "persistent": True})
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("beside", ["consumer", "side"])
def test_a_broken_epoch_leaves_nothing_under_way(persistent: bool, beside: str, late: Late) -> None:
    device, order = late(), list(range(60))
    to_device = ToDevice("cuda", transform=identity, transform_stream=beside)
    options: Any = {"num_workers": 2, "persistent_workers": persistent, "device": to_device}
    loader = DataLoader(IMAGES(60), 2, sampler=order, **options)
    for epoch in range(4):
        random.Random(epoch).shuffle(order)
        for at, (images, labels) in enumerate(loader):
            assert images[:, 0, 0, 0].tolist() == labels.tolist() == order[2 * at : 2 * at + 2]
            if at == 3 + 6 * epoch:  # further each time: past what was under way at the last break
                break
        assert at == 3 + 6 * epoch
    loader.close()
    staged = loader.statistics().staging
    assert (device.registered, staged and staged.pinned_bytes) == ({}, 0)


@pytest.mark.processes
@pytest.mark.parametrize("ending", ["close", "drop"])
def test_copies_are_drained_before_memory_goes(ending: str, late: Late) -> None:
    device, dataset = late(runs=False), MapDataset("large", 30)
    loader = DataLoader(dataset, 2, num_workers=2, device="cuda")
    iterator = iter(loader)
    batch = next(iterator)
    poll_until(iterator, lambda: device.queued)
    if ending == "close":
        loader.close()
    del loader, iterator
    gc.collect()
    assert not device.queued
    assert not device.registered
    assert_same([dataset[0][0], dataset[1][0]], list(batch[0]))


@pytest.mark.processes
def test_an_interrupted_drain_is_left_to_the_next_close(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    device = late(runs=False)
    loader = DataLoader(MapDataset("large", 40), 2, num_workers=2, device="cuda")
    iterator = iter(loader)
    next(iterator)
    poll_until(iterator, lambda: device.queued)
    with monkeypatch.context() as patch:
        patch.setattr(device, "synchronize", fail_with(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            loader.close()
    assert device.registered
    iterator.pool.close()
    assert not device.queued
    assert not device.registered


def fail_with(kind: type[BaseException], first: int = 0, last: int = 1000) -> Any:
    def fail(batch: Any = None, *_: Any) -> Any:
        if isinstance(batch, list) and not first <= batch[1][0] < last:
            return batch
        raise kind("on purpose")

    return fail


@thorough.thorough(but={"beside": "side"})
@pytest.mark.processes
@WORKERS
@pytest.mark.parametrize("beside", ["consumer", "side"])
def test_errors_of_the_transform_have_their_places(workers: int, beside: str, late: Late) -> None:
    late()
    transform = fail_with(KeyError, 4, 28)
    device = ToDevice("cuda", transform=transform, transform_stream=beside)
    with DataLoader(IMAGES(48), 2, num_workers=workers, device=device) as loader:
        iterator = iter(loader)
        assert [next(iterator)[1].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        for _ in range(12):
            with pytest.raises(KeyError, match="on purpose"):
                next(iterator)
        assert labels_of(iterator) == [[at, at + 1] for at in range(28, 48, 2)]


@pytest.mark.processes
@pytest.mark.parametrize("first", [0, 2], ids=["raised", "waiting"])
def test_an_error_of_the_transform_does_not_keep_the_workers(first: int, late: Late) -> None:
    device, before = late(), descendants().keys()
    options = ToDevice("cuda", transform=fail_with(StopIteration, first), transform_stream="side")
    loader = DataLoader(IMAGES(4), 2, num_workers=1, device=options, persistent_workers=True)
    iterator = iter(loader)
    if first:
        next(iterator)
        poll_until(iterator, lambda: len(device.copies) == 2)
    else:
        with pytest.raises(RuntimeError, match="StopIteration"):
            next(iterator)
    with collector_off():
        del iterator, loader
        assert wait_until(lambda: descendants().keys() <= before, 30)


@pytest.mark.processes
def test_a_device_without_memory_is_an_error_in_place(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    device = late()
    with DataLoader(IMAGES(30), 2, num_workers=2, device="cuda") as loader:
        iterator = iter(loader)
        assert next(iterator)[1].tolist() == [0, 1]
        poll_until(iterator, lambda: len(device.copies) == 3)
        with monkeypatch.context() as patch:
            patch.setattr(device, "empty", fail_with(RuntimeError))
            assert [next(iterator)[1].tolist() for _ in range(2)] == [[2, 3], [4, 5]]
            with pytest.raises(RuntimeError, match="on purpose"):
                next(iterator)
        assert labels_of(iterator) == [[at, at + 1] for at in range(8, 30, 2)]


def halved(batch: Any) -> Any:
    return [(part / 2).requires_grad_(torch.is_grad_enabled()) for part in batch]


@pytest.mark.processes
@pytest.mark.parametrize("kind", [DataLoader, Prefetcher])
def test_a_batch_that_was_begun_in_inference_mode_can_be_trained_with(kind: type, late: Late) -> None:
    """Its transform is called without inference mode, and without grad."""
    device = late()
    options = ToDevice("cuda", 1, halved, transform_stream="side")
    if kind is DataLoader:
        iterator: Any = iter(DataLoader(IMAGES(8), 2, num_workers=1, device=options))
    else:
        iterator = iter(Prefetcher(TorchDataLoader(IMAGES(8), 2), options))
    with torch.inference_mode():
        next(iterator)
        if kind is DataLoader:
            poll_until(iterator, lambda: len(device.copies) > 1)
    images, _ = next(iterator)
    assert not images.requires_grad
    (images * torch.ones(1, requires_grad=True)).sum().backward()
