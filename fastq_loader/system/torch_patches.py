"""Finds patches of torch's loader: parts of `torch.utils.data` that a library has replaced.

Runs in the consumer, whenever an iteration begins. SpeechBrain replaces methods of torch's iterators, axolotl
a class of its fetchers, and both rely on their code being run. Our loader does not use these parts, so
torch's own iterators run if one was replaced, before or after this package was imported.
"""

from __future__ import annotations

from inspect import isfunction
from operator import attrgetter, itemgetter
from typing import Any

import torch.utils.data
from torch.utils.data import _utils, dataloader

_CLASSES = {
    f"{path}.{name}": kind
    for path, module in (("dataloader", dataloader), ("_utils.fetch", _utils.fetch))
    for name, kind in vars(module).items()
    if isinstance(kind, type) and name.endswith(("DataLoaderIter", "DatasetFetcher"))
}
#: The watched names, below `torch.utils.data`: torch's iterators and fetchers, and their methods.
NAMES = [
    name
    for path, kind in _CLASSES.items()
    for name in (path, *(f"{path}.{method}" for method, value in vars(kind).items() if isfunction(value)))
]


def _module_of(value: Any) -> str:
    """Where a class or a function comes from: `functools.wraps` copies `__module__`, but not the globals."""
    scope = getattr(value, "__globals__", None)
    return str(getattr(value, "__module__", type(value).__module__) if scope is None else scope["__name__"])


# What was replaced before this import is not kept.
_KEPT = tuple(
    value if _module_of(value).startswith("torch.") else None
    for value in attrgetter(*NAMES)(torch.utils.data)
)


# The classes and what is in them, which takes a third of the time of reading each name.
_iterators, _fetchers = (
    itemgetter(*(path.removeprefix(scope) for path in _CLASSES if path.startswith(scope)))
    for scope in ("dataloader.", "_utils.fetch.")
)
_SCOPES: list[Any] = [vars(kind) for kind in _CLASSES.values()]
_AS_IMPORTED = _iterators(vars(dataloader)), _fetchers(vars(_utils.fetch)), [dict(scope) for scope in _SCOPES]


def found() -> str:
    """Return the first patch found, as a clause for a message; "" without a patch."""
    now = _iterators(vars(dataloader)), _fetchers(vars(_utils.fetch)), _SCOPES
    if now == _AS_IMPORTED and None not in _KEPT:
        return ""
    for name, kept in zip(NAMES, _KEPT, strict=True):
        value = attrgetter(name)(torch.utils.data)
        if value is not kept:
            return f"torch.utils.data.{name} was replaced by {_module_of(value)}"
    return ""
