"""On a real GPU: which host memory is page-locked, what happens when the driver refuses, and what is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastq_loader.iterators.base
from fastq_loader import DataLoader, PinFailed, PinFallback, ToDevice
from fastq_loader.device.backend import TorchStager
from fastq_loader.device.pinning import Pinner
from tests.support.gpu import (
    BATCH,
    BATCH_BYTES,
    BATCHES,
    MARKS,
    Guard,
    Numbers,
    Runtime,
    guarded,
    lag,
    staging_of,
    warm_loader,
    wrong_batches,
)

pytestmark = MARKS


# ---- page-locking -------------------------------------------------------------------------------------


@pytest.mark.processes
@guarded
def test_a_copy_reads_from_one_registration_which_close_undoes(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.processes
def test_fifty_loaders_in_a_row_leave_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(TorchStager, "_runtime", lambda self: runtime)
    for _ in range(50):
        with DataLoader(
            Numbers(24, 1 << 15), BATCH, num_workers=1, device=ToDevice("cuda", pin="register")
        ) as loader:
            assert wrong_batches(loader) == []
        assert runtime.locked == {}
    assert set(runtime.codes) == {0}
    assert runtime.most > 1


def fail_to_register(patch: pytest.MonkeyPatch, succeed: int) -> None:
    """After `succeed` calls the driver is asked to lock memory that is not there: the error is its own."""
    register = TorchStager.register
    calls = 0

    def failing(self: TorchStager, address: int, nbytes: int) -> None:
        nonlocal calls
        calls += 1
        register(self, address if calls <= succeed else 4096, nbytes)

    patch.setattr(TorchStager, "register", failing)


def test_an_error_of_the_driver_is_not_left_for_the_next_kernel() -> None:
    stager = TorchStager(torch.device("cuda"))
    with pytest.raises(PinFailed, match=r"cudaHostRegister of 4096 bytes failed with error [1-9]"):
        stager.register(4096, 4096)
    assert torch.ones(1000, device="cuda").sum().item() == 1000


def test_without_the_guard_the_next_kernel_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchStager, "_clear_error", lambda self: None)
    with pytest.raises(PinFailed):
        TorchStager(torch.device("cuda")).register(4096, 4096)
    with pytest.raises(RuntimeError, match="CUDA error"):
        torch.ones(1000, device="cuda")  # raising clears it


@pytest.mark.processes
@pytest.mark.parametrize("succeed", [0, 1, 3], ids=["the proof", "the first block", "the third block"])
def test_a_failed_registration_leads_to_bounce(succeed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(TorchStager, "_runtime", lambda self: runtime)
    fail_to_register(monkeypatch, succeed)
    with DataLoader(Numbers(), BATCH, num_workers=2, device="cuda") as loader:
        with pytest.warns(PinFallback, match="cudaHostRegister") as said:
            assert wrong_batches(loader) == []
        assert wrong_batches(loader) == []  # the next pool knows, and nothing is said again
        staging = staging_of(loader)
    assert len(said) == 1
    assert (staging.pin, "cudaHostRegister" in staging.pin_reason) == ("bounce", True)
    assert [code != 0 for code in runtime.codes].count(True) == 1, "the driver was asked once more"
    assert set(runtime.locked) <= {4096}, "half a pool stays locked"


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_where_no_page_can_be_locked_batches_go_as_they_are(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = TorchStager.pinned
    fail_to_register(monkeypatch, 0)
    monkeypatch.setattr(TorchStager, "pinned", lambda self, nbytes: pinned(self, 1 << 50))
    with DataLoader(Numbers(), BATCH, num_workers=workers, device="cuda") as loader:
        with pytest.warns(PinFallback):
            assert wrong_batches(loader) == []
        staging = staging_of(loader)
    assert (staging.pin, staging.pinned_bytes, staging.copies) == ("pageable", 0, BATCHES)
    assert torch.ones(1000, device="cuda").sum().item() == 1000


# ---- pin_memory=True without a device ------------------------------------------------------------------


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


# ---- statistics ---------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    ("wish", "workers", "pin", "reason"),
    [
        ("auto", 2, "register", "it is the fastest here"),
        ("register", 2, "register", "was asked for"),
        ("bounce", 2, "bounce", "was asked for"),
        ("pageable", 2, "pageable", "was asked for"),
        ("auto", 0, "bounce", "without workers"),
        ("pageable", 0, "pageable", "was asked for"),
    ],
)
def test_statistics_say_how_batches_went_over(wish: str, workers: int, pin: str, reason: str) -> None:
    with warm_loader(pin=wish, num_workers=workers) as loader:
        staging = staging_of(loader)
        assert (staging.device, staging.pin) == ("cuda:0", pin)
        assert reason in staging.pin_reason
        assert (staging.copies, staging.copied_bytes) == (BATCHES, BATCHES * BATCH_BYTES)
        assert (staging.pinned_bytes >= BATCH_BYTES) == (pin != "pageable")
        assert (staging.register_seconds > 0) == (pin != "pageable")
        assert (staging.populate_seconds > 0) == (pin == "register")
        assert wrong_batches(loader) == []
        again = staging_of(loader)
        assert again.copies == 2 * BATCHES
    if workers:
        assert staging_of(loader).pinned_bytes == 0
