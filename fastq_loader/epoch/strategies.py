"""The three ways to draw the order of an epoch, and to draw the rest of it when the epoch is resumed.

Runs in the consumer, on the thread that calls `next()`. Where its start and a count determine an order,
nothing else is recorded. A stateful sampler (one with `state_dict` and `load_state_dict`) resumes from its
own state, after the indices that were drawn and not delivered. Any other is restarted, and a digest shows
whether it yields the same indices.
"""

from __future__ import annotations

import copy
import marshal
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import numpy as np

from fastq_loader.epoch.fields import Saved
from fastq_loader.epoch.samplers import SamplerInfo, draw_once
from fastq_loader.reading import generators, position
from fastq_loader.scheduling.progress import Progress

#: An index, and None; or None, and the error in the place of an index.
IndexOrError = tuple[Any, Exception | None]

#: Indices that are digested at each end of a batch.
_ENDS = 8
_PLAIN = {int, float, bool, str, type(None)}


class OrderStrategy:
    """Base class of the strategies, and the strategy of an order that has not begun.

    Args:
        traits: of the samplers.
        saved: the state that the epoch resumes from; None for a new epoch.

    Attributes:
        states: states of the loader's own generators after the draws so far.
        digest: see `EpochSnapshot`.
        exhausted: whether the sampler has ended.
        expected: the saved digest, or None.
        differs: the indices drawn again have another digest.
        due: indices that were drawn again and are yielded next.
        note: called with each index drawn, unless None.
        last: the position from which on any draw may use the loader's own generators, or needs a record.
    """

    note: Callable[[Any], None] | None = None
    last = 0

    def __init__(self, traits: SamplerInfo, saved: Saved | None) -> None:
        self.traits = traits
        self.states: dict[str, Any] = {}
        self.digest: tuple[int, int] | None = (0, 0) if traits.shared else None
        self.exhausted = saved is not None and saved.now.exhausted
        self.expected = None if saved is None else saved.now.digest
        self.differs = False
        self.due: deque[IndexOrError] = deque()

    def own_states(self) -> dict[str, Any]:
        """The present states of the loader's own generators."""
        return generators.states_of(self.traits.own) if self.traits.own else {}

    def draw(self, source: Iterator[Any]) -> IndexOrError:
        """Draw the index of a position, or the error in its place."""
        try:
            index = next(source)
        except StopIteration:
            raise
        except Exception as raised:  # takes a position, but is not in the digest
            return None, raised
        if self.note is not None:
            self.note(index)
        return index, None

    def yields(self, position: int, drawn: IndexOrError, head: int) -> None:
        """Record an index that is about to be yielded. `head`: the lowest position not delivered."""

    def add(self, drawn: Any) -> None:
        """Add an index, or a permutation of a shuffle, to the digest."""
        if self.digest is None:
            return
        count, digest = self.digest
        self.digest = now = count + 1, digested(digest, drawn)
        if self.expected is not None and now[0] == self.expected[0]:
            self.differs = now != self.expected


class ComputedOrder(OrderStrategy):
    """The order of torch's sequential and shuffling samplers, and of this package's: its start and a number
    of indices determine the rest. Of a shuffle, permutations are counted and digested, not indices."""

    last = sys.maxsize

    def add(self, drawn: Any) -> None:
        super().add(drawn)
        self.states = self.own_states()


class ReplayedOrder(OrderStrategy):
    """The order of any other sampler without a state: it is begun again, draws as often, and a digest of the
    indices is compared."""

    def __init__(self, traits: SamplerInfo, saved: Saved | None) -> None:
        super().__init__(traits, saved)
        self.note = self.add
        # Torch's samplers use generators when they begin and at their end, which may come while the last
        # batch is drawn. Others may use them for each index.
        self.last = sys.maxsize
        if traits.own:
            self.last = len(traits.sampler) - 1 if draw_once(traits.sampler) else 0


class StatefulOrder(OrderStrategy):
    """The order of a sampler with `state_dict`, or whose iterator has one."""

    def __init__(self, traits: SamplerInfo, saved: Saved | None) -> None:
        super().__init__(traits, saved)
        self.digest = None
        self._given: dict[int, Any] = {}  # indices that were yielded and not delivered, by position

    def draw(self, source: Iterator[Any]) -> IndexOrError:
        drawn = super().draw(source)
        # torch's last batch is not full: the sampler's state is then the start of its next iteration.
        if type(drawn[0]) is list and self.traits.asked is not self.traits.sampler:
            self.exhausted |= len(drawn[0]) < getattr(self.traits.sampler, "batch_size", 0)
        try:
            return drawn
        finally:
            del drawn  # an error holds this frame by its traceback

    def yields(self, position: int, drawn: IndexOrError, head: int) -> None:
        self._given[position] = as_json(*drawn)
        for old in [at for at in self._given if at < head]:
            del self._given[old]

    def asked(self, source: Any, progress: Progress, end: int) -> tuple[dict[str, Any], list[Any]]:
        """The sampler's state between two draws, and the indices that were drawn and not delivered: those
        before the position `end`, and those that are due.

        Raises:
            Exception: raised by the sampler's `state_dict`.
        """
        asked = self.traits.asked
        place = position.place_of(asked, None if id(asked) == id(source) else source)
        given = [
            None if at in progress.beyond else as_json(self._given[at]) for at in range(progress.head, end)
        ]
        return copy.deepcopy(place), [*given, *(as_json(*drawn) for drawn in self.due)]


# ---- digests of indices ----------------------------------------------------------------------------


def digested(digest: int, index: Any) -> int:
    """Update a digest with an index, or a batch of indices. Indices that are neither integers nor values that
    `marshal` writes (strings, tuples, …) do not change it."""
    if type(index) is not list and _kind(index) in _ARRAYS:
        part = index.reshape(-1)  # converted by slices: ten times as fast as by items
        ends = [*part[:_ENDS].tolist(), *part[-_ENDS:].tolist()]
    else:
        part = index if type(index) is list else [index]
        ends = [*part[:_ENDS], *part[-_ENDS:]]
    kinds = set(map(type, ends))
    if kinds != {int} and not {kind.__module__ for kind in kinds} <= _NOT_THE_USERS:
        return digest
    try:
        return crc32(array("q", ends), digest)
    except (TypeError, OverflowError):  # not integers, or too large ones
        try:  # version 2 writes the same bytes for the same values
            return crc32(marshal.dumps(ends, 2), digest)
        except ValueError:
            return digest


def _kind(index: Any) -> tuple[str, str]:
    kind = type(index)
    return kind.__module__, kind.__qualname__


#: Arrays and tensors; and modules whose classes run no user code when they are converted to an integer.
_ARRAYS = {("numpy", "ndarray"), ("torch", "Tensor")}
_NOT_THE_USERS = {"builtins", "numpy", "torch"}


# ---- indices in a state -----------------------------------------------------------------------------


def as_json(index: Any, error: Exception | None = None) -> Any:
    """Copy an index, as JSON if it consists of numbers and text; or describe the error in its place."""
    if error is not None:
        return {"raised": f"{type(error).__name__}: {error}"}
    kind = type(index)
    if kind is list or kind is tuple:
        found = list(index) if _PLAIN.issuperset(map(type, index)) else list(map(as_json, index))
        return found if kind is list else {"tuple": found}
    if isinstance(index, np.generic):
        return {"numpy": [index.dtype.str, index.item()]}
    return copy.deepcopy(index)


def from_json(plain: Any) -> IndexOrError:
    if type(plain) is dict and plain.keys() == {"raised"}:
        return None, RuntimeError(f"the sampler raised {plain['raised']}, before the state was saved")
    return _index(plain), None


def _index(plain: Any) -> Any:
    if type(plain) is list:
        return list(plain) if _PLAIN.issuperset(map(type, plain)) else list(map(_index, plain))
    if type(plain) is dict and plain.keys() == {"tuple"}:
        return tuple(map(_index, plain["tuple"]))
    if type(plain) is dict and plain.keys() == {"numpy"}:
        return np.dtype(plain["numpy"][0]).type(plain["numpy"][1])
    return copy.deepcopy(plain)
