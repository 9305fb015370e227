"""Seeds for the generators that a user's sampler holds.

Runs in the consumer.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable
from typing import Any

import torch
from numpy import random as numpy_random

_SEED = struct.Struct("<qqq")


def seed(own: Iterable[Any], base_seed: int, number: int) -> None:
    """Seed generators that were found in a sampler, each by 64 bits of a hash of both numbers and of its
    place among them. Runs no user code. numpy's get a state derived from the seed."""
    for at, generator in enumerate(own):
        if not can_seed(generator):
            continue
        digest = hashlib.blake2b(_SEED.pack(base_seed, number, at), digest_size=8).digest()
        chosen = int.from_bytes(digest, "little")
        if isinstance(generator, torch.Generator):
            torch.Generator.manual_seed(generator, chosen)
        elif isinstance(generator, random.Random):
            random.Random.seed(generator, chosen)
        elif isinstance(generator, numpy_random.RandomState):
            bits = type(_bits(generator))(chosen)
            generator.set_state(numpy_random.RandomState(bits).get_state(legacy=False))
        else:
            _bits(generator).state = type(_bits(generator))(chosen).state


def can_seed(generator: Any) -> bool:
    """Whether `seed` seeds a generator: not those of devices, nor bit generators of others than numpy."""
    if isinstance(generator, torch.Generator):
        return generator.device.type == "cpu"
    return isinstance(generator, random.Random) or type(_bits(generator)).__module__.startswith("numpy.")


def _bits(generator: Any) -> Any:
    """The bit generator of a generator of numpy's."""
    if isinstance(generator, numpy_random.RandomState):
        return generator._bit_generator
    return getattr(generator, "bit_generator", generator)
