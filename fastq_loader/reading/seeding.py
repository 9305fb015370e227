"""Seeds of the random number generators while a dataset is read.

Runs in workers, and in the consumer with num_workers=0. Owns the two ways in which the generators follow from
the base seed that the consumer drew. One is torch's, to the bit: a seed for each worker
(`torch/utils/data/_utils/worker.py`). The other is a seed for each batch, which depends neither on who loads
it nor on what was loaded before.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import struct
from types import ModuleType
from typing import Any

import torch

# numpy imports this module when it is first used: in every forked worker, for 11 ms each.
from numpy import random as numpy_random

from fastq_loader.reading import generators


def _seed_torch(seed: int) -> None:
    """torch.manual_seed, for the devices that this build of torch knows.

    For every kind of device that is not in use yet, known or not, torch formats the stack of the call, and
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
    # torch's own condition: forked from a process that uses CUDA, this one cannot.
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
    """The seed of an iteration: exactly one `int64.random_()`, as torch draws it."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


_BATCH, _SEEDS = struct.Struct("<qq"), struct.Struct("<QQI")


def seed_batch(base_seed: int, batch: int) -> int:
    """Seed torch's CPU generator, `random` and numpy's global generator for one batch.

    The seeds are parts of a BLAKE2b hash of both numbers, so neighbouring batches have nothing in common:
    64 bits for torch and for `random`, and 32 for numpy. More would have to be an array, for which numpy's
    legacy generator needs up to 160 us (6 us for an integer). Generators of devices are left alone: to seed
    one that is not in use yet costs torch milliseconds.

    Returns:
        torch's seed, which is `worker_info.seed` while the batch is loaded.
    """
    digest = hashlib.blake2b(_BATCH.pack(base_seed, batch), digest_size=_SEEDS.size).digest()
    for_torch, for_random, for_numpy = _SEEDS.unpack(digest)
    torch.default_generator.manual_seed(for_torch)
    random.seed(for_random)
    numpy_random.seed(for_numpy)
    return int(for_torch)


def put_back() -> generators.restored:
    """A context that leaves the three generators as they were, whatever is drawn or seeded in it."""
    return generators.restored(generators.GLOBAL.values())


def states(*roots: Any) -> tuple[Any, ...]:
    """What user code draws from, to be compared: the state of the three generators, and of those that `roots`
    (a dataset, a collate function) or something in them has as attributes."""
    own = generators.find({str(number): root for number, root in enumerate(roots)})
    return tuple(map(_comparable, [*generators.GLOBAL.values(), *own.values()]))


def _comparable(generator: Any) -> Any:
    # A class of the user's may have more of a state than its base says.
    whole = isinstance(generator, (torch.Generator, ModuleType))
    try:
        return pickle.dumps(generators.state_of(generator) if whole else generator)
    except Exception:  # a class of the user's: nobody can tell whether it was drawn from
        return object()
