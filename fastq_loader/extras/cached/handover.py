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

from fastq_loader.system import process_id
from fastq_loader.workers.payload import BESIDE

_made: Counter[bytes] = Counter()
_caches: weakref.WeakSet[Any] = weakref.WeakSet()
#: In a worker: the consumer's descriptors, by the names of the caches.
_handed: dict[Any, int] = {}


def register(cache: Any, digest: bytes) -> tuple[bytes, int]:
    """Register a cache of a function that holds nothing. Returns its name, of the digest of the function."""
    _caches.add(cache)
    _made[digest] += 1
    return digest, _made[digest]


def received(handed_as: Any) -> int:
    """A copy of the descriptor for a cache; -1 if the consumer has no such cache."""
    return os.dup(_handed[handed_as]) if handed_as in _handed else -1


class _HandOver:
    def __reduce__(self) -> Any:
        caches = [cache for cache in _caches if cache.fd >= 0] if get_spawning_popen() is not None else []
        handed = {cache.handed_as: reduction.DupFd(cache.fd) for cache in caches}
        return _receive, (process_id.pid, handed)


def _receive(consumer: int, handed: dict[Any, Any]) -> None:
    for name, duplicate in handed.items():
        fd = duplicate.detach()
        if consumer == process_id.pid or name in _handed:
            os.close(fd)
        else:
            _handed[name] = fd


BESIDE.append(_HandOver())
