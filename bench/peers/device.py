"""The peers of `--device cuda`: loops that bring batches onto the device, here called arms.

An arm lives in the consumer. Its workers come from a fork server, which never sees the device: it does not
matter to any of them what another arm has initialised before.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader as TorchDataLoader

import fastq_loader
from bench.workloads.ready_made import ReadyMade, Shape
from fastq_loader import ToDevice

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
    "and .to(non_blocking=True) of each leaf; side stream: the same beside the step, by a prefetcher. "
    "fastq_loader: device='cuda' and that way to pin."
)
"""What is behind the labels."""


class Batches(Iterable[list[int]]):
    """A batch sampler of the same batch over and over.

    Attributes:
        length: batches of the next epoch; None: until `stopped` is set.
    """

    def __init__(self, samples: int) -> None:
        self._indices = list(range(samples))
        self.length: int | None = None
        self.stopped = False

    def __iter__(self) -> Iterator[list[int]]:
        for _ in itertools.count() if self.length is None else range(self.length):
            if self.stopped:
                return
            yield self._indices


class Arm:
    """Batches on the device, one after the other.

    Args:
        batches: tells an epoch's length.
        begin: an epoch's batches, on the device.
        ahead: batches that may be ready before they are asked for.
        loader: a loader of ours to close; torch's ends with the last reference to the arm.
    """

    def __init__(
        self, batches: Batches, begin: Callable[[], Iterator[Any]], ahead: int, loader: Any = None
    ) -> None:
        self.ahead = ahead
        self._batches = batches
        self._begin = begin
        self._loader = loader
        self._live: Iterator[Any] | None = None

    def next(self) -> Any:
        """A batch, on the device for what is queued on the current stream from here on."""
        if self._live is None:
            self._live = self._begin()
        return next(self._live)

    def epochs(self, count: int, batches: int) -> None:
        """So many epochs of so many batches, after the one that is under way."""
        if self._live is not None:
            self._batches.stopped = True  # a persistent loader of torch's must not be left in an epoch
            deque(self._live, maxlen=0)
            self._live, self._batches.stopped = None, False
        self._batches.length = batches
        for _ in range(count):
            deque(self._begin(), maxlen=0)
        self._batches.length = None

    def staging(self) -> dict[str, Any]:
        """The fields of the loader's `StagingStatistics`; {} of other loaders."""
        statistics = None if self._loader is None else self._loader.statistics().staging
        return {} if statistics is None else dict(vars(statistics))

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()


def make(name: str, shape: Shape, device: torch.device, workers: int, start_method: str) -> Arm:
    """An arm of `ARMS`, whose workers start with the first batch; or what the workers can supply: the same
    batches, left on the host."""
    batches = Batches(shape.samples)
    if name == RESIDENT:
        there = [to_device(ReadyMade(shape).batch(), device) for _ in range(2)]
        return Arm(batches, lambda: itertools.cycle(there), 0)
    ahead = PREFETCH_FACTOR * workers + 2
    common: dict[str, Any] = {
        "dataset": ReadyMade(shape),
        "batch_sampler": batches,
        "num_workers": workers,
        "prefetch_factor": PREFETCH_FACTOR,
        "persistent_workers": True,
        "multiprocessing_context": start_method,
    }
    if name in (HOST, *OURS):
        to = None if name == HOST else ToDevice(device, pin=name)
        ours = fastq_loader.DataLoader(**common, device=to)
        return Arm(batches, lambda: iter(ours), ahead, ours)
    loader: Any = TorchDataLoader(**common, pin_memory=True)
    if name == TORCH:
        return Arm(batches, lambda: (to_device(batch, device) for batch in loader), ahead)
    # One stream for all epochs: the allocator caches memory for each stream by itself.
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return Arm(batches, lambda: prefetched(loader, device, side), ahead)


def to_device(batch: Any, device: torch.device) -> Any:
    """Each leaf by itself, on the current stream: what most training loops do."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True), batch)


def prefetched(host: Iterable[Any], device: torch.device, side: torch.cuda.Stream) -> Iterator[Any]:
    """NVIDIA apex's prefetcher, done right: the next batch is copied on a side stream meanwhile.

    Right, because the consumer's stream waits for this copy and no later one; because memory that was
    allocated on the side stream is not given out again before the consumer's stream is done with it; and
    because the host's side is pinned by torch, whose allocator waits for copies from what it pinned.
    """

    def begin(batch: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(side):
            return to_device(batch, device), side.record_event()

    batches = iter(host)
    under_way = [begin(batch) for batch in itertools.islice(batches, 1)]
    while under_way:
        there, arrived = under_way.pop()
        consumer = torch.cuda.current_stream(device)
        consumer.wait_event(arrived)
        for leaf in tree_leaves(there):
            leaf.record_stream(consumer)
        under_way = [begin(batch) for batch in itertools.islice(batches, 1)]
        yield there
