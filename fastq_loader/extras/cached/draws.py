"""Whether a call drew from a global generator, of torch, numpy or Python.

Runs in every process that calls a cached function. The states are read from memory where their place in it
is known, which takes a tenth of the time. A normal number that waits in a generator is not seen: the checks
of hits find it.
"""

from __future__ import annotations

import ctypes
import random
import threading
from typing import Any

import numpy as np
import torch

from fastq_loader.extras.images import sample_seeds

_WORDS = 624  # of a Mersenne twister; its position is beside them
_INDEX_AND_WORDS = (_WORDS + 1) * 4
_PYTHONS: Any = getattr(random, "_inst", None)


def _numpys() -> bytes:
    bits: Any = np.random.mtrand._rand._bit_generator
    known = type(bits) is np.random.MT19937  # else the checks of hits find it
    return ctypes.string_at(bits.ctypes.state_address, _INDEX_AND_WORDS) if known else b""


def _pythons_in_memory() -> bytes:
    return ctypes.string_at(id(_PYTHONS) + object.__basicsize__, _INDEX_AND_WORDS)


def _is_where_expected() -> bool:
    """Whether Python's own generator lies in memory as in CPython: an index of 32 bits, then the words."""
    if type(_PYTHONS) is not random.Random or random.Random.__basicsize__ < _INDEX_AND_WORDS:
        return False
    words = _PYTHONS.getstate()[1]
    return _pythons_in_memory() == np.array((words[-1], *words[:-1]), np.uint32).tobytes()


_READ = {
    "torch": lambda: torch.default_generator.get_state().numpy().tobytes(),
    "numpy": _numpys,
    "random": _pythons_in_memory if _is_where_expected() else random.getstate,
}


class StatesBeforeCall:
    """The states of the global generators before a call."""

    def __init__(self) -> None:
        self._states = [read() for read in _READ.values()]
        self._seeds_used = sample_seeds.reading.used

    def since(self) -> tuple[list[str], bool]:
        """The generators that were drawn from since, and whether it was this call: another thread may have
        drawn from a global one."""
        moved = [
            name for (name, read), state in zip(_READ.items(), self._states, strict=True) if read() != state
        ]
        seeds = ["the seed of a sample"] * (sample_seeds.reading.used > self._seeds_used)
        return seeds + moved, bool(seeds) or (bool(moved) and _is_only_thread())


def _is_only_thread() -> bool:
    """Whether no other thread runs a user's code, which may draw. This package's threads draw nothing."""
    return sum(not thread.name.startswith("fastq_loader") for thread in threading.enumerate()) == 1
