"""Whether a stored value is what computing it again gave, and if not, where the two differ.

Runs in every process that checks a hit. Numbers with a fraction may differ by rounding, because sums depend
on the number of threads; all else must be the same.
"""

from __future__ import annotations

import copyreg
import dataclasses
import types
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

#: By how much numbers may differ, as a part of the largest one beside them; of half precision 1e-2.
_CLOSE, _HALF_CLOSE = 1e-5, 1e-2
_HALF = (torch.float16, torch.bfloat16, torch.complex32, np.float16)
#: Parts of an object that are missing in the other one.
_NONE: Any = object()
_PLAIN = str | bytes | bytearray | int | range | None
_NAMED = type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType
#: Pairs of containers that are being compared, or are equal.
_Around = dict[tuple[int, int], tuple[Any, Any]]


class Incomparable(Exception):
    """It cannot be decided whether two values are equal."""


def difference(stored: Any, fresh: Any) -> str:
    """The first difference of two values, with its place and both sides; "" if they are equal.

    Raises:
        Incomparable: comparing raised an exception.
    """
    try:
        return _difference(stored, fresh, "value", {})
    except Exception as error:  # of user code: a property, or a method of pickle's; or too deep a value
        raise Incomparable(f"{type(error).__name__}: {error}") from error


def _difference(a: Any, b: Any, path: str, around: _Around) -> str:
    kind = type(a)
    if a is b:
        return ""
    if kind is type(b):
        if isinstance(a, torch.Tensor):
            return _of_tensors(a, b, path, around)
        if isinstance(a, np.ndarray | np.generic):
            return _of_arrays(a, b, path, around)
        if isinstance(a, float | complex):
            return _of_numbers(np.asarray(a), np.asarray(b), path)
        if (id(a), id(b)) in around:
            return ""
        if not isinstance(a, _PLAIN | _NAMED):
            around[id(a), id(b)] = a, b
            parts = _parts(a, b, path)
            return next((where for each in parts if (where := _difference(*each, around))), "")
        if a == b:
            return ""
    return f"{path}: {_shown(a)} and {_shown(b)}"


def _parts(a: Any, b: Any, path: str) -> list[tuple[Any, Any, str]]:
    """The parts of two objects of one type, with their places."""
    kind = type(a)
    if kind in (set, frozenset):  # of members that may be equal to themselves alone, such as NaN
        return [] if a == b else [(sorted(a, key=repr), sorted(b, key=repr), path)]
    if kind in (list, tuple):
        both = enumerate(zip_longest(a, b, fillvalue=_NONE))
        return [(one, other, f"{path}[{at}]") for at, (one, other) in both]
    if kind is dict:
        keys = [*a], [*b], f"{path}: the keys "
        pairs_of = zip_longest(a.items(), b.values(), fillvalue=(_NONE, _NONE))
        return [keys, *((one, other, f"{path}[{key!r}]") for (key, one), other in pairs_of)]
    if dataclasses.is_dataclass(a):
        names = [each.name for each in dataclasses.fields(a)]
        return [(getattr(a, name, _NONE), getattr(b, name, _NONE), f"{path}.{name}") for name in names]
    # What pickle would write: class and arguments, state, members. Before `==`, which may change the state.
    one, other = (_reduced(each) for each in (a, b))
    # Unequal ones may still be pickled as the same bytes, as objects with NaN.
    if not hasattr(kind, "_fields") and _are_equal(a, b):
        return []
    paths = f"{path}()", f"{path}.__args__", path, path, path
    return [(x, y, where) for where, (x, y) in zip(paths, zip_longest(one, other), strict=False)]


def _reduced(value: Any) -> list[Any]:
    registered: Any = copyreg.dispatch_table.get(type(value))
    reduced = value.__reduce_ex__(4) if registered is None else registered(value)
    parts = [reduced] if isinstance(reduced, str) else reduced
    parts = [list(each) if isinstance(each, Iterator) else each for each in parts]
    return [dict(each) if type(each) is dict else each for each in parts]


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return (a == b) is True
    except Exception:  # two objects that hold arrays
        return False


def _of_tensors(a: torch.Tensor, b: torch.Tensor, path: str, around: _Around) -> str:
    if a.is_nested and b.is_nested:
        return _difference([*a.unbind()], [*b.unbind()], path, around)
    about = [(each.dtype, tuple(each.shape), each.layout, each.device, each.requires_grad) for each in (a, b)]
    if about[0] != about[1]:
        return f"{path}: a tensor of {about[0]} and one of {about[1]}"
    if a.is_meta:  # without values
        return ""
    plain = []
    for each in (a, b):
        each = (each.dequantize() if each.is_quantized else each.detach().to_dense()).as_subclass(
            torch.Tensor
        )
        if each.dtype in _HALF:
            each = each.to(torch.complex64 if each.is_complex() else torch.float32)
        elif each.is_floating_point() and each.dtype.itemsize == 1:
            each = each.view(torch.uint8)
        plain.append(each.cpu().resolve_conj().resolve_neg().numpy())
    close = _HALF_CLOSE if a.dtype in _HALF else _CLOSE
    # A pickle of a tensor has the attributes that somebody gave it.
    return _of_numbers(plain[0], plain[1], path, close) or _difference(
        vars(a), vars(b), f"{path}.__dict__", around
    )


def _of_arrays(a: Any, b: Any, path: str, around: _Around) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{path}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
    if isinstance(a, np.ma.MaskedArray):
        masks = _difference(np.ma.getmaskarray(a), np.ma.getmaskarray(b), f"{path}.mask", around)
        return masks or _of_arrays(a.filled(), b.filled(), path, around)
    if a.dtype.names is not None:
        parts = [(a[name], b[name], f"{path}[{name!r}]") for name in a.dtype.names]
        return next((where for each in parts if (where := _difference(*each, around))), "")
    if a.dtype.hasobject:
        return _difference(a.reshape(-1).tolist(), b.reshape(-1).tolist(), path, around)
    return _of_numbers(np.asarray(a), np.asarray(b), path, _HALF_CLOSE if a.dtype.type in _HALF else _CLOSE)


def _of_numbers(a: np.ndarray, b: np.ndarray, path: str, close: float = _CLOSE) -> str:
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
    if np.all(same):
        return ""
    at = tuple(int(i) for i in np.argwhere(~np.atleast_1d(same))[0])
    where = f"{path}[{', '.join(map(str, at))}]" if a.ndim else path
    return f"{where}: {np.atleast_1d(a)[at]} and {np.atleast_1d(b)[at]}"


def _shown(value: Any) -> str:
    return "nothing" if value is _NONE else f"{value!r:.60}"
