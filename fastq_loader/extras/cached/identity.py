"""Identity of a cached function: its name, and a digest of all that it is bound to.

Runs in every process that calls the function; reads attributes, and runs no code of the user's. A function
that a module has under its name is that name. Any other one (a lambda, a local function) is its code as well.
A closure, the object of a method, and a partial's arguments are digested if they are plain data: numbers,
texts, paths, bytes, arrays, functions, classes, and containers of these.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import marshal
import os
import sys
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from fastq_loader.extras.cached.keys import PLAIN
from fastq_loader.extras.samplers.walk import function_members
from fastq_loader.system import attributes

_POINTER = 8  # bytes
#: What an object is, the form of the names of its parts in a path, and the parts with these names.
_Held = tuple[tuple[Any, ...], str, Iterable[tuple[Any, Any]]]


class Source(NamedTuple):
    """The code of a function: its file, and a digest. Both are empty for a function in C; one of a notebook
    has no file."""

    file: str
    code: str


class NotPlain(TypeError):
    """A function holds something that is no plain data; the text names it."""


class Apart:
    """Base class of `cached`: an attribute of this class is no part of what an object holds."""


def base_of(function: Any) -> Any:
    """The function or class behind a callable: of a method, a partial or an object with `__call__`."""
    while isinstance(function, functools.partial | MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function if hasattr(function, "__qualname__") else type(function)


def name_of(function: Any) -> str:
    """Module and name. A script counts as the module that its spec or its file's stem names."""
    base = base_of(function)
    module = getattr(base, "__module__", None) or ""
    if module in ("__main__", "__mp_main__"):
        main = vars(sys.modules.get(module, sys))
        spec, file = main.get("__spec__"), main.get("__file__")
        module = spec.name if spec is not None else Path(file).stem if file else module
    return f"{module}.{base.__qualname__}"


def source_of(function: Any) -> Source:
    """The code behind a callable."""
    base = base_of(function)
    code = getattr(base, "__code__", None) or getattr(
        getattr(base, "__dict__", {}).get("__call__"), "__code__", None
    )
    if code is None:
        return Source("", "")
    there = os.path.isfile(code.co_filename)
    file = os.path.abspath(code.co_filename) if there else ""
    return Source(file, _digest(marshal.dumps(_code(code), 2), 8).hex())


def holds_nothing(function: Any) -> bool:
    """Whether a callable is a function without closure or object."""
    of = getattr(function, "__self__", None)
    is_bound = of is not None and not isinstance(of, ModuleType)
    return hasattr(function, "__qualname__") and not (is_bound or getattr(function, "__closure__", None))


def digest_of(function: Any) -> bytes:
    """Digest of a callable, or another object, with all that it holds.

    Raises:
        NotPlain: it holds something that is no plain data.
    """
    return _digest(marshal.dumps(_apart(function, base_of(function).__qualname__, (), whole=True), 2))


def _digest(data: bytes, size: int = 16) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


def _apart(value: Any, path: str, around: tuple[int, ...], whole: bool = False) -> Any:
    """All that an object holds, for marshal: plain values, and for any other object a tuple that begins with
    its class.

    Args:
        value: the object.
        path: its name in errors.
        around: ids of the objects around it.
        whole: whether its attributes are parts, whatever its class.
    """
    if type(value) in PLAIN:
        return value
    for kind, words in _DATA.items():
        if isinstance(value, kind):
            return (kind.__name__, *words(value, path))
    if id(value) in around:
        return "again", around.index(id(value))
    around = (*around, id(value))
    about, form, held = _members(value) or _object(value, path, whole)
    parts = [
        part
        if type(part) in PLAIN
        else _apart(part, path + form.format(name), around, name in ("self", "func"))
        for name, part in held
    ]
    if isinstance(value, set | frozenset):
        parts = sorted(marshal.dumps(part, 2) for part in parts)
    return (name_of(type(value)), *about, parts)


def _object(value: Any, path: str, whole: bool) -> _Held:
    """The attributes of an object, if these are all that it holds."""
    code: Any = ""
    if hasattr(value, "__qualname__"):
        code = _code_beside_name(value, path)
        if code is None:
            return (name_of(value),), "", ()
    elif not (
        isinstance(value, functools.partial)
        or is_dataclass(value)
        or (whole and _is_made_of_attributes(type(value)))
    ):
        raise _refused(value, path)
    parts = [each for each in parts_of(value) if each[0] != "__wrapped__" and not isinstance(each[1], Apart)]
    return (name_of(value), code, *(name for name, _ in parts)), ".{}", parts


def _code_beside_name(value: Any, path: str) -> Any:
    """The code of a function, class, method or cache; "" if its name stands for that; None if the name stands
    for all that is held, too."""
    if isinstance(value, MethodType | BuiltinFunctionType):
        return ""
    is_found = isinstance(value, Apart) or _is_found(value)
    if is_found and not getattr(value, "__closure__", None):
        return None
    if not hasattr(value, "__code__"):
        raise NotPlain(f"{path} is {name_of(value)}, which its module does not have under its name")
    return "" if is_found else _code(value.__code__)


def _members(value: Any) -> _Held | None:
    """The members of a container, or None for another object."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return (), "[{!r:.40}]", [*((key, key) for key in value), *value.items()]
    if kind in (list, tuple, set, frozenset) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return (), "[{}]", enumerate(value)
    return None


def _refused(value: Any, path: str) -> NotPlain:
    return NotPlain(f"{path} is of class {name_of(type(value))}")


def _words_of_array(value: Any, path: str) -> tuple[Any, ...]:
    if value.dtype.hasobject:
        raise _refused(value, path)
    return repr(value.dtype), value.shape, _digest(np.ascontiguousarray(value).tobytes())


def _words_of_tensor(value: torch.Tensor, path: str) -> tuple[Any, ...]:
    if value.layout is not torch.strided or value.is_quantized:
        raise _refused(value, path)
    dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(dense.dtype), tuple(dense.shape), _digest(data)


#: Data besides the plain values, by class: words that say which.
_DATA: dict[type, Any] = {
    torch.Tensor: _words_of_tensor,
    np.ndarray: _words_of_array,
    np.generic: _words_of_array,
    PurePath: lambda value, _: (str(value),),
    bytearray: lambda value, _: (bytes(value),),
    ModuleType: lambda value, _: (value.__name__,),
    enum.Enum: lambda value, _: (name_of(type(value)), value._name_ or repr(value._value_)),
    **dict.fromkeys(
        (complex, range, slice, torch.dtype, torch.device, np.dtype), lambda value, _: (repr(value),)
    ),
}


_FIELDS: dict[type, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    BuiltinFunctionType: ("__self__",),
    functools.partial: ("func", "args", "keywords"),
}


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """What an object holds, by name: closure and defaults, object, arguments, attributes."""
    if isinstance(value, FunctionType):
        return function_members("", value)
    names = [name for kind, names in _FIELDS.items() if isinstance(value, kind) for name in names]
    return [(name.strip("_"), getattr(value, name)) for name in names] + [*attributes.held(value).items()]


def _is_made_of_attributes(kind: type) -> bool:
    """Whether instances hold nothing but attributes: no state of a class in C. As pickle finds it."""
    slots = sum(
        type(member) is MemberDescriptorType
        for each in kind.__mro__
        if "__slots__" in vars(each)
        for member in vars(each).values()
    )
    others = (kind.__dictoffset__ != 0) + (kind.__weakrefoffset__ != 0)
    return kind.__basicsize__ <= object.__basicsize__ + _POINTER * (slots + others)


def found(value: Any) -> Any:
    """The object that a module has under the name of this one; None if it has none."""
    at: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for name in value.__qualname__.split("."):
        at = vars(at).get(name) if hasattr(at, "__dict__") else None
    return at


def _is_found(value: Any) -> bool:
    """Whether an object's module contains it under its name, or contains a cache that wraps it."""
    at = found(value)
    at = vars(at)["__wrapped__"] if isinstance(at, Apart) else at
    return (at.__func__ if isinstance(at, staticmethod | classmethod) else at) is value


def _code(code: CodeType) -> tuple[Any, ...]:
    """The instructions and constants of a function, without its file and line numbers."""
    constants = [
        _code(each)
        if isinstance(each, CodeType)
        else repr(sorted(map(repr, each)) if isinstance(each, frozenset) else each)
        for each in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants
