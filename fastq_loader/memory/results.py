"""What collate functions call: results of a batch that lie in shared memory from the start.

Runs in a worker process. The functions here use the allocator that was installed in it. Anywhere else there
is none, and results are allocated as ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastq_loader.memory.allocator import Allocator, Array

_NAMES = "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128"
#: The dtypes that numpy has, too: torch takes over arrays of them. Others go through bytes.
TYPESTR = {getattr(torch, name): np.dtype(name).str for name in _NAMES.split()}

_current: Allocator | None = None


def install(allocator: Allocator | None) -> None:
    """Make `allocator` the one that `empty` and the collate functions of this process use."""
    global _current
    _current = allocator


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor that travels to the consumer without a copy.

    In a worker of this package a result of 64 KiB or more lies in shared memory: when it (or a view of
    it) is part of the batch, it is handed over where it is. Anywhere else, and for smaller results, this
    is `torch.empty`.

    Args:
        shape: the sizes.
        dtype: torch's default dtype if None.

    Returns:
        A contiguous CPU tensor, its memory its own.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    tensor = out_tensor(sizes, dtype)
    return torch.empty(sizes, dtype=dtype) if tensor is None else tensor


def out_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """`empty` for collate functions: None where they should allocate as they always do."""
    if _current is None:
        return None
    nbytes = math.prod(shape) * dtype.itemsize
    typestr = TYPESTR.get(dtype)
    if typestr is not None:
        array = _current.empty_array(shape, typestr, nbytes)
        return None if array is None else torch.from_numpy(array)
    array = _current.empty_array((nbytes,), "|u1", nbytes)
    return None if array is None else torch.from_numpy(array).view(dtype).view(shape)


def out_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
    """The same as an array."""
    if _current is None:
        return None
    return _current.empty_array(shape, dtype.str, math.prod(shape) * dtype.itemsize)


def use_nontemporal(nbytes: int) -> bool:
    """Whether pieces of `nbytes` are better written with non-temporal stores to what the functions above
    gave out."""
    return _current is not None and _current.is_nontemporal(nbytes)
