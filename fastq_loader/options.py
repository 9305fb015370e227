"""Validate and resolve arguments that torch lacks, or that this system may not support.

Runs in the consumer: at construction, whenever an argument is set later, and when an iteration begins, as
torch's arguments, on which ours depend, may have changed. torch's own arguments are checked by torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _DatasetKind

from fastq_loader.device.accelerator import ToDevice, read_device
from fastq_loader.errors import TorchWorkers, warn_user
from fastq_loader.ipc.claim_table import WORKERS
from fastq_loader.reading import datapipes
from fastq_loader.reading.computed import is_computed
from fastq_loader.reading.tolerance import Tolerance, read_errors
from fastq_loader.scheduling.schedules import Dynamic, RoundRobin, Schedule, Window, read_schedule
from fastq_loader.system import calls, pages, torch_patches
from fastq_loader.workers.config import Plan, Rules
from fastq_loader.workers.kinds import Auto, Processes, WorkerKind, read_workers
from fastq_loader.workers.payload import Payload

#: A loader, to the modules below ours: torch's arguments, under torch's names. By torch's contract, which
#: wrappers rely on, iterators are made from a loader and reset with one.
Loader: TypeAlias = torch.utils.data.DataLoader[Any]

#: Values of the worker arguments in a loader without workers.
WITHOUT_WORKERS = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}


@dataclass(frozen=True)
class Options:
    """The arguments that torch lacks, resolved. Made by the constructor of a loader, and immutable.

    A loader has the arguments as attributes, too, for frameworks that rebuild it from them. But a subclass
    may use these names for something else, such as the device of a model. So nothing reads the attributes.
    """

    schedule: Schedule
    device: ToDevice | None
    errors: Tolerance | None
    workers: WorkerKind

    @property
    def is_dynamic(self) -> bool:
        """Whether every batch has random numbers of its own."""
        return isinstance(self.schedule, Dynamic)


#: The arguments that torch lacks, in the order in which they are read, and how each is read for a loader.
ARGUMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "schedule": lambda loader, value: read_schedule(value),
    "device": lambda loader, value: read_device(value),
    "errors": lambda loader, value: read_errors(value, is_iterable(loader)),
    "workers": lambda loader, value: read_workers(value),
}
#: The attributes of a loader that are checked when they are assigned.
ASSIGNED = {"num_workers", *ARGUMENTS}
#: Options of a loader without the keywords.
_NONE = Options(RoundRobin(), None, None, Processes())


def of(loader: Any) -> Options:
    """The options of a loader; the defaults if its constructor has not run, which frameworks may skip."""
    options: Options = vars(loader).get("_options", _NONE)
    return options


def _with_arguments(loader: Loader, arguments: Mapping[str, Any]) -> Options:
    """The options of a loader with other values of some arguments, each of which is checked by itself.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    given = {name: read(loader, arguments[name]) for name, read in ARGUMENTS.items() if name in arguments}
    return replace(of(loader), **given)


def assigned(loader: Loader, name: str, value: Any) -> None:
    """Change an option because an attribute of its name is being assigned.

    Does nothing if the loader's class uses this name for something of its own, as it may with torch's loader:
    it defines the name, or one of its methods assigns it, before or after `super().__init__()`.

    Raises:
        TypeError, ValueError, RuntimeError: it is invalid, or cannot be used with the others.
    """
    if name == "num_workers":
        if isinstance(value, str):
            raise ValueError(
                f"num_workers={value!r} cannot be set: pass it to the constructor, or set a number"
            )
    elif _is_in_own_method(loader):
        vars(loader)["_own_names"] = vars(loader).get("_own_names", frozenset()) | {name}
    elif not is_own_name(loader, name):
        options = _with_arguments(loader, {name: value})
        check_workers(loader, options)
        vars(loader)["_options"] = options


def put(loader: Any, arguments: Mapping[str, Any]) -> None:
    """Set arguments of a new loader, also those that torch lets only its constructor set. They are not
    checked against each other."""
    for name, value in arguments.items():
        if name not in ARGUMENTS or not is_own_name(loader, name):
            object.__setattr__(loader, name, value)
    vars(loader)["_options"] = _with_arguments(loader, arguments)


def is_own_name(loader: Loader, name: str) -> bool:
    """Whether a loader's class uses the name of an option for something of its own."""
    defined = any(name in vars(kind) for kind in _subclasses(type(loader)))
    return defined or name in vars(loader).get("_own_names", ())


def _subclasses(kind: type) -> Iterator[type]:
    """The classes of a loader that are neither ours nor torch's."""
    for each in kind.__mro__:
        if not each.__module__.startswith(("fastq_loader.", "torch.utils.data.")):
            yield each


def _is_in_own_method(loader: Loader) -> bool:
    """Whether a method of the loader's own class assigns, directly or through wrappers of `__setattr__` as
    Lightning has them: the frames above have the loader as their first argument."""
    names = {name for kind in _subclasses(type(loader)) for name in vars(kind)}
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_argcount:
        code = frame.f_code
        if frame.f_locals.get(code.co_varnames[0]) is not loader:
            return False
        if code.co_name in names and not frame.f_globals["__name__"].startswith("fastq_loader."):
            return True
        frame = frame.f_back
    return False


def is_iterable(loader: Loader) -> bool:
    """Whether its dataset is iterable, not map-style."""
    return bool(getattr(loader, "_dataset_kind", None) == _DatasetKind.Iterable)


def rules(loader: Loader, errors: Tolerance | None) -> Rules:
    """Rules by which its dataset is read."""
    iterable = is_iterable(loader)
    population = None if errors is None or iterable else _population(loader._index_sampler)
    return Rules(iterable, loader._auto_collation, loader.drop_last, population)


def _population(index_sampler: Any) -> int | None:
    """Number of indices that a sampler chooses from, if these are 0, 1, 2, ...; None if unknown."""
    sampler: Any = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    if is_computed(sampler):
        return sampler.population  # type: ignore[no-any-return]
    source = {RandomSampler: "data_source", SequentialSampler: "data_source", DistributedSampler: "dataset"}
    return len(getattr(sampler, source[type(sampler)])) if type(sampler) in source else None


def check_workers(loader: Loader, options: Options, resumes: bool = False) -> None:
    """Raise unless a loader's workers can be started here, and replaced with its dataset.

    Args:
        loader: the loader.
        options: its options, or those that it is to get.
        resumes: whether the next epoch goes on from a loaded state.

    Raises:
        RuntimeError: Ray is requested and not installed; or torch's own workers run here, and cannot do what
            an argument requires.
        TypeError: the number of workers or `prefetch_factor` is no integer, or the workers of the
            multiprocessing context are not processes.
        ValueError: there are too many, the dataset does not allow workers to be replaced, or `device` does
            not go with workers.
    """
    kind = options.workers
    number = getattr(loader, "num_workers", 0)
    if isinstance(number, Auto):
        _check_auto(loader, options.schedule)
    if not number:
        return
    _check_integer("num_workers", number, "os.cpu_count() // 2")
    _check_integer("prefetch_factor", getattr(loader, "prefetch_factor", None) or 2, "2")
    if options.device is not None:
        options.device.check_workers()
    if _lacking(loader):
        _check_torchs(loader, options, resumes)
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


def _check_integer(name: str, value: Any, example: str) -> None:
    """Raise if an argument is no integer: a quotient of CPUs is a float, which torch would refuse later."""
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} must be an integer, such as {example}")


def _check_auto(loader: Loader, schedule: Schedule) -> None:
    """Raise if the number of workers is chosen automatically, but the batches would depend on it.

    Raises:
        ValueError: they would.
    """
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


_told: set[str] = set()  # hints that were issued in this process


def torchs_own(loader: Loader, resumes: bool = False, asked: str = "") -> str:
    """The reason for which torch's own iterators run in place of ours, as the clause of a text; "" if ours
    run. A hint says so, once in a process, and if a patch has no effect on ours.

    Args:
        loader: the loader.
        resumes: whether the next epoch goes on from a loaded state.
        asked: a method whose result does not include what torch's iterators do; the hint names it.
    """
    patch, reason, remedy = torch_patches.found(), "", ""
    if lacking := _lacking(loader):
        reason, remedy = f"this system or sandbox lacks {lacking}", ". With num_workers=0 it is"
    elif patch and suits_torchs(loader, resumes):
        reason = patch
    if asked and reason:
        text = f"{asked}: torch's own iterators run, and their work is not recorded: {reason}{remedy}"
        warn_user(text, TorchWorkers)
    elif reason:
        _tell(f"torch's own iterators run: {reason}. Batches and errors are torch's, and so is the speed")
    elif patch:
        _tell(
            f"{patch}, which has no effect here: torch's own iterators lack this loader's arguments "
            "(schedule, workers, device or errors) or its loaded state"
        )
    return reason


def suits_torchs(loader: Loader, resumes: bool) -> bool:
    """Whether torch's own iterators have all that the loader needs."""
    return of(loader) == _NONE and not resumes


def _tell(text: str) -> None:
    if text not in _told:
        _told.add(text)
        warn_user(text, TorchWorkers)


def _lacking(loader: Loader) -> str:
    """Name of the thing that workers need and this system lacks; "" without workers."""
    return calls.missing() if getattr(loader, "num_workers", 0) else ""


def check_ours(loader: Loader, what: str, remedy: str = "") -> None:
    """Raise if torch's own workers run for a loader; they cannot do `what`. `remedy`: another one than no
    workers.

    Raises:
        RuntimeError: they run.
    """
    if lacking := _lacking(loader):
        raise RuntimeError(
            f"{what} cannot go with num_workers={loader.num_workers} here: this system or sandbox lacks "
            f"{lacking}, so torch's own workers run. Use num_workers=0{remedy}"
        )


def _check_torchs(loader: Loader, options: Options, resumes: bool) -> None:
    """Raise unless torch's own workers, which run here, support the loader's arguments and its loaded state.

    Raises:
        RuntimeError: they do not.
    """
    kind, device = options.workers, options.device
    same = "" if is_iterable(loader) else ", whose batches are the same"
    for asked, argument, remedy in (
        (options.is_dynamic, f"schedule={options.schedule}", same),
        (kind.is_remote or kind.max_restarts, f"workers={kind}", ", or workers='processes'"),
        (device and (device.target or device.transform), f"device={device}", ", or a Prefetcher"),
        (options.errors, f"errors={options.errors}", ", or errors='raise'"),
        (resumes, "load_state_dict()", ""),
    ):
        if asked:
            check_ours(loader, argument, remedy)


def plan(loader: Loader, for_device: bool = False, kept: dict[str, Any] | None = None) -> Plan:
    """The plan of its pool of workers.

    Args:
        loader: the loader.
        for_device: whether its batches go to a device.
        kept: objects that one pool after the other uses.
    """
    options = of(loader)
    kind, prefetch, iterable = options.workers, loader.prefetch_factor or 2, is_iterable(loader)
    return Plan(
        make_pool=kind.make_pool,
        payload=Payload(
            loader.dataset,
            loader.collate_fn,
            datapipes.sharding_init_fn(loader.dataset, loader.worker_init_fn),
            options.errors,
        ),
        rules=rules(loader, options.errors),
        workers=int(loader.num_workers),
        prefetch=prefetch,
        in_order=loader.in_order,
        dynamic=options.is_dynamic,
        window=Window.of(
            options.schedule,
            workers=loader.num_workers,
            prefetch=prefetch,
            iterable=iterable,
            memory_bytes=pages.installed(),
        ),
        restarts=kind.restarts(iterable),
        timeout=float(loader.timeout) if isinstance(loader.timeout, np.generic) else loader.timeout,
        persistent=loader.persistent_workers,
        context=loader.multiprocessing_context,
        for_device=for_device,
        save_generators=options.schedule.save_generators,
        grace=kind.grace,
        kept={} if kept is None else kept,
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
