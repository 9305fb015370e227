"""Whether a stored value is what computing it again gave, and if not, where the two differ.

Runs in every process that checks a hit. Values are taken apart as `compare` takes batches. Numbers with a
fraction may differ by rounding, because sums depend on the number of threads; all else must be the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastq_loader.extras.tools.leaves import ComparedLeaf, describe, leaves

#: By how much a number may differ, as a part of the largest one beside it; of half precision 1e-2.
_CLOSE, _HALF_CLOSE = 1e-5, 1e-2
_HALF = (torch.float16, torch.bfloat16, torch.complex32, np.dtype(np.float16))
#: A sum that is nearly 0 has lost its last digits: it may differ by more than the root of that, of itself. So
#: may this part of the numbers that differ; and all, if each does by only so many last bits of the largest.
_CANCELLED, _LAST_BITS = 0.25, 64


def difference(stored: Any, fresh: Any) -> str:
    """The first difference of two values, with its place and both sides; "" if they are equal.

    Raises:
        Exception: of user code, such as a property or a method of pickle's; or of values that are too deep.
    """
    for one, other in zip(leaves(stored, "value"), leaves(fresh, "value"), strict=False):
        if one.opaque:
            raise TypeError(f"{one.path}: {one.kind} cannot be taken apart")
        if one == other:
            continue
        number, alike = 0, (one.path, one.kind) == (other.path, other.kind)
        if alike and (one.dtype is not None or one.kind in ("float", "complex")):
            are_far = _are_far(_numbers(one), _numbers(other), _HALF_CLOSE if one.dtype in _HALF else _CLOSE)
            if not are_far.any():
                continue
            number = int(are_far.argmax())
        return describe(one, other, ("in the cache", "now"), number)
    return ""


def _numbers(leaf: ComparedLeaf) -> np.ndarray:
    """The numbers of a leaf in a row."""
    if leaf.dtype is None:
        return np.array([complex(leaf.data.decode())])
    if not isinstance(leaf.dtype, torch.dtype):
        return np.frombuffer(leaf.data, leaf.dtype)
    tensor = torch.frombuffer(bytearray(leaf.data), dtype=leaf.dtype)
    if leaf.dtype in _HALF:
        return tensor.to(torch.complex64 if leaf.dtype.is_complex else torch.float32).numpy()
    has_numpys = not leaf.dtype.is_floating_point or leaf.dtype.itemsize > 1
    return (tensor if has_numpys else tensor.view(torch.uint8)).numpy()


def _are_far(a: np.ndarray, b: np.ndarray, close: float) -> Any:
    """Which numbers of two arrays differ by more than rounding."""
    if a.dtype.names is not None:
        fields = [_are_far(a[name], b[name], close) for name in a.dtype.names]
        return np.any([each.reshape(len(a), -1).any(1) for each in fields], axis=0)
    if a.dtype.kind == "c":
        one, other = (np.stack([each.real, each.imag], -1) for each in (a, b))
        return _are_far(one, other, close).any(-1)
    differ = a.view(np.int64) != b.view(np.int64) if a.dtype.kind in "mM" else a != b
    if a.dtype.kind == "f":
        differ &= (a == a) | (b == b)  # not two NaN
        differ[differ] = _beyond_rounding(a, b, differ, close)
    return differ


@np.errstate(all="ignore")
def _beyond_rounding(a: np.ndarray, b: np.ndarray, differ: np.ndarray, close: float) -> Any:
    """Which of the numbers that differ do so by more than rounding."""
    largest = max(float(np.abs(each[np.isfinite(each)]).max(initial=0)) for each in (a, b))
    x, y = (each[differ].astype(np.result_type(each, np.float32)) for each in (a, b))
    by, size = np.abs(x - y), np.maximum(np.abs(x), np.abs(y))
    is_far, is_cancelled = ~(by <= close * largest), ~(by <= close**0.5 * size)
    last_bits = _LAST_BITS * np.finfo(x.dtype).eps * size[np.isfinite(size)].max(initial=0)
    if np.mean(is_cancelled) > _CANCELLED and np.any(by > last_bits):
        is_far |= is_cancelled
    return is_far
