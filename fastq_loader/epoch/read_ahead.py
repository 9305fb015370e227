"""Hides from a user's generators that the sampler is read ahead of delivery.

Runs in the consumer, on the thread that calls `iter()` and `next()`. A sampler may use its generators for
each index, and how far it is read ahead depends on the workers and on timing. So between two draws the
generators are reset to their states after the last index whose batch was delivered: code that breaks off the
epoch, saves the generators, or sends them to other ranks sees the same as with a loader without workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from fastq_loader.reading import generators

T = TypeVar("T")
States = dict[str, Any]


class PrefetchedGenerators:
    """Generators with two states each: after the last index drawn, and after the last batch delivered.

    Args:
        own: name → generator.
    """

    def __init__(self, own: dict[str, Any]) -> None:
        self._own = own
        self._drawn = self._shown = self._now()
        self._moves: deque[tuple[int, States]] = deque()  # (indices drawn, states after that), if changed

    def draw(self, count: int, draw: Callable[[], T]) -> T:
        """Draw index number `count`, the first being 1, from the states after the previous draw."""
        self._follow()
        self._set(self._drawn)
        try:
            return draw()
        finally:
            if not generators.same(now := self._now(), self._drawn):
                self._moves.append((count, now))
                self._drawn = now
            self._set(self._shown)

    def show(self, count: float) -> None:
        """Set the generators to their states after the first `count` indices, now delivered."""
        if self._moves and self._moves[0][0] <= count:
            self._follow()
            while self._moves and self._moves[0][0] <= count:
                self._shown = self._moves.popleft()[1]
            generators.set_states(self._own, self._shown)

    def states(self) -> States:
        """The states after the last draw, or the present ones if other code has changed them. Any thread."""
        now = self._now()
        return self._drawn if generators.same(now, self._shown) else now

    def _follow(self) -> None:
        """If other code has used or set a generator, adopt the present states and drop the recorded ones."""
        if not generators.same(now := self._now(), self._shown):
            self._moves.clear()
            self._drawn = self._shown = now

    def _now(self) -> States:
        return generators.states_of(self._own)

    def _set(self, states: States) -> None:
        if self._drawn is not self._shown:
            generators.set_states(self._own, states)
