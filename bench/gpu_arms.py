"""What `python -m bench gpu` compares: shapes of batches, and the arms that bring them to the device.

An arm lives in the consumer. Its workers come from a fork server, which never sees the device: it does not
matter to any of them what another arm has initialised before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, default_collate

import fastq_loader
from bench.gpu_results import LABELS, LARGE, PREFETCH, RESIDENT, TORCH
from fastq_loader import ToDevice

START_METHOD = "forkserver"
PREFETCH_FACTOR = 2  # batches that a worker works ahead; torch's default


@dataclass(frozen=True)
class Shape:
    """A batch: `fields` tensors of `samples` x `sample_shape`; a single one is no dict."""

    name: str
    description: str
    fields: int
    samples: int
    sample_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of a batch."""
        return self.fields * self.samples * torch.Size(self.sample_shape).numel() * self.dtype.itemsize


SHAPES = (
    Shape(LARGE, "one uint8 tensor, 256 images of 3x224x224", 1, 256, (3, 224, 224), torch.uint8),
    # Two samples: collating many small pieces is Python's work in the workers, and not what is compared.
    Shape("fields_32", "32 fields of 64 KiB, float32", 32, 2, (8192,), torch.float32),
    Shape("fields_500", "500 fields of 256 bytes, float32", 500, 2, (32,), torch.float32),
)


class ReadyMade(Dataset[Any]):
    """Samples that are there already: a batch costs a worker one copy, into the memory it leaves in."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    @cached_property
    def _samples(self) -> list[Any]:
        """Made where it is first used, in the worker: it does not travel."""
        shape = self._shape
        size = shape.fields, shape.samples, *shape.sample_shape
        count = torch.Size(size).numel()
        # 251 is prime: neighbours, samples and fields all differ, also within a byte.
        values = torch.arange(251).to(shape.dtype).repeat(count // 251 + 1)[:count].view(size)
        if shape.fields == 1:
            return list(values[0])
        names = [f"field {number}" for number in range(shape.fields)]
        return [
            {name: values[number, sample] for number, name in enumerate(names)}
            for sample in range(shape.samples)
        ]

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self._samples[index] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return {"_shape": self._shape}

    def batch(self) -> Any:
        """What every batch has to be, on the host."""
        return default_collate(self._samples)


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
        batches: tells an epoch's length; None: there are no epochs.
        begin: an epoch's batches, on the device.
        ahead: batches that may be ready before they are asked for.
        loader: a loader of ours to close; torch's ends with the last reference to it.
    """

    def __init__(
        self, batches: Batches | None, begin: Callable[[], Iterator[Any]], ahead: int, loader: Any = None
    ) -> None:
        self.ahead = ahead
        self._batches = batches
        self._begin: Callable[[], Iterator[Any]] | None = begin
        self._loader = loader
        self._live: Iterator[Any] | None = None

    def next(self) -> Any:
        """A batch, on the device for what is queued on the current stream from here on."""
        if self._live is None:
            assert self._begin is not None
            self._live = self._begin()
        return next(self._live)

    def epochs(self, count: int, batches: int) -> None:
        """So many epochs of so many batches, after the one that is under way."""
        assert self._batches is not None
        assert self._begin is not None
        if self._live is not None:
            self._batches.stopped = True  # a persistent loader of torch's must not be left in an epoch
            for _ in self._live:
                pass
            self._live, self._batches.stopped = None, False
        self._batches.length = batches
        for _ in range(count):
            for _ in self._begin():
                pass
        self._batches.length = None

    def staging(self) -> dict[str, Any]:
        """The fields of the loader's `StagingStatistics`; {} of other loaders."""
        statistics = None if self._loader is None else self._loader.statistics().staging
        return {} if statistics is None else dict(vars(statistics))

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        self._live = self._begin = self._loader = None


def make(name: str, shape: Shape, device: torch.device, workers: int, start_method: str) -> Arm:
    """An arm of `LABELS`, whose workers start with the first batch."""
    assert name in LABELS
    if name == RESIDENT:
        there = [to_device(ReadyMade(shape).batch(), device) for _ in range(2)]
        return Arm(None, lambda: itertools.cycle(there), 0)
    batches = Batches(shape.samples)
    ahead = PREFETCH_FACTOR * workers + 2
    if name not in (TORCH, PREFETCH):
        arguments: dict[str, Any] = {"device": ToDevice(device, pin=name)}
        ours = fastq_loader.DataLoader(**_common(shape, batches, workers, start_method), **arguments)
        return Arm(batches, lambda: iter(ours), ahead, ours)
    loader: Any = TorchDataLoader(**_common(shape, batches, workers, start_method), pin_memory=True)
    if name == TORCH:
        return Arm(batches, lambda: (to_device(batch, device) for batch in loader), ahead)
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # one for all epochs: memory is cached for each stream by itself
    return Arm(batches, lambda: prefetched(loader, device, side), ahead)


def host_only(shape: Shape, workers: int, start_method: str) -> Arm:
    """What the workers can supply: the same batches, left on the host."""
    batches = Batches(shape.samples)
    ours = fastq_loader.DataLoader(**_common(shape, batches, workers, start_method))
    return Arm(batches, lambda: iter(ours), PREFETCH_FACTOR * workers, ours)


def _common(shape: Shape, batches: Batches, workers: int, start_method: str) -> dict[str, Any]:
    return {
        "dataset": ReadyMade(shape),
        "batch_sampler": batches,
        "num_workers": workers,
        "prefetch_factor": PREFETCH_FACTOR,
        "persistent_workers": True,
        "multiprocessing_context": start_method,
    }


# ---- torch, by hand -----------------------------------------------------------------------------


def to_device(batch: Any, device: torch.device) -> Any:
    """Each leaf by itself, on the current stream: what most training loops do."""
    if isinstance(batch, dict):
        return {name: leaf.to(device, non_blocking=True) for name, leaf in batch.items()}
    return batch.to(device, non_blocking=True)


def leaves(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in its order."""
    return list(batch.values()) if isinstance(batch, dict) else [batch]


def prefetched(host: Iterable[Any], device: torch.device, side: torch.cuda.Stream) -> Iterator[Any]:
    """NVIDIA apex's prefetcher, done right: the batch after the one that is worked on is copied on a side
    stream.

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
        for leaf in leaves(there):
            leaf.record_stream(consumer)
        under_way = [begin(batch) for batch in itertools.islice(batches, 1)]
        yield there
