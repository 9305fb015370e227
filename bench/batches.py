"""What is in a batch: its leaves, their bytes, and whether two batches are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

PAGE = 4096


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray))


def leaves(batch: Any) -> Iterator[Any]:
    """Everything in a batch that is no dict, list or tuple."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from leaves(value)
    else:
        yield batch


def nbytes(batch: Any) -> int:
    """Bytes of the tensors, arrays and strings in a batch; other objects count nothing."""
    total = 0
    for leaf in leaves(batch):
        if is_array(leaf):
            total += leaf.nbytes
        elif isinstance(leaf, (str, bytes)):
            total += len(leaf)
    return total


def touch(batch: Any) -> None:
    """Read one byte of every page of the tensors and arrays in a batch, as a training step would."""
    for leaf in leaves(batch):
        if is_array(leaf):
            flat = torch.as_tensor(leaf).reshape(-1)
            if flat.numel():
                flat.view(torch.uint8)[::PAGE].max()


@dataclass
class Difference:
    """How a batch differs from the one it should be, in words.

    Attributes:
        wrong: values, shapes or a structure that differ: another batch.
        types: the same numbers in another type ("[0] is ndarray, not Tensor").
    """

    wrong: list[str] = field(default_factory=list)
    types: list[str] = field(default_factory=list)


def compare(batch: Any, expected: Any, *, values: bool = True) -> Difference:
    """Compare a batch with the one it should be; without `values` only structure, shapes and dtypes."""
    difference = Difference()
    _compare(batch, expected, "batch", values, difference)
    return difference


def _compare(batch: Any, expected: Any, place: str, values: bool, difference: Difference) -> None:
    if type(batch) is not type(expected):
        difference.types.append(f"{place} is {_kind(batch)}, not {_kind(expected)}")
    if is_array(expected):
        _compare_arrays(batch, expected, place, values, difference)
    elif isinstance(expected, Mapping):
        if not isinstance(batch, Mapping) or set(batch) != set(expected):
            difference.wrong.append(f"{place} has other keys")
            return
        for key, value in expected.items():
            _compare(batch[key], value, f"{place}[{key!r}]", values, difference)
    elif isinstance(expected, (list, tuple)):
        if not isinstance(batch, Sequence) or isinstance(batch, str) or len(batch) != len(expected):
            difference.wrong.append(f"{place} has another length")
            return
        for position, value in enumerate(expected):
            _compare(batch[position], value, f"{place}[{position}]", values, difference)
    elif values and batch != expected:
        difference.wrong.append(f"{place} has other values")


def _compare_arrays(batch: Any, expected: Any, place: str, values: bool, difference: Difference) -> None:
    if not is_array(batch):
        difference.wrong.append(f"{place} is no array")
        return
    tensor, wanted = torch.as_tensor(batch), torch.as_tensor(expected)
    if tensor.shape != wanted.shape:
        difference.wrong.append(f"{place} has shape {tuple(tensor.shape)}, not {tuple(wanted.shape)}")
    elif tensor.dtype != wanted.dtype:
        difference.wrong.append(f"{place} has dtype {tensor.dtype}, not {wanted.dtype}")
    elif values and not torch.equal(tensor, wanted):
        difference.wrong.append(f"{place} has other values")


def _kind(value: Any) -> str:
    return type(value).__name__
