"""Random number generators: finding them, seeding them while a dataset is read, and their states.

Runs in the consumer and in workers. A generator is a `torch.Generator`, `random` or a `random.Random`,
`numpy.random` or an instance of its `RandomState` or `Generator`. A state has its native form.

Generators are seeded from the base seed that the consumer drew in one of two ways. One is torch's, bit for
bit: a seed for each worker (`torch/utils/data/_utils/worker.py`). The other is a seed for each batch, which
depends neither on the worker that loads the batch nor on earlier batches.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import random
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch

# numpy imports this module on first use: otherwise in every forked worker, for 11 ms each.
from numpy import random as numpy_random

from fastq_loader.system.attributes import held, inherits, own_dict

#: Classes of generators, and the attributes that get and set the state of each.
KINDS: dict[type, tuple[str, ...]] = {
    torch.Generator: ("get_state", "set_state"),
    random.Random: ("getstate", "setstate"),
    numpy_random.Generator: ("bit_generator",),
    numpy_random.RandomState: ("get_state", "set_state"),
    **dict.fromkeys(
        (getattr(numpy_random, name) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")),
        ("state",),
    ),
}

#: The generators that all code of a process shares, by name.
GLOBAL: dict[str, Any] = {"torch": torch.default_generator, "random": random, "numpy": numpy_random}
#: The objects behind the functions of two of these modules.
INSIDE: tuple[Any, ...] = GLOBAL["random"].random.__self__, GLOBAL["numpy"].rand.__self__


_GENERATORS = (*KINDS, numpy_random.BitGenerator)
#: Packages whose generators have no other state than the one that they return.
_PACKAGES = {"numpy", "random", "torch"}
#: How far `find` looks: levels below the roots, objects, and members of a container.
_DEEPEST, _OBJECTS, _MEMBERS = 3, 1000, 100
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)
_COLLECTED = 1 << 14  # Py_TPFLAGS_HAVE_GC: instances have references that the garbage collector follows
_flags = type.__dict__["__flags__"].__get__  # a metaclass may override it
_dtype = vars(np.ndarray)["dtype"].__get__  # and a subclass this


def find(roots: dict[str, Any], but: Iterable[Any] = ()) -> tuple[dict[str, Any], bool]:
    """Find the generators among some objects, their attributes and members, and so on down to the
    third level. Runs no code of the user's.

    Args:
        roots: name → object.
        but: objects to leave out.

    Returns:
        Name → generator, where a name is a path like "sampler.generator"; each generator once, without the
        ones behind `random.random` and `np.random.rand`, which `GLOBAL` has. And whether the search saw all
        that the roots hold, and user code is not needed for any state.
    """
    found: dict[str, Any] = {}
    all_seen = True
    seen = {id(part): part for part in (*INSIDE, *but)}  # kept, so that no other object gets the id
    level = list(roots.items())
    for _ in range(_DEEPEST + 1):
        below: list[tuple[str, Any]] = []
        for path, part in level:
            if id(part) in seen or _is_plain(part):
                continue
            seen[id(part)] = part
            base = next((base for base in _GENERATORS if issubclass(type(part), base)), None)
            if base is None:
                members, complete = _members(part)
                below += [
                    (f"{path}.{name if type(name) in (str, int) else '*'}", each) for name, each in members
                ]
                all_seen &= complete
                if len(seen) > _OBJECTS:
                    return found, False
            else:
                has_state = base in KINDS and inherits(part, base, KINDS[base])
                if has_state:
                    found[path] = part
                all_seen &= has_state and type(part).__module__.partition(".")[0] in _PACKAGES
        level = below
    return found, all_seen and all(id(part) in seen or _is_plain(part) for _, part in level)


def _is_plain(part: Any) -> bool:
    """Whether an object neither is a generator nor holds anything that is searched."""
    kind = type(part)
    if issubclass(kind, np.ndarray):
        return not _dtype(part).hasobject
    no_references = not _flags(kind) & _COLLECTED
    return issubclass(kind, (type, ModuleType, torch.Tensor)) or (
        no_references and not issubclass(kind, _GENERATORS)
    )


def _members(part: Any) -> tuple[list[tuple[Any, Any]], bool]:
    """The attributes and members of an object with their names, and whether these are all that it holds. Of a
    long container the first members are looked at: if they are data, all are."""
    kind, own = type(part), own_dict(part)
    if kind is FunctionType:
        return [], not (part.__closure__ or part.__defaults__ or part.__kwdefaults__ or own)
    members: list[tuple[Any, Any]] = list(held(part).items())
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    if base is None:
        members += [(at, each) for at, each in enumerate(gc.get_referents(part)) if each is not own]
        return members, not issubclass(kind, np.ndarray)
    values = dict.items(part) if base is dict else enumerate(base.__iter__(part))
    first = list(islice(values, _MEMBERS))
    return members + first, base.__len__(part) <= _MEMBERS or all(_is_data(each) for _, each in first)


def _is_data(part: Any) -> bool:
    """Whether an object is plain, or a tuple or list of such: a row of a table."""
    return _is_plain(part) or (type(part) in (tuple, list) and all(map(_is_plain, part)))


def held_by(dataset: Any) -> list[str]:
    """Names of the generators among a dataset's own attributes, but for the ones that a process shares."""
    shared = [GLOBAL["torch"], *INSIDE]
    return [
        f"dataset.{name}"
        for name, part in held(dataset).items()
        if issubclass(type(part), _GENERATORS) and not any(part is each for each in shared)
    ]


# ---- states ---------------------------------------------------------------------------------------


def state_of(generator: Any) -> Any:
    """Copy the state of a generator. Raises whatever a user's class raises."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    if generator is numpy_random or isinstance(generator, numpy_random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, numpy_random.Generator):
        return generator.bit_generator.state
    return generator.state if isinstance(generator, numpy_random.BitGenerator) else generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Restore a generator to a state."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(state))
    elif generator is numpy_random or isinstance(generator, numpy_random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, numpy_random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, numpy_random.BitGenerator):
        generator.state = state
    else:
        generator.setstate(state)


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the states of generators, by name."""
    return {name: state_of(generator) for name, generator in generators.items()}


def set_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Restore the generators that `states` names."""
    for name, generator in generators.items():
        if name in states:
            set_state(generator, states[name])


def moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the states that differ from those `before`, or were not among them."""
    return [
        name
        for name, state in now.items()
        if name not in before or not (state is before[name] or same(before[name], state))
    ]


def same(state: Any, other: Any) -> bool:
    """Whether two states of one generator, or two dicts or tuples of states, are equal."""
    if isinstance(state, dict) and isinstance(other, dict):
        return state.keys() == other.keys() and all(same(each, other[name]) for name, each in state.items())
    if isinstance(state, (tuple, list)) and isinstance(other, (tuple, list)):
        with contextlib.suppress(ValueError):  # of arrays inside, which are compared one by one below
            if state == other:
                return True
        return len(state) == len(other) and all(map(same, state, other))
    if isinstance(state, np.ndarray) and isinstance(other, np.ndarray):  # `array_equal` is ten times slower
        return state.dtype == other.dtype and state.tobytes() == other.tobytes()
    return bool(state == other)


class restored:
    """Context that restores generators on exit, whatever was drawn from them or set inside.

    Args:
        generators: to be restored, by name; the three shared ones unless others are given.
        states: states to set on entry, by name.

    A class and not `contextlib.contextmanager`: a context that an interrupt abandoned would be closed by the
    garbage collector, perhaps while torch holds the lock of its random number generator.
    """

    def __init__(
        self, generators: Mapping[str, Any] = GLOBAL, states: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._generators, self._states = generators, states

    def __enter__(self) -> None:
        self._kept = states_of(self._generators)
        set_states(self._generators, self._states)

    def __exit__(self, *_: object) -> None:
        set_states(self._generators, self._kept)


#: Context that does nothing; it may be entered many times at once.
UNTOUCHED = contextlib.nullcontext()


def as_at(states: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Context in which shared generators start from these states. A generator that already has its state on
    entry keeps the draws made inside; the others are restored."""
    if not states:
        return UNTOUCHED
    now = {name: state_of(GLOBAL[name]) for name in states}
    return restored({name: GLOBAL[name] for name in moved(now, states)}, states)


# ---- seeds ----------------------------------------------------------------------------------------


def _seed_torch(seed: int) -> None:
    """Like torch.manual_seed, for the devices that this build of torch supports.

    For every kind of device that is not in use yet, supported or not, torch formats the stack of the call and
    reads the source files of its frames: milliseconds in a worker that was just forked.
    """
    if (
        torch.backends.mps.is_built()
        or torch.xpu._is_compiled()
        or torch._C._get_privateuse1_backend_name() != "privateuseone"
    ):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    # torch's own condition: a process forked from one that uses CUDA cannot use it.
    if torch.backends.cuda.is_built() and not torch.cuda._is_in_bad_fork():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed torch, `random` and numpy's global generator as torch's worker loop does.

    torch and `random` get `base_seed + worker_id`. numpy gets four 32-bit words: torch's
    `_generate_state(base_seed, worker_id)` is numpy's own `SeedSequence` over the entropy below.

    Returns:
        `base_seed + worker_id`, which is `worker_info.seed`.
    """
    seed = base_seed + worker_id
    random.seed(seed)
    _seed_torch(seed)
    entropy = [worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
    numpy_random.seed(numpy_random.SeedSequence(entropy).generate_state(4))
    return seed


_BATCH, _SEEDS = struct.Struct("<qq"), struct.Struct("<QQI")


def seed_batch(base_seed: int, batch: int) -> int:
    """Seed torch's CPU generator, `random` and numpy's global generator for one batch.

    The seeds are parts of a BLAKE2b hash of both numbers, so neighbouring batches have nothing in common:
    64 bits for torch and for `random`, and 32 for numpy. A longer seed would have to be an array, for which
    numpy's legacy generator needs up to 160 us (6 us for an integer). Generators of devices are left alone:
    seeding one that is not in use yet costs torch milliseconds.

    Args:
        base_seed, batch: from -2^63 to 2^63 - 1.

    Returns:
        torch's seed, which is `worker_info.seed` while the batch is loaded.
    """
    digest = hashlib.blake2b(_BATCH.pack(base_seed, batch), digest_size=_SEEDS.size).digest()
    for_torch, for_random, for_numpy = _SEEDS.unpack(digest)
    torch.default_generator.manual_seed(for_torch)
    random.seed(for_random)
    numpy_random.seed(for_numpy)
    return int(for_torch)
