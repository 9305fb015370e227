"""On a real GPU: which host memory is page-locked, how a loader ends, and what it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch

import fastq_loader.iterators.base
from fastq_loader import DataLoader, PinFailed, PinFallback, ToDevice
from fastq_loader.device.accelerator import TorchStager
from fastq_loader.device.copies import Copies
from fastq_loader.device.pinning import Pinner
from tests.conftest import run_script
from tests.support.gpu import (
    BATCH,
    BATCHES,
    MARKS,
    Guard,
    Numbers,
    Runtime,
    guarded,
    lag,
    slow_copies,
    staging_of,
    warm_loader,
    wrong_batches,
)

pytestmark = MARKS


@pytest.mark.processes
@guarded
@pytest.mark.parametrize("end", ["break", "close"])
def test_blocks_are_unlocked_after_copies(end: str, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    idle: list[bool] = []
    unregister = TorchStager.unregister

    def watched(self: TorchStager, address: int) -> None:
        idle.append(self.side.query())
        self.side.synchronize()  # or the run without the guard would take memory from under a copy
        unregister(self, address)

    with warm_loader(pin="register", persistent_workers=False) as loader:
        monkeypatch.setattr(TorchStager, "unregister", watched)
        guard.remove(monkeypatch, TorchStager, "synchronize", lambda self, event: None)
        slow_copies(monkeypatch)
        batches = iter(loader)
        next(batches)
        if end == "close":
            loader.close()
        del batches
        with guard.outcome:
            assert idle
            assert all(idle)


DESCRIPTORS = """
import os, torch
from fastq_loader import DataLoader
from tests.conftest import descendants
from tests.support.gpu import Numbers, nvidia_descriptors
if {early}:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
loader = DataLoader(Numbers(), 4, num_workers=2, device="cuda", multiprocessing_context="fork")
assert torch.cuda.is_initialized() == {early}, "the constructor initialised CUDA"
batches = iter(loader)
next(batches), next(batches)
workers = descendants()
assert len(workers) == 2
print(bool(nvidia_descriptors(os.getpid())), any(nvidia_descriptors(pid) for pid in workers))
loader.close()
"""


@pytest.mark.parametrize("early", [False, True])
def test_forked_workers_inherit_nothing_of_the_driver(early: bool) -> None:
    """With CUDA initialised before, which is the run without the guard, they do."""
    result = run_script(DESCRIPTORS.format(early=early), timeout=50)
    assert result.stdout.split() == ["True", str(early)], result.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stream", "guard"), [("consumer", Guard(True)), ("side", Guard(True)), ("side", Guard(False))]
)
def test_twenty_epochs_take_no_more_device_memory_than_two(stream: str, guard: Guard) -> None:
    """The run without the guard has a new side stream in every epoch. The host waits at every step, so that
    how many batches are under way does not depend on time."""
    torch.cuda.empty_cache()
    device = ToDevice("cuda", transform=torch.clone, transform_stream=stream)

    def epochs(count: int) -> int:
        for _ in range(count):
            for _ in loader:
                torch.cuda.synchronize()
                time.sleep(0.02)  # the next batches are ready by then
            session = loader._resources.session
            if not guard.kept and session is not None:
                vars(session).pop("stager")
        return torch.cuda.memory_reserved()

    with DataLoader(Numbers(8 * BATCH), BATCH, num_workers=2, device=device) as loader:
        before = epochs(2)
        with guard.outcome:
            assert epochs(18) == before


@pytest.mark.processes
@guarded
@pytest.mark.parametrize("pin", ["register", "bounce", "pageable"])
def test_few_blocks_and_a_slow_gpu_go_on(pin: str, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within this module's time limit. Workers never wait for a block: without the guard, that copies give
    their blocks back, they make new ones without end."""
    guard.remove(monkeypatch, Copies, "reap", lambda self: [])
    slow_copies(monkeypatch)
    device = ToDevice("cuda", prefetch=3, pin=pin)
    with DataLoader(Numbers(), BATCH, num_workers=1, prefetch_factor=1, device=device) as loader:
        assert wrong_batches(loader, lag) == []
        with guard.outcome:
            # One with the worker, one that has come, twice `prefetch` under way, and one to spare.
            assert loader.statistics().blocks_grown <= 9


@pytest.mark.processes
@guarded
def test_a_copy_reads_from_one_registration(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run without the guard unlocks behind the ledger's back: the driver is not left with memory that is
    gone, and the ledger has to tell."""

    def forget(self: Pinner, offset: int) -> None:
        if self._registered.pop(offset, None):
            torch.cuda.cudart().cudaHostUnregister(self._address(offset))  # type: ignore[no-untyped-call]

    runtime = Runtime()
    monkeypatch.setattr(TorchStager, "_runtime", lambda self: runtime)
    guard.remove(monkeypatch, Pinner, "forget", forget)
    copy_async = TorchStager.copy_async
    registrations: list[int] = []

    def watched(self: TorchStager, memory: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
        start = source.data_ptr()
        ends = [(address, address + size) for address, size in runtime.locked.items()]
        registrations.append(sum(first <= start and start + nbytes <= end for first, end in ends))
        assert source.is_pinned()
        copy_async(self, memory, source, nbytes)

    monkeypatch.setattr(TorchStager, "copy_async", watched)
    with warm_loader(pin="register") as loader:
        assert wrong_batches(loader) == []
        assert sum(runtime.locked.values()) == staging_of(loader).pinned_bytes
    assert registrations == [1] * len(registrations)
    assert len(registrations) > 2 * BATCHES, "the proof at the start is one of them"
    with guard.outcome:
        assert runtime.locked == {}
    assert set(runtime.codes) == {0}


@guarded
def test_an_error_of_the_driver_is_cleared(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    guard.remove(monkeypatch, TorchStager, "_clear_error", lambda self: None)
    with pytest.raises(PinFailed, match="cudaHostRegister of 4096 bytes failed with error"):
        TorchStager(torch.device("cuda")).register(4096, 4096)
    # Raising clears it.
    with nullcontext() if guard.kept else pytest.raises(RuntimeError, match="CUDA error"):
        assert torch.ones(1000, device="cuda").sum().item() == 1000


@pytest.mark.processes
@pytest.mark.parametrize(
    ("succeed", "workers", "pin"),
    [(0, 2, "bounce"), (1, 2, "bounce"), (3, 2, "bounce"), (0, 2, "pageable"), (0, 0, "pageable")],
    ids=["the proof", "the first block", "the third block", "buffers too", "without workers"],
)
def test_a_refusal_of_the_driver_leads_to_the_next_mode(
    succeed: int, workers: int, pin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `succeed` calls it is asked to lock memory that is not there: the error is its own."""
    runtime, calls = Runtime(), count()
    register, pinned = TorchStager.register, TorchStager.pinned

    def failing(self: TorchStager, address: int, nbytes: int) -> None:
        register(self, address if next(calls) < succeed else 4096, nbytes)

    monkeypatch.setattr(TorchStager, "_runtime", lambda self: runtime)
    monkeypatch.setattr(TorchStager, "register", failing)
    if pin == "pageable":
        monkeypatch.setattr(TorchStager, "pinned", lambda self, nbytes: pinned(self, 1 << 50))
    with DataLoader(Numbers(), BATCH, num_workers=workers, device="cuda") as loader:
        with pytest.warns(PinFallback) as said:
            assert wrong_batches(loader) == []
        assert wrong_batches(loader) == []  # the next pool knows, and nothing is said again
        staging = staging_of(loader)
    assert len(said) == (2 if workers and pin == "pageable" else 1)
    assert (staging.pin, staging.copies) == (pin, 2 * BATCHES)
    assert pin == "bounce" or staging.pinned_bytes == 0
    assert [code != 0 for code in runtime.codes].count(True) == bool(workers), "the driver was asked again"
    assert set(runtime.locked) <= {4096}, "half a pool stays locked"
    assert torch.ones(1000, device="cuda").sum().item() == 1000


@pytest.mark.processes
@guarded
def test_a_users_own_copy_of_a_pinned_batch_is_safe(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run without the guard hands out blocks that are page-locked where they lie: torch's allocator does
    not know that a copy still reads them."""
    locked: set[int] = set()

    def lock_in_place(batch: torch.Tensor, device: str) -> torch.Tensor:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if batch.data_ptr() not in locked:
            locked.add(batch.data_ptr())
            assert int(runtime.cudaHostRegister(batch.data_ptr(), batch.nbytes, 1)) == 0
        return batch

    def sent(batches: Any) -> Iterator[torch.Tensor]:
        for batch in batches:
            assert batch.is_pinned()
            lag()
            yield batch.to("cuda", non_blocking=True)

    guard.remove(monkeypatch, fastq_loader.iterators.base, "pin_memory", lock_in_place)
    with DataLoader(Numbers(), BATCH, num_workers=2, pin_memory=True, persistent_workers=True) as loader:
        for batch in loader:  # everything is locked, or in torch's cache, after this epoch
            batch.to("cuda")
        own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own):
            wrong = wrong_batches(sent(loader))
        for address in locked:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
    with guard.outcome:
        assert wrong == []
