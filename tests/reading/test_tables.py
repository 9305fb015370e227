"""Gathered batches of tables are those that torch reads row by row and stacks, in every respect."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import fetch as torch_fetch

from fastq_loader.reading.fetch import Fetcher
from fastq_loader.reading.tables import _LARGE, Gatherer, is_table
from tests.support.datasets import assert_same
from tests.support.pair import LARGE, paired
from tests.support.thorough import examples

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64),
]


def tensor(rows: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    size = (rows, *shape)
    return torch.arange(int(np.prod(size))).remainder(100).reshape(size).to(dtype)


def fetched(dataset: Any, index: Any) -> Any:
    fetcher = Fetcher(dataset, iterable=False, auto_collation=True, collate=default_collate, drop_last=False)
    try:
        return fetcher.fetch(index)
    except Exception as error:
        return type(error), str(error)


def by_rows(dataset: Any, index: Any) -> Any:
    """As torch does it."""
    try:
        return torch_fetch._MapDatasetFetcher(dataset, True, default_collate, False).fetch(index)  # type: ignore[no-untyped-call]
    except Exception as error:
        return type(error), str(error)


INDICES: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "small array": lambda indices: np.array(indices, np.int16),
    "unsigned array": lambda indices: np.array(indices, np.uint8),
    "tensor": torch.tensor,
    "bytes": lambda indices: torch.tensor(indices, dtype=torch.uint8),
    "tensors": lambda indices: [torch.tensor(index) for index in indices],
}


@st.composite
def combined(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    """Concatenations and stacks, in each other, mostly of parts that are alike."""
    field = st.tuples(st.lists(st.integers(0, 3), max_size=2), st.sampled_from(DTYPES))
    fields = draw(st.lists(field, min_size=1, max_size=2))

    def table(rows: int, depth: int) -> Any:
        kind = draw(st.sampled_from(["table", "subset", "stack", "names", "concatenation"][: 2 + 3 * depth]))
        if kind == "table":
            odd = draw(st.integers(0, 19)) == 0
            mine = [([3], torch.int64)] if odd else fields
            return TensorDataset(*(tensor(rows, *field) + draw(st.integers(0, 1)) for field in mine))
        if kind == "subset":
            form = draw(st.sampled_from([*INDICES]))
            least = 0 if form in ("unsigned array", "bytes") else -1
            chosen = draw(st.lists(st.integers(least, 4), min_size=rows, max_size=rows))
            return Subset(table(5, max(0, depth - 1)), INDICES[form](chosen))
        if kind == "stack":
            return StackDataset(*(table(rows, depth - 1) for _ in range(draw(st.integers(1, 2)))))
        if kind == "names":
            return StackDataset(x=table(rows, depth - 1), y=table(rows, depth - 1))
        cuts = [0, *sorted(draw(st.lists(st.integers(0, rows), min_size=1, max_size=2))), rows]
        return ConcatDataset([table(end - begin, depth - 1) for begin, end in pairwise(cuts)])

    rows = draw(st.integers(1, 9))
    several = draw(st.sampled_from([st.integers(0, rows - 1), st.integers(-rows - 1, rows)]))
    return table(rows, 2), draw(st.lists(several, max_size=9))


def flat(batch: Any) -> list[Any]:
    """The tensors of a batch, with the types of what they lie in."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = list(batch.values()) if isinstance(batch, dict) else batch
    names = tuple(batch) if isinstance(batch, dict) else ()
    return [(type(batch), len(batch), names), *(leaf for part in parts for leaf in flat(part))]


@examples(100)
@given(combined())
def test_concatenations_and_stacks_give_what_torch_gives(case: tuple[Any, list[Any]]) -> None:
    check(*case)


def check(dataset: Any, index: Any) -> None:
    batch, wanted = fetched(dataset, index), by_rows(dataset, index)
    if isinstance(wanted, tuple):
        assert batch == wanted
        return
    for leaf, of_torch in zip(flat(batch), flat(wanted), strict=True):
        assert type(leaf) is type(of_torch)
        if isinstance(leaf, torch.Tensor):
            assert (leaf.dtype, leaf.stride()) == (of_torch.dtype, of_torch.stride())
            assert leaf.requires_grad == of_torch.requires_grad
            assert torch.equal(leaf.detach(), of_torch.detach())
        else:
            assert leaf == of_torch


def rows_of(*fields: torch.Tensor) -> Any:
    return TensorDataset(*fields)


def test_concatenations_and_stacks_of_tables_are_gathered() -> None:
    one, other = rows_of(torch.arange(6.0)), rows_of(torch.arange(6.0, 9))
    both = ConcatDataset([one, other])
    assert Gatherer().gather(both, [7, 0, 8, 3])[0].tolist() == [7, 0, 8, 3]
    stacked = StackDataset(x=both, y=Subset(one, [5, 4, 3, 2, 1, 0, 5, 4, 3]))
    assert is_table(stacked)
    batch = Gatherer().gather(stacked, [8, 0])
    assert (batch["x"][0].tolist(), batch["y"][0].tolist()) == ([8, 0], [3, 5])


def three(field: torch.Tensor) -> Any:
    return ConcatDataset([rows_of(part) for part in field.tensor_split(3)])


ONE = rows_of(torch.arange(6.0))
UNLIKE: dict[str, tuple[list[Any], list[int]]] = {
    "dtypes": ([ONE, rows_of(torch.arange(6))], [7, 0]),
    "dtypes that numpy lacks": ([rows_of(torch.ones(2, dtype=torch.bfloat16))] * 2, [3, 0]),
    "shapes": ([ONE, rows_of(torch.ones(6, 2))], [7, 0]),
    "containers within": ([StackDataset(x=ONE), StackDataset(x=StackDataset(ONE))], [7, 0]),
    "order of names": ([StackDataset(x=ONE, y=ONE), StackDataset(y=ONE, x=ONE)], [7, 0]),
    "too large an index": ([ONE, ONE], [12, 0]),
    "a negative index": ([ONE, ONE], [-1, 0]),
}


@pytest.mark.parametrize("unlike", UNLIKE)
def test_parts_that_differ_are_read_row_by_row(unlike: str) -> None:
    parts, index = UNLIKE[unlike]
    both = ConcatDataset(parts)
    assert Gatherer().gather(both, index) is None
    check(both, index)


def test_fields_of_a_concatenation_may_get_other_memory_during_an_epoch() -> None:
    gatherer, fields = Gatherer(), [torch.arange(3.0), torch.arange(3.0, 6)]
    both = ConcatDataset([rows_of(field) for field in fields])
    for moved in (lambda: None, fields[0].share_memory_, lambda: fields[1].resize_(100_000)):
        moved()
        for field in fields:
            field += 1
        assert gatherer.gather(both, [4, 0])[0].tolist() == [fields[1][1], fields[0][0]]


@pytest.mark.parametrize("elements", [LARGE // 4, _LARGE])
def test_large_rows_of_concatenations_lie_in_blocks_or_are_read_row_by_row(elements: int) -> None:
    field = torch.arange(6.0 * elements).reshape(6, elements)
    with paired() as pair:
        batch = pair.run(lambda: Gatherer().gather(three(field), [5, 0, 3, 2]))
        assert_same(None if elements == _LARGE else [field[[5, 0, 3, 2]]], batch)
        assert pair.copied == []


@pytest.mark.parametrize("kind", ["list", "array"])
def test_a_subset_of_a_table_is_gathered(kind: str) -> None:
    table = rows_of(torch.arange(20).reshape(10, 2), torch.arange(10.0))
    subset = Subset(Subset(table, range(9, -1, -1)), INDICES[kind]([1, 8, 1, 3]))  # type: ignore[arg-type]
    batch = Gatherer().gather(subset, [0, 3, 2])
    assert batch is not None
    assert batch[1].tolist() == [8, 6, 8]
    check(subset, [0, 3, 2])


class Own(TensorDataset):
    pass


PLAIN = torch.arange(24.0).reshape(6, 4)


def with_attribute() -> Any:
    dataset: Any = rows_of(PLAIN)
    dataset.__getitems__ = lambda index: [(torch.zeros(1),) for _ in index]
    return dataset


NOT_PLAIN: dict[str, Callable[[], Any]] = {
    "subclass": lambda: Own(PLAIN),
    "own attribute": with_attribute,
    "grad": lambda: rows_of(PLAIN.clone().requires_grad_()),
    "transposed": lambda: rows_of(PLAIN.T),
    "sparse": lambda: rows_of(PLAIN.to_sparse()),
    "a row for a mask": lambda: Subset(rows_of(PLAIN), torch.tensor([1, 0, 1, 1], dtype=torch.uint8)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_other_tables_are_read_row_by_row(kind: str) -> None:
    dataset = NOT_PLAIN[kind]()
    assert Gatherer().gather(dataset, [2, 0]) is None
    if kind not in ("own attribute", "sparse"):
        check(dataset, [2, 0])


def test_an_index_that_is_refused_is_refused_where_torch_refuses_it() -> None:
    table = rows_of(PLAIN)
    for index in ([], [True], [1, 6], [-1, 0], [-7], [2**70], [torch.tensor(1)], (0, 1), [np.int64(1)]):
        assert Gatherer().gather(table, index) is None
        check(table, index)


@pytest.mark.parametrize("kind", [TensorDataset, StackDataset, ConcatDataset])
@pytest.mark.parametrize("method", ["__getitem__", "__getitems__"])
def test_a_method_that_was_replaced_is_called(
    kind: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gatherer = Gatherer()
    assert gatherer.gather(rows_of(PLAIN), [0]) is not None
    monkeypatch.setattr(kind, method, lambda self, index: "own", raising=False)
    assert gatherer.gather(rows_of(PLAIN), [0]) is None


@pytest.mark.parametrize("kind", [torch.Tensor, tuple, dict, object])
def test_a_collate_function_of_the_users_is_called(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    gatherer = Gatherer()
    assert gatherer.gather(rows_of(PLAIN), [0]) is not None
    own = lambda batch, *, collate_fn_map=None: "own"  # noqa: E731
    monkeypatch.setitem(torch_collate.default_collate_fn_map, kind, own)
    assert gatherer.gather(rows_of(PLAIN), [0]) is None
