"""A batch of a table: one gather for each field, in place of a call for each row and a stack.

Runs in workers, and in the consumer with num_workers=0. Only for torch's own `TensorDataset`, and its own
`Subset` of one, whose rows cannot be anything but slices of plain tensors. Whatever else it finds is left to
the usual way, which also raises the errors: a subclass, a method that somebody has replaced, an index that is
no int or out of range, a tensor that is not dense, contiguous, on the CPU and without grad.
"""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.data._utils import collate as torch_collate

from fastq_loader.memory.allocator import out_tensor
from fastq_loader.memory.blocks import SMALLEST
from fastq_loader.reading.collate import stack_tensors, torch_tensors
from fastq_loader.system.interrupts import refuse_interrupt

TABLES = (TensorDataset, Subset)

_STACKS = (torch_tensors, stack_tensors)


class Gatherer:
    """Gathers the batches of a table."""

    def __init__(self) -> None:
        # What was looked at last, and is not looked at again: 50 fields would take as long as their gather.
        self._fields: Any = None
        self._row_bytes: list[int] | None = None  # of each field; None: they are not plain
        self._kinds, self._allows = 0, False  # of the table of collate functions

    def gather(self, dataset: Any, index: Any) -> list[torch.Tensor] | None:
        """Rows of one of TABLES as torch's default collate makes them; None: it has to be asked."""
        if not (_is_torchs() and self._is_default()):
            return None
        try:
            while type(dataset) is Subset and len(vars(dataset)) == 2 and _ints(index):
                index, dataset = _through(dataset.indices, index), dataset.dataset
            if type(dataset) is not TensorDataset or len(vars(dataset)) != 1 or not _ints(index):
                return None
            fields = dataset.tensors
            if fields is not self._fields:
                self._fields, self._row_bytes = fields, _row_bytes(fields)
            if self._row_bytes is None:
                return None
            rows = torch.from_numpy(np.array(index))
            if max(self._row_bytes) * len(index) < SMALLEST:
                return list(map(torch.index_select, fields, repeat(0), repeat(rows)))
            return list(map(_select, fields, repeat(rows), self._row_bytes))
        except (IndexError, TypeError, RuntimeError, OverflowError) as error:
            refuse_interrupt(error)
            return None  # also for a negative index

    def _is_default(self) -> bool:
        """Whether nobody has told torch's default collate what to make of tuples or tensors."""
        functions = torch_collate.default_collate_fn_map
        if len(functions) != self._kinds:
            self._kinds, self._allows = len(functions), not issubclass(tuple, tuple(functions))
        return self._allows and functions.get(torch.Tensor) in _STACKS


def _is_torchs() -> bool:
    """Whether the rows are read by torch's own code."""
    return (
        _FOUND_TORCHS
        and TensorDataset.__getitem__ is _ROW
        and Subset.__getitem__ is _OF_SUBSET
        and Subset.__getitems__ is _ALL_OF_SUBSET
        and not hasattr(TensorDataset, "__getitems__")
    )


_ROW, _OF_SUBSET, _ALL_OF_SUBSET = TensorDataset.__getitem__, Subset.__getitem__, Subset.__getitems__
_FOUND_TORCHS = {each.__module__ for each in (_ROW, _OF_SUBSET, _ALL_OF_SUBSET)} == {Subset.__module__}


def _ints(index: Any) -> bool:
    """Whether it is a batch of numbers of rows, which True and a tensor are not."""
    return type(index) is list and set(map(type, index)) == {int}


def _through(indices: Any, index: list[int]) -> Any:
    """The indices of a subset at these places; None: they are no list or array of integers."""
    if type(indices) is torch.Tensor:
        indices = indices.numpy()
    if type(indices) is np.ndarray:
        return indices[index].tolist() if indices.ndim == 1 and indices.dtype.kind == "i" else None
    return [indices[each] for each in index] if type(indices) in (list, tuple, range) else None


def _row_bytes(fields: Any) -> list[int] | None:
    """Bytes of a row of each field; None: one is not dense, contiguous, on the CPU, without grad."""
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


def _select(field: torch.Tensor, rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """Rows of a field, in a block if they are worth one."""
    worth = row_bytes * len(rows) >= SMALLEST
    out = out_tensor((len(rows), *field.shape[1:]), field.dtype) if worth else None
    return torch.index_select(field, 0, rows, out=out)
