"""On a real GPU: who waits for whom, what users do with batches there, and what is left behind.

Each test that has a guard runs without it too, and must fail then; see `tests.support.gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fastq_loader.epoch.base
from fastq_loader import DataLoader, PinFailed, PinFallback, ToDevice
from fastq_loader.device.accelerator import TorchBackend
from fastq_loader.device.staging import CapturedCall, DeviceSession
from tests.conftest import run_script
from tests.support.crimes import ManyFields
from tests.support.datasets import identity
from tests.support.gpu import (
    BATCH,
    BATCH_BYTES,
    BATCHES,
    MARKS,
    WIDTH,
    Guard,
    Numbers,
    guarded,
    lag,
    looks_right,
    slow_copies,
    staging_of,
    waits_of,
    warm_loader,
    warm_prefetcher,
    wrong_batches,
)

pytestmark = MARKS


def at_once(*_: Any) -> bool:
    return True


@pytest.mark.processes
@guarded
@pytest.mark.parametrize(
    ("make", "options", "name", "without", "late"),
    [
        # Host memory is rewritten before its copy has run.
        (warm_loader, {}, "query", at_once, "copies"),
        (warm_loader, {"num_workers": 0}, "query", at_once, "copies"),
        # A batch is read before it has come.
        (warm_loader, {}, "wait", waits_of(side=True), "copies"),
        (warm_prefetcher, {}, "wait", waits_of(side=True), "copies"),
        # Device memory is overwritten under queued reads.
        (warm_loader, {}, "wait", waits_of(side=False), "reads"),
    ],
)
def test_no_memory_is_read_or_written_too_early(
    make: Any, options: Any, name: str, without: Any, late: str, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(**options) as batches:
        guard.remove(monkeypatch, TorchBackend, name, without)
        if late == "copies":
            slow_copies(monkeypatch)
        with guard.outcome:
            assert wrong_batches(batches, *[lag] * (late == "reads")) == []


class Pair:
    """Two batches, of which the second gets the memory of the first, which another stream reads."""

    def __init__(self) -> None:
        torch.cuda.empty_cache()
        self.copies = DeviceSession(ToDevice("cuda", prefetch=1)).open(in_blocks=False)
        self.sources = [self._source(0), self._source(BATCH)]
        self.other = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def _source(self, first: int) -> torch.Tensor:
        rows = torch.arange(first + 1, first + 1 + BATCH, dtype=torch.int32)[:, None].expand(BATCH, WIDTH)
        return rows.contiguous().view(-1).view(torch.uint8).pin_memory()

    def begin(self, key: int, transformed: bool) -> None:
        build, beside = (torch.clone, CapturedCall) if transformed else (identity, None)
        self.begun = self.copies.begin(self.sources[key], BATCH_BYTES, build, beside=beside)
        self.copies.wait_for(self.begun)

    def read_first_elsewhere(self, pause: Callable[[], None]) -> torch.Tensor:
        with torch.cuda.stream(self.other):
            batch = self.copies.take(self.begun)
            del self.begun
            pause()
            seen = looks_right(batch[:BATCH_BYTES].view(torch.int32).view(BATCH, WIDTH), 0)
        self.copies.reap()  # forgets the copy, whose bytes have come
        return seen


@guarded
@pytest.mark.parametrize("transformed", [False, True])
def test_a_batch_may_be_read_on_another_stream(
    transformed: bool, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair()
    guard.remove(monkeypatch, TorchBackend, "share", lambda self, memory, stream: None)
    pair.begin(0, transformed)
    seen = pair.read_first_elsewhere(lag)
    pair.begin(1, transformed)
    torch.cuda.synchronize()
    with guard.outcome:
        assert seen.item()
    pair.copies.drain()


def refused(self: TorchBackend, address: int, nbytes: int) -> None:
    raise PinFailed("not today")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
@pytest.mark.filterwarnings("ignore::fastq_loader.PinFallback")
@guarded
def test_a_batch_is_one_copy_from_page_locked_memory(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler keeps descriptors of its own, and that of torch 2.11 warns that a second cycle clears the
    events of the first."""
    guard.remove(monkeypatch, TorchBackend, "register", refused)
    dataset = ManyFields(BATCH * BATCHES, 32, 1000)
    with DataLoader(dataset, BATCH, num_workers=2, device="cuda", persistent_workers=True) as loader:
        for _ in loader:
            pass
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in loader:
                pass
            torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.name.startswith("Memcpy HtoD")]
    with guard.outcome:
        assert names == ["Memcpy HtoD (Pinned -> Device)"] * BATCHES


CAPTURE = """
import os
import torch
from fastq_loader import DataLoader
from fastq_loader.device.accelerator import TorchBackend
from tests.support.gpu import Numbers

refused = []
batches = iter(DataLoader(Numbers(), 4, num_workers=2, device="cuda"))
static = next(batches).clone()
crime = {crime!r}
if crime == "next without the guard":
    TorchBackend.capturing = lambda self: False
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="global"):
        twice = static * 2
        if crime:
            try:
                next(batches)
            except RuntimeError as error:
                if "while a CUDA graph is being captured" not in str(error):
                    raise
except RuntimeError as error:
    refused.append(error)
print("broken" if refused else "captured", flush=True)
os._exit(0)  # a broken capture leaves a context that cannot be tidied up
"""


@pytest.mark.parametrize(
    ("crime", "outcome"),
    [("", "captured"), ("next", "captured"), ("next without the guard", "broken")],
)
def test_a_graph_is_captured_between_two_batches(crime: str, outcome: str) -> None:
    """The guard: `next()` refuses. A broken capture ends its process."""
    result = run_script(CAPTURE.format(crime=crime), timeout=50)
    assert result.stdout.splitlines()[-1:] == [outcome], result.stderr


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
@pytest.mark.parametrize("succeed", [0, 3], ids=["the proof", "the third block"])
def test_a_refusal_of_the_driver_leads_to_the_next_mode(
    succeed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `succeed` calls it is asked to lock memory that is not there: the error is its own."""
    calls, register = count(), TorchBackend.register

    def failing(self: TorchBackend, address: int, nbytes: int) -> None:
        register(self, address if next(calls) < succeed else 4096, nbytes)

    monkeypatch.setattr(TorchBackend, "register", failing)
    with DataLoader(Numbers(), BATCH, num_workers=2, device="cuda") as loader:
        with pytest.warns(PinFallback) as said:
            assert wrong_batches(loader) == []
        assert wrong_batches(loader) == []  # the next pool knows, and nothing is said again
        staging = staging_of(loader)
    # Python 3.12 adds a warning of its own for each worker that is forked beside the driver's threads.
    told = [one for one in said if issubclass(one.category, PinFallback)]
    assert len(told) == 1
    assert (staging.pin, staging.copies, staging.pinned_bytes) == ("pageable", 2 * BATCHES, 0)
    assert torch.ones(1000, device="cuda").sum().item() == 1000


@pytest.mark.processes
@guarded
def test_a_users_own_copy_of_a_pinned_batch_is_safe(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run without the guard hands out locked blocks: torch's allocator does not know of their copies."""
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

    guard.remove(monkeypatch, fastq_loader.epoch.base, "page_locked", lock_in_place)
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
