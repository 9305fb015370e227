"""Seeds of the random number generators inside workers.

Runs in workers. Owns the rule by which a worker's generators follow from the base seed that the
consumer drew, which is torch's (`torch/utils/data/_utils/worker.py`), to the bit.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed torch, `random` and numpy's global generator as torch's worker loop does.

    torch and `random` get `base_seed + worker_id`. numpy gets four 32-bit words: torch's
    `_generate_state(base_seed, worker_id)` is numpy's own `SeedSequence` over the entropy below.

    Returns:
        `base_seed + worker_id`, which is `worker_info.seed`.
    """
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    entropy = [worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
    np.random.seed(np.random.SeedSequence(entropy).generate_state(4))
    return seed


def capture() -> tuple[Any, ...]:
    """The state of the three generators, for `rewind`."""
    return random.getstate(), torch.get_rng_state(), np.random.get_state()


def rewind(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Continue after an abandoned epoch with a stream that does not depend on how far it came.

    How many batches of an epoch that the consumer broke off were fetched is a matter of timing, and so
    is the generators' state after it. The next epoch therefore starts from the state at the beginning of
    the abandoned one, stepped once: each generator is seeded with a draw from that state.

    Returns:
        The new state, as `capture` would give it.
    """
    python, torch_state, numpy = state
    random.setstate(python)
    random.seed(random.getrandbits(64))
    torch.set_rng_state(torch_state)
    torch.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    np.random.set_state(numpy)
    np.random.seed(np.random.randint(0, 2**32, size=4, dtype=np.uint32))
    return capture()
