"""Which object a call of a method is for, if the method was cached in its class: by a number in the object.

Runs in every process that calls the method. When workers start, the consumer gives numbers to the objects
that a dataset holds, so that they are the same in all workers. A copy of an object gets a number of its own.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator
from itertools import islice
from multiprocessing.context import get_spawning_popen
from typing import Any

from fastq_loader.system import attributes

#: The attribute of an object that has its number.
_NAME = "_fastq_loader_number_in_caches"
#: The numbers of objects with slots.
_of_slots: weakref.WeakKeyDictionary[Any, _Number] = weakref.WeakKeyDictionary()
_made, _KINDS = itertools.count(), 16
#: How far a dataset is searched: objects in objects, and members of a container.
_DEPTH, _MEMBERS = 3, 100


class _Number:
    """The number of one object. A deep copy of that, and a pickle, get another one; only a worker's does not.

    Attributes:
        bytes: the number: one of `_KINDS`, and seven bytes drawn from the system. Objects of one kind
            share the first checks in memory, so that these are few for a dataset of many objects.
        owner: weak reference to the object, by which its shallow copies are told from it; None at first.
    """

    __slots__ = ("__weakref__", "bytes", "owner")

    def __init__(self, number: bytes = b"") -> None:
        self.bytes, self.owner = number or bytes((next(_made) % _KINDS,)) + os.urandom(7), None

    def __reduce__(self) -> Any:
        return type(self), (self.bytes if get_spawning_popen() is not None else b"",)

    def __deepcopy__(self, memo: Any) -> _Number:
        return type(self)()


def number_of(instance: Any) -> tuple[bytes, bool]:
    """The number of an object, and whether it is a new one.

    Raises:
        TypeError: it has slots, and no weak references or no hash.
    """
    held = getattr(instance, "__dict__", None)
    try:
        number: Any = _of_slots.get(instance) if held is None else held.get(_NAME)
        is_new = number is None or (number.owner is not None and number.owner() is not instance)
        if is_new:
            number = _Number()
            if held is None:
                _of_slots[instance] = number
            else:
                held[_NAME] = number
    except TypeError:
        raise TypeError(
            f"cached: a method of {type(instance).__name__} is cached in its class, whose objects have slots "
            "and cannot be told apart: give it __weakref__ and __hash__, or cache the method of one object"
        ) from None
    if number.owner is None and held is not None:
        number.owner = weakref.ref(instance) if type(instance).__weakrefoffset__ else (lambda: instance)
    return bytes(number.bytes), is_new


def held_by(dataset: Any, kind: type) -> Iterator[tuple[Any, Any]]:
    """The objects of a kind that a dataset, its class, and the objects that it holds have, with the holder of
    each. Looks into attributes and small containers, a few objects deep; runs no code of the user's."""
    level, seen = [dataset], {id(dataset)}
    for _ in range(_DEPTH + 1):
        following = []
        for each in level:
            for owner in type(each).__mro__:
                yield from ((each, value) for value in vars(owner).values() if issubclass(type(value), kind))
            if type(each) in (list, tuple, set, frozenset):
                members = [*islice(each, _MEMBERS)]
            elif type(each) is dict:
                members = [*islice(each.values(), _MEMBERS)]
            else:
                members = [*attributes.held(each).values()]
            for value in members:
                if issubclass(type(value), kind):
                    yield each, value
                elif id(value) not in seen:
                    seen.add(id(value))
                    following.append(value)
        level = following
