"""Batches of tables: one gather for each field, instead of a call for each row and a stack.

Runs in workers, and in the consumer with num_workers=0. Only for torch's own `TensorDataset`, and its own
`Subset`, `StackDataset` and `ConcatDataset` of these, whose rows can only be slices of plain tensors.
Everything else is left to the usual path, which also raises the errors: a subclass, a replaced method, an
index that is not an int or is out of range, a tensor that is not dense, contiguous, on the CPU and without
grad, or parts of a concatenation that differ, have large rows, or a dtype that numpy lacks.
"""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from fastq_loader.memory.allocator import out_array, out_tensor
from fastq_loader.memory.blocks import SMALLEST
from fastq_loader.reading.collate import stack_tensors, torch_tensors
from fastq_loader.system.torch_names import collate as torch_collate

_STACKS = (torch_tensors, stack_tensors)
_MOST_PARTS = 1000
#: Errors of numpy, torch and this module for what has to be read row by row.
_OTHERWISE = (IndexError, TypeError, ValueError, OverflowError, RuntimeError, BufferError)
#: Bytes of a row above which concatenations, whose rows are copied three times, are read row by row.
_LARGE = 32 << 10
#: The tables, and how many attributes each has; one with more of them is the user's.
TABLES = {TensorDataset: 1, Subset: 2, StackDataset: 2, ConcatDataset: 2}


class Gatherer:
    """Gathers the batches of a table, for one epoch."""

    def __init__(self) -> None:
        # id of a table's fields → the fields, and the bytes of a row of each; None: they are not plain. A
        # cache, because checking 50 fields takes as long as gathering them.
        self._looked_at: dict[int, tuple[Any, list[int] | None]] = {}
        # The same for parts of a concatenation → the fields, their addresses, and arrays of the same memory.
        self._parts: dict[int, tuple[Any, list[int], list[Any]]] = {}
        self._kinds, self._allows = 0, False  # see `_is_default`

    def gather(self, dataset: Any, index: Any) -> Any:
        """Gather rows as torch's default collate would return them; None: the usual path has to be taken."""
        if not (_FOUND_TORCHS and _methods() == _METHODS and self._is_default() and _ints(index)):
            return None
        try:
            return self._rows(dataset, np.array(index), whole=True)
        except _OTHERWISE:
            return None  # also for a negative index

    def _rows(self, dataset: Any, rows: Any, whole: bool) -> Any:
        """Gather rows of a table and of the tables in it: the `whole` batch as tensors, or a part of it as
        arrays, which `_merge` copies.

        Raises:
            TypeError, and others of `_OTHERWISE`: the rows have to be read one by one.
        """
        kind = type(dataset)
        if len(vars(dataset)) != TABLES.get(kind):
            raise TypeError(f"{kind} is not a table")
        if kind is Subset:
            return self._rows(dataset.dataset, _through(dataset.indices, rows), whole)
        if kind is TensorDataset:
            return self._select(dataset.tensors, rows) if whole else self._take(dataset.tensors, rows)
        if kind is StackDataset:
            parts = dataset.datasets
            if type(parts) is dict:
                return {name: self._rows(part, rows, whole) for name, part in parts.items()}
            return [self._rows(part, rows, whole) for part in parts]
        return self._concatenated(dataset, rows, whole)

    def _concatenated(self, dataset: Any, rows: Any, whole: bool) -> Any:
        """Gather rows of a concatenation. Sorted, the rows of each part are a slice of them."""
        order = rows.argsort()
        ascending, ends = rows[order], dataset.cumulative_sizes
        cuts = ascending.searchsorted(ends).tolist()
        found, begin, first = [], 0, 0
        for part, end, last in zip(dataset.datasets, ends, cuts, strict=True):
            if first < last:
                found.append(self._rows(part, ascending[first:last] - begin, whole=False))
            begin, first = end, last
        if first < len(rows) or ascending[0] < 0:
            raise IndexError("an index that is negative or too large")
        return _merge(found, order.argsort(), whole)

    def _select(self, fields: Any, rows: Any) -> list[torch.Tensor]:
        """Rows of fields, in blocks if they are large enough."""
        known, row_bytes = self._looked_at.get(id(fields), (None, None))
        if known is not fields:
            row_bytes = _row_bytes(fields)
            self._looked_at[id(fields)] = fields, row_bytes
        if row_bytes is None:
            raise TypeError("fields that are not plain")
        rows = torch.from_numpy(rows)
        if max(row_bytes) * len(rows) < SMALLEST:
            return list(map(torch.index_select, fields, repeat(0), repeat(rows)))
        return list(map(_select, fields, repeat(rows), row_bytes))

    def _take(self, fields: Any, rows: Any) -> list[Any]:
        """Rows of fields as arrays, for `_merge`: a call of numpy takes a quarter of the time of torch's."""
        known, addresses, arrays = self._parts.get(id(fields), (None, [], []))
        if known is not fields or addresses != list(map(_ADDRESS, fields)):
            row_bytes = _row_bytes(fields)
            if row_bytes is None or max(row_bytes) > _LARGE:
                raise TypeError("fields that are not plain, or rows that are better copied only once")
            arrays = list(map(np.from_dlpack, fields))  # what `numpy()` gives could not grow
            self._parts[id(fields)] = fields, list(map(_ADDRESS, fields)), arrays
        return [array.take(rows, 0) for array in arrays]

    def _is_default(self) -> bool:
        """Whether torch's default collate has no user-defined function for tuples, dicts or tensors."""
        functions = torch_collate.default_collate_fn_map
        if len(functions) != self._kinds:
            self._kinds = len(functions)
            self._allows = not any(issubclass(kind, tuple(functions)) for kind in (tuple, dict))
        return self._allows and functions.get(torch.Tensor) in _STACKS


def _methods() -> list[Any]:
    """The methods that read rows; batches are gathered while these are torch's own, unmodified ones."""
    return [
        *(TensorDataset.__getitem__, getattr(TensorDataset, "__getitems__", None)),
        *(Subset.__getitem__, Subset.__getitems__, StackDataset.__getitem__, StackDataset.__getitems__),
        *(ConcatDataset.__getitem__, getattr(ConcatDataset, "__getitems__", None)),
    ]


_METHODS = _methods()
_FOUND_TORCHS = {each.__module__ for each in _METHODS if each is not None} == {Subset.__module__}


def is_table(dataset: Any) -> bool:
    """Whether a dataset consists only of torch's own tables, a thousand at most, as one may contain itself.
    Their contents are checked with each batch."""
    todo = [dataset]
    for _ in range(_MOST_PARTS):
        if not todo:
            return True
        part = todo.pop()
        kind = type(part)
        if kind is Subset:
            todo.append(vars(part).get("dataset"))
        elif kind in (StackDataset, ConcatDataset):
            parts = vars(part).get("datasets")
            if type(parts) not in (tuple, list, dict):
                return False
            todo += parts.values() if type(parts) is dict else parts
        elif kind is not TensorDataset:
            return False
    return False


def _ints(index: Any) -> bool:
    """Whether it is a list of row numbers; True and tensors are rejected."""
    return type(index) is list and set(map(type, index)) == {int}


def _through(indices: Any, rows: Any) -> Any:
    """The indices of a subset at these positions.

    Raises:
        TypeError: they are not ints in a sequence or in an array.
    """
    if type(indices) is torch.Tensor:
        indices = indices.numpy()
    if type(indices) is np.ndarray and indices.ndim == 1 and indices.dtype.kind == "i":
        return indices[rows]
    found = [indices[each] for each in rows.tolist()] if type(indices) in (list, tuple, range) else None
    if not _ints(found):
        raise TypeError("indices that are not ints")
    return np.array(found)


def _row_bytes(fields: Any) -> list[int] | None:
    """Bytes of a row of each field; None if one is not dense, contiguous, on the CPU and without grad."""
    plain = (
        type(fields) is tuple
        and set(map(type, fields)) == {torch.Tensor}
        and set(map(_LOOKS, fields)) == {(torch.strided, True, False, False, False)}
        and all(map(torch.Tensor.is_contiguous, fields))
        and not any(map(torch.Tensor.is_conj, fields))
        and not any(map(torch.Tensor.is_neg, fields))
    )
    return [field[:1].nbytes for field in fields] if plain else None


_LOOKS = attrgetter("layout", "is_cpu", "requires_grad", "is_nested", "is_quantized")
_ADDRESS, _DTYPE = torch.Tensor.data_ptr, attrgetter("dtype")


def _select(field: torch.Tensor, rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """Rows of a field, in a block if they are large enough."""
    worth = row_bytes * len(rows) >= SMALLEST
    out = out_tensor((len(rows), *field.shape[1:]), field.dtype) if worth else None
    return torch.index_select(field, 0, rows, out=out)


def _merge(parts: Any, order: Any, whole: bool) -> Any:
    """Merge batches of the parts of a concatenation into one, with the rows in this order."""
    first = parts[0]
    kind = type(first)
    if set(map(type, parts)) != {kind} or (kind is dict and len(set(map(tuple, parts))) > 1):
        raise TypeError("parts with different fields")
    if kind is dict:
        return {name: _merge([part[name] for part in parts], order, whole) for name in first}
    if kind is list:
        return [_merge(fields, order, whole) for fields in zip(*parts, strict=True)]
    return _join(parts, order, whole)


def _join(parts: Any, order: Any, whole: bool) -> Any:
    if len(set(map(_DTYPE, parts))) > 1 or not parts[0].size:
        raise TypeError("rows of different dtypes, or empty ones, whose strides are torch's own")
    joined = np.concatenate(parts)
    out = out_array(joined.shape, joined.dtype) if whole and joined.nbytes >= SMALLEST else None
    merged = joined.take(order, 0, out, "clip")
    return torch.from_numpy(merged) if whole else merged
