"""A training process that ends in the middle of an epoch: where it runs, its loader, and how it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
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
    "restarts": {"workers": Processes(max_restarts=2)},
    "plain": {},
    "busy": {},
    "busy, restarts": {"workers": Processes(max_restarts=2)},
    "persistent, restarts": {"workers": Processes(max_restarts=2), "persistent_workers": True},
    "dynamic, restarts": {"workers": Processes(max_restarts=2), "schedule": "dynamic"},
    "spawned workers": {"workers": Processes(max_restarts=2), "multiprocessing_context": "spawn"},
    "forkserver's workers": {"workers": Processes(max_restarts=2), "multiprocessing_context": "forkserver"},
    "far": {},
    "torch": {},
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


def run(where: str, loader: str, ends: list[str]) -> None:
    """Start a process for each end, and print the exit codes when all have ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    children: dict[str, Any] = {}
    files: list[str] = []  # where a text waits for a caller who joins all ranks
    for how in ends:
        if where == "program":
            children[how] = subprocess.Popen([sys.executable, "-m", "tests.support.ends", loader, how])
        elif where == "torch.multiprocessing.spawn":
            ranks: Any = torch.multiprocessing.spawn(_rank, (loader, how), nprocs=1, join=False)
            children[how] = ranks.processes[0]
            files += ranks.error_files
        else:
            context: Any = multiprocessing.get_context(where)
            children[how] = context.Process(target=end, args=(loader, how))
            children[how].start()
    codes = {}
    for how, child in children.items():
        if where == "program":
            codes[how] = child.wait()
        else:
            child.join()
            codes[how] = child.exitcode
    for file in files:
        with suppress(FileNotFoundError):
            os.unlink(file)
    print("exit codes", codes)


if __name__ == "__main__":
    end(*sys.argv[1:])
