"""torch's default collate, writing into shared memory.

Runs in workers. The rules stay torch's: its own `default_collate` walks the samples, whether the loader
calls it or a user's collate does. Only the functions that stack tensors and arrays are replaced, in torch's
table of collate functions (`default_collate_fn_map`) and in the worker process: torch's would make a fresh
shared-memory segment for every result, ours stack into a block that was used before, in one pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from fastq_loader.allocator import TYPESTR, out_array, out_tensor

torch_tensors = torch_collate.collate_tensor_fn


def stack_tensors(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack tensors of one shape along a new first dimension, in a block if the result is worth one.

    Args:
        batch: at least one tensor.
        collate_fn_map: part of torch's interface for collate functions; unused.

    Raises:
        RuntimeError: the shapes differ, with torch's own text.
    """
    first = batch[0]
    if type(first) is not torch.Tensor or first.is_nested or first.layout is not torch.strided:
        refused: torch.Tensor = torch_tensors(batch, collate_fn_map=collate_fn_map)
        return refused
    if first.device.type != "cpu" or first.is_quantized or first.requires_grad:
        return torch.stack(batch, 0)
    shape = (len(batch), *first.shape)
    out = out_tensor(shape, first.dtype)
    if out is None:
        stacked = torch.stack(batch, 0)
        if stacked.dtype is first.dtype and stacked.is_contiguous():
            return stacked
        # torch's worker stacks into a contiguous tensor of the first sample's dtype, whatever the
        # others are and in whatever order the memory of the samples lies.
        out = torch.empty(shape, dtype=first.dtype)
    return torch.stack(batch, 0, out=out)


def stack_arrays(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack numpy arrays into one tensor, in a block if the result is worth one.

    torch makes a tensor of every array first; where all are alike, numpy stacks them in one pass.

    Args:
        batch: at least one array.
        collate_fn_map: the table in use.

    Raises:
        TypeError, RuntimeError: strings and objects, or shapes that differ, with torch's own texts.
    """
    first = batch[0]
    if (
        collate_fn_map is not None
        and collate_fn_map.get(torch.Tensor) is stack_tensors  # else tensors are the user's business
        and first.dtype.str in _TORCH_TYPES
        and first.size
        and {(type(array), array.dtype, array.shape) for array in batch} == {_kind_of(first)}
    ):
        shape = (len(batch), *first.shape)
        out = out_array(shape, first.dtype)
        return torch.from_numpy(np.stack(batch, out=np.empty(shape, first.dtype) if out is None else out))
    stacked: torch.Tensor = torch_arrays(batch, collate_fn_map=collate_fn_map)
    return stacked


def _kind_of(array: np.ndarray[Any, Any]) -> tuple[type, np.dtype[Any], tuple[int, ...]]:
    return np.ndarray, array.dtype, array.shape


torch_arrays = torch_collate.collate_numpy_array_fn
_TORCH_TYPES = frozenset(TYPESTR.values())


def install() -> None:
    """Let torch's default collate of this process stack into blocks; a user's own entries stay."""
    table = torch_collate.default_collate_fn_map
    if table.get(torch.Tensor) is torch_tensors:
        table[torch.Tensor] = stack_tensors
    if table.get(np.ndarray) is torch_arrays:
        table[np.ndarray] = stack_arrays
