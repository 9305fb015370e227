"""Whether a call drew from a global generator, of torch, numpy or Python.

Runs in every process that calls a cached function. The states are read from memory where their place in it
is known, which takes a tenth of the time. A normal number that waits in numpy's or Python's generator is not
seen: the checks of hits find it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fastq_loader.extras.images import sample_seeds
from fastq_loader.system import calls

_WORDS = 624  # of a Mersenne twister; its position is beside them
_NUMPYS: Any = np.random.mtrand._rand


def _memory_of(generator: Any, words: Any, before: int, after: int) -> memoryview | None:
    """The memory of a generator's words, with bytes before and after them: in its object, or where the first
    word of that points to. None if they are not there: reading at a wrong address is an error."""
    sought, nbytes = np.array(words[:_WORDS], np.uint32).tobytes(), 2 * _WORDS * 4
    start = id(generator) + object.__basicsize__
    with contextlib.suppress(OSError, OverflowError), open("/proc/self/mem", "rb", 0) as memory:
        pointer = int.from_bytes(os.pread(memory.fileno(), 8, start), "little")
        for place in (start, pointer):
            found = os.pread(memory.fileno(), nbytes, place).find(sought)
            if found >= before:
                return calls.view(place + found - before, before + len(sought) + after)
    return None


def _torchs() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


def _torchs_in_memory() -> Any:
    """The position before the words, the words, and whether a float or a double waits after them."""
    memory = _memory_of(torch.default_generator, np.frombuffer(_torchs(), np.uint64)[3:], 4, 28)
    return memory and (lambda words=memory[:-28], waits=memory[-20::12]: words.tobytes() + waits.tobytes())


@functools.lru_cache(1)
def _reader_of(bits: Any) -> Callable[[], bytes]:
    """Reads the state of numpy's generator, with the position after it; nothing of one that is not known,
    which the checks of hits find."""
    known = type(bits) is np.random.MT19937
    return calls.view(bits.ctypes.state_address, (_WORDS + 1) * 4).tobytes if known else bytes


_PYTHONS = _memory_of(getattr(random, "_inst", None), random.getstate()[1], 4, 0)
_READ: dict[str, Callable[[], Any]] = {
    "torch": _torchs_in_memory() or _torchs,
    "numpy": lambda: _reader_of(_NUMPYS._bit_generator)(),
    "random": _PYTHONS.tobytes if _PYTHONS else random.getstate,
}


def _states() -> list[Any]:
    return [read() for read in _READ.values()]


class StatesBeforeCall:
    """The states of the global generators before a call."""

    def __init__(self) -> None:
        self._states = _states()
        self._seeds_used = sample_seeds.reading.used

    def since(self) -> tuple[list[str], bool]:
        """The generators that were drawn from since, and whether it was this call: another thread may have
        drawn from a global one."""
        now, moved = _states(), []
        if now != self._states:
            moved = [name for name, *both in zip(_READ, now, self._states, strict=True) if both[0] != both[1]]
        seeds = ["the seed of a sample"] * (sample_seeds.reading.used > self._seeds_used)
        return seeds + moved, bool(seeds) or (bool(moved) and _is_only_thread())


def _is_only_thread() -> bool:
    """Whether no other thread runs a user's code, which may draw. This package's threads draw nothing."""
    return sum(not thread.name.startswith("fastq_loader") for thread in threading.enumerate()) == 1
