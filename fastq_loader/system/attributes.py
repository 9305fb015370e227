"""Attributes of a user's objects, read without running the user's code: no property, no `__getattr__`.

Runs in any process and thread. For advice, counting and other work that a user did not ask for. Reads the
object's own dict, its slots and its classes, as `inspect.getattr_static` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from itertools import islice
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

#: Largest number of an object's own attributes to read.
MOST = 1000
C_FIELDS = (GetSetDescriptorType, MemberDescriptorType)
#: The namespace of a class, and the classes that it inherits from. A metaclass may define these anew.
namespace, mro = type.__dict__["__dict__"].__get__, type.__dict__["__mro__"].__get__


def own_dict(part: Any) -> dict[str, Any]:
    """Return the `__dict__` of an object; an empty one if it has none."""
    for kind in mro(type(part)):
        if (member := namespace(kind).get("__dict__")) is not None:
            held = member.__get__(part) if type(member) in C_FIELDS else None
            return held if isinstance(held, dict) else {}
    return {}


def held(part: Any) -> dict[str, Any]:
    """Return the attributes in an object's `__dict__`, and in the `__slots__` of its classes."""
    found = dict(islice(dict.items(own_dict(part)), MOST))
    for kind in mro(type(part)):
        if "__slots__" in namespace(kind):
            for name, member in namespace(kind).items():
                if type(member) is MemberDescriptorType and name not in found:
                    with contextlib.suppress(AttributeError):  # it is not set
                        found[name] = member.__get__(part)
    return found


def attribute(part: Any, name: str, default: Any = None) -> Any:
    """Read an attribute of an object or of its class, without running user code (properties, `__getattr__`).
    Returns a method as its function, and `default` if the attribute is missing or needs such code."""
    own = own_dict(part)
    if dict.__contains__(own, name):
        return dict.__getitem__(own, name)
    for kind in mro(type(part)):
        if (member := namespace(kind).get(name)) is not None:
            if type(member) is MemberDescriptorType:
                try:
                    return member.__get__(part)
                except AttributeError:
                    return default
            return default if hasattr(type(member), "__get__") and not callable(member) else member
    return default


def inherits(part: Any, base: type, names: Collection[str]) -> bool:
    """Whether an object inherits the methods `names` from its class `base`, and nothing overrides them."""
    for kind in mro(type(part)):
        if kind is base:
            return dict.keys(own_dict(part)).isdisjoint(names)
        if any(name in namespace(kind) for name in names):
            return False
    return False
