"""Fetchers: torch's rules for asking a dataset, and the two places where they part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset
from torch.utils.data._utils import fetch as torch_fetch

from fastq_loader.reading.fetch import EndOfStream, Fetcher, make_fetcher


class Squares(Dataset[int]):
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getitem__(self, index: Any) -> Any:
        self.asked.append(index)
        return index * index

    def __len__(self) -> int:
        return 100


class Batched(Squares):
    def __getitems__(self, indices: list[int]) -> list[int]:
        self.asked.append(list(indices))
        return [-index for index in indices]


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.iterated = 0

    def __iter__(self) -> Iterator[int]:
        self.iterated += 1
        return iter(range(self.count))


def mapped(dataset: Any, *, auto_collation: bool = True, collate: Any = tuple) -> Fetcher:
    return make_fetcher(
        dataset, iterable=False, auto_collation=auto_collation, collate=collate, drop_last=False
    )


def streamed(
    dataset: Any, *, auto_collation: bool = True, collate: Any = tuple, drop_last: bool = False
) -> Fetcher:
    return make_fetcher(
        dataset, iterable=True, auto_collation=auto_collation, collate=collate, drop_last=drop_last
    )


# ---- map-style --------------------------------------------------------------------------------------


def test_a_batch_is_asked_for_sample_by_sample_in_order() -> None:
    dataset = Squares()
    assert mapped(dataset).fetch([3, 1, 3]) == (9, 1, 9)
    assert dataset.asked == [3, 1, 3]
    assert mapped(dataset).fetch([]) == ()


def test_without_auto_collation_the_index_goes_through_as_it_is() -> None:
    index = object()

    class Same(Squares):
        def __getitem__(self, index: Any) -> Any:
            return index

    fetched = mapped(Same(), auto_collation=False, collate=lambda data: [data]).fetch(index)
    assert fetched[0] is index


def test_getitems_takes_the_whole_batch() -> None:
    dataset = Batched()
    assert mapped(dataset).fetch([2, 3]) == (-2, -3)
    assert dataset.asked == [[2, 3]]


def test_getitems_is_not_asked_for_single_samples() -> None:
    assert mapped(Batched(), auto_collation=False, collate=lambda data: data).fetch(3) == 9


def test_getitems_that_is_none_is_no_getitems() -> None:
    class OptedOut(Batched):
        __getitems__ = None  # type: ignore[assignment]

    assert mapped(OptedOut()).fetch([2]) == (4,)


def test_getitems_may_stand_on_the_instance_or_come_from_getattr() -> None:
    dataset = Squares()
    dataset.__getitems__ = lambda indices: ["own"] * len(indices)  # type: ignore[attr-defined]
    assert mapped(dataset).fetch([1, 2]) == ("own", "own")

    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            if name == "__getitems__":
                return lambda indices: ["wrapped"] * len(indices)
            raise AttributeError(name)

    assert mapped(Wrapper()).fetch([1]) == ("wrapped",)


def test_a_subset_passes_the_batch_on() -> None:
    assert mapped(Subset(Batched(), [5, 6, 7])).fetch([0, 2]) == (-5, -7)
    assert mapped(Subset(Squares(), [5, 6, 7])).fetch([0, 2]) == (25, 49)


class Doubled(Subset[int]):
    def __init__(self, dataset: Any, indices: list[int]) -> None:
        self.dataset, self.indices = (
            dataset,
            indices,
        )  # newer versions of torch refuse such a class in __init__

    def __getitem__(self, index: Any) -> Any:
        return 2 * super().__getitem__(index)


class DoubledInBatches(Doubled):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [1000 + index for index in indices]


class DoubledAgain(DoubledInBatches):
    pass


def test_what_overrides_getitem_below_subset_counts() -> None:
    assert mapped(Doubled(Squares(), [5, 6, 7])).fetch([0, 2]) == (50, 98)
    assert mapped(DoubledInBatches(Squares(), [5, 6, 7])).fetch([0, 2]) == (1000, 1002)
    assert mapped(DoubledAgain(Squares(), [5, 6, 7])).fetch([1]) == (1001,)


def test_below_other_datasets_getitems_wins_as_in_torch() -> None:
    class Overridden(Batched):
        def __getitem__(self, index: Any) -> Any:
            return "own"

    dataset = Overridden()
    ours = mapped(dataset).fetch([1, 2])
    assert ours == torch_fetch._MapDatasetFetcher(dataset, True, tuple, False).fetch([1, 2]) == (-1, -2)


@pytest.mark.parametrize("place", ["__getitem__", "__getitems__", "collate"])
def test_a_stop_iteration_of_user_code_is_an_error(place: str) -> None:
    def stop(*arguments: Any) -> Any:
        raise StopIteration("mine")

    class Stopping(Squares):
        pass

    if place != "collate":
        setattr(Stopping, place, stop)
    fetcher = mapped(Stopping(), collate=stop if place == "collate" else tuple)
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        fetcher.fetch([1, 2])
    assert isinstance(caught.value.__cause__, StopIteration)


def test_other_errors_of_user_code_pass_through() -> None:
    def fail(data: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mapped(Squares(), collate=fail).fetch([1])
    with pytest.raises(TypeError):
        mapped(Squares()).fetch(["a"])


# ---- iterable ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 20), st.integers(1, 6), st.booleans(), st.booleans())
def test_a_stream_is_cut_as_torch_cuts_it(
    count: int, batch_size: int, drop_last: bool, auto_collation: bool
) -> None:
    ours = streamed(Stream(count), auto_collation=auto_collation, drop_last=drop_last, collate=repr)
    theirs = torch_fetch._IterableDatasetFetcher(Stream(count), auto_collation, repr, drop_last)
    index = list(range(batch_size)) if auto_collation else None
    for _ in range(count + 3):
        try:
            expected = theirs.fetch(index)
        except StopIteration:
            with pytest.raises(EndOfStream):
                ours.fetch(index)
        else:
            assert ours.fetch(index) == expected


def test_the_end_is_final() -> None:
    class Restarting:
        def __init__(self) -> None:
            self.turns = iter([1, None, 2, 3])

        def __iter__(self) -> Iterator[int]:
            return self  # type: ignore[return-value]

        def __next__(self) -> int:
            turn = next(self.turns)
            if turn is None:
                raise StopIteration
            return turn

    fetcher = streamed(Restarting())
    assert fetcher.fetch([0, 0, 0]) == (1,)
    for _ in range(3):
        with pytest.raises(EndOfStream):
            fetcher.fetch([0])


def test_the_iterator_is_made_once_and_at_once() -> None:
    dataset = Stream(5)
    fetcher = streamed(dataset)
    assert dataset.iterated == 1
    fetcher.fetch([0, 0])
    fetcher.fetch([0, 0])
    assert dataset.iterated == 1


def test_an_error_in_the_middle_does_not_end_the_stream() -> None:
    class Stumbling:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[int]:
            return self  # type: ignore[return-value]

        def __next__(self) -> int:
            self.at += 1
            if self.at == 2:
                raise KeyError("second")
            return self.at

    fetcher = streamed(Stumbling())
    with pytest.raises(KeyError, match="second"):
        fetcher.fetch([0, 0])
    assert fetcher.fetch([0, 0]) == (3, 4)


@pytest.mark.parametrize("auto_collation", [True, False])
def test_a_stop_iteration_of_collate_is_an_error_and_not_the_end(auto_collation: bool) -> None:
    def stop(data: Any) -> Any:
        raise StopIteration

    fetcher = streamed(Stream(5), auto_collation=auto_collation, collate=stop)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="collate_fn raised StopIteration"):
            fetcher.fetch([0])


def test_end_of_stream_is_no_stop_iteration() -> None:
    assert not issubclass(EndOfStream, StopIteration)
    with pytest.raises(EndOfStream) as caught:
        streamed(Stream(0), auto_collation=False).fetch(None)
    assert caught.value.__cause__ is None
