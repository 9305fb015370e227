"""A training process that ends in the middle of an epoch: where it runs, its loader, and how it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import Dataset

import fastq_loader
from fastq_loader import Processes
from tests.support.far_workers import far

LOADERS: dict[str, dict[str, Any]] = {
    "torch": {},
    "plain": {},
    "busy": {},
    "restarts": {"workers": Processes(max_restarts=2)},
    "busy, restarts": {"workers": Processes(max_restarts=2)},
    "persistent, restarts": {"workers": Processes(max_restarts=2), "persistent_workers": True},
    "dynamic, restarts": {"workers": Processes(max_restarts=2), "schedule": "dynamic"},
    "spawned workers": {"workers": Processes(max_restarts=2), "multiprocessing_context": "spawn"},
    "forkserver's workers": {"workers": Processes(max_restarts=2), "multiprocessing_context": "forkserver"},
    "far": {},
}
WHERE = ("program", "fork", "spawn", "forkserver", "torch.multiprocessing.spawn")
#: Name → exit code.
ENDS = {"return": 0, "raise": 1, "sys.exit": 3, "os._exit": 4, "SIGTERM": -15, "SIGINT": 1, "SIGKILL": -9}


class Samples(Dataset[torch.Tensor]):
    """Large samples, of which those after the first batches may take for ever."""

    def __init__(self, busy: bool) -> None:
        self.busy = busy

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.busy and index >= 8:
            signal.pause()
        return torch.full((50_000,), float(index))


def end(loader: str, how: str) -> None:
    """Hand out one batch, and end this process while loader and iterator live."""
    made = torch.utils.data.DataLoader if loader == "torch" else fastq_loader.DataLoader
    options = {"workers": far()} if loader == "far" else LOADERS[loader]
    # Names that outlive this function: nothing ends them before the process does.
    globals()["alive"] = loading = iter(made(Samples("busy" in loader), 2, num_workers=2, **options))
    assert next(loading).shape == (2, 50_000)
    print("one batch was handed out", flush=True)
    if how == "raise":
        raise ValueError("on purpose")
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(4)
    if how.startswith("SIG"):
        signal.raise_signal(getattr(signal, how))
        for _ in count():  # SIGINT is noticed between two steps
            time.sleep(0.01)


def _rank(_: int, loader: str, how: str) -> None:
    end(loader, how)


def run(where: str, loader: str, how: str) -> None:
    """End there, and print the exit code of the process that has ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if where == "program":
        end(loader, how)
    elif where == "torch.multiprocessing.spawn":
        process: Any = torch.multiprocessing.spawn(_rank, (loader, how), nprocs=1, join=False)
        process.processes[0].join()
        for file in process.error_files:  # where its text waits for a caller who joins all ranks
            with suppress(FileNotFoundError):
                os.unlink(file)
        print("exit code", process.processes[0].exitcode)
    else:
        target: Callable[..., None] = end
        child: Any = multiprocessing.get_context(where).Process(target=target, args=(loader, how))  # type: ignore[attr-defined]
        child.start()
        child.join()
        print("exit code", child.exitcode)
