"""From an index to a batch: read the samples, collate them.

Runs in workers, and in the consumer with num_workers=0. It follows torch's
`torch/utils/data/_utils/fetch.py`, with two differences. A StopIteration from a map-style dataset or a
collate function is an error in user code and becomes a RuntimeError, as in generators (PEP 479); torch
silently ends the epoch. And a `__getitems__` inherited from `Subset` is not used if a subclass overrides
`__getitem__`: the user means the override (pytorch#163184).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastq_loader.reading.collate import DEFAULT, default
from fastq_loader.reading.tables import TABLES, Gatherer, is_table
from fastq_loader.system.unpatched import time


class EndOfStream(Exception):
    """An iterable dataset has no further batch."""


class LeftOut(Exception):
    """All samples of a batch were left out."""


Collate = Callable[[Any], Any]


class _Loading(threading.local):
    """The `Reader` that loads a batch on this thread; None outside of a loader."""

    reader: Any = None


loading = _Loading()


class Fetcher:
    """Loads the batches of one epoch. For an iterable dataset the constructor calls `iter(dataset)`.

    Attributes that torch's fetcher has, too, keep torch's names, because outside code reads them from an
    iterator's `_dataset_fetcher`.

    Attributes:
        indices, left: the indices whose samples are read one by one, and an iterator over them, which says
            which sample is being read: this costs no call for each of them.
        fetched: when the samples of the last batch had been read, in nanoseconds of the monotonic clock.
        dataset_iter, ended: the iterator of an iterable dataset, and whether it ended before a batch was
            full.
        stateful: whether the dataset or its iterator can save its position; None until first determined.
        batch_numbers: numbers of the epoch and of the batch, set before each batch by an `ErrorPolicy` that
            made the fetcher.
        remark: the samples that it could not read, for `ErrorPolicy.judge`; None without any.
    """

    indices: Any = ()
    left: Iterator[Any] = iter(())
    dataset_iter: Any = None
    ended = False
    stateful: bool | None = None
    batch_numbers = (0, 0)
    remark: Any = None
    fetched = 0

    def __init__(
        self, dataset: Any, *, iterable: bool, auto_collation: bool, collate: Collate, drop_last: bool
    ) -> None:
        self.dataset = dataset
        self.auto_collation = auto_collation
        self.collate_fn = collate
        self.drop_last = drop_last
        # torch, too, requires a true value: datasets set `__getitems__ = None` to opt out.
        might = auto_collation and not iterable and getattr(dataset, "__getitems__", None)
        self._getitems = bool(might) and _has_getitems(dataset)
        might = auto_collation and collate is DEFAULT and type(dataset) in TABLES
        self._gatherer = Gatherer() if might and is_table(dataset) else None
        self._collate = default if collate is DEFAULT else collate
        if iterable:
            self.dataset_iter = iter(dataset)

    def fetch(self, index: Any) -> Any:
        """Load the batch for an index.

        Raises:
            EndOfStream: an iterable dataset is exhausted.
        """
        try:
            gatherer = self._gatherer
            if gatherer is not None and (batch := gatherer.gather(self.dataset, index)) is not None:
                self.fetched = time.monotonic_ns()
                return batch
            data = self._read(index)
            self.indices = ()
            self.fetched = time.monotonic_ns()
            return self._collate(data)
        except StopIteration as stop:
            raise RuntimeError("dataset or collate_fn raised StopIteration") from stop

    def _read(self, index: Any) -> Any:
        """Read the samples to be collated; a single one without batching."""
        dataset = self.dataset
        if self.dataset_iter is not None:
            data = self._read_stream(index)
            return data if self.auto_collation else data[0]
        if self._getitems:
            return dataset.__getitems__(index)
        if not self.auto_collation:
            return dataset[index]
        self.indices, self.left = index, iter(index)
        return [dataset[i] for i in self.left]

    def _read_stream(self, index: Any) -> Any:
        if self.ended:
            raise EndOfStream
        data: list[Any] = []
        try:
            self.indices = index if self.auto_collation else (None,)
            self.left = iter(self.indices)
            for _ in self.left:
                data.append(next(self.dataset_iter))  # noqa: PERF401
        except StopIteration:
            self.ended = self.auto_collation
            if self.drop_last:
                raise EndOfStream from None
        if not data:
            raise EndOfStream
        return data


def _has_getitems(dataset: Any) -> bool:
    """Whether the `__getitems__` of a dataset, which has one, is its own."""
    for kind in type(dataset).__mro__:
        if "__getitems__" in vars(kind):
            return True
        if "__getitem__" in vars(kind) and issubclass(kind, torch.utils.data.Subset):
            return False
    return True  # set on the instance, or by __getattr__
