"""The deep search for generators, and seeds for those that it finds.

Runs in the consumer, and where a cached function is called.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from numpy import random as numpy_random

from fastq_loader.extras.samplers.walk import Walk
from fastq_loader.reading.generators import INSIDE, KINDS
from fastq_loader.system.attributes import inherits

#: Packages whose generators have no other state than the one that they return.
_PACKAGES = {"numpy", "random", "torch"}
_BATCH = struct.Struct("<qq")


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
        """Whether that is so in any case, and `seed` seeds all of them."""
        return self.complete and not self.large and all(map(_can_seed, self.values()))


def find(roots: dict[str, Any], but: Iterable[Any] = ()) -> Found:
    """Find the generators in `roots`, and in all that these hold; see `Walk`. The arguments and names are
    those of `reading.generators.find`."""
    walk, found = Walk(roots, (*KINDS, numpy_random.BitGenerator), [*INSIDE, *but]), Found()
    found.unseen, found.large = walk.unseen, walk.large
    for name, part in walk.found.items():
        base = next((base for base in KINDS if issubclass(type(part), base)), None)
        if base is not None and inherits(part, base, KINDS[base]):
            found[name] = part
        else:  # only user code can save its state
            found.unseen.append(name)
    return found


def _package(generator: Any) -> str:
    return type(generator).__module__.partition(".")[0]


def seed(own: Mapping[str, Any], base_seed: int, number: int) -> None:
    """Seed generators that `find` returned by 64 bits of a hash of both numbers and the name of each. The
    members of a set get the same seed."""
    for name, generator in own.items():
        named = _BATCH.pack(base_seed, number) + name.rstrip("'").encode("utf-8", "surrogatepass")
        _seed(generator, int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "little"))


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
