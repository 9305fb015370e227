"""Which object a call of a method is for, if the method was cached in its class: by a number in the object.

Runs in every process that calls the method. When workers start, the consumer gives numbers to all objects of
these classes, so that they are the same in all workers. A copy of an object gets a number of its own.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import weakref
from multiprocessing.context import get_spawning_popen
from typing import Any

from fastq_loader.workers.payload import PREPARE

#: The attribute of an object that has its number.
_NAME = "_fastq_loader_number_in_caches"
_made, _KINDS = itertools.count(), 16
#: The classes that have such methods.
classes: weakref.WeakSet[type] = weakref.WeakSet()


class _Number:
    """The number of one object. A deep copy of that, and a pickle, get another one; only a worker's does not.

    Attributes:
        bytes: the number: one of `_KINDS`, and seven bytes drawn from the system. Objects of one kind
            share the first checks in memory, so that these are few for a dataset of many objects.
        owner: weak reference to the object, by which its shallow copies are told from it; None at first.
    """

    __slots__ = ("bytes", "owner")

    def __init__(self, number: bytes = b"") -> None:
        self.bytes = number or bytes((next(_made) % _KINDS,)) + os.urandom(7)
        self.owner: weakref.ref[Any] | None = None

    def __reduce__(self) -> Any:
        return type(self), (self.bytes if get_spawning_popen() is not None else b"",)


def number_of(instance: Any) -> tuple[bytes, bool]:
    """The number of an object, and whether it is a new one.

    Raises:
        TypeError: it has no `__dict__`, or no weak references.
    """
    number = getattr(instance, "__dict__", {}).get(_NAME)
    if number is not None and number.owner is not None and number.owner() is instance:
        return number.bytes, False
    try:
        if is_new := number is None or number.owner is not None:
            number = vars(instance)[_NAME] = _Number()
        number.owner = weakref.ref(instance)
    except TypeError:
        raise TypeError(
            f"cached: a method of {type(instance).__name__} is cached in its class, whose objects have slots "
            "and cannot be told apart: give it __dict__ and __weakref__, or cache the method of one object"
        ) from None
    return number.bytes, is_new


def prepare(dataset: Any) -> None:
    """Give the dataset, and all other objects that the garbage collector knows, the numbers that they have in
    the workers, if they are of these classes. Runs none of their code."""
    kinds: set[type] = set()
    more: set[type] = {*classes}
    while more:
        kinds |= more
        more = {*itertools.chain(*map(type.__subclasses__, more))} - kinds
    for each in itertools.chain([dataset], gc.get_objects() if kinds else []):
        if type(each) in kinds:
            with contextlib.suppress(TypeError):  # of slots, which a call is told
                number_of(each)


PREPARE.append(prepare)
