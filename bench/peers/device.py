"""The peers of `--device cuda`: loops that bring batches onto the device, here called arms.

An arm lives in the consumer. Its workers come from a fork server, which never sees the device: it does not
matter to any of them what another arm has initialised before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader as TorchDataLoader

import fastq_loader
from bench.workloads.ready_made import ReadyMade, Shape
from fastq_loader import Prefetcher, ToDevice

START_METHOD = "forkserver"
PREFETCH_FACTOR = 2  # batches that a worker works ahead; torch's default

HOST = "host"
RESIDENT, TORCH, SIDE_STREAM = "resident", "torch", "torch_side_stream"
PAGEABLE, BOUNCE, REGISTER = OURS = ("pageable", "bounce", "register")
ARMS = {
    RESIDENT: "resident",
    TORCH: "torch, .to()",
    SIDE_STREAM: "torch, side stream",
    PAGEABLE: "fastq_loader, pageable",
    BOUNCE: "fastq_loader, bounce",
    REGISTER: "fastq_loader, register",
}
"""Name → label, in the order of the report."""

MEANINGS = (
    "resident: batches that are on the device already. torch, .to(): its DataLoader with pin_memory=True, "
    "and .to(non_blocking=True) of each leaf; side stream: that loader in a Prefetcher. "
    "fastq_loader: device='cuda' and that way to pin."
)
"""What is behind the labels."""


class Batches(Iterable[list[int]]):
    """A batch sampler of the same batch over and over."""

    def __init__(self, samples: int) -> None:
        self._indices = list(range(samples))

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.repeat(self._indices)


class Arm:
    """Batches on the device, one after the other.

    Args:
        begin: an epoch's batches, on the device.
        ahead: batches that may be ready before they are asked for.
        loader: a loader of ours to close; torch's ends with the last reference to the arm.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], ahead: int, loader: Any = None) -> None:
        self.ahead = ahead
        self._begin = begin
        self._loader = loader
        self._live: Iterator[Any] | None = None

    def next(self) -> Any:
        """A batch, on the device for what is queued on the current stream from here on."""
        if self._live is None:
            self._live = self._begin()
        return next(self._live)

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()


def make(name: str, shape: Shape, device: torch.device, workers: int, start_method: str) -> Arm:
    """An arm of `ARMS`, whose workers start with the first batch; or what the workers can supply: the same
    batches, left on the host."""
    if name == RESIDENT:
        there = [to_device(ReadyMade(shape).batch(), device) for _ in range(2)]
        return Arm(lambda: itertools.cycle(there), 0)
    ahead = PREFETCH_FACTOR * workers + 2
    common: dict[str, Any] = {
        "dataset": ReadyMade(shape),
        "batch_sampler": Batches(shape.samples),
        "num_workers": workers,
        "prefetch_factor": PREFETCH_FACTOR,
        "persistent_workers": True,
        "multiprocessing_context": start_method,
    }
    if name in (HOST, *OURS):
        to = None if name == HOST else ToDevice(device, pin=name)
        ours = fastq_loader.DataLoader(**common, device=to)
        return Arm(lambda: iter(ours), ahead, ours)
    loader: Any = TorchDataLoader(**common, pin_memory=True)
    prefetcher = Prefetcher(loader, device)
    if name == TORCH:
        return Arm(lambda: (to_device(batch, device) for batch in loader), ahead)
    return Arm(lambda: iter(prefetcher), ahead)


def to_device(batch: Any, device: torch.device) -> Any:
    """Each leaf by itself, on the current stream: what most training loops do."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True), batch)
