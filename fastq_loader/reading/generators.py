"""Random number generators as objects: where they are, and their states as text.

Runs in the consumer and in workers. A generator is a `torch.Generator`, `random` or a `random.Random`,
`numpy.random` or one of its `RandomState` and `Generator`. A state is kept as it was got until somebody wants
it as text: JSON, with compressed arrays in base64, of 4 to 7 kB for a Mersenne twister.
"""

from __future__ import annotations

import base64
import copyreg
import json
import random
import zlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
import torch

# numpy imports this module when it is first used: in every forked worker, for 11 ms each.
from numpy import random as numpy_random

#: Objects that `find` visits, and members of a container: generators of an object's own are few and near.
_MOST_OBJECTS, _MOST_MEMBERS = 1000, 100

_RANDOM = (random.Random,)
_NUMPY = (numpy_random.Generator, numpy_random.RandomState)
_KINDS = (torch.Generator, *_RANDOM, *_NUMPY)

#: The generators that all code of a process shares, by name.
GLOBAL: dict[str, Any] = {"torch": torch.default_generator, "random": random, "numpy": numpy_random}


def find(roots: dict[str, Any], but: Iterable[Any] = ()) -> dict[str, Any]:
    """The generators among `roots`, and among what they have as attributes.

    Args:
        roots: name → object.
        but: objects that are not looked into.

    Returns:
        Name → generator, where a name is a way like "sampler.generator"; each generator once, in an order
        that only depends on the attributes.
    """
    found: dict[str, Any] = {}
    seen = {id(part) for part in but}
    todo = list(reversed(roots.items()))
    most = len(seen) + _MOST_OBJECTS
    while todo and len(seen) < most:
        name, part = todo.pop()
        if id(part) in seen or isinstance(part, (type, ModuleType, str, bytes, int, float)) or part is None:
            continue
        seen.add(id(part))
        if isinstance(part, _KINDS):
            found[name] = part
        else:
            todo += [(f"{name}.{key}", member) for key, member in _members(part)]
    return found


def _members(part: Any) -> list[tuple[Any, Any]]:
    if not isinstance(part, (dict, list, tuple, set)):
        return list(attributes(part).items())
    if len(part) > _MOST_MEMBERS:
        return []
    return list(part.items() if isinstance(part, dict) else enumerate(part))


def attributes(part: Any) -> dict[str, Any]:
    """What an object has in its `__dict__`, and in the `__slots__` of its classes."""
    slots = [name for name in copyreg._slotnames(type(part)) if hasattr(part, name)]  # type: ignore[attr-defined]
    return {**getattr(part, "__dict__", {}), **{name: getattr(part, name) for name in slots}}


# ---- states ---------------------------------------------------------------------------------------


def state_of(generator: Any) -> Any:
    """Its state, which later draws do not change. Raises whatever a class of the user's raises."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    if generator is numpy_random or isinstance(generator, numpy_random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, numpy_random.Generator):
        return generator.bit_generator.state
    return generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Put a generator into a state."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(state))
    elif generator is numpy_random or isinstance(generator, numpy_random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, numpy_random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def same(state: Any, other: Any) -> bool:
    """Whether two states of one generator are the same."""
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(same(state[key], other[key]) for key in state)
    if isinstance(state, tuple):
        return len(state) == len(other) and all(map(same, state, other))
    if isinstance(state, np.ndarray):
        return bool(state.tobytes() == other.tobytes())
    return bool(state == other)


class restored:
    """A context that leaves generators as they were, whatever is drawn from them or set in it.

    Args:
        generators: these.
        states: of some of them, to be set on entry.

    A class and not `contextlib.contextmanager`: what an interrupt left behind would be ended by a garbage
    collection, perhaps while torch holds the lock of its random number generator.
    """

    def __init__(self, generators: Iterable[Any], states: Iterable[tuple[Any, Any]] = ()) -> None:
        self._generators = list(generators)
        self._states = list(states)

    def __enter__(self) -> None:
        self._kept = [state_of(generator) for generator in self._generators]
        for generator, state in self._states:
            set_state(generator, state)

    def __exit__(self, *_: object) -> None:
        for generator, state in zip(self._generators, self._kept, strict=True):
            set_state(generator, state)


def as_at(states: dict[str, Any]) -> restored:
    """A context in which shared generators are in these states. Those that are when it begins go on as they
    are drawn from in it; others are put back."""
    moved = [
        (GLOBAL[name], state) for name, state in states.items() if not same(state, state_of(GLOBAL[name]))
    ]
    return restored((generator for generator, _ in moved), moved)


# ---- states as text -------------------------------------------------------------------------------


def dump(state: Any) -> str:
    """A state as text."""
    return json.dumps(state, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "zlib": base64.b64encode(zlib.compress(value.tobytes())).decode()}
    return value.item()  # a scalar of numpy's


def load(text: Any) -> Any:
    """A state from `dump`'s text.

    Raises:
        ValueError: it is no such text.
    """
    try:
        state = _from_plain(json.loads(text))
        if not len(state):
            raise ValueError("it is empty")
    except (ValueError, TypeError, zlib.error) as error:
        raise ValueError(f"{text!r:.60} is not the state of a generator: {error}") from error
    return state


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_from_plain, value))
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "zlib"}:
        data = zlib.decompress(base64.b64decode(value["zlib"], validate=True))
        return np.frombuffer(data, value["dtype"]).copy()
    return {key: _from_plain(member) for key, member in value.items()}


def fits(generator: Any, state: Any) -> str:
    """Why a generator cannot take a state, found without touching it; "" if it can."""
    try:
        set_state(_twin(generator), state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _twin(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    if isinstance(generator, numpy_random.Generator):
        return numpy_random.Generator(type(generator.bit_generator)())
    if generator is numpy_random or isinstance(generator, numpy_random.RandomState):
        legacy: Any = numpy_random.mtrand._rand if generator is numpy_random else generator
        return numpy_random.RandomState(type(legacy._bit_generator)())
    return random.Random()
