"""Validate and resolve arguments that torch lacks, or that this system may not support.

Runs in the consumer: at construction, whenever an argument is set later, and when an iteration begins,
because attributes can be set past `__setattr__`. torch's own arguments are checked by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _DatasetKind

from fastq_loader.device.accelerator import read_device
from fastq_loader.errors import TorchWorkers, warn_user
from fastq_loader.ipc.claim_table import WORKERS
from fastq_loader.reading import datapipes
from fastq_loader.reading.computed import PermutationSampler
from fastq_loader.reading.tolerance import Tolerance, read_errors
from fastq_loader.remote.ray_workers import RayWorkers
from fastq_loader.scheduling.schedules import Dynamic, RoundRobin, Schedule, Window, read_schedule
from fastq_loader.system import calls, pages
from fastq_loader.workers.config import Plan, Rules
from fastq_loader.workers.kinds import Auto, Processes, WorkerKind, read_workers
from fastq_loader.workers.payload import Payload


class Loader(Protocol):
    """Interface of a loader to the modules below it: its arguments, under torch's names, and its runtime
    state (`_resources`). By torch's contract, which wrappers rely on, iterators are made from a loader and
    reset with one."""

    dataset: Any
    num_workers: Any
    prefetch_factor: int | None
    batch_size: int | None
    collate_fn: Any
    generator: Any
    worker_init_fn: Any
    multiprocessing_context: Any
    pin_memory: bool
    pin_memory_device: str
    persistent_workers: bool
    drop_last: bool
    timeout: float
    in_order: bool
    schedule: str | Schedule
    workers: str | WorkerKind
    device: Any
    errors: str | Tolerance
    _dataset_kind: Any
    _IterableDataset_len_called: Any

    @property
    def _auto_collation(self) -> bool: ...
    @property
    def _index_sampler(self) -> Any: ...
    @property
    def _resources(self) -> Any: ...
    def _device_session(self) -> Any: ...
    def _start_engine(self, base_seed: int, shared_seed: int | None) -> Any: ...
    def check_worker_number_rationality(self) -> None: ...


#: Values of the worker arguments in a loader without workers.
WITHOUT_WORKERS = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}
#: The kinds of workers with a short form, such as "processes".
KINDS = (Processes, RayWorkers)


def is_iterable(loader: Loader) -> bool:
    """Whether its dataset is an IterableDataset, which is not read by index."""
    return bool(getattr(loader, "_dataset_kind", None) == _DatasetKind.Iterable)


def is_dynamic(loader: Loader) -> bool:
    """Whether every batch has its own random numbers."""
    return isinstance(read_schedule(loader.schedule), Dynamic)


def saves_generators(loader: Loader) -> bool:
    """Whether workers send the states of their generators with each batch."""
    schedule = read_schedule(loader.schedule)
    return isinstance(schedule, RoundRobin) and schedule.save_generators


def reseeds(loader: Loader) -> bool:
    """Whether generators that are attributes of dataset or collate function are seeded for each batch."""
    schedule = read_schedule(loader.schedule)
    return isinstance(schedule, Dynamic) and schedule.reseed


def rules(loader: Loader) -> Rules:
    """Rules by which its dataset is read."""
    replaces = read_errors(loader.errors, iterable := is_iterable(loader)) is not None and not iterable
    population = _population(loader._index_sampler) if replaces else None
    return Rules(iterable, loader._auto_collation, loader.drop_last, population)


def _population(index_sampler: Any) -> int | None:
    """Number of indices that a sampler chooses from, if these are 0, 1, 2, ...; None if unknown."""
    sampler: Any = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    if type(sampler) is PermutationSampler:
        return sampler.n
    source = {RandomSampler: "data_source", SequentialSampler: "data_source", DistributedSampler: "dataset"}
    return len(getattr(sampler, source[type(sampler)])) if type(sampler) in source else None


def workers(loader: Loader) -> WorkerKind:
    """The kind of workers of a loader.

    Raises:
        TypeError, ValueError, RuntimeError: they cannot be started or replaced; see `check_workers`.
    """
    kind = read_workers(loader.workers, KINDS)
    check_workers(loader, kind)
    return kind


def elsewhere(workers: str | WorkerKind) -> bool:
    """Whether workers of this kind run on other machines.

    Raises:
        TypeError, ValueError: there is no such kind.
    """
    return read_workers(workers, KINDS).is_remote


def check_workers(loader: Loader, kind: WorkerKind) -> None:
    """Raise unless workers of this kind can be started here, and replaced with the loader's dataset.

    Raises:
        RuntimeError: Ray is requested and not installed; or torch's own workers run here, and cannot do what
            an argument requires.
        TypeError: the workers of the multiprocessing context are not processes.
        ValueError: there are too many, or the dataset does not allow workers to be replaced.
    """
    check_auto(loader, read_schedule(loader.schedule))
    number = getattr(loader, "num_workers", 0)
    if not number:
        return
    if lacking := calls.missing():
        _check_torchs(loader, kind, lacking)
        return
    context = getattr(loader, "multiprocessing_context", None)
    process = getattr(context, "Process", None)
    if isinstance(process, type) and not issubclass(process, BaseProcess):
        raise TypeError(
            f"multiprocessing_context={context!r} starts workers as {process.__module__}."
            f"{process.__qualname__}, which is no process. Workers need processes, for their signals and "
            'generators: use "fork", "spawn" or "forkserver", or num_workers=0'
        )
    if missing := kind.missing():
        raise RuntimeError(f"workers={kind} needs {missing}")
    if number > WORKERS:
        raise ValueError(f"num_workers={number} is too many: use at most {WORKERS}")
    if is_iterable(loader) and kind.restarts(iterable=True):
        raise ValueError(
            f"{kind} cannot be used with an IterableDataset: a new worker would read its part from the "
            "beginning. Use max_restarts=0, or a dataset with __getitem__"
        )


def check_auto(loader: Loader, schedule: Schedule) -> None:
    """Raise if the number of workers is chosen automatically, but the batches would depend on it.

    Raises:
        ValueError: they would.
    """
    if not isinstance(getattr(loader, "num_workers", 0), Auto):
        return
    if not isinstance(schedule, Dynamic):
        raise ValueError(
            f"num_workers='auto' cannot go with schedule={schedule}: the random numbers of its batches "
            "depend on how many workers there are. Use schedule='dynamic', where they do not, or a number; "
            "tune() finds one"
        )
    if is_iterable(loader):
        raise ValueError(
            "num_workers='auto' cannot go with an IterableDataset: each worker reads a part of it, so that "
            "the batches depend on how many there are. Use a number; tune() finds one"
        )


_told: set[str] = set()  # not empty once this process has warned that torch's own workers run


def torchs_own(loader: Loader, asked: str = "") -> str:
    """Name of the missing system call because of which torch's own workers run in place of ours; "" if ours
    run, or no workers at all.

    Args:
        loader: the loader.
        asked: a method whose result does not include torch's workers; if set, a hint says so.
    """
    lacking = calls.missing() if getattr(loader, "num_workers", 0) else ""
    if lacking and asked:
        text = f"{asked}: torch's own workers run here, for lack of {lacking}, and their work is not recorded"
        warn_user(f"{text}. With num_workers=0 it is", TorchWorkers)
    return lacking


def tell_of_torchs(lacking: str) -> None:
    """Warn, once in a process, that torch's own workers run."""
    if not _told:
        _told.add(lacking)
        text = f"With num_workers > 0 torch's own workers run: this system or sandbox lacks {lacking}"
        warn_user(f"{text}. Batches and errors are torch's, and so is the speed", TorchWorkers)


def check_ours(loader: Loader, what: str) -> None:
    """Raise if torch's own workers run for a loader; they cannot do `what`.

    Raises:
        RuntimeError: they run.
    """
    if lacking := torchs_own(loader):
        raise _cannot(loader, what, lacking)


def _cannot(loader: Loader, what: str, lacking: str, remedy: str = "") -> RuntimeError:
    """The error for something that torch's own workers cannot do."""
    return RuntimeError(
        f"{what} cannot go with num_workers={loader.num_workers} here: this system or sandbox lacks "
        f"{lacking}, so torch's own workers run. Use num_workers=0{remedy}"
    )


def _check_torchs(loader: Loader, kind: WorkerKind, lacking: str) -> None:
    """Raise unless torch's own workers support the loader's arguments and its loaded state.

    Raises:
        RuntimeError: they do not.
    """
    device, same = read_device(loader.device), "" if is_iterable(loader) else ", whose batches are the same"
    resources = vars(loader).get("_resources")  # not the property, which would create them
    for asked, argument, remedy in (
        (is_dynamic(loader), f"schedule={loader.schedule!r}", same),
        (kind.is_remote or kind.max_restarts, f"workers={kind}", ", or workers='processes'"),
        (device and (device.target or device.transform), f"device={loader.device!r}", ", or a Prefetcher"),
        (read_errors(loader.errors), f"errors={loader.errors!r}", ", or errors='raise'"),
        (resources and resources.saved, "load_state_dict()", ""),
    ):
        if asked:
            raise _cannot(loader, argument, lacking, remedy)


#: Checks that run when an argument is set.
CHECKS: dict[str, Callable[[Loader, Any], object]] = {
    "num_workers": lambda loader, value: _check_number(value),
    "schedule": lambda loader, value: check_auto(loader, read_schedule(value)),
    "workers": lambda loader, value: check_workers(loader, read_workers(value, KINDS)),
    "device": lambda loader, value: read_device(value),
    "errors": lambda loader, value: read_errors(value, is_iterable(loader)),
}


def _check_number(value: Any) -> None:
    if isinstance(value, str):
        raise ValueError(f"num_workers={value!r} cannot be set: pass it to the constructor, or set a number")


def window(loader: Loader) -> Window:
    """The window: how many batches may be in flight."""
    assert loader.prefetch_factor is not None, "torch's constructor sets it for num_workers > 0"
    return Window.of(
        read_schedule(loader.schedule),
        workers=loader.num_workers,
        prefetch=loader.prefetch_factor,
        iterable=is_iterable(loader),
        memory_bytes=pages.installed(),
    )


def plan(loader: Loader) -> Plan:
    """The plan of its pool of workers."""
    kind = workers(loader)
    return Plan(
        make_pool=kind.make_pool,
        payload=Payload(
            loader.dataset,
            loader.collate_fn,
            datapipes.sharding_init_fn(loader.dataset, loader.worker_init_fn),
            read_errors(loader.errors),
        ),
        rules=rules(loader),
        workers=int(loader.num_workers),
        prefetch=loader.prefetch_factor or 2,
        in_order=loader.in_order,
        dynamic=is_dynamic(loader),
        window=window(loader),
        restarts=kind.restarts(is_iterable(loader)),
        timeout=loader.timeout,
        persistent=loader.persistent_workers,
        context=loader.multiprocessing_context,
        for_device=loader._resources.session is not None,
        save_generators=saves_generators(loader),
        reseed=reseeds(loader),
        grace=kind.grace,
        kept=loader._resources.kept,
    )


def pinning(loader: Loader) -> tuple[bool, str | None]:
    """Whether batches are copied to page-locked memory, and for which type of device. Issues torch's
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
    if accelerator is not None and accelerator.type != "mps":
        return True, accelerator.type
    why = "no accelerator is found, then " if accelerator is None else "not supported on MPS now, "
    warn_user(
        f"'pin_memory' argument is set as true but {why}device pinned memory won't be used.", UserWarning
    )
    return False, None if accelerator is None else accelerator.type
