"""Crimes with names: what a dataset, a collate function or an init function can do to its loader.

All of it stands at module level, so that it reaches a worker under any start method. A crime is a function of
the index; `CrimeAt` commits it at one index and is an honest dataset of integers otherwise.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tests.support.datasets import Sized

Crime = Callable[[int], Any]

MARK = "as imported"
"""Tests change it in the parent: a forked worker sees the change, a spawned one imports this module anew."""


def segfault(_: int) -> None:
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def kill_itself(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_beside_a_child(_: int) -> None:
    """The child lives on for a while, with all that it has inherited."""
    if not os.fork():
        time.sleep(3)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def exit_with_7(_: int) -> None:
    os._exit(7)


def exit_with_0(_: int) -> None:
    os._exit(0)


def system_exit(_: int) -> None:
    sys.exit(3)


def dawdle(_: int) -> None:
    """Hang, under a name to look for in the stack of a slow worker."""
    time.sleep(3600)


def ignore_sigterm_and_hang(_: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)


def raise_value_error(index: int) -> None:
    raise ValueError(f"sample {index} is broken")


def raise_os_error(index: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"shard-{index}.tar")


def raise_stop_iteration(_: int) -> None:
    raise StopIteration("from inside a sample")


def return_lambda(_: int) -> Any:
    """It cannot be pickled; give it to a loader with `collate_fn=list`."""
    return {"label": 1, "transform": lambda x: x}


@dataclass(eq=False)
class CrimeAt(Sized, Dataset[Any]):
    """`length` integers, a crime at index `at`, `delay` seconds before it."""

    crime: Crime
    at: int
    length: int = 12
    delay: float = 0

    def __getitem__(self, index: int) -> Any:
        if index != self.at:
            return index
        time.sleep(self.delay)
        return self.crime(index)


@dataclass(eq=False)
class CrimeInStream(IterableDataset[int]):
    """A stream of 12 integers with a crime at index `at`."""

    crime: Crime
    at: int

    def __iter__(self) -> Iterator[int]:
        return (self.crime(index) if index == self.at else index for index in range(12))


class CrimeInIter(IterableDataset[int]):
    """A stream that fails before its first sample."""

    def __iter__(self) -> Iterator[int]:
        raise ValueError("no stream to read")


@dataclass(eq=False)
class Slow(Sized, Dataset[int]):
    """Integers that take `seconds` each."""

    length: int
    seconds: float

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


@dataclass(eq=False)
class Rows(Sized, Dataset[torch.Tensor]):
    """Rows of `width` floats, all equal to their index."""

    length: int = 4
    width: int = 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), float(index))


@dataclass(eq=False)
class ManyFields(Sized, Dataset[Any]):
    """A dict of `fields` tensors of `width` floats for each index; field j of sample i is full of i + j."""

    length: int
    fields: int
    width: int

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {f"field{j}": torch.full((self.width,), float(index + j)) for j in range(self.fields)}


def slow_length(index: bytes) -> int:
    """The length of the index, after a while."""
    time.sleep(0.2)
    return len(index)


@dataclass(eq=False)
class CountsPickling(Sized, Dataset[int]):
    """Counts, in the process that pickles it, how often it was pickled."""

    length: int = 4
    pickled: int = 0

    def __getstate__(self) -> dict[str, Any]:
        self.pickled += 1
        return self.__dict__

    def __getitem__(self, index: int) -> int:
        return index


@dataclass(eq=False)
class WorkerReport(CountsPickling):
    """What a worker says about itself; it writes to a file when it is dropped, and whether in a worker."""

    path: str = os.devnull

    def __del__(self) -> None:
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()} {get_worker_info()}\n")

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return {
            "index": index,
            "worker": None if info is None else info.id,
            "pid": os.getpid(),
            "daemon": multiprocessing.current_process().daemon,
            "threads": torch.get_num_threads(),
            "dtype": torch.get_default_dtype(),
            "grad": torch.is_grad_enabled(),
            "mark": MARK,
        }


class FailsToUnpickle(CountsPickling):
    """Reaches no worker: raises where it is unpickled."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ValueError("this dataset does not survive the journey")


def load_inside(inner_workers: int, index: int) -> int:
    """The sum of what a loader inside the worker gives."""
    from fastq_loader import DataLoader

    return int(sum(batch.sum() for batch in DataLoader(Rows(index + 1, 1), num_workers=inner_workers)))


def init_raises(worker: int) -> None:
    raise ValueError(f"worker {worker} cannot start")


def init_raises_in_worker_1(worker: int) -> None:
    if worker == 1:
        init_raises(worker)


def init_exits(_: int) -> None:
    os._exit(5)
