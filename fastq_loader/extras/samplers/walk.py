"""Finds instances of given classes in a user's objects, and in all objects that these reference. It runs no
user code: no property, no `__getattr__`, no method.

Runs in any process and thread, like `attributes`. It also reads closures and defaults of functions, and asks
the garbage collector for the references of objects written in C.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, islice
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from fastq_loader.system.attributes import C_FIELDS, MOST, held, namespace, own_dict

#: Largest number of objects that a walk visits, and of members of a container that is not visited last.
_MOST_OBJECTS, _FEW_MEMBERS = 1000, 100
#: Cost of visiting an object. One without members (a function, a tuple of numbers) costs 1.
_COST = 10
#: A large container counts as data if its first members are data, and theirs in turn, to this depth.
_FIRST, _DEPTH = 5, 4

_PLAIN = {str, bytes, int, float, bool, complex, type(None)}
#: Modules whose instances are not searched. Instances of a user's subclasses are.
_DATA_MODULES = {
    *("datetime", "decimal", "logging", "pathlib", "pathlib._local", "re", "uuid"),
    *("torch", "torch.nn.parameter"),
}
#: Packages whose classes are not searched: they have no generators as class attributes.
_LIBRARIES = {*sys.stdlib_module_names, "fastq_loader", "numpy", "torch"}
_NOT_ENTERED = (ModuleType, CodeType)
#: Returns the members of an object, each with its name.
_Expand = Callable[[str, Any], list[tuple[Any, Any]]]
_COLLECTED = 1 << 14  # Py_TPFLAGS_HAVE_GC: instances have references that the garbage collector follows
# Descriptors, because a user's subclass or metaclass may override these attributes.
_flags, _bases = type.__dict__["__flags__"].__get__, type.__dict__["__bases__"].__get__
_size, _dtype = vars(np.ndarray)["size"].__get__, vars(np.ndarray)["dtype"].__get__
_flat, _factory = vars(np.ndarray)["flat"].__get__, vars(defaultdict)["default_factory"].__get__
#: Size and members of a container, by its class.
_CONTAINERS: dict[type, tuple[Callable[[Any], int], Callable[[Any], Iterable[Any]]]] = {
    OrderedDict: (dict.__len__, dict.items),
    dict: (dict.__len__, dict.items),
    list: (list.__len__, list.__iter__),
    tuple: (tuple.__len__, tuple.__iter__),
    set: (set.__len__, set.__iter__),
    frozenset: (frozenset.__len__, frozenset.__iter__),
    deque: (deque.__len__, deque.__iter__),
    np.ndarray: (lambda array: _size(array) if _dtype(array).hasobject else 0, _flat),
}


class Walk:
    """A walk over objects, for instances of some classes: breadth first, and bounded.

    Classes are visited after all other objects, and large containers last. The walk follows attributes,
    slots, members of containers, closures and defaults of functions, attributes of classes, and references of
    objects written in C. It enters neither modules nor the global variables of functions.

    Args:
        roots: name → object.
        kinds: classes of the objects to find.
        but: objects to leave out.

    Attributes:
        found: path → object, each once. A path like "sampler.generator" consists of attributes, keys and
            positions, which are the same in every process. The order of a set is not, so its members have one
            path. If a path is taken, a ' is appended.
        unseen: paths of parts that the walk did not look into; empty if there are none.
        large: paths of large containers whose first members are data, if not all members were searched: some
            are containers, or there are more than a thousand.
    """

    def __init__(self, roots: Mapping[str, Any], kinds: tuple[type, ...], but: Iterable[Any] = ()) -> None:
        self.found: dict[str, Any] = {}
        self.unseen: list[str] = []
        self.large: list[str] = []
        self._kinds = kinds
        self._handlers: dict[int, tuple[type, type | None, _Expand | None]] = {}
        self._seen = {id(part): part for part in but}  # kept, so that no other object gets the id
        self._objects, self._classes, self._last = (deque[tuple[str, _Expand, Any]]() for _ in range(3))
        self._add("", roots.items())
        left = _MOST_OBJECTS * _COST
        while queue := self._objects or self._classes or self._last:
            path, expand, part = queue.popleft()
            members = expand(path, part)
            left -= _COST if members else 1
            if left < 0:
                self.unseen.append(path)
                break
            self._add(path, members)
        self._seen.clear()

    def _add(self, path: str, members: Iterable[tuple[Any, Any]]) -> None:
        """Queue the members of an object. Members without a name get the object's path."""
        for name, part in members:
            kind = type(part)
            if kind in _PLAIN or id(part) in self._seen:
                continue
            if id(kind) not in self._handlers:  # by its id, because its hash may be user code
                self._handlers[id(kind)] = self._handler(kind)
            _, base, expand = self._handlers[id(kind)]
            if expand is not None:
                self._seen[id(part)] = part
                inner = _joined(path, name)
                is_large = base is not None and _CONTAINERS[base][0](part) > _FEW_MEMBERS
                queue = (
                    self._last if is_large else self._classes if expand is _class_members else self._objects
                )
                queue.append((inner, expand, part))
                if issubclass(kind, self._kinds):
                    self._find(inner, part)

    def _find(self, path: str, part: Any) -> None:
        while path in self.found:
            path += "'"
        self.found[path] = part

    def _handler(self, kind: type) -> tuple[type, type | None, _Expand | None]:
        """Return a class, the container type that it derives from, and the function that lists the members of
        its instances: None for plain values."""
        base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
        if not issubclass(kind, self._kinds):
            if issubclass(kind, _NOT_ENTERED) or (base is not np.ndarray and _is_plain(kind)):
                return kind, base, None
            if kind is FunctionType or issubclass(kind, type):
                return kind, base, function_members if kind is FunctionType else _class_members
        return kind, base, partial(self._object_members, base)

    def _object_members(self, base: type | None, path: str, part: Any) -> list[tuple[Any, Any]]:
        """Return the attributes of an object, its class, its members, and its references in C."""
        kind, own = type(part), own_dict(part)
        if kind in self._kinds or _is_namespace(part):
            return []
        members = self._container_members(base, path, part) if base is not None else []
        if kind is base:
            return members
        if kind is FrameType:  # it references all frames of its stack
            self.unseen.append(path)
            return []
        self.unseen += [path] * (dict.__len__(own) > MOST)
        self._seen[id(own)] = own  # `get_referents` returns it, too
        members = [*held(part).items(), ("", kind), *members]
        if kind is MethodType:
            members += ("", part.__self__), ("", part.__func__)
        elif issubclass(kind, defaultdict):
            members += [("default_factory", _factory(part))]
        elif base is None:
            members += enumerate(gc.get_referents(part))
        return members

    def _container_members(self, base: type, path: str, part: Any) -> list[tuple[Any, Any]]:
        """Return the first members of a container. If it counts as data, leave out inner containers."""
        size = _CONTAINERS[base][0](part)
        if not size or (size <= _FEW_MEMBERS and _PLAIN.issuperset(map(type, _contents(part, base)))):
            return []
        members = _named(part, base)
        if size > _FEW_MEMBERS and all(map(_is_data, islice(_contents(part, base), _FIRST))):
            found = [each for each in members if type(each[1]) not in _CONTAINERS]
            self.large += [path] * (size > MOST or len(found) < len(members))
            return found
        self.unseen += [path] * (size > MOST)
        return members


def _joined(path: str, name: Any) -> str:
    name = name if type(name) in _PLAIN else "*"  # a key of a `__dict__` need not be a string
    return f"{path}.{name}" if path and name != "" else path or str(name)


def _module(kind: type) -> str:
    name = namespace(kind).get("__module__")
    return name if type(name) is str else "builtins"


def _is_plain(kind: type) -> bool:
    """Whether objects of exactly this type need not be searched."""
    return kind in _PLAIN or not _flags(kind) & _COLLECTED or _module(kind) in _DATA_MODULES


def _class_members(_: str, kind: type) -> list[tuple[Any, Any]]:
    """The attributes of a class, its methods, and its base classes."""
    if _module(kind).partition(".")[0] in _LIBRARIES:
        return []
    fields = [
        (name, field)
        for name, field in list(namespace(kind).items())
        if type(field) is FunctionType
        or not (type(field) in C_FIELDS or (type(name) is str and name.startswith("__")))
    ]
    return [*fields, *(("", base) for base in _bases(kind))]


def _is_namespace(part: Any) -> bool:
    """Whether an object is the namespace of a module."""
    return type(part) is dict and part.keys() >= {"__name__", "__loader__", "__spec__"}


def function_members(_: str, function: FunctionType) -> list[tuple[str, Any]]:
    """The closure of a function, its defaults and its attributes, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    arguments = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    found = [*zip(arguments, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is empty
            found.append((name, cell.cell_contents))
    return [*found, *vars(function).items()]


def _contents(part: Any, base: type) -> Iterable[Any]:
    """The members of a container; for a dict, also the keys."""
    members = _CONTAINERS[base][1](part)
    return chain.from_iterable(members) if issubclass(base, dict) else members


def _named(part: Any, base: type) -> list[tuple[Any, Any]]:
    """The first members of a container, by key or position; for a dict, also keys that are not plain."""
    members = list(islice(_CONTAINERS[base][1](part), MOST))
    if base in (set, frozenset):
        return [("*", each) for each in members]
    if not issubclass(base, dict):
        return list(enumerate(members))
    # The name of any other key would come from its `repr`, which may be user code.
    values = [(key if type(key) in _PLAIN else at, each) for at, (key, each) in enumerate(members)]
    return values + [(at, key) for at, (key, _) in enumerate(members) if type(key) not in _PLAIN]


def _is_data(part: Any, depth: int = _DEPTH) -> bool:
    """Whether an object is a plain value, or a container whose first members are data."""
    kind = type(part)
    if kind not in _CONTAINERS:
        return _is_plain(kind)
    first = islice(_contents(part, kind), _FIRST)
    return depth > 0 and all(_is_data(each, depth - 1) for each in first)
