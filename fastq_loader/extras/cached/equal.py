"""Whether a stored value is what computing it again gave, and if not, where the two differ.

Runs in every process that checks a hit. Numbers with a fraction may differ by rounding, because sums depend
on the number of threads; all else must be the same. Objects are compared by what pickle writes of them, and
never by `==`, which may look at a part of them.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

#: By how much a number may differ, as a part of the largest one beside it; of half precision 1e-2.
_CLOSE, _HALF_CLOSE = 1e-5, 1e-2
_HALF = (torch.float16, torch.bfloat16, torch.complex32, np.float16)
#: A sum that is nearly 0 has lost its last digits: it may differ by more than the root of that, of itself. So
#: may this part of the numbers that differ; and all, if each does by only so many last bits of the largest.
_CANCELLED, _LAST_BITS = 0.25, 64
#: Parts of an object that are missing in the other one.
_NONE: Any = object()
_PLAIN = (str, bytes, bytearray, int, bool, range, type(None))
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
        if isinstance(a, torch.Tensor) and a.is_nested and b.is_nested:
            return _difference([*a.unbind()], [*b.unbind()], path, around)
        if isinstance(a, torch.Tensor | np.ndarray | np.generic):
            compare: Any = _of_tensors if isinstance(a, torch.Tensor) else _of_arrays
            return compare(a, b, path, around) or _difference(*_attributes(a, b, path), around)
        if kind in (float, complex):
            return _of_numbers(np.asarray(a), np.asarray(b), path)
        if (id(a), id(b)) in around:
            return ""
        if kind not in _PLAIN and not isinstance(a, _NAMED):
            around[id(a), id(b)] = a, b
            return _first(_parts(a, b, path), around)
        if a == b:
            return ""
    return f"{path}: {_shown(a)} and {_shown(b)}"


def _first(parts: list[tuple[Any, Any, str]], around: _Around) -> str:
    return next((where for each in parts if (where := _difference(*each, around))), "")


def _parts(a: Any, b: Any, path: str) -> list[tuple[Any, Any, str]]:
    """The parts of two objects of one type, with their places."""
    kind = type(a)
    if isinstance(a, set | frozenset):  # of members that may be equal to themselves alone, such as NaN
        members = [] if a == b else [(sorted(a, key=repr), sorted(b, key=repr), path)]
        return [*members, _attributes(a, b, path)]
    if kind in (list, tuple):
        pairs_of = zip_longest(a, b, fillvalue=_NONE)
        return [(one, other, f"{path}[{at}]") for at, (one, other) in enumerate(pairs_of)]
    if kind is dict:
        keys = [*a], [*b], f"{path}: the keys "
        pairs_of = zip_longest(a.items(), b.values(), fillvalue=(_NONE, _NONE))
        return [keys, *((one, other, f"{path}[{key!r}]") for (key, one), other in pairs_of)]
    if (hidden := getattr(kind, "_not_compared", None)) is not None:  # of this package: seeds of samples
        names = [name for name in copyreg._slotnames(kind) if name not in hidden]  # type: ignore[attr-defined]
        return [(getattr(a, name), getattr(b, name), f"{path}.{name}") for name in names]
    # What pickle would write: class and arguments, state, members.
    both = zip(("()", ".__args__", "", "", ""), zip_longest(_reduced(a), _reduced(b)), strict=False)
    return [(one, other, path + where) for where, (one, other) in both]


def _attributes(a: Any, b: Any, path: str) -> tuple[Any, Any, str]:
    return getattr(a, "__dict__", None), getattr(b, "__dict__", None), f"{path}.__dict__"


def _reduced(value: Any) -> list[Any]:
    registered: Any = copyreg.dispatch_table.get(type(value))
    reduced = value.__reduce_ex__(4) if registered is None else registered(value)
    parts = [reduced] if isinstance(reduced, str) else reduced
    return [list(each) if isinstance(each, Iterator) else each for each in parts]


def _of_tensors(a: torch.Tensor, b: torch.Tensor, path: str, around: _Around) -> str:
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
    return _of_numbers(plain[0], plain[1], path, _HALF_CLOSE if a.dtype in _HALF else _CLOSE)


def _of_arrays(a: Any, b: Any, path: str, around: _Around) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{path}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
    if isinstance(a, np.ma.MaskedArray):
        masks = _difference(np.ma.getmaskarray(a), np.ma.getmaskarray(b), f"{path}.mask", around)
        return masks or _of_arrays(a.filled(), b.filled(), path, around)
    if a.dtype.names is not None:
        return _first([(a[name], b[name], f"{path}[{name!r}]") for name in a.dtype.names], around)
    if a.dtype.hasobject:
        return _difference(a.reshape(-1).tolist(), b.reshape(-1).tolist(), path, around)
    return _of_numbers(np.asarray(a), np.asarray(b), path, _HALF_CLOSE if a.dtype.type in _HALF else _CLOSE)


def _of_numbers(a: np.ndarray, b: np.ndarray, path: str, close: float = _CLOSE) -> str:
    """Compare two arrays of the same dtype and shape."""
    if a.dtype.kind == "c":
        one, other = (np.stack([each.real, each.imag], -1) for each in (a, b))
        return _of_numbers(one, other, path, close)
    one, other = np.atleast_1d(a), np.atleast_1d(b)
    differs = one.view(np.int64) != other.view(np.int64) if a.dtype.kind in "mM" else one != other
    if a.dtype.kind == "f":
        differs &= (one == one) | (other == other)  # not two NaN
        if differs.any():
            differs[differs] = _are_far(one, other, differs, close)
    if not differs.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    where = f"{path}[{', '.join(map(str, at))}]" if a.ndim else path
    return f"{where}: {one[at]} and {other[at]}"


@np.errstate(all="ignore")
def _are_far(a: np.ndarray, b: np.ndarray, differs: np.ndarray, close: float) -> Any:
    """Which of the numbers that differ do so by more than rounding."""
    largest = max(float(np.abs(each[np.isfinite(each)]).max(initial=0)) for each in (a, b))
    x, y = (each[differs].astype(np.result_type(each, np.float32)) for each in (a, b))
    by, size = np.abs(x - y), np.maximum(np.abs(x), np.abs(y))
    is_far, is_cancelled = ~(by <= close * largest), ~(by <= close**0.5 * size)
    last_bits = _LAST_BITS * np.finfo(x.dtype).eps * size[np.isfinite(size)].max(initial=0)
    if np.mean(is_cancelled) > _CANCELLED and np.any(by > last_bits):
        is_far |= is_cancelled
    return is_far


def _shown(value: Any) -> str:
    return "nothing" if value is _NONE else f"{value!r:.60}"
