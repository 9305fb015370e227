"""Whether a stored value is what computing it again gave, and if not, where the two differ.

Runs in every process that checks a hit. Numbers with a fraction may differ by rounding, because sums depend
on the number of threads; all else must be the same.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

#: By how much numbers may differ, as a part of the largest one beside them; of half precision 1e-2.
_CLOSE, _HALF_CLOSE = 1e-5, 1e-2
_HALF = (torch.float16, torch.bfloat16)
#: Parts of an object that are missing in the other one.
_NONE: Any = object()
_Named = type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType


class Incomparable(Exception):
    """It cannot be decided whether two values are equal."""


def difference(stored: Any, fresh: Any) -> str:
    """The first difference of two values, with its place and both sides; "" if they are equal.

    Raises:
        Incomparable: comparing raised an exception.
    """
    try:
        return next(_differences(stored, fresh, "value", set()), "")
    except RecursionError:
        raise Incomparable("it is nested too deeply") from None
    except Exception as error:  # of user code: a property, or a method of pickle's
        raise Incomparable(f"{type(error).__name__}: {error}") from error


def _differences(a: Any, b: Any, path: str, around: set[tuple[int, int]]) -> Iterator[str]:
    kind = type(a)
    if a is b:
        return
    if kind is not type(b):
        yield f"{path}: {_shown(a)} and {_shown(b)}"
    elif isinstance(a, torch.Tensor):
        yield from _of_tensors(a, b, path)
    elif isinstance(a, torch.UntypedStorage):
        one, other = (torch.empty(0, dtype=torch.uint8).set_(each) for each in (a, b))
        yield from _of_tensors(one, other, path)
    elif isinstance(a, np.ndarray | np.generic):
        yield from _of_arrays(a, b, path, around)
    elif isinstance(a, float | complex):
        yield from _of_numbers(np.asarray(a), np.asarray(b), path)
    elif isinstance(a, str | bytes | bytearray | int | range | None | _Named):
        if a != b:
            yield f"{path}: {_shown(a)} and {_shown(b)}"
    elif kind in (set, frozenset):
        rest = [*(b - a)]  # NaN, or objects that are equal to themselves alone
        for member in a - b:
            if not (same := [at for at, each in enumerate(rest) if not difference(member, each)]):
                break
            del rest[same[0]]
        else:
            if not rest:
                return
        yield f"{path}: {_shown(a)} and {_shown(b)}"
    elif (id(a), id(b)) not in around:
        around.add((id(a), id(b)))  # both live as long as the comparison
        yield from _of_parts(a, b, path, around)


def _of_parts(a: Any, b: Any, path: str, around: set[tuple[int, int]]) -> Iterator[str]:
    kind = type(a)
    if kind in (list, tuple):
        parts = [(f"[{at}]", *both) for at, both in enumerate(zip_longest(a, b, fillvalue=_NONE))]
    elif kind is dict:
        if difference([*a], [*b]):
            yield f"{path}: the keys {_shown([*a])} and {_shown([*b])}"
        parts = [(f"[{key!r}]", a[key], other) for key, other in zip(a, b.values(), strict=True)]
    elif dataclasses.is_dataclass(a):
        fields = [each.name for each in dataclasses.fields(a)]
        parts = [(f".{name}", getattr(a, name, _NONE), getattr(b, name, _NONE)) for name in fields]
    else:
        # Unequal ones may still be pickled as the same bytes, as objects with NaN.
        parts = [] if not hasattr(kind, "_fields") and _are_equal(a, b) else _reduced(a, b)
    for name, one, other in parts:
        yield from _differences(one, other, path + name, around)


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return (a == b) is True
    except Exception:  # two objects that hold arrays
        return False


def _reduced(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """What pickle would write of two objects: class and arguments, state, members."""
    one, other = a.__reduce_ex__(4), b.__reduce_ex__(4)
    if isinstance(one, str):
        return [("", one, other)]
    pairs = zip_longest(one, other)
    names = "()", ".__args__", "", "", ""
    return [
        (name, list(x) if isinstance(x, Iterator) else x, list(y) if isinstance(y, Iterator) else y)
        for name, (x, y) in zip(names, pairs, strict=False)
    ]


def _of_tensors(a: torch.Tensor, b: torch.Tensor, path: str) -> Iterator[str]:
    about = [(each.dtype, each.layout, each.device, each.requires_grad) for each in (a, b)]
    if about[0] != about[1] or a.is_nested != b.is_nested:
        yield f"{path}: a tensor of {about[0]} and one of {about[1]}"
        return
    if a.is_nested:
        for at, (one, other) in enumerate(zip_longest(a.unbind(), b.unbind(), fillvalue=_NONE)):
            yield from _differences(one, other, f"{path}[{at}]", set())
        return
    if a.shape != b.shape:
        yield f"{path}: the shapes {tuple(a.shape)} and {tuple(b.shape)}"
        return
    plain = []
    for each in (a, b):
        each = (each.dequantize() if each.is_quantized else each.detach()).to_dense()
        each = each if type(each) is torch.Tensor else each.as_subclass(torch.Tensor)
        each = each.cpu().resolve_conj().resolve_neg().contiguous()
        is_known = each.is_complex() or (each.is_floating_point() and each.dtype.itemsize > 1)
        if is_known and each.dtype in _HALF:
            each = each.float()
        plain.append(each.numpy() if is_known else each.reshape(-1).view(torch.uint8).numpy())
    yield from _of_numbers(plain[0], plain[1], path, _HALF_CLOSE if a.dtype in _HALF else _CLOSE)


def _of_arrays(a: Any, b: Any, path: str, around: set[tuple[int, int]]) -> Iterator[str]:
    if a.dtype != b.dtype or a.shape != b.shape:
        yield f"{path}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
    elif isinstance(a, np.ma.MaskedArray):
        yield from _differences(np.ma.getmaskarray(a), np.ma.getmaskarray(b), f"{path}.mask", around)
        yield from _of_arrays(a.filled(), b.filled(), path, around)
    elif a.dtype.names is not None:
        for name in a.dtype.names:
            yield from _differences(a[name], b[name], f"{path}[{name!r}]", around)
    elif a.dtype.hasobject:
        yield from _differences(a.reshape(-1).tolist(), b.reshape(-1).tolist(), path, around)
    else:
        close = _HALF_CLOSE if a.dtype == np.float16 else _CLOSE
        yield from _of_numbers(np.asarray(a), np.asarray(b), path, close)


def _of_numbers(a: np.ndarray, b: np.ndarray, path: str, close: float = _CLOSE) -> Iterator[str]:
    """Compare two arrays of the same dtype and shape."""
    if a.dtype.kind in "fc":
        with np.errstate(all="ignore"):
            size = [np.abs(each[np.isfinite(each)]) for each in (a, b)]
            largest = max((float(each.max()) for each in size if each.size), default=0.0)
            same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= close * largest)
    elif a.dtype.kind in "mM":  # NaT is not equal to itself
        same = np.ascontiguousarray(a).view(np.int64) == np.ascontiguousarray(b).view(np.int64)
    else:
        same = a == b
    if not np.all(same):
        at = tuple(int(i) for i in np.argwhere(~np.atleast_1d(same))[0])
        where = f"{path}[{', '.join(map(str, at))}]" if a.ndim else path
        yield f"{where}: {np.atleast_1d(a)[at]} and {np.atleast_1d(b)[at]}"


def _shown(value: Any) -> str:
    return "nothing" if value is _NONE else f"{value!r:.60}"
