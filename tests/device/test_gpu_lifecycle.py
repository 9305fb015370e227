"""On a real GPU: how a loader with a device begins, breaks and ends, and what it leaves behind."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fastq_loader import DataLoader, ToDevice, normalize
from fastq_loader.device.backend import TorchStager
from fastq_loader.device.copies import Copies
from tests.conftest import run_script
from tests.support.gpu import (
    BATCH,
    MARKS,
    Guard,
    Numbers,
    guarded,
    lag,
    looks_right,
    slow_copies,
    warm_loader,
    wrong_batches,
)

pytestmark = MARKS


# ---- the end of an iteration --------------------------------------------------------------------------


def _break(loader: Any) -> None:
    for _ in loader:
        break


def _fail(loader: Any) -> None:
    for _ in loader:
        raise ZeroDivisionError


def _close(loader: Any) -> None:
    batches = iter(loader)
    next(batches)
    loader.close()


@pytest.mark.processes
@guarded
@pytest.mark.parametrize("end", [_break, _fail, _close])
def test_blocks_are_unlocked_after_their_copies(
    end: Any, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        try:
            end(loader)
        except ZeroDivisionError:
            assert end is _fail
        with guard.outcome:
            assert idle
            assert all(idle)


@pytest.mark.processes
@guarded
def test_a_new_epoch_waits_for_the_copies_of_the_one_that_it_cuts_off(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warm_loader(pin="register") as loader:
        guard.remove(monkeypatch, TorchStager, "synchronize", lambda self, event: None)
        slow_copies(monkeypatch, times=4)
        batches = iter(loader)
        held = [next(batches) for _ in range(3)]
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        torch.cuda.synchronize()
        with guard.outcome:
            assert [looks_right(batch, number * BATCH).item() for number, batch in enumerate(held)] == [
                True,
                True,
                True,
            ]


# ---- what is left behind ------------------------------------------------------------------------------

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


class _Images(Numbers):
    """Images of 3 channels; a batch has 12 MiB."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 1024, 1024), index % 251, dtype=torch.uint8)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stream", "buffers", "guard"),
    [
        ("consumer", "fresh", Guard(True)),
        ("consumer", "reuse", Guard(True)),
        ("side", "fresh", Guard(True)),
        ("side", "fresh", Guard(False)),
    ],
)
def test_twenty_epochs_take_no_more_device_memory_than_two(stream: str, buffers: str, guard: Guard) -> None:
    """The run without the guard has a new side stream in every epoch. The host waits at every step, so that
    how many batches are under way does not depend on time."""
    torch.cuda.empty_cache()
    transform = normalize([0.5] * 3, [0.25] * 3, torch.float16)
    loader = DataLoader(
        _Images(8 * BATCH),
        BATCH,
        num_workers=2,
        device=ToDevice("cuda", transform=transform, transform_stream=stream, buffers=buffers),
    )

    def epochs(count: int) -> int:
        for _ in range(count):
            for batch in loader:
                assert batch.dtype is torch.float16
                torch.cuda.synchronize()
                time.sleep(0.02)  # the next batches are ready by then
            if not guard.kept:
                session = loader._runtime.session
                assert session is not None
                session._stager = None
        return torch.cuda.memory_reserved()

    with loader:
        before = epochs(2)
        with guard.outcome:
            assert epochs(18) == before


# ---- hard times ---------------------------------------------------------------------------------------


@pytest.mark.processes
@guarded
@pytest.mark.parametrize("pin", ["register", "bounce", "pageable"])
def test_few_blocks_a_deep_prefetch_and_a_slow_gpu_come_to_an_end(
    pin: str, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within this module's time limit. Workers never wait for a block: without the guard, that copies give
    their blocks back, they make new ones without end."""
    guard.remove(monkeypatch, Copies, "reap", lambda self: [])
    slow_copies(monkeypatch)
    with DataLoader(
        Numbers(),
        BATCH,
        num_workers=1,
        prefetch_factor=1,
        device=ToDevice("cuda", prefetch=3, pin=pin),
    ) as loader:
        assert wrong_batches(loader, lag) == []
        with guard.outcome:
            # One with the worker, one that has come, twice `prefetch` under way, and one to spare.
            assert loader.statistics().blocks_grown <= 9
