"""A dataset whose module does at import what modules of users do: it starts pools, draws random numbers and
changes torch's default dtype. For the programs of `end_to_end/test_module_state.py`, not for a test itself.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import edited  # type: ignore[import-not-found]  # in the folder of the program, which edits it between epochs
import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

#: Seconds after which a pool that was not inherited whole counts as hanging.
LIMIT = 20

AT_IMPORT = {
    "environment": os.environ.get("MODULE_STATE"),
    "folder": os.getcwd(),
    "path": list(sys.path),
    "arguments": list(sys.argv),
    "threads": torch.get_num_threads(),
    "worker": repr(get_worker_info()),
}
DRAWN = {"random": random.random(), "numpy": np.random.random(), "torch": torch.rand(1).item()}
DRAWN["torch's seed"] = torch.initial_seed()
torch.set_default_dtype(torch.float64)

RNG = np.random.default_rng()
LOCK = threading.Lock()
FILE = open(os.environ["MODULE_STATE_FILE"], "rb", buffering=0)  # noqa: SIM115
CALLS: list[int] = []
FORKED: list[int] = []
os.register_at_fork(after_in_child=lambda: FORKED.append(os.getpid()))
LOGGER = logging.getLogger(__name__)
LOGGER.addHandler(logging.NullHandler())
THREADS = ThreadPoolExecutor(1)
THREADS.submit(len, "").result()

with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as program:  # ends by SIGTERM, or at its input's end
    program.terminate()
    program.wait(LIMIT)
AT_IMPORT["program"] = program.returncode

with multiprocessing.get_context("fork").Pool(1) as processes:  # which are ended by SIGTERM
    AT_IMPORT["processes"] = processes.map_async(abs, [-1, 2]).get(LIMIT)


@functools.lru_cache
def token() -> bytes:
    return os.urandom(8)


token()

#: Equal in all runs.
EXACT: dict[str, Callable[[int], Any]] = {
    "a counter": lambda index: (CALLS.append(index), len(CALLS))[1],
    "a lock": lambda _: LOCK.acquire(blocking=False),
    "hooks of forks": lambda _: len(FORKED),
    "a logger": lambda _: len(LOGGER.handlers),
    "an edited module": lambda _: edited.VALUE,
    "the default dtype": lambda _: str(torch.get_default_dtype()),
    "numbers after the import": lambda _: (torch.rand(1).item(), random.random(), np.random.random()),
}
#: Forks cannot go on with these, in torch's loader either.
NOT_FORKED: dict[str, Callable[[int], Any]] = {
    "a file": lambda _: FILE.read(4).decode(),
    "a pool of threads": lambda index: THREADS.submit(abs, index).result(LIMIT),
}
#: Random: of these only which are equal.
RANDOM: dict[str, Callable[[int], Any]] = {
    "a generator": lambda _: int(RNG.integers(1 << 60)),
    "a cache": lambda _: token().hex(),
    **{f"{name} at import": lambda _, value=value: value for name, value in DRAWN.items()},
}


class States(Dataset[dict[str, Any]]):
    """What the module's state is at each sample.

    Args:
        forked: whether workers inherit it.
        main: asked for the state of `__main__`.
    """

    def __init__(self, forked: bool, main: Any) -> None:
        self.forked, self.main = forked, main

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        asked = {**EXACT, **RANDOM, **({} if self.forked else NOT_FORKED)}
        return {**AT_IMPORT, **{name: ask(index) for name, ask in asked.items()}, **self.main()}
