"""Where a dataset says that it stands."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from fastq_loader.reading import position
from fastq_loader.reading.fetch import EndOfStream, Fetcher


class Counts(IterableDataset):  # type: ignore[type-arg]
    """Says where it stands. `rewinds`: at its end it says that it is at its beginning."""

    def __init__(self, length: int, rewinds: bool = False) -> None:
        self.length, self.at, self.resumed, self.rewinds = length, 0, False, rewinds

    def __iter__(self) -> Iterator[int]:
        self.at = self.at if self.resumed or self.rewinds else 0
        self.resumed = False
        while self.at < self.length:
            self.at += 1
            yield self.at - 1
        if self.rewinds:
            self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.resumed = state["at"], True


class Iterates(IterableDataset):  # type: ignore[type-arg]
    """Its iterator says it, and not the dataset."""

    def __iter__(self) -> Any:
        return iter(Counting())


class Counting(Counts):
    def __init__(self) -> None:
        super().__init__(7)
        self.__next__ = None

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:  # type: ignore[no-redef]
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1


def fetcher(dataset: Any, place: dict[str, Any] | None = None) -> Fetcher:
    rules = {"iterable": True, "auto_collation": True, "collate": list, "drop_last": False}
    return position.fetcher_at(place, dataset, **rules)


def rest(made: Fetcher) -> list[Any]:
    batches = []
    while True:
        try:
            batches.append(made.fetch([None] * 3))
        except EndOfStream:
            return batches


@pytest.mark.parametrize("fetched", [0, 1, 2, 3])
@pytest.mark.parametrize("make", [lambda: Counts(7), lambda: Counts(7, rewinds=True), Iterates])
def test_a_dataset_goes_on_where_it_stood_and_its_next_epoch_is_whole(make: Any, fetched: int) -> None:
    first = fetcher(make())
    assert position.is_known(first)
    for _ in range(fetched):
        first.fetch([None] * 3)
    place = position.of(first)
    dataset = make()
    assert rest(fetcher(dataset, place)) == [[0, 1, 2], [3, 4, 5], [6]][fetched:]
    assert rest(fetcher(dataset)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_what_says_nothing_is_not_asked() -> None:
    assert not position.is_known(fetcher(range(3)))
    assert position.of(fetcher(range(3))) == {"ended": False}


def test_what_is_said_is_packed_with_more_or_with_the_error_in_its_place() -> None:
    class CannotSay(Counts):
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("at")

    def unpacked(dataset: Any, **more: Any) -> Any:
        packed = position.packed(fetcher(dataset), **more)
        return pickle.loads(packed) if packed else None

    place = {"ended": False, "dataset": {"at": 0}}
    assert unpacked(Counts(3), more=1) == {"position": place, "more": 1}
    assert unpacked(CannotSay(3), more=1) == {"position": {"error": "KeyError: 'at'"}, "more": 1}
    assert unpacked([1], more=1) == {"more": 1}
    assert unpacked([1]) is None
