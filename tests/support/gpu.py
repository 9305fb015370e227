"""What the tests on a real GPU share: batches whose bytes tell their number, sleeps on streams, and guards.

Runs in the test's process and, for `Numbers`, in workers; importing it initialises no CUDA, and neither does
collecting the tests. A GPU test asserts what must hold, and runs a second time with one of the loader's waits
taken away, where the same assertion must fail: a test that cannot see the breach proves nothing.

What makes a breach certain, and not a matter of luck, is that a stream sleeps for as long as workers need to
load many batches (`slow_copies`, `lag`). The driver itself waits for everything under way when it page-locks
memory, makes new device memory or loads a kernel, and would hide the breach. So loaders are *warm* before: an
epoch has gone through them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader, Prefetcher, StagingStatistics, ToDevice
from fastq_loader.device.accelerator import TorchBackend
from tests.support.datasets import Sized

CYCLES = 200_000_000  # of the GPU's clock: about 0.1 s
BATCH, BATCHES = 4, 16
#: int32 values in a sample. A batch has 12 MiB, and from 10 MiB on torch's allocator gives memory of its own
#: to each size: what was freed last is what is taken next.
WIDTH = 3 << 18
BATCH_BYTES = BATCH * WIDTH * 4

#: The filters and limits of all GPU tests.
MARKS = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
]


class Guard(NamedTuple):
    """One run of a test: with the loader as it is, or with one wait taken away.

    Attributes:
        kept: whether it is as it is.
    """

    kept: bool

    def remove(self, patch: pytest.MonkeyPatch, owner: Any, name: str, replacement: Any) -> None:
        """Put `replacement` in the guard's place, in the run without it."""
        if not self.kept:
            patch.setattr(owner, name, replacement)

    @property
    def outcome(self) -> AbstractContextManager[Any]:
        """Around the assertions: without the guard they must fail."""
        return nullcontext() if self.kept else pytest.raises(AssertionError)


guarded = pytest.mark.parametrize("guard", [Guard(True), Guard(False)], ids=["guarded", "unguarded"])


@contextmanager
def device_or_skip() -> Iterator[None]:
    """For a fixture around every GPU test: skips without a GPU, and leaves the GPU idle for the next one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    # Loads their kernels, which the driver would else do in the middle of a race.
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    looks_right(torch.zeros(BATCH, 8, dtype=torch.int32, device="cuda"), 0).item()
    yield
    torch.cuda.synchronize()


@dataclass(eq=False)
class Numbers(Sized, Dataset[torch.Tensor]):
    """Sample i is `width` int32 values i + 1: no batch is like another, or like memory that is new."""

    length: int = BATCH * BATCHES
    width: int = WIDTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), index + 1, dtype=torch.int32)


def looks_right(batch: torch.Tensor, first: int) -> torch.Tensor:
    """Whether every byte of a batch of `Numbers` is as it was written, samples from `first` on: a tensor on
    the device, computed when the current stream comes to it."""
    expected = torch.arange(first + 1, first + 1 + len(batch), dtype=torch.int32, device=batch.device)
    return (batch == expected[:, None]).all()


def lag(stream: Any = None, times: int = 1) -> None:
    """Let a stream (default: the current one) sleep for `times` 0.1 s or so before what is queued next."""
    with torch.cuda.stream(stream):
        for _ in range(times):
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]


def wrong_batches(batches: Iterable[torch.Tensor], then: Callable[[], None] = lambda: None) -> list[int]:
    """Numbers of the batches of an epoch that held other values than theirs when the device read them.

    Args:
        batches: a loader of `Numbers`, or its iterator.
        then: called after each `next()`, before the batch is read.
    """
    seen, first = [], 0
    for batch in batches:
        then()
        seen.append(looks_right(batch, first))
        first += len(batch)
        del batch  # its memory is free again before the device has read it
    torch.cuda.synchronize()
    assert first, "an epoch without batches proves nothing"
    return [number for number, right in enumerate(torch.stack(seen).tolist()) if not right]


@contextmanager
def warm_loader(**options: Any) -> Iterator[DataLoader[torch.Tensor]]:
    """A loader of `Numbers` after its first epoch, which was right: blocks are page-locked, device memory is
    cached, kernels are loaded."""
    names = {field.name for field in fields(ToDevice)}
    device = ToDevice("cuda", **{name: options.pop(name) for name in list(options) if name in names})
    options = {"num_workers": 2, "device": device, **options}
    options.setdefault("persistent_workers", options["num_workers"] > 0)
    with DataLoader(Numbers(), BATCH, **options) as loader:
        assert wrong_batches(loader) == []
        yield loader


@contextmanager
def warm_prefetcher() -> Iterator[Prefetcher]:
    """The same over torch's loader."""
    with Prefetcher(torch.utils.data.DataLoader(Numbers(), BATCH, num_workers=2), "cuda") as batches:
        assert wrong_batches(batches) == []
        yield batches


def slow_copies(patch: pytest.MonkeyPatch, times: int = 1) -> None:
    """From here on the side stream sleeps for `times` 0.1 s before every copy."""
    copy_async = TorchBackend.copy_async

    def late(self: TorchBackend, memory: torch.Tensor, source: torch.Tensor, nbytes: int) -> None:
        lag(self.side, times)
        copy_async(self, memory, source, nbytes)

    patch.setattr(TorchBackend, "copy_async", late)


def waits_of(side: bool) -> Callable[[TorchBackend, Any, Any], None]:
    """A `TorchBackend.wait` that works for the side stream only, or for the consumer's streams only."""
    wait = TorchBackend.wait

    def some(self: TorchBackend, stream: Any, event: Any) -> None:
        if (stream == self.side) == side:
            wait(self, stream, event)

    return some


def staging_of(loader: DataLoader[Any]) -> StagingStatistics:
    """What a loader with a device did so far."""
    staging = loader.statistics().staging
    assert staging is not None
    return staging


def nvidia_descriptors(pid: int) -> list[str]:
    """What a process holds open of the driver's devices."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(descriptor))
    return [target for target in found if target.startswith("/dev/nvidia")]
