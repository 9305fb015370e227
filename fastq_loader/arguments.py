"""What the arguments beyond torch's may be, alone and together, and what they come to.

Runs in the consumer: at construction, whenever one is set later, and when an iteration begins, because
attributes can be set past `__setattr__`. torch's own arguments are checked by torch.
"""

from __future__ import annotations

import os
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from fastq_loader.device.session import DeviceOptions, read_options
from fastq_loader.errors import check_choice, is_int, warn_user
from fastq_loader.ipc.claim_table import WORKERS
from fastq_loader.memory import arena

if TYPE_CHECKING:
    from fastq_loader.loader import DataLoader

SCHEDULES = ("round_robin", "dynamic")
#: Batches; the table of claims has a word for more than twice as many.
WIDEST_WINDOW = (arena.CLAIMS - WORKERS) // 2 - 1
#: How far a window widens on its own: in its own lengths, in bytes, and in parts of the machine's memory.
_WIDEST, _WIDEST_BYTES, _WIDEST_SHARE = 16, 1 << 30, 16

#: The names of arguments that are checked together. Those of a device are in the order of `read_options`,
#: with values that go with any value of the others.
SCHEDULE = ("schedule", "reorder_window", "max_worker_restarts")
DEVICE = {
    "device": "cpu",
    "device_prefetch": 1,
    "device_transform": None,
    "transform_stream": "consumer",
    "device_buffers": "fresh",
    "pin": "auto",
    "pin_limit_bytes": None,
}


def iterable(loader: DataLoader[Any]) -> bool:
    """Whether its dataset is read in order, and not by index."""
    return bool(getattr(loader, "_dataset_kind", None) == _DatasetKind.Iterable)


def check_workers(loader: DataLoader[Any]) -> None:
    """Raise unless workers can be started here.

    Raises:
        RuntimeError: the system has no memfd.
        TypeError: the context's workers would be no processes.
    """
    if not loader.num_workers:
        return
    if not arena.AVAILABLE:
        raise RuntimeError(
            f"num_workers={loader.num_workers} needs memfd_create, which this system does not have (Linux "
            "has it): use num_workers=0"
        )
    context = loader.multiprocessing_context
    process = getattr(context, "Process", None)
    if isinstance(process, type) and not issubclass(process, BaseProcess):
        raise TypeError(
            f"multiprocessing_context={context!r} starts workers as {process.__module__}."
            f"{process.__qualname__}, which is no process. Workers need processes, for their signals and "
            'generators: use "fork", "spawn" or "forkserver", or num_workers=0'
        )


def check_schedule(loader: DataLoader[Any], **changed: Any) -> None:
    """Raise unless the arguments of `SCHEDULE` can be true, with `changed` in the place of what is set.

    Raises:
        TypeError, ValueError: an argument, with its name, its value and what it may be.
    """
    schedule, window, restarts = [changed.get(name, getattr(loader, name)) for name in SCHEDULE]
    workers = getattr(loader, "num_workers", 0)
    check_choice("schedule", schedule, SCHEDULES)
    if workers > WORKERS:
        raise ValueError(f"num_workers={workers} is too many: use at most {WORKERS}")
    if window is not None and not is_int(window):
        raise TypeError(f"reorder_window={window!r} must be a number of batches, or None")
    if window is not None and not 1 <= window <= WIDEST_WINDOW:
        raise ValueError(f"reorder_window={window} must be from 1 to {WIDEST_WINDOW} batches, or None")
    if not is_int(restarts):
        raise TypeError(f"max_worker_restarts={restarts!r} must be a number of workers")
    if restarts < 0:
        raise ValueError(f"max_worker_restarts={restarts} must not be negative: use 0 for none")
    if restarts and workers and iterable(loader):
        raise ValueError(
            f"max_worker_restarts={restarts} cannot be kept with an IterableDataset: a new worker would "
            "read its part from the beginning. Use max_worker_restarts=0, or a dataset with __getitem__"
        )


def check_device_argument(name: str, value: Any) -> None:
    """Raise what `read_options` raises for a value that goes with no other: they are set one after the
    other."""
    read_options(*{**DEVICE, name: value}.values())


def device_options(loader: DataLoader[Any]) -> DeviceOptions | None:
    """What the arguments of `DEVICE` come to; None: batches stay on the host.

    Raises:
        what `read_options` raises.
    """
    return read_options(*[getattr(loader, name) for name in DEVICE])


def window(loader: DataLoader[Any]) -> tuple[int, int, int, int]:
    """Least and widest number of batches under way, the bytes up to which it widens, and how many batches
    are asked for together."""
    assert loader.prefetch_factor is not None, "torch's constructor sets it for num_workers > 0"
    workers, ahead = loader.num_workers, loader.prefetch_factor * loader.num_workers
    if loader.schedule != "dynamic" or iterable(loader):
        size = ahead if loader.reorder_window is None else loader.reorder_window
        return size, size, 0, 1
    if loader.reorder_window is not None:
        # One batch in work and the next one stay with every worker while a group is asked for.
        group = min(max(loader.reorder_window - 2 * workers, 1), workers)
        return loader.reorder_window, loader.reorder_window, 0, group
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    widest = min(_WIDEST * ahead, WIDEST_WINDOW)
    return ahead + workers, widest, min(_WIDEST_BYTES, memory // _WIDEST_SHARE), workers


def pinning(loader: DataLoader[Any]) -> tuple[bool, str | None]:
    """Whether to copy batches into page-locked memory, and the type of device that it is for; with torch's
    warnings."""
    if not loader.pin_memory:
        return False, None
    if loader.pin_memory_device:
        warn_user(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{loader.pin_memory_device}'.",
            UserWarning,
        )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        warn_user(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            UserWarning,
        )
        return False, None
    if accelerator.type == "mps":
        warn_user(
            "'pin_memory' argument is set as true but not supported on MPS now, "
            "device pinned memory won't be used.",
            UserWarning,
        )
        return False, "mps"
    return True, accelerator.type
