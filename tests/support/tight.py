"""What scripts that are hard on memory and descriptors share: `from tests.support.tight import *`.

Importable, so that it reaches workers that are spawned; the modules that scripts use come along.
"""

# ruff: noqa: F401
from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.utils.data
from torch.utils.data import Dataset, TensorDataset

import fastq_loader
from fastq_loader import empty
from tests.conftest import held_memory, open_descriptors
from tests.support.datasets import Sized, identity
from tests.support.forking import end_of, fork

OURS = fastq_loader.DataLoader
BOTH = (torch.utils.data.DataLoader, OURS)
#: For loaders of what a script defines, or that is measured in this process: not the default of every Python.
FORK = {"multiprocessing_context": "fork"}


def memfd_bytes() -> int:
    """Bytes of pages behind the shared memory of our loaders."""
    found = [os.stat(fd) for fd, target in open_descriptors().items() if "memfd:fastq_loader" in target]
    return sum({status.st_ino: status.st_blocks * 512 for status in found}.values())


def limited(extra: int) -> None:
    """Leave this process, and those that it starts, `extra` MB of address space beyond what it has now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (extra << 20), resource.RLIM_INFINITY))


def take_all_descriptors() -> list[int]:
    """As many as this process may still open."""
    mine: list[int] = []
    with suppress(OSError):
        while True:
            mine.append(os.dup(0))
    return mine


def is_number(batch: torch.Tensor, number: int) -> bool:
    """Whether all of a batch is number + 1: pages that went back to the system read as 0."""
    return bool((batch == number + 1).numpy().all())


@dataclass(eq=False)
class Numbered(Sized, Dataset[torch.Tensor]):
    """Samples of so many bytes, or as many as a function of the index says, each full of its index + 1."""

    length: int
    nbytes: int | Callable[[int], int]

    def __getitem__(self, index: int) -> torch.Tensor:
        nbytes = self.nbytes(index) if callable(self.nbytes) else self.nbytes
        return torch.full((nbytes // 8,), index + 1)


@dataclass(eq=False)
class Big(Sized, Dataset[torch.Tensor]):
    """Batches of `mega` MB, each with its number in every page."""

    mega: int
    length: int

    def __getitem__(self, index: int) -> torch.Tensor:
        batch = torch.empty(self.mega << 20, dtype=torch.uint8)
        batch[::4096] = index + 1
        return batch


def right(batch: torch.Tensor, number: int) -> bool:
    return int(batch[0]) == int(batch[-4096]) == number + 1
