"""Samples that cannot be read: what takes their place, what is left out, and what is raised as ever."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from fastq_loader.extras.bad_samples.fetcher import TolerantFetcher
from fastq_loader.extras.bad_samples.policies import Replace, Skip, Tolerance
from fastq_loader.reading.error_policy import read_errors
from fastq_loader.reading.fetch import EndOfStream, LeftOut

SIZE = 50


class Stream(IterableDataset[int]):
    """Yields its turns; an exception among them is raised, and more may follow."""

    def __init__(self, *turns: Any) -> None:
        self.turns = turns

    def __iter__(self) -> Iterator[int]:
        return map(self.take, self.turns)

    def take(self, turn: Any) -> int:
        if isinstance(turn, Exception):
            raise turn
        return int(turn)


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nor can it be shown")


class Reads:
    """Gives what it is asked for, but raises at some indices; notes what was read."""

    def __init__(self, *bad: Any, error: Callable[[Any], Exception] = KeyError) -> None:
        self.bad, self.error = bad, error
        self.read: list[Any] = []

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        whole = isinstance(index, (int, np.integer))
        if any(index is bad or (whole and index == bad) for bad in self.bad):
            raise self.error(index)
        return index

    def __len__(self) -> int:
        return SIZE


class ReadsMany(Reads):
    def __getitems__(self, indices: Any) -> Any:
        return [self[index] for index in indices]


class Generated(IterableDataset[int]):
    """A generator ends with its error, also inside of another iterator."""

    def __init__(self, turns: list[Any], outside: Callable[[Any], Any] = iter) -> None:
        self.turns, self.outside = turns, outside

    def __iter__(self) -> Iterator[int]:
        return iter(self.outside(self._all()))

    def _all(self) -> Iterator[int]:
        for turn in self.turns:
            if isinstance(turn, Exception):
                raise turn
            yield turn


def fetcher(
    dataset: Any, errors: Tolerance, population: int | None = None, collate: Any = list, **rules: Any
) -> Any:
    rules = {"auto_collation": True, "drop_last": False, **rules}
    iterable = isinstance(dataset, IterableDataset)
    return TolerantFetcher(
        dataset, errors=errors, population=population, iterable=iterable, collate=collate, **rules
    )


def indices_of(fetching: Any) -> list[tuple[Any, Any]]:
    return [(index, instead) for index, instead, _ in fetching.bad]


@pytest.mark.parametrize("kind", [Reads, ReadsMany])
def test_samples_that_raise_are_left_out_and_the_others_are_read_once(kind: Any) -> None:
    fetching = fetcher(dataset := kind(3, 5), Skip())
    assert fetching.fetch([1, 3, 4, 5, 1]) == [1, 4, 1]
    assert fetching.bad == [[3, None, "KeyError: 3"], [5, None, "KeyError: 5"]]
    assert (fetching.remark[0], type(fetching.remark[1])) == (fetching.bad, KeyError)
    if kind is Reads:
        assert dataset.read == [1, 3, 4, 5, 1]
    with pytest.raises(LeftOut):
        fetching.fetch([5, 3])
    assert indices_of(fetching) == [(5, None), (3, None)]
    assert fetching.fetch([]) == []
    assert fetching.fetch(iter([1, 3, 2])) == [1, 2]
    assert fetching.fetch(torch.tensor([1, 2])) == [1, 2]
    assert fetching.bad == []


def test_without_batches_a_sample_is_left_out_or_replaced() -> None:
    alone: dict[str, Any] = {"auto_collation": False, "collate": lambda sample: sample}
    with pytest.raises(LeftOut):
        fetcher(Reads(3), Skip(), **alone).fetch(3)
    replacing = fetcher(Reads(3), Replace(), SIZE, **alone)
    assert replacing.fetch(3) in set(range(SIZE)) - {3}
    with pytest.raises(KeyError):
        fetcher(Reads(3), Replace(), None, **alone).fetch(3)
    assert fetcher(Reads(3), Skip(), **alone).fetch((1, 2)) == (1, 2)


@pytest.mark.parametrize("kind", [Reads, ReadsMany])
@pytest.mark.parametrize("population", [None, SIZE])
def test_the_replacement_follows_from_epoch_batch_position_and_index(
    kind: Any, population: int | None
) -> None:
    bad = random.Random(5).sample(range(SIZE), 20)
    index = list(range(SIZE)) * 2
    at = [number for number, old in enumerate(index) if old in bad]

    def read(numbers: tuple[int, int], index: list[Any] = index) -> list[Any]:
        fetching = fetcher(kind(*bad), Replace(), population)
        fetching.fetch([min(set(range(SIZE)) - set(bad))])
        fetching.batch_numbers = numbers
        data: list[Any] = fetching.fetch(index)
        return data

    found = read((2, 7))
    assert read((2, 7)) == read((2, 7), [np.int64(i) if i in bad else i for i in index]) == found
    assert len(found) == len(index)
    assert not set(found) & set(bad)
    assert all(new == old for new, old in zip(found, index, strict=True) if old not in bad)
    shifted = read((2, 7), [*index[1:], index[0]])
    for others in (read((2, 8)), read((3, 7)), found[SIZE:] + found[:SIZE], shifted[-1:] + shifted[:-1]):
        assert sum(others[place] != found[place] for place in at) > len(at) / 2


def test_a_replacement_is_one_of_the_same_batch_or_one_below_the_population() -> None:
    same = fetcher(Reads(3, 5), Replace())
    assert set(same.fetch([30, 3, 5, 31])) == {30, 31}
    assert {index for index, _ in indices_of(same)} == {3, 5}
    assert {instead for _, instead in indices_of(same)} <= {30, 31}
    drawn = {fetcher(Reads(3), Replace(), 4).fetch([at, 3])[1] for at in range(30)}
    assert drawn <= {0, 1, 2}
    for population in (None, 2):
        with pytest.raises(KeyError):
            fetcher(Reads(0, 1), Replace(), population).fetch([0, 1])


def test_an_error_may_be_anything_that_only_names() -> None:
    fetching = fetcher(Reads(1, error=Broken), Skip())
    assert fetching.fetch([1, 2]) == [2]
    assert fetching.bad == [[1, None, "<repr failed: RuntimeError>"]]
    fetching = fetcher(Reads(1, error=lambda index: ValueError("x" * 9999)), Skip(only=(OSError, ValueError)))
    assert fetching.fetch([1, 2]) == [2]
    assert len(fetching.bad[0][2]) == 200
    for errors in (Skip(only=ValueError), Replace(only=(OSError, ValueError))):
        with pytest.raises(KeyError):
            fetcher(Reads(1), errors, SIZE).fetch([1, 2])
    stream = fetcher(Stream(1, KeyError("other"), 2), Skip(only=OSError))
    with pytest.raises(KeyError, match="other"):
        stream.fetch([None] * 3)
    assert stream.fetch([None] * 3) == [2]
    with pytest.raises(ZeroDivisionError):
        fetcher(Reads(1), Skip(), collate=lambda data: 1 / 0).fetch([1, 2])


@pytest.mark.parametrize("kind", [Reads, ReadsMany])
def test_a_stop_iteration_is_an_error_of_the_sample_and_never_the_end(kind: Any) -> None:
    def stopping() -> Any:
        return kind(1, 4, error=StopIteration)

    skipping = fetcher(stopping(), Skip())
    assert skipping.fetch([0, 1, 2, 4]) == [0, 2]
    assert type(skipping.remark[1]) is RuntimeError  # StopIteration would end the epoch
    assert set(fetcher(stopping(), Replace()).fetch([0, 1, 2, 4])) == {0, 2}
    for errors in (Skip(only=OSError), Replace(only=OSError), Replace()):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            fetcher(stopping(), errors).fetch([1, 4, 1] if errors == Replace() else [0, 1])


def drain(fetching: Any, size: int = 3) -> list[list[Any]]:
    found = []
    try:
        while True:
            try:
                found.append(fetching.fetch([None] * size))
            except LeftOut:
                found.append([])
    except EndOfStream:
        return found


BAD = OSError("broken")


@pytest.mark.parametrize(
    ("turns", "drop_last", "expected"),
    [
        ([1, BAD, 2, 3, BAD, BAD, BAD, 4], False, [[1, 2], [3], [4]]),
        ([1, 2, 3, BAD], False, [[1, 2, 3], []]),
        ([1, BAD, 3, BAD, BAD], True, [[1, 3]]),
        ([BAD, BAD, BAD], False, [[]]),
    ],
)
def test_a_stream_that_goes_on_is_read_to_its_end(turns: Any, drop_last: bool, expected: Any) -> None:
    fetching = fetcher(Stream(*turns), Skip(), drop_last=drop_last)
    assert drain(fetching) == expected
    for _ in range(2):
        with pytest.raises(EndOfStream):
            fetching.fetch([None])
    single = fetcher(Stream(*turns), Skip(), auto_collation=False, collate=lambda sample: sample)
    flat = [each for each in drain(single, 1) if each != []]
    assert flat == [turn for turn in turns if turn is not BAD]


def sliced(turns: Any) -> Any:
    return itertools.islice(turns, 100)  # which drops a generator that has raised


@pytest.mark.parametrize("outside", [iter, enumerate, lambda turns: map(abs, turns), sliced])
@pytest.mark.parametrize("at", range(5))
def test_a_generator_does_not_go_on_and_the_error_says_so(outside: Any, at: int) -> None:
    turns: list[Any] = [1, 2, 3, 4, 5]
    turns[at] = OSError("broken")
    fetching = fetcher(Generated(turns, outside), Skip())
    with pytest.raises(OSError, match="broken") as caught:
        drain(fetching)
    notes = getattr(caught.value, "__notes__", [])
    assert "cannot leave it out" in "".join(notes) or not hasattr(caught.value, "add_note")
    with pytest.raises(EndOfStream):
        fetching.fetch([None])


def test_the_limit_is_a_number_or_a_share_of_at_least_a_thousand() -> None:
    assert Skip(limit=None).allows(10**9, 10**9)
    assert [Skip(limit=3).allows(bad, 10**6) for bad in (3, 4)] == [True, False]
    assert [Replace(limit=0).allows(bad, 10) for bad in (0, 1)] == [True, False]
    assert [Skip(limit=0.01).allows(bad, 5) for bad in (10, 11)] == [True, False]
    assert [Skip(limit=0.01).allows(bad, 5000) for bad in (50, 51)] == [True, False]
    assert [Skip().allows(bad, 4000) for bad in (2000, 2001)] == [True, False]
    assert Skip(limit=1.0).allows(5000, 5000)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Skip(limit=-1), ValueError, "limit=-1.*at least 0"),
        (lambda: Replace(limit=1.5), ValueError, "limit=1.5.*at most 1.0"),
        (lambda: Skip(limit=True), TypeError, "limit=True.*number of samples"),
        (lambda: Skip(only=[OSError]), TypeError, "only=.*OSError.*or a tuple"),  # type: ignore[arg-type]
        (lambda: Replace(only=KeyboardInterrupt), TypeError, "only=.*KeyboardInterrupt"),  # type: ignore[arg-type]
        (lambda: read_errors("skip"), ValueError, "errors='skip'.*Skip"),
        (lambda: read_errors(Skip), TypeError, "errors=.*Skip"),
        (lambda: read_errors(Replace(), iterable=True), ValueError, "errors=Replace.*use Skip"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value_and_a_way_out(
    make: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("index", [[3, 1, 4], (3, 1), slice(4, 10, 2), range(5), torch.tensor([3])], ids=str)
def test_rows_that_are_read_by_one_index_are_not_replaced(index: Any) -> None:
    alone: dict[str, Any] = {"auto_collation": False, "collate": lambda sample: sample}
    with pytest.raises(KeyError) as caught:
        fetcher(Reads(index), Replace(), SIZE, **alone).fetch(index)
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert "cannot replace samples that are read by one index" in notes
