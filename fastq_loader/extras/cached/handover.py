"""Caches on their way to a spawned worker: those that are pickled, and those of modules, which the worker
makes anew when it imports the module.

`_HandOver` is pickled in the consumer and unpickled in each worker that does not inherit, before the user's
objects. Caches of functions are known by the name of their function, and several of one function by a
number, in the order in which a process makes them; those of methods by a number that is drawn.
"""

from __future__ import annotations

import weakref
from collections import Counter
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

from fastq_loader.extras.cached.memory import Memory
from fastq_loader.system import process_id
from fastq_loader.workers.payload import BESIDE

#: The caches of this process, by their names in others.
caches: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
_made: Counter[str] = Counter()
#: In a worker: the consumer's memory of a cache, and its program.
handed: dict[Any, tuple[Memory, int]] = {}


def next_of(function: str) -> tuple[str, int]:
    """The name of a new cache of a function, in every process."""
    _made[function] += 1
    return function, _made[function]


class _HandOver:
    def __reduce__(self) -> Any:
        held = [(name, each) for name, each in caches.items() if each.memory is not None]
        if get_spawning_popen() is None:
            held = []
        given = {name: (reduction.DupFd(each.memory.fd), each.program) for name, each in held}
        return _receive, (process_id.pid, given)


def _receive(consumer: int, given: dict[Any, Any]) -> None:
    for name, (duplicate, program) in given.items():
        received = Memory(duplicate.detach()), program
        if consumer != process_id.pid:
            handed.setdefault(name, received)


BESIDE.append(_HandOver())
