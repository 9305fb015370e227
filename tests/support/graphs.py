"""Objects that hold something: an attribute, a container, a function, a class, and chains of these.

For tests that something is found wherever it is. `HOLD` has the ways, `graphs()` draws chains of them, with
other objects beside it.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st


class Plain:
    """Has attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def method(self, *_: Any) -> None:
        """Of no use but to be held."""


class Slots:
    __slots__ = ("held", "unset")

    def __init__(self, held: Any) -> None:
        self.held = held


class OwnList(list[Any]):
    """A list with attributes."""


def in_list(held: Any) -> Any:
    of = OwnList([1, 2])
    of.held = held  # type: ignore[attr-defined]
    return of


def in_array(held: Any) -> Any:
    array = np.empty(3, object)
    array[1] = held
    return array


def in_closure(held: Any) -> Any:
    return lambda *_: held


def in_default(held: Any) -> Any:
    def function(_: Any, held: Any = held) -> Any:
        return held

    return function


def in_method(held: Any) -> Any:
    return type("WithMethod", (Plain,), {"draw": in_default(held), "of": staticmethod(in_list)})()


def in_generator(held: Any) -> Iterator[Any]:
    def numbers(held: Any) -> Iterator[Any]:
        yield 1
        yield held

    made = numbers(held)
    next(made)
    return made


#: Ways to hold one object, which can be hashed.
HOLD: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda held: Plain(number=1, held=held),
    "slot": Slots,
    "class attribute": lambda held: type("Kind", (Plain,), {"held": held})(),
    "method": in_method,
    "bound method": lambda held: Plain(held=held).method,
    "list": lambda held: ["name", held],
    "tuple": lambda held: (1, None, held),
    "dict": lambda held: {"name": 1, "held": held},
    "key": lambda held: {Plain(held=held): 1},
    "set": lambda held: {1, Plain(held=held)},
    "deque": lambda held: deque([held], 3),
    "default factory": lambda held: defaultdict(functools.partial(Plain, held=held)),
    "list with attributes": in_list,
    "array": in_array,
    "partial": lambda held: functools.partial(print, held),
    "closure": in_closure,
    "default": in_default,
    "generator": in_generator,
    "many": lambda held: [*map(str, range(900)), Plain(), held],
    "large dict": lambda held: {"first": Plain(), **dict.fromkeys(range(500), 0), "held": held},
}


def held_by(ways: list[str], held: Any) -> Any:
    """An object behind a chain of holders."""
    for way in ways:
        held = HOLD[way](held)
    return held


def many_objects(count: int) -> list[Any]:
    return [Plain(number=number) for number in range(count)]


def much_data(count: int) -> list[Any]:
    return [(str(number), number) for number in range(count)]


#: Attributes that are in the way, by name.
BESIDE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "data": lambda: much_data(5000),
    "some objects": lambda: many_objects(300),
    "more objects than are looked at": lambda: many_objects(1500),
}


@st.composite
def graphs(draw: Any) -> tuple[list[str], str, bool]:
    """A chain of holders, what is beside it, and whether that comes before it."""
    ways = draw(st.lists(st.sampled_from(sorted(HOLD)), max_size=5))
    return ways, draw(st.sampled_from(sorted(BESIDE))), draw(st.booleans())


def attributes(graph: tuple[list[str], str, bool], held: Any) -> dict[str, Any]:
    """The attributes of an object: the chain, and what is beside it."""
    ways, beside, is_before = graph
    both = {"beside": BESIDE[beside](), "chain": held_by(ways, held)}
    return both if is_before else dict(reversed(both.items()))
