"""The generators of a user's sampler that is read ahead: they stand where they would if it were not.

Runs in the consumer, on the thread that calls `iter()` and `next()`. A sampler that is asked for an index
draws from its generators, and how far ahead it is asked depends on the workers and on time. So between two
draws the generators have the states that they had after the last index whose batch was handed out: whoever
breaks off the epoch, saves them, or sends them to other ranks finds what a loader without workers leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from fastq_loader.reading import generators

T = TypeVar("T")
States = dict[str, Any]


class ReadAhead:
    """Some generators, of which each has two states: of what was drawn, and of what was handed out.

    Args:
        own: name → generator.
    """

    def __init__(self, own: dict[str, Any]) -> None:
        self._own = own
        self._drawn = self._shown = self._now()
        self._moves: deque[tuple[int, States]] = deque()  # indices drawn → the states after that, if others

    def draw(self, count: int, draw: Callable[[], T]) -> T:
        """Draw index number `count`, the first being 1, from the states of what was drawn."""
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
        """The batches of so many indices were handed out."""
        if self._moves and self._moves[0][0] <= count:
            self._follow()
            while self._moves and self._moves[0][0] <= count:
                self._shown = self._moves.popleft()[1]
            for name, state in self._shown.items():
                generators.set_state(self._own[name], state)

    def states(self) -> States:
        """The states of what was drawn, or those that others have left. Any thread."""
        now = self._now()
        return self._drawn if generators.same(now, self._shown) else now

    def _follow(self) -> None:
        """Where others have drawn from a generator, or have set it, forget what was drawn ahead of that."""
        if not generators.same(now := self._now(), self._shown):
            self._moves.clear()
            self._drawn = self._shown = now

    def _now(self) -> States:
        return {name: generators.state_of(generator) for name, generator in self._own.items()}

    def _set(self, states: States) -> None:
        if self._drawn is not self._shown:
            for name, state in states.items():
                generators.set_state(self._own[name], state)
