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

from fastq_loader.system.attributes import C_FIELDS, MOST, namespace, own_dict, slots

#: Objects that a walk visits, at most. A container of more members than this is visited after all else.
_MOST_OBJECTS, _FEW_MEMBERS = 1000, 100
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
#: A step of a walk: a path, and a method with its argument.
_Step = tuple[str, Callable[[str, Any], None], Any]
_COLLECTED = 1 << 14  # Py_TPFLAGS_HAVE_GC: instances have references that the garbage collector follows
# A user's subclass or metaclass may define these attributes anew.
_flags, _bases = type.__dict__["__flags__"].__get__, type.__dict__["__bases__"].__get__
_size, _dtype = vars(np.ndarray)["size"].__get__, vars(np.ndarray)["dtype"].__get__
_flat, _factory = vars(np.ndarray)["flat"].__get__, vars(defaultdict)["default_factory"].__get__
#: Size and members of a container, by its class.
_CONTAINERS: dict[type, tuple[Callable[[Any], int], Callable[[Any], Iterable[Any]]]] = {
    OrderedDict: (dict.__len__, OrderedDict.items),
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
        self._ways: dict[int, tuple[type, Any]] = {}  # by the id of a class: its hash may be user code
        self._seen = {id(part): part for part in but}  # kept, so that no other object gets the id
        self._objects, self._classes, self._last = deque[_Step](), deque[_Step](), deque[_Step]()
        self._add_all("", roots.items())
        for _ in range(_MOST_OBJECTS):
            if not (queue := self._objects or self._classes or self._last):
                break
            path, look, part = queue.popleft()
            look(path, part)
        self.unseen += [path for path, *_ in islice(chain(self._objects, self._classes, self._last), 1)]
        self._seen.clear()

    def _add_all(self, path: str, members: Iterable[tuple[Any, Any]]) -> None:
        """Queue the members of an object, each with its name; those without a name have the object's path."""
        for name, part in members:
            kind = type(part)
            if kind in _PLAIN or id(part) in self._seen:
                continue
            if id(kind) not in self._ways:
                self._ways[id(kind)] = kind, self._way(kind)
            if (add := self._ways[id(kind)][1]) is not None:
                self._seen[id(part)] = part
                add(f"{path}.{name}" if path and name != "" else path or str(name), part)

    def _way(self, kind: type) -> Callable[[str, Any], None] | None:
        """The method that adds instances of a class; None if they hold nothing to look for."""
        base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
        if issubclass(kind, self._kinds):
            return self._add_found
        if issubclass(kind, _OUTSIDE) or (base is not np.ndarray and _is_plain(kind)):
            return None
        if base is not None:
            return partial(self._add_container, base)
        if issubclass(kind, type):
            return self._add_class
        if kind is FunctionType:
            return self._add_function
        return self._add_frame if kind is FrameType else self._add_object

    def _add_found(self, path: str, part: Any) -> None:
        while path in self.found:
            path += "'"
        self.found[path] = part
        if type(part) not in self._kinds:
            self._add_object(path, part)

    def _add_object(self, path: str, part: Any) -> None:
        self._objects.append((path, self._look_into, (part, None, 0)))

    def _add_function(self, path: str, part: FunctionType) -> None:
        if members := _of_function(part):
            self._objects.append((path, self._add_all, members))

    def _add_frame(self, path: str, _: FrameType) -> None:
        self.unseen.append(path)  # it refers to all frames of its stack

    def _add_class(self, path: str, part: type) -> None:
        if _module(part).partition(".")[0] not in _LIBRARIES:
            self._classes.append((path, self._look_into_class, part))

    def _add_container(self, base: type, path: str, part: Any) -> None:
        size = _CONTAINERS[base][0](part)
        if size > _FEW_MEMBERS:
            self._last.append((path, self._look_into, (part, base, size)))
        elif type(part) is not base or (size and not _PLAIN.issuperset(map(type, _contents(part, base)))):
            self._objects.append((path, self._look_into, (part, base, size)))

    def _look_into(self, path: str, found: tuple[Any, type | None, int]) -> None:
        """Queue the attributes of an object, its class, its members, and its references in C."""
        part, base, size = found
        kind, own = type(part), own_dict(part)
        self.unseen += [path] * (dict.__len__(own) > MOST)
        members: list[tuple[Any, Any]] = [*islice(dict.items(own), MOST), *slots(part), ("", kind)]
        if base is not None:
            members += self._members(path, part, base, size)
        elif kind is MethodType:
            members += ("", part.__self__), ("", part.__func__)
        else:
            members += enumerate(each for each in gc.get_referents(part) if each is not own)
        if not _is_namespace(part):
            self._add_all(path, members)

    def _members(self, path: str, part: Any, base: type, size: int) -> list[tuple[Any, Any]]:
        """The first members of a container, named; of data only those that are no containers."""
        members = _named(part, base)
        if size > _FEW_MEMBERS and all(map(_is_data, islice(_contents(part, base), _FIRST))):
            found = [each for each in members if type(each[1]) not in _CONTAINERS]
            self.large += [path] * (size > MOST or len(found) < len(members))
            return found
        self.unseen += [path] * (size > MOST)
        return members

    def _look_into_class(self, path: str, kind: type) -> None:
        """Queue the attributes of a class, its methods, and its base classes."""
        fields = list(namespace(kind).items())
        self._add_all(path, [(name, field) for name, field in fields if _is_users(name, field)])
        self._add_all(path, [("", base) for base in _bases(kind)])


def _module(kind: type) -> str:
    name = namespace(kind).get("__module__")
    return name if type(name) is str else "builtins"


def _is_plain(kind: type) -> bool:
    """Whether objects of exactly this type hold nothing to look for."""
    return kind in _PLAIN or not _flags(kind) & _COLLECTED or _module(kind) in _DATA_MODULES


def _is_users(name: Any, field: Any) -> bool:
    """Whether a field of a class comes from its body, and may hold something."""
    kind = type(field)
    return kind is FunctionType or not (kind in C_FIELDS or (type(name) is str and name.startswith("__")))


def _is_namespace(part: Any) -> bool:
    """Whether it is the namespace of a module."""
    return type(part) is dict and part.keys() >= {"__name__", "__loader__", "__spec__"}


def _of_function(function: FunctionType) -> list[tuple[str, Any]]:
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
    """The first members of a container, by key or position; of a dict its keys and a default factory, too."""
    members = list(islice(_CONTAINERS[base][1](part), MOST))
    if base in (set, frozenset):
        return [("*", each) for each in members]
    if not issubclass(base, dict):
        return list(enumerate(members))
    found, keys = [], []
    for at, (key, each) in enumerate(members):
        if type(key) in _PLAIN:
            found.append((key, each))
        else:  # it has no name without its `repr`
            found.append((at, each))
            keys.append((at, key))
    factory = [("default_factory", _factory(part))] if issubclass(type(part), defaultdict) else []
    return found + keys + factory


def _is_data(part: Any, depth: int = _DEPTH) -> bool:
    """Whether it is a plain value, or a container whose first members are."""
    kind = type(part)
    if kind not in _CONTAINERS:
        return _is_plain(kind)
    first = islice(_contents(part, kind), _FIRST)
    return depth > 0 and all(_is_data(each, depth - 1) for each in first)
