"""Fetchers: torch's rules for asking a dataset, and the two places where they part."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset, Subset
from torch.utils.data._utils import fetch as torch_fetch

from fastq_loader.reading.fetch import Fetcher


class Squares(Dataset[int]):
    def __getitem__(self, index: Any) -> Any:
        return index * index

    def __len__(self) -> int:
        return 100


class Batched(Squares):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [-index for index in indices]


class OptedOut(Batched):
    __getitems__ = None  # type: ignore[assignment]


class Overridden(Batched):
    def __getitem__(self, index: Any) -> Any:
        return "own"


class Wrapper:
    def __getattr__(self, name: str) -> Any:
        return {"__getitems__": lambda indices: ["wrapped"] * len(indices)}[name]


class Doubled(Subset[int]):
    def __init__(self, dataset: Any, indices: list[int]) -> None:
        self.dataset, self.indices = dataset, indices  # newer versions of torch refuse such a class

    def __getitem__(self, index: Any) -> Any:
        return 2 * super().__getitem__(index)


class DoubledInBatches(Doubled):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [1000 + index for index in indices]


class DoubledAgain(DoubledInBatches):
    pass


def fetcher(
    dataset: Any, collate: Any = tuple, *, auto_collation: bool = True, drop_last: bool = False
) -> Fetcher:
    iterable = isinstance(dataset, IterableDataset)
    options: dict[str, Any] = {"auto_collation": auto_collation, "drop_last": drop_last}
    return Fetcher(dataset, iterable=iterable, collate=collate, **options)


ON_THE_INSTANCE = Squares()
ON_THE_INSTANCE.__getitems__ = lambda indices: ["own"] * len(indices)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dataset", "index", "expected"),
    [
        (Squares(), [3, 1, 3], (9, 1, 9)),
        (Squares(), [], ()),
        (Batched(), [2, 3], (-2, -3)),
        (OptedOut(), [2], (4,)),
        (ON_THE_INSTANCE, [1, 2], ("own", "own")),
        (Wrapper(), [1], ("wrapped",)),
        (Subset(Batched(), [5, 6, 7]), [0, 2], (-5, -7)),
        (Subset(Squares(), [5, 6, 7]), [0, 2], (25, 49)),
        # Unlike torch: what overrides __getitem__ below Subset counts.
        (Doubled(Squares(), [5, 6, 7]), [0, 2], (50, 98)),
        (DoubledInBatches(Squares(), [5, 6, 7]), [0, 2], (1000, 1002)),
        (DoubledAgain(Squares(), [5, 6, 7]), [1], (1001,)),
        (Overridden(), [1, 2], (-1, -2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_batch_is_asked_for_at_once_where_the_dataset_has_a_way(
    dataset: Any, index: list[int], expected: tuple[Any, ...]
) -> None:
    assert fetcher(dataset).fetch(index) == expected
    if not isinstance(dataset, Doubled):
        assert torch_fetch._MapDatasetFetcher(dataset, True, tuple, False).fetch(index) == expected


def stop(*arguments: Any) -> Any:
    raise StopIteration


@pytest.mark.parametrize("place", ["__getitem__", "__getitems__", "collate"])
def test_a_stop_iteration_of_user_code_is_an_error(place: str) -> None:
    kind: Any = type("Stopping", (Squares,), {place: stop})
    fetching = fetcher(kind(), stop if place == "collate" else tuple)
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        fetching.fetch([1, 2])
    assert isinstance(caught.value.__cause__, StopIteration)
