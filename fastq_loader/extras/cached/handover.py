"""Caches of modules: a spawned worker makes them anew when it imports the module, and gets the consumer's.

`_HandOver` is pickled in the consumer and unpickled in each worker that does not inherit, before the user's
objects. The caches of one function have numbers, in the order in which a process makes them.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

from fastq_loader.api import BESIDE, process_id

_made: Counter[str] = Counter()
_caches: weakref.WeakSet[Any] = weakref.WeakSet()
#: In a worker: the consumer's descriptors.
_handed: dict[Any, list[int]] = {}


def register(cache: Any, name: str) -> int:
    """Register a cache of a function that holds nothing. Returns its number."""
    _caches.add(cache)
    _made[name] += 1
    return _made[name]


def received(handed_as: Any) -> list[int]:
    """Copies of the descriptors for a cache; none if the consumer has no such cache."""
    return [os.dup(fd) for fd in _handed.get(handed_as, ())]


class _HandOver:
    def __reduce__(self) -> Any:
        caches = list(_caches) if get_spawning_popen() is not None else []
        handed = {cache.handed_as(): [reduction.DupFd(fd) for fd in cache.descriptors()] for cache in caches}
        handed.pop(None, None)
        return _receive, (process_id.current(), handed)


def _receive(consumer: int, handed: dict[Any, Any]) -> None:
    for name, several in handed.items():
        descriptors = [each.detach() for each in several]
        if consumer == process_id.current() or name in _handed:
            for fd in descriptors:
                os.close(fd)
        else:
            _handed[name] = descriptors


BESIDE.append(_HandOver())
