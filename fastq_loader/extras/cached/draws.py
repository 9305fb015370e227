"""Whether a call drew random numbers, from a global generator or from one that the function holds.

Runs in every process that calls a cached function.
"""

from __future__ import annotations

import threading
from types import CodeType, FunctionType
from typing import Any

from fastq_loader.extras.cached.identity import base_of
from fastq_loader.extras.images import sample_seeds
from fastq_loader.extras.samplers import search
from fastq_loader.reading.generators import GLOBAL, moved, states_of


class Draws:
    """States of generators before a call.

    Args:
        own: the generators that the function holds.

    Attributes:
        are_all_known: whether the search for these saw all that the function holds.
    """

    def __init__(self, own: dict[str, Any]) -> None:
        self.are_all_known: bool = getattr(own, "complete", True)
        self._own, self._before = own, (states_of(own), states_of(GLOBAL))
        self._seeds_used = sample_seeds.reading.used

    def since(self) -> tuple[list[str], bool]:
        """The generators that were drawn from since, and whether it was this call: another thread may have
        drawn from a global one."""
        own, shared = map(moved, self._before, (states_of(self._own), states_of(GLOBAL)))
        own += ["the seed of a sample"] * (sample_seeds.reading.used > self._seeds_used)
        return own + shared, bool(own) or (bool(shared) and _is_only_thread())


def _is_only_thread() -> bool:
    """Whether no other thread runs a user's code. This package's threads draw from no generator."""
    return sum(not thread.name.startswith("fastq_loader") for thread in threading.enumerate()) == 1


def generators_of(function: Any, of: Any, cache: Any, known: Any = None) -> Any:
    """The generators in a function's closure, defaults and arguments, of its object, and in what it names of
    its module; none if a user's object raises. `known` were found before, and are among them."""
    try:
        found = search.find({**_of_module(function), "self": of, "": function}, [cache])
        if known is not None:
            found.update(known)
            found.unseen += getattr(known, "unseen", [])
        states_of(found)
    except Exception:
        return {}
    return found


def _of_module(function: Any) -> dict[str, Any]:
    """What a function names of its module, itself or in other functions of the module."""
    base, found = base_of(function), dict[str, Any]()
    names, codes = getattr(base, "__globals__", {}), [getattr(base, "__code__", None)]
    for code in codes:  # which grows
        for name in (name for name in getattr(code, "co_names", ()) if name in names):
            value = found[name] = names[name]
            if type(value) is FunctionType and value.__globals__ is names and value.__code__ not in codes:
                codes.append(value.__code__)
        codes += [each for each in getattr(code, "co_consts", ()) if type(each) is CodeType]
    return found
