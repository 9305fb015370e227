"""Random number generators: finding them, seeding them while a dataset is read, and their states.

Runs in the consumer and in workers. A generator is a `torch.Generator`, `random` or a `random.Random`,
`numpy.random` or an instance of its `RandomState` or `Generator`. A state keeps its native form until text is
needed: JSON, with arrays in base64, of 4 to 7 kB for a Mersenne twister.

Generators are seeded from the base seed that the consumer drew in one of two ways. One is torch's, bit for
bit: a seed for each worker (`torch/utils/data/_utils/worker.py`). The other is a seed for each batch, which
depends neither on the worker that loads the batch nor on earlier batches.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import json
import random
import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

# numpy imports this module on first use: otherwise in every forked worker, for 11 ms each.
from numpy import random as numpy_random

from fastq_loader.system.attributes import held, inherits
from fastq_loader.system.walk import Walk

#: Classes of generators, and the attributes that get and set the state of each.
_KINDS: dict[type, tuple[str, ...]] = {
    torch.Generator: ("get_state", "set_state"),
    random.Random: ("getstate", "setstate"),
    numpy_random.Generator: ("bit_generator",),
    numpy_random.RandomState: ("get_state", "set_state"),
    **dict.fromkeys(
        (getattr(numpy_random, name) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")),
        ("state",),
    ),
}

#: Packages whose generators have no other state than the one that they return.
_PACKAGES = {"numpy", "random", "torch"}

#: Size of a Mersenne twister: 624 words and the position among them. Python has the position first.
_TWISTER_BYTES = 625 * 4

#: The generators that all code of a process shares, by name.
GLOBAL: dict[str, Any] = {"torch": torch.default_generator, "random": random, "numpy": numpy_random}
#: The objects behind the functions of two of these modules.
_INSIDE: tuple[Any, ...] = GLOBAL["random"].random.__self__, GLOBAL["numpy"].rand.__self__


class Found(dict[str, Any]):
    """Generators by name, as `find` returns them.

    Attributes:
        unseen: names of parts that may hold further generators: the search ended before them, or only user
            code can save their state.
        large: names of large containers that were taken for data after a look at their first members.
    """

    unseen: list[str]
    large: list[str]

    @property
    def complete(self) -> bool:
        """Whether the states of these are the states of all. A user's subclass may have another state."""
        return not self.unseen and all(_package(each) in _PACKAGES for each in self.values())

    @property
    def certain(self) -> bool:
        """Whether that is so in any case, and `seed_batch` seeds all of them."""
        return self.complete and not self.large and all(map(_can_seed, self.values()))


def find(roots: dict[str, Any], but: Iterable[Any] = ()) -> Found:
    """Find the generators in `roots`, and in all that these hold; see `system.walk`.

    Args:
        roots: name → object.
        but: objects to leave out.

    Returns:
        Name → generator, where a name is a path like "sampler.generator"; each generator once, in an order
        that only depends on the attributes. Without the ones behind `random.random` and `np.random.rand`,
        which `GLOBAL` has.
    """
    walk, found = Walk(roots, (*_KINDS, numpy_random.BitGenerator), [*_INSIDE, *but]), Found()
    found.unseen, found.large = walk.unseen, walk.large
    for name, part in walk.found.items():
        base = next((base for base in _KINDS if issubclass(type(part), base)), None)
        if base is not None and inherits(part, base, _KINDS[base]):
            found[name] = part
        else:  # only user code can save its state
            found.unseen.append(name)
    return found


def held_by(dataset: Any) -> list[str]:
    """Names of the generators among a dataset's own attributes, but for the ones that a process shares."""
    kinds, shared = (*_KINDS, numpy_random.BitGenerator), [GLOBAL["torch"], *_INSIDE]
    return [
        f"dataset.{name}"
        for name, part in held(dataset).items()
        if issubclass(type(part), kinds) and not any(part is each for each in shared)
    ]


def _package(generator: Any) -> str:
    return type(generator).__module__.partition(".")[0]


# ---- states ---------------------------------------------------------------------------------------


def state_of(generator: Any) -> Any:
    """Copy the state of a generator. Raises whatever a user's class raises."""
    if type(base := _INSIDE[0] if generator is random else generator) is random.Random:
        return _state_of_random(base)
    if generator is numpy_random:
        return _state_of_numpy()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    if isinstance(generator, numpy_random.RandomState):
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


#: The newest memory of numpy's shared generator while no normal number was cached, and its state; the newest
#: memory of a generator of Python's, and its words.
_of_numpy: tuple[bytes, dict[str, Any]] = b"", {}
_of_random: tuple[bytes, tuple[int, ...]] = b"", ()


def _state_of_numpy() -> dict[str, Any]:
    """The state of numpy's shared generator, read from its memory: numpy itself needs 50 us for it.

    Every draw changes the memory, except one of a cached normal number: these are drawn in pairs. While one
    is cached, numpy is asked; that none is cached is determined once for each content of the memory.
    """
    global _of_numpy
    bits, memory = GLOBAL["numpy"].get_bit_generator(), b""
    if type(bits) is numpy_random.MT19937:
        memory = ctypes.string_at(bits.ctypes.state_address, _TWISTER_BYTES)
        if memory == _of_numpy[0]:
            return _of_numpy[1]
    state: dict[str, Any] = numpy_random.get_state(legacy=False)
    if memory and not state["has_gauss"]:
        _of_numpy = memory, state
    return state


def _state_of_random(generator: random.Random) -> tuple[Any, ...]:
    """The state of a generator of Python's, read from its memory: `getstate` needs 20 us for it."""
    global _of_random
    if not _WORDS_AT:
        return generator.getstate()
    memory = ctypes.string_at(id(generator) + _WORDS_AT, _TWISTER_BYTES)
    known, words = _of_random
    if memory != known:
        words = _words(memory)
        _of_random = memory, words
    return generator.VERSION, words, generator.gauss_next  # type: ignore[attr-defined]


def _words(memory: bytes) -> tuple[int, ...]:
    position, *words = np.frombuffer(memory, np.uint32).tolist()
    return *words, position


def _place_of_words() -> int:
    """Where the memory of a `random.Random` begins in the object; 0 if this Python has another layout."""
    base, place = random.Random.__base__, object.__basicsize__
    if base is None or base.__basicsize__ < place + _TWISTER_BYTES:
        return 0
    drawn = random.Random(1)
    drawn.random()
    memory = ctypes.string_at(id(drawn) + place, _TWISTER_BYTES)
    return place if _words(memory) == drawn.getstate()[1] else 0


_WORDS_AT = _place_of_words()


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


class GeneratorSnapshot:
    """States of generators at one moment, to find which of them have moved since.

    Args:
        generators: by name; the three shared ones unless others are given.
    """

    def __init__(self, generators: Mapping[str, Any] = GLOBAL) -> None:
        self._generators = generators
        self.states = states_of(generators)

    def moved_since(self, now: Mapping[str, Any] | None = None) -> list[str]:
        """Names of the generators that were drawn from, seeded or set since; of those in `now`, if given,
        also the ones that were made since."""
        return moved(self.states, states_of(self._generators if now is None else now))


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


def draw_base_seed(generator: torch.Generator | None) -> int:
    """The seed of an iteration: exactly one `random_()` of an int64 tensor, as torch draws it."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


_BATCH, _SEEDS = struct.Struct("<qq"), struct.Struct("<QQI")


def seed_batch(base_seed: int, batch: int, own: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Seed torch's CPU generator, `random` and numpy's global generator for one batch, and others by name.

    The seeds are parts of a BLAKE2b hash of both numbers, so neighbouring batches have nothing in common:
    64 bits for torch and for `random`, and 32 for numpy. A longer seed would have to be an array, for which
    numpy's legacy generator needs up to 160 us (6 us for an integer). Generators of devices are left alone:
    seeding one that is not in use yet costs torch milliseconds. Each generator in `own` gets 64 bits of a
    hash of both numbers and its name; see `_seed`.

    Args:
        base_seed, batch: from -2^63 to 2^63 - 1.
        own: name → generator, as `find` returns them. The members of a set get the same seed.

    Returns:
        torch's seed, which is `worker_info.seed` while the batch is loaded.
    """
    digest = hashlib.blake2b(_BATCH.pack(base_seed, batch), digest_size=_SEEDS.size).digest()
    for_torch, for_random, for_numpy = _SEEDS.unpack(digest)
    torch.default_generator.manual_seed(for_torch)
    random.seed(for_random)
    numpy_random.seed(for_numpy)
    for name, generator in own.items():
        named = _BATCH.pack(base_seed, batch) + name.rstrip("'").encode("utf-8", "surrogatepass")
        _seed(generator, int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little"))
    return int(for_torch)


def _can_seed(generator: Any) -> bool:
    """Whether `_seed` seeds a generator: not those of devices, nor bit generators of others than numpy."""
    if isinstance(generator, torch.Generator):
        return generator.device.type == "cpu"
    return isinstance(generator, random.Random) or _package(_bits(generator)) == "numpy"


def _bits(generator: Any) -> Any:
    """The bit generator of a generator of numpy's."""
    if isinstance(generator, numpy_random.RandomState):
        return generator._bit_generator
    return getattr(generator, "bit_generator", generator)


def _seed(generator: Any, seed: int) -> None:
    """Seed a generator that `find` returned, without running user code. numpy's get a state derived from the
    seed."""
    if not _can_seed(generator):
        return
    if isinstance(generator, torch.Generator):
        torch.Generator.manual_seed(generator, seed)
    elif isinstance(generator, random.Random):
        random.Random.seed(generator, seed)
    elif isinstance(generator, numpy_random.RandomState):
        bits = type(_bits(generator))(seed)
        generator.set_state(numpy_random.RandomState(bits).get_state(legacy=False))
    else:
        _bits(generator).state = type(_bits(generator))(seed).state


# ---- states as text -------------------------------------------------------------------------------


def dump(value: Any) -> str:
    """Convert a state, or any value made of dicts, tuples, arrays and plain values, to text."""
    return json.dumps(value, default=_json_safe)


def _json_safe(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "base64": base64.b64encode(value.tobytes()).decode()}
    return value.item()  # a numpy scalar


def load(text: str) -> Any:
    """Convert the text from `dump` back; lists become tuples."""
    return _as_it_was(json.loads(text, object_hook=_dict))


def _dict(value: dict[str, Any]) -> Any:
    if value.keys() == {"dtype", "base64"}:
        return np.frombuffer(base64.b64decode(value["base64"], validate=True), value["dtype"]).copy()
    return {name: _as_it_was(each) for name, each in value.items()}


def _as_it_was(value: Any) -> Any:
    """Convert lists back to tuples, which JSON writes as lists."""
    return tuple(map(_as_it_was, value)) if isinstance(value, list) else value


def fits(generator: Any, state: Any) -> str:
    """Why a generator refuses a state; "" if it accepts it. Tries the state, and restores the generator."""
    before = state_of(generator)
    try:
        set_state(generator, state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        set_state(generator, before)
    return ""
