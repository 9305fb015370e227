"""A walk over a user's objects and all that they hold, to find some among them. It runs no user code: no
property, no `__getattr__`, no method.

Runs in any process and thread, like `attributes`. Also reads closures and defaults of functions, and asks the
garbage collector for the references of objects written in C.
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

#: Objects that a walk visits, at most. A container of more members than this is visited after all else.
_MOST_OBJECTS, _FEW_MEMBERS = 1000, 100
#: An object counts as much as so many that turn out to have no members: functions, and tuples of numbers.
_COST = 10
#: A large container is taken for data if its first members are, and their first members, to this depth.
_FIRST, _DEPTH = 5, 4

_PLAIN = {str, bytes, int, float, bool, complex, type(None)}
#: Modules whose classes hold nothing to look for. Instances of a user's subclass are walked.
_DATA_MODULES = {
    *("datetime", "decimal", "logging", "pathlib", "pathlib._local", "re", "uuid"),
    *("torch", "torch.nn.parameter"),
}
#: Packages whose classes have no generators as attributes.
_LIBRARIES = {*sys.stdlib_module_names, "fastq_loader", "numpy", "torch"}
_OUTSIDE = (ModuleType, CodeType)
#: Returns the members of an object, each with its name.
_Look = Callable[[str, Any], list[tuple[Any, Any]]]
_COLLECTED = 1 << 14  # Py_TPFLAGS_HAVE_GC: instances have references that the garbage collector follows
# A user's subclass or metaclass may define these attributes anew.
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

    An object's own attributes come before the objects behind them, classes after these, and large containers
    last. The walk follows attributes, slots, members of containers, closures and defaults of functions,
    attributes of classes, and references of objects written in C. It does not enter modules, and so not the
    global variables of functions.

    Args:
        roots: name → object.
        kinds: classes of the objects to find.
        but: objects to leave out.

    Attributes:
        found: path → object, each once. A path like "sampler.generator" depends only on the attributes. The
            members of a set have one path, because their order differs between processes; further objects
            with the path of another one get a ' each.
        unseen: paths of parts that the walk did not look into; empty if there are none.
        large: paths of large containers that were taken for data after a look at their first members, if
            they hold others or more than a thousand members.
    """

    def __init__(self, roots: Mapping[str, Any], kinds: tuple[type, ...], but: Iterable[Any] = ()) -> None:
        self.found: dict[str, Any] = {}
        self.unseen: list[str] = []
        self.large: list[str] = []
        self._kinds = kinds
        self._ways: dict[int, tuple[type, type | None, _Look | None]] = {}
        self._seen = {id(part): part for part in but}  # kept, so that no other object gets the id
        self._objects, self._classes, self._last = (deque[tuple[str, _Look, Any]]() for _ in range(3))
        self._add("", roots.items())
        left = _MOST_OBJECTS * _COST
        while queue := self._objects or self._classes or self._last:
            path, look, part = queue.popleft()
            members = look(path, part)
            left -= _COST if members else 1
            if left < 0:
                self.unseen.append(path)
                break
            self._add(path, members)
        self._seen.clear()

    def _add(self, path: str, members: Iterable[tuple[Any, Any]]) -> None:
        """Queue the members of an object. Those without a name have the object's path."""
        for name, part in members:
            kind = type(part)
            if kind in _PLAIN or id(part) in self._seen:
                continue
            if id(kind) not in self._ways:  # by its id, because its hash may be user code
                self._ways[id(kind)] = self._way(kind)
            _, base, look = self._ways[id(kind)]
            if look is not None:
                self._seen[id(part)] = part
                inner = _joined(path, name)
                is_large = base is not None and _CONTAINERS[base][0](part) > _FEW_MEMBERS
                queue = self._last if is_large else self._classes if look is _of_class else self._objects
                queue.append((inner, look, part))
                if issubclass(kind, self._kinds):
                    self._find(inner, part)

    def _find(self, path: str, part: Any) -> None:
        while path in self.found:
            path += "'"
        self.found[path] = part

    def _way(self, kind: type) -> tuple[type, type | None, _Look | None]:
        """A class, the container that its instances are, and how to look into them: None for plain values."""
        base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
        if not issubclass(kind, self._kinds):
            if issubclass(kind, _OUTSIDE) or (base is not np.ndarray and _is_plain(kind)):
                return kind, base, None
            if kind is FunctionType or issubclass(kind, type):
                return kind, base, _of_function if kind is FunctionType else _of_class
        return kind, base, partial(self._of_object, base)

    def _of_object(self, base: type | None, path: str, part: Any) -> list[tuple[Any, Any]]:
        """The attributes of an object, its class, its members, and its references in C."""
        kind, own = type(part), own_dict(part)
        if kind in self._kinds or _is_namespace(part):
            return []
        members = self._of_container(base, path, part) if base is not None else []
        if kind is base:
            return members
        if kind is FrameType:  # refers to all frames of its stack
            self.unseen.append(path)
            return []
        self.unseen += [path] * (dict.__len__(own) > MOST)
        self._seen[id(own)] = own  # the collector refers to it, too
        members = [*held(part).items(), ("", kind), *members]
        if kind is MethodType:
            members += ("", part.__self__), ("", part.__func__)
        elif issubclass(kind, defaultdict):
            members += [("default_factory", _factory(part))]
        elif base is None:
            members += enumerate(gc.get_referents(part))
        return members

    def _of_container(self, base: type, path: str, part: Any) -> list[tuple[Any, Any]]:
        """The first members of a container, named; of large data only those that are no containers."""
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
    name = name if type(name) in _PLAIN else "*"  # a key of a `__dict__` that is not text
    return f"{path}.{name}" if path and name != "" else path or str(name)


def _module(kind: type) -> str:
    name = namespace(kind).get("__module__")
    return name if type(name) is str else "builtins"


def _is_plain(kind: type) -> bool:
    """Whether objects of exactly this type hold nothing to look for."""
    return kind in _PLAIN or not _flags(kind) & _COLLECTED or _module(kind) in _DATA_MODULES


def _of_class(_: str, kind: type) -> list[tuple[Any, Any]]:
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
    """Whether it is the namespace of a module."""
    return type(part) is dict and part.keys() >= {"__name__", "__loader__", "__spec__"}


def _of_function(_: str, function: FunctionType) -> list[tuple[str, Any]]:
    """The closure of a function, its defaults and its attributes, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    arguments = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    found = [*zip(arguments, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            found.append((name, cell.cell_contents))
    return [*found, *vars(function).items()]


def _contents(part: Any, base: type) -> Iterable[Any]:
    """The members of a container; of a dict also its keys."""
    members = _CONTAINERS[base][1](part)
    return chain.from_iterable(members) if issubclass(base, dict) else members


def _named(part: Any, base: type) -> list[tuple[Any, Any]]:
    """The first members of a container, by key or position; of a dict its keys, too."""
    members = list(islice(_CONTAINERS[base][1](part), MOST))
    if base in (set, frozenset):
        return [("*", each) for each in members]
    if not issubclass(base, dict):
        return list(enumerate(members))
    # Keys of other types have no name without their `repr`.
    values = [(key if type(key) in _PLAIN else at, each) for at, (key, each) in enumerate(members)]
    return values + [(at, key) for at, (key, _) in enumerate(members) if type(key) not in _PLAIN]


def _is_data(part: Any, depth: int = _DEPTH) -> bool:
    """Whether it is a plain value, or a container whose first members are."""
    kind = type(part)
    if kind not in _CONTAINERS:
        return _is_plain(kind)
    first = islice(_contents(part, kind), _FIRST)
    return depth > 0 and all(_is_data(each, depth - 1) for each in first)
