"""Identity of a cached function: its name, and a digest of all that it is bound to.

Runs in every process that calls the function; reads attributes, and runs no code of the user's. A function
that a module has under its name is that name. Any other one (a lambda, a local function) is its code as well.
A closure, the object of a method, and a partial's arguments are digested if they are plain data: numbers,
texts, paths, bytes, arrays, functions, classes, and containers of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import marshal
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from fastq_loader.api import attributes
from fastq_loader.extras.cached.keys import PLAIN

_AS_TEXT = (complex, range, slice, torch.dtype, torch.device, np.dtype)
_WORD = 8  # bytes of a pointer


class Source(NamedTuple):
    """The code of a function: its file, and a digest. Both are empty for a function in C; one of a notebook
    has no file."""

    file: str
    code: str


class NotPlain(TypeError):
    """A function holds something that is no plain data; the text names it."""


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
    digest = hashlib.blake2b(digest_size=8)
    _add_code(digest.update, code)
    there = os.path.isfile(code.co_filename)
    return Source(os.path.abspath(code.co_filename) if there else "", digest.hexdigest())


def holds_nothing(function: Any) -> bool:
    """Whether a callable is a function without closure or object."""
    of = getattr(function, "__self__", None)
    is_bound = of is not None and not isinstance(of, ModuleType)
    return hasattr(function, "__qualname__") and not (is_bound or getattr(function, "__closure__", None))


def digest_of(function: Any, caches: type) -> bytes:
    """Digest of a callable, or another object, with all that it holds.

    Args:
        function: the callable.
        caches: class of the attributes that are left out.

    Raises:
        NotPlain: it holds something that is no plain data.
    """
    digest = hashlib.blake2b(digest_size=16)
    _Digest(digest.update, caches).add(function, base_of(function).__qualname__, whole=True)
    return digest.digest()


class _Digest:
    def __init__(self, update: Callable[[bytes], None], caches: type) -> None:
        self._update, self._caches = update, caches
        self._around: list[int] = []  # ids of the objects around a part

    def _tag(self, *words: Any) -> None:
        self._update(marshal.dumps(words, 2))

    def add(self, value: Any, path: str, whole: bool = False) -> None:
        """Add an object; `whole`: its attributes are added, whatever its class."""
        if type(value) in PLAIN:
            self._tag(value)
        elif id(value) in self._around:
            self._tag("again", self._around.index(id(value)))
        else:
            self._around.append(id(value))
            if not (self._add_data(value, path) or self._add_container(value, path)):
                self._add_object(value, path, whole)
            self._around.pop()

    def _add_data(self, value: Any, path: str) -> bool:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
            dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            self._tag("tensor", str(dense.dtype), tuple(dense.shape))
            self._update(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.generic | np.ndarray) and not value.dtype.hasobject:
            array = np.ascontiguousarray(value)
            self._tag("array", repr(value.dtype), value.shape)
            self._update(array.tobytes())
        elif isinstance(value, PurePath):
            self._tag("path", str(value))
        elif isinstance(value, bytearray):
            self._tag("bytearray", bytes(value))
        elif isinstance(value, _AS_TEXT):
            self._tag(type(value).__name__, repr(value))
        elif isinstance(value, enum.Enum):
            self._tag("enum", name_of(type(value)), value.name)
        elif isinstance(value, ModuleType):
            self._tag("module", value.__name__)
        else:
            return False
        return True

    def _add_container(self, value: Any, path: str) -> bool:
        kind = type(value)
        if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            are_plain = PLAIN.issuperset(map(type, value))
            self._tag(name_of(kind), len(value), are_plain)
            if are_plain:  # a million names in a fraction of a second
                self._tag(*value)
                return True
            for at, part in enumerate(value):
                self.add(part, f"{path}[{at}]")
        elif kind in (dict, OrderedDict):
            self._tag(name_of(kind), len(value))
            for key, part in value.items():
                self.add(key, f"a key of {path}")
                self.add(part, f"{path}[{key!r:.40}]")
        elif kind in (set, frozenset):
            members = []
            for part in value:
                digest = hashlib.blake2b(digest_size=16)
                _Digest(digest.update, self._caches).add(part, f"a member of {path}")
                members.append(digest.digest())
            self._tag(kind.__name__, *sorted(members))
        else:
            return False
        return True

    def _add_object(self, value: Any, path: str, whole: bool) -> None:
        if hasattr(value, "__qualname__"):  # a function, a class, a method or a cache
            self._tag("function", name_of(value))
            if not self._is_more_than_its_name(value, path):
                return
        elif (
            isinstance(value, functools.partial)
            or dataclasses.is_dataclass(value)
            or (whole and _is_made_of_attributes(type(value)))
        ):
            self._tag("object", name_of(type(value)))
        else:
            raise NotPlain(f"{path} is {value!r:.60}, a {name_of(type(value))}")
        for name, part in parts_of(value):
            if name != "__wrapped__" and not isinstance(part, self._caches):
                self._tag("part", name)
                self.add(part, f"{path}.{name}", whole=name in ("self", "func"))
        self._tag("end", path.count("."))

    def _is_more_than_its_name(self, value: Any, path: str) -> bool:
        if isinstance(value, self._caches):
            return False
        if isinstance(value, MethodType | BuiltinFunctionType):
            return True
        is_found, code = _is_found(value, self._caches), getattr(value, "__code__", None)
        if is_found and not getattr(value, "__closure__", None):
            return False
        if code is None:
            raise NotPlain(f"{path} is {value!r:.60}, which its module does not have under its name")
        if not is_found:
            _add_code(self._update, code)
        return True


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, by name: closure and defaults, object, arguments, attributes."""
    if isinstance(value, MethodType):
        yield from (("function", value.__func__), ("self", value.__self__))
        return
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType | type(None)):
        yield "self", value.__self__
    if isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # still empty
                yield name, cell.cell_contents
        yield from (("defaults", value.__defaults__), ("keyword defaults", value.__kwdefaults__))
    if not isinstance(value, type):
        yield from attributes.held(value).items()


def _is_made_of_attributes(kind: type) -> bool:
    """Whether instances hold nothing but attributes: no state of a class in C. As pickle finds it."""
    slots = sum(
        type(member) is MemberDescriptorType
        for each in kind.__mro__
        if "__slots__" in vars(each)
        for member in vars(each).values()
    )
    others = (kind.__dictoffset__ != 0) + (kind.__weakrefoffset__ != 0)
    return kind.__basicsize__ <= object.__basicsize__ + _WORD * (slots + others)


def found(value: Any) -> Any:
    """The object that a module has under the name of this one; None if it has none."""
    at: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for name in value.__qualname__.split("."):
        at = vars(at).get(name) if hasattr(at, "__dict__") else None
    return at


def _is_found(value: Any, caches: type) -> bool:
    """Whether an object's module contains it under its name, or contains a cache that wraps it."""
    at = found(value)
    at = vars(at)["__wrapped__"] if isinstance(at, caches) else at
    return (at.__func__ if isinstance(at, staticmethod | classmethod) else at) is value


def _add_code(update: Callable[[bytes], None], code: CodeType | None) -> None:
    """Add the instructions and constants of a function, without its file and line numbers."""
    if code is None:
        return
    texts: list[Any] = [code.co_names, code.co_varnames, code.co_freevars]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(update, constant)
        else:
            texts.append(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
    update(code.co_code + repr(texts).encode("utf-8", "surrogatepass"))
