"""From an index to a batch: read the samples, collate them.

Runs in workers, and in the consumer with num_workers=0. It follows torch's
`torch/utils/data/_utils/fetch.py`, with two differences. A StopIteration from a map-style dataset or a
collate function is an error in user code and becomes a RuntimeError, as in generators (PEP 479); torch
silently ends the epoch. And a `__getitems__` inherited from `Subset` is not used if a subclass overrides
`__getitem__`: the user means the override (pytorch#163184).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import sub
from typing import Any

import torch

from fastq_loader.reading import sample_seeds
from fastq_loader.reading.collate import DEFAULT, default
from fastq_loader.reading.tables import Gatherer, is_table
from fastq_loader.system.unpatched import time


class EndOfStream(Exception):
    """An iterable dataset has no further batch."""


class LeftOut(Exception):
    """All samples of a batch were left out."""


Collate = Callable[[Any], Any]

#: Nanoseconds per sample above which the samples of the next batch are timed one by one. Timing costs 0.1 µs
#: per sample: half a percent at most.
_WORTH_TIMING = 25_000


class Fetcher:
    """Loads the batches of one epoch. For an iterable dataset the constructor calls `iter(dataset)`.

    Attributes that torch's fetcher has, too, keep torch's names, because outside code reads them from an
    iterator's `_dataset_fetcher`.

    Attributes:
        fetched: when the last batch was requested, or, after that, when its samples had been read;
            nanoseconds of the monotonic clock.
        slowest, slowest_at: nanoseconds that the slowest sample of the last batch took, and its position in
            the batch; 0, 0 if the samples were not timed.
        dataset_iter, ended: the iterator of an iterable dataset, and whether it ended before a batch was
            full.
        stateful: whether the dataset or its iterator can save its position; None until first determined.
        place: numbers of the epoch and of the batch, set before each batch if an `ErrorPolicy` has made the
            fetcher.
        remark: what that could not read, for `ErrorPolicy.judge`; None where there is nothing.
    """

    dataset_iter: Any = None
    ended = False
    stateful: bool | None = None
    place = (0, 0)
    remark: Any = None
    fetched = slowest = slowest_at = 0

    def __init__(
        self, dataset: Any, *, iterable: bool, auto_collation: bool, collate: Collate, drop_last: bool
    ) -> None:
        self.dataset = dataset
        self.auto_collation = auto_collation
        self.collate_fn = collate
        self.drop_last = drop_last
        self._getitems = auto_collation and not iterable and _has_getitems(dataset)
        gathers = auto_collation and collate is DEFAULT and is_table(dataset)
        self._gatherer = Gatherer() if gathers else None
        self._times_samples = False
        if iterable:
            self.dataset_iter = iter(dataset)

    def fetch(self, index: Any) -> Any:
        """Load the batch for an index.

        Raises:
            EndOfStream: an iterable dataset is exhausted.
        """
        began = self.fetched = time.monotonic_ns()
        self.slowest = self.slowest_at = 0
        try:
            if self._gatherer and (batch := self._gatherer.gather(self.dataset, index)) is not None:
                self.fetched = time.monotonic_ns()
                return batch
            data = self._read(index)
            self.fetched = time.monotonic_ns()
            samples = 0 if self._getitems or not self.auto_collation else len(data)
            self._times_samples = 0 < samples * _WORTH_TIMING < self.fetched - began
            return (default if self.collate_fn is DEFAULT else self.collate_fn)(data)
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
        places = sample_seeds.followed(index) if sample_seeds.wanted else index
        return self._read_timed(places) if self._times_samples else [dataset[i] for i in places]

    def _read_timed(self, index: Iterable[Any]) -> list[Any]:
        data: list[Any] = []
        ends = [self.fetched]
        for i in index:
            data.append(self.dataset[i])
            ends.append(time.monotonic_ns())
        self._compare(ends)
        return data

    def _read_stream(self, index: Any) -> Any:
        if self.ended:
            raise EndOfStream
        data: list[Any] = []
        ends = [self.fetched]
        try:
            places = index if self.auto_collation else (None,)
            for _ in sample_seeds.followed(places) if sample_seeds.wanted else places:
                data.append(next(self.dataset_iter))
                if self._times_samples:
                    ends.append(time.monotonic_ns())
        except StopIteration:
            self.ended = self.auto_collation
            if self.drop_last:
                raise EndOfStream from None
        if not data:
            raise EndOfStream
        if self._times_samples:
            self._compare(ends)
        return data

    def _compare(self, ends: list[int]) -> None:
        """Record the slowest sample. `ends`: start of the batch, then the time after each sample."""
        took = list(map(sub, ends[1:], ends))
        self.slowest = max(took, default=0)
        self.slowest_at = took.index(self.slowest) if took else 0


def _has_getitems(dataset: Any) -> bool:
    # torch also requires a true value: datasets set `__getitems__ = None` to opt out.
    if not getattr(dataset, "__getitems__", None):
        return False
    for kind in type(dataset).__mro__:
        if "__getitems__" in vars(kind):
            return True
        if "__getitem__" in vars(kind) and issubclass(kind, torch.utils.data.Subset):
            return False
    return True  # set on the instance, or by __getattr__
