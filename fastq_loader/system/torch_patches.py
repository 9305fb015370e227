"""Finds patches of torch's loader: functions and classes of `torch.utils.data` that a library has replaced.

Runs in the consumer, whenever an iteration begins. Libraries replace parts of torch's loader, before or after
this package is imported, and rely on their code being run. Our loader does not use these parts, so torch's
own iterators run if one was replaced. A wrapper that keeps the original in `__wrapped__` (instrumentation)
does not count as a patch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import attrgetter
from types import CodeType
from typing import Any, NamedTuple

import torch.utils.data

#: Owner below `torch.utils.data` → its names that our loader does not use. Not each release has all.
NAMES = {
    "dataloader": "_DatasetKind _InfiniteConstantSampler _get_distributed_settings _sharding_worker_init_fn "
    "_share_dist_seed _BaseDataLoaderIter _SingleProcessDataLoaderIter _MultiProcessingDataLoaderIter",
    "dataloader._DatasetKind": "create_fetcher",
    "dataloader._InfiniteConstantSampler": "__iter__",
    "dataloader.DataLoader": "__iter__ _get_iterator",
    "dataloader._BaseDataLoaderIter": "__init__ __iter__ _reset _next_index _next_data __next__ __len__ "
    "__getstate__",
    "dataloader._SingleProcessDataLoaderIter": "__init__ _next_data",
    "dataloader._MultiProcessingDataLoaderIter": "__init__ _reset _try_get_data _get_data _next_data "
    "_try_put_index _process_data _mark_worker_as_unavailable _shutdown_workers "
    "_clean_up_worker _clean_up_persistent_workers_atexit _register_persistent_workers_atexit __del__",
    "_utils.fetch": "_BaseDatasetFetcher _IterableDatasetFetcher _MapDatasetFetcher",
    "_utils.fetch._BaseDatasetFetcher": "__init__ fetch",
    "_utils.fetch._IterableDatasetFetcher": "__init__ fetch",
    "_utils.fetch._MapDatasetFetcher": "fetch",
    "_utils.collate": "collate",
    "_utils.pin_memory": "_pin_memory_loop pin_memory",
    "_utils.worker": "_worker_loop _generate_state ManagerWatchdog",
    "_utils.worker.ManagerWatchdog": "__init__ is_alive",
}
_MOST_WRAPPERS = 20


class Place(NamedTuple):
    """A name that may be patched: its owner, and torch's own code for it, None if that is unknown."""

    path: str
    owner: Any
    name: str
    code: Any


def found() -> str:
    """Return the first patch found, as a clause for a message; "" if there is none."""
    try:
        codes = _read_all(torch.utils.data)  # the usual case, in one call
    except AttributeError:
        codes = None
    if codes == _CODES:
        return ""
    for path, owner, name, _ in _PLACES:
        value = getattr(owner, name, None)
        if own_code(value, path) is None:
            by: Any = value if hasattr(value, "__qualname__") else type(value)
            return f"torch.utils.data.{path}.{name} was replaced by {by.__module__}.{by.__qualname__}"
    return ""


def own_code(value: Any, path: str) -> Any:
    """Return the code of a function, or a class itself, if a torch module defines it; else None. For a
    function the file of its code decides, because `functools.wraps` copies `__name__` and `__module__`.

    Args:
        value: a function or class, or a wrapper of one.
        path: the owner of the name, below `torch.utils.data`: a module, or a class in one.
    """
    module = "torch.utils.data." + ".".join(path.split(".")[: 1 + path.startswith("_utils")])
    source = module.replace(".", os.sep) + ".py"
    for _ in range(_MOST_WRAPPERS):
        code = getattr(value, "__code__", None)
        if code is not None and code.co_filename.endswith(source):
            return code
        if isinstance(value, type) and value.__module__ == module:
            return value
        value = getattr(value, "__wrapped__", None)
    return None


def _places() -> Iterator[Place]:
    for path, names in NAMES.items():
        owner: Any = torch.utils.data
        for name in path.split("."):
            owner = getattr(owner, name, None)
        for name in names.split() if owner is not None else ():
            if (value := getattr(owner, name, None)) is not None:
                yield Place(path, owner, name, own_code(value, path))


_PLACES = list(_places())
_CODES = tuple(place.code for place in _PLACES)
_read_all = attrgetter(*(f"{p.path}.{p.name}" + ".__code__" * isinstance(p.code, CodeType) for p in _PLACES))
