"""What a workload is, and the list of them.

Owns the protocol every workload follows. It must know nothing of any loader: a workload names a dataset, a
batch size and an order, and each peer turns these into its own arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

Step = Callable[[Any], None]
Collate = Callable[[Any], Any]

# Longer than any run: 20,000 batches of 64 a second would take 14 minutes to end the epoch. A sequential
# sampler over it iterates a `range`, which costs nothing to start.
ENDLESS = 1 << 30


@dataclass(frozen=True)
class Load:
    """A dataset and how it is to be batched, the same for every peer.

    Attributes:
        dataset: map-style (with `__getitems__` if it likes), or an `IterableDataset` that takes its share by
            `torch.utils.data.get_worker_info()`, and does not end.
        batch_size: samples in a batch.
        shuffle: map-style only; the order is drawn anew in every epoch.
        collate_fn: the user's; None is torch's default.
        batches: whole batches in an epoch; None is what the dataset's length gives. Map-style only.
        reads_files: each sample is read from a file when it is asked for; elsewhere data are in memory.
    """

    dataset: Dataset[Any]
    batch_size: int
    shuffle: bool = False
    collate_fn: Collate | None = None
    batches: int | None = None
    reads_files: bool = False

    @property
    def iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def by_lists(self) -> bool:
        """Whether the dataset wants the indices of a batch at once."""
        return hasattr(self.dataset, "__getitems__")

    @property
    def collate(self) -> Collate:
        """What makes a batch of a list of samples."""
        return self.collate_fn or default_collate

    def sampler(self) -> SequentialSampler | RandomSampler | None:
        """A new source of indices; two of them yield the same ones. None for an iterable dataset."""
        if self.iterable:
            return None
        samples = len(self.dataset) if self.batches is None else self.batches * self.batch_size  # type: ignore[arg-type]
        if not self.shuffle:
            return SequentialSampler(range(samples))
        return RandomSampler(
            self.dataset,  # type: ignore[arg-type]
            num_samples=samples,
            generator=torch.Generator().manual_seed(0),
        )

    def index_batches(self) -> Iterator[list[int]]:
        """The index lists of one epoch, whole batches only."""
        sampler = self.sampler()
        assert sampler is not None, "an iterable dataset has no indices"
        return whole_batches(sampler, self.batch_size)

    def fetch(self, indices: list[int]) -> Any:
        """The samples of a batch, asked for as torch asks."""
        if self.by_lists:
            return self.dataset.__getitems__(indices)  # type: ignore[attr-defined]
        return [self.dataset[index] for index in indices]

    def share(self, worker: int = 0, workers: int = 0) -> Iterator[Any]:
        """The batches of one epoch that are this worker's, as torch deals them out; made without any loader.

        An iterable dataset asks torch for its worker's number itself.
        """
        if self.iterable:
            return map(self.collate, whole_batches(self.dataset, self.batch_size))  # type: ignore[arg-type]
        indices = islice(self.index_batches(), worker, None, max(1, workers))
        return (self.collate(self.fetch(batch)) for batch in indices)


def whole_batches(items: Iterable[Any], batch_size: int) -> Iterator[list[Any]]:
    """Lists of `batch_size` items; what is left over at the end is dropped."""
    pieces = [iter(items)] * batch_size
    return (list(piece) for piece in zip(*pieces, strict=False))


class Endless(Dataset[Any]):
    """A dataset whose epoch is longer than any run; its samples come again and again."""

    def __len__(self) -> int:
        return ENDLESS


class Cycled(Endless):
    """`dataset[i]` is `samples[i % len(samples)]`: of a tensor a view, no copy and no arithmetic."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


@dataclass(frozen=True)
class Workload:
    """One kind of data to load.

    Datasets and collate functions are classes and functions at the top level of their module, so that
    spawned workers can import them.

    Attributes:
        build: makes the dataset, of what `prepare` wrote into the folder.
        random: samples depend on random generators, so that two loaders' batches have equal shapes only.
        new_step: makes a function to call with every batch; each peer trains a model of its own.
    """

    name: str
    description: str
    build: Callable[[Path], Load]
    prepare: Callable[[Path], None] = lambda folder: None
    random: bool = False
    new_step: Callable[[], Step] = lambda: lambda batch: None

    def files(self, folder: Path) -> Path:
        """Where its files are, below the run's folder; they are written once."""
        own = folder / self.name
        if not own.exists():
            own.mkdir()
            self.prepare(own)
        return own

    def load(self, folder: Path) -> Load:
        return self.build(self.files(folder))


def all_workloads() -> dict[str, Workload]:
    """Every workload by name, in the order of the report."""
    # Imported here because the modules themselves import the protocol above.
    from bench.workloads import files, jpeg, ready_made, tables, text

    workloads = [jpeg.BYTES, jpeg.FLOATS, jpeg.DECODED, files.TENSORS, tables.CSV]
    workloads += [*ready_made.LARGE_BATCHES, tables.ROWS]
    workloads += [text.TOKENS, tables.FIELDS, text.OBJECTS, tables.VECTORISED, text.RAGGED, files.STREAM]
    workloads += [tables.TABLE, tables.WIDE_TABLE]
    return {workload.name: workload for workload in workloads}


def find_workload(name: str) -> Workload:
    """The workload of that name, sized ones included."""
    from bench.workloads.ready_made import sized

    kind, _, size = name.partition("_")
    return sized(int(size)) if kind == "bytes" else all_workloads()[name]
