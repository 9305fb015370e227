"""Caches of modules: a spawned worker makes them anew when it imports the module, and gets the consumer's.

`_HandOver` is pickled in the consumer and unpickled in each worker that does not inherit, before the user's
objects. Caches are known by the module and the name of their function, and several of one function by a
number, in the order in which a process makes them.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

from fastq_loader.system import process_id
from fastq_loader.workers.payload import BESIDE

_made: Counter[str] = Counter()
_caches: weakref.WeakValueDictionary[tuple[str, int], Any] = weakref.WeakValueDictionary()
#: In a worker: the consumer's descriptors, and the numbers of its caches' programs.
_handed: dict[tuple[str, int], tuple[int, int]] = {}


def register(cache: Any, name: str) -> tuple[str, int]:
    """Register a cache of a function of this name. Returns its name in every process."""
    _made[name] += 1
    _caches[name, _made[name]] = cache
    return name, _made[name]


def received(handed_as: Any) -> tuple[int, int] | None:
    """A copy of the descriptor for a cache, and its program; None if the consumer has no such cache."""
    if handed_as not in _handed:
        return None
    fd, program = _handed[handed_as]
    return os.dup(fd), program


class _HandOver:
    def __reduce__(self) -> Any:
        caches = [*_caches.items()] if get_spawning_popen() is not None else []
        handed = {name: (reduction.DupFd(each.fd), each.program) for name, each in caches if each.fd >= 0}
        return _receive, (process_id.pid, handed)


def _receive(consumer: int, handed: dict[Any, Any]) -> None:
    for name, (duplicate, program) in handed.items():
        fd = duplicate.detach()
        if consumer == process_id.pid or name in _handed:
            os.close(fd)
        else:
            _handed[name] = fd, program


BESIDE.append(_HandOver())
