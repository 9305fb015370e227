"""From an index to a batch: the dataset is asked, the samples are collated.

Runs in workers, and in the consumer with num_workers=0. The rules are those of torch's
`torch/utils/data/_utils/fetch.py`, with two differences. A StopIteration that comes out of a map-style
dataset or a collate function is an error in user code and becomes a RuntimeError, as in generators
(PEP 479); torch silently ends the epoch. And a `__getitems__` inherited from `Subset` is not used when a
subclass overrides `__getitem__` below it: the override is what the user means (pytorch#163184).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class EndOfStream(Exception):
    """An iterable dataset has no further batch."""


class Fetcher(Protocol):
    """Loads the batches of one epoch. The attributes of both kinds have torch's names, because code outside
    reads them from an iterator's `_dataset_fetcher`."""

    def fetch(self, index: Any) -> Any:
        """The batch for an index.

        Raises:
            EndOfStream: an iterable dataset is exhausted.
        """
        ...


Collate = Callable[[Any], Any]


def _has_getitems(dataset: Any) -> bool:
    # torch also asks for a true value: datasets set `__getitems__ = None` to opt out.
    if not getattr(dataset, "__getitems__", None):
        return False
    for kind in type(dataset).__mro__:
        if "__getitems__" in vars(kind):
            return True
        if "__getitem__" in vars(kind) and issubclass(kind, torch.utils.data.Subset):
            return False
    return True  # set on the instance, or by __getattr__


class _MapFetcher:
    def __init__(self, dataset: Any, auto_collation: bool, collate: Collate, drop_last: bool) -> None:
        self.dataset = dataset
        self.auto_collation = auto_collation
        self.collate_fn = collate
        self.drop_last = drop_last
        self._getitems = auto_collation and _has_getitems(dataset)

    def fetch(self, index: Any) -> Any:
        try:
            if self._getitems:
                data = self.dataset.__getitems__(index)
            elif self.auto_collation:
                dataset = self.dataset
                data = [dataset[i] for i in index]
            else:
                data = self.dataset[index]
            return self.collate_fn(data)
        except StopIteration as stop:
            raise RuntimeError("dataset or collate_fn raised StopIteration") from stop


class _IterableFetcher:
    def __init__(self, dataset: Any, auto_collation: bool, collate: Collate, drop_last: bool) -> None:
        self.dataset = dataset
        self.dataset_iter = iter(dataset)
        self.auto_collation = auto_collation
        self.collate_fn = collate
        self.drop_last = drop_last
        self.ended = False

    def fetch(self, index: Any) -> Any:
        if self.ended:
            raise EndOfStream
        if self.auto_collation:
            data: Any = []
            for _ in index:
                try:
                    data.append(next(self.dataset_iter))
                except StopIteration:
                    self.ended = True
                    break
            if not data or (self.drop_last and len(data) < len(index)):
                raise EndOfStream
        else:
            try:
                data = next(self.dataset_iter)
            except StopIteration:
                raise EndOfStream from None
        try:
            return self.collate_fn(data)
        except StopIteration as stop:
            raise RuntimeError("collate_fn raised StopIteration") from stop


def make_fetcher(
    dataset: Any, *, iterable: bool, auto_collation: bool, collate: Collate, drop_last: bool
) -> Fetcher:
    """The fetcher of one epoch; for an iterable dataset this calls `iter(dataset)`."""
    kind = _IterableFetcher if iterable else _MapFetcher
    return kind(dataset, auto_collation, collate, drop_last)
