"""Validate and resolve arguments that torch lacks, or that this system may not support.

Runs in the consumer: at construction, and when an iteration begins, as torch's arguments, on which ours
depend, may have changed. torch's own arguments are checked by torch.
"""

from __future__ import annotations

import dis
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data.dataloader import _DatasetKind

from fastq_loader.device.accelerator import read_device
from fastq_loader.errors import TorchWorkers, warn_user
from fastq_loader.ipc.claim_table import WORKERS
from fastq_loader.reading import datapipes, generators
from fastq_loader.reading.error_policy import read_errors
from fastq_loader.reading.fetch import Fetcher
from fastq_loader.scheduling.schedules import LIKE_TORCHDATA, RoundRobin, Window, read_schedule
from fastq_loader.system import calls, pages, torch_patches
from fastq_loader.workers.config import Options, Plan, Rules
from fastq_loader.workers.kinds import Processes, read_workers
from fastq_loader.workers.payload import Payload

#: A loader, to the modules below ours: torch's arguments, under torch's names. By torch's contract, which
#: wrappers rely on, iterators are made from a loader and reset with one.
Loader: TypeAlias = torch.utils.data.DataLoader[Any]

#: Values of the worker arguments in a loader without workers.
WITHOUT_WORKERS = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}


#: The arguments that torch lacks, in the order in which they are read, and how each is read for a loader.
ARGUMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "schedule": lambda loader, value: read_schedule(value),
    "device": lambda loader, value: read_device(value),
    "errors": lambda loader, value: read_errors(value, is_iterable(loader)),
    "workers": lambda loader, value: read_workers(value),
}
#: The attribute of a loader that has its options. Users extend the class: no name of ours may be theirs.
ATTRIBUTE = "_fastq_loader_options"
#: Options of a loader without the keywords.
_NONE = Options(RoundRobin(), None, None, Processes())


def of(loader: Any) -> Options:
    """The options of a loader; the defaults if its constructor has not run, which frameworks may skip."""
    options: Options = vars(loader).get(ATTRIBUTE, _NONE)
    return options


#: A class of loaders → the names of our arguments that it uses for something of its own.
_own_names: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def own_names(kind: type) -> frozenset[str]:
    """The names of our arguments that a class of loaders uses for something of its own, as it may with
    torch's loader: it defines the name, or one of its methods assigns it to an attribute."""
    if kind in _own_names:
        return _own_names[kind]
    found: set[str] = set()
    for each in kind.__mro__:
        if each.__module__.startswith(("fastq_loader.", "torch.utils.data.")):
            continue
        found |= vars(each).keys()
        for member in vars(each).values():
            setter: Any = member.fset if isinstance(member, property) else getattr(member, "__func__", member)
            code = getattr(inspect.unwrap(setter), "__code__", None)
            if code is not None and not ARGUMENTS.keys().isdisjoint(code.co_names):
                found |= {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}
    _own_names[kind] = names = frozenset(found & ARGUMENTS.keys())
    return names


def put(loader: Any, arguments: Mapping[str, Any]) -> None:
    """Set arguments of a new loader, also those that torch lets only its constructor set. Each is checked by
    itself, and they are not checked against each other.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    given = {name: read(loader, arguments[name]) for name, read in ARGUMENTS.items() if name in arguments}
    for name, value in arguments.items():
        if name not in own_names(type(loader)):
            object.__setattr__(loader, name, value)
    vars(loader)[ATTRIBUTE] = replace(of(loader), **given)


def is_iterable(loader: Loader) -> bool:
    """Whether its dataset is iterable, not map-style."""
    return bool(getattr(loader, "_dataset_kind", None) == _DatasetKind.Iterable)


def rules(loader: Loader) -> Rules:
    """Rules by which its dataset is read."""
    return Rules(is_iterable(loader), loader._auto_collation, loader.drop_last)


def fetchers(loader: Loader) -> Callable[..., Fetcher]:
    """The function that makes the fetchers of its dataset."""
    errors = of(loader).errors
    return Fetcher if errors is None else errors.fetchers(loader._index_sampler, is_iterable(loader))


def check_workers(loader: Loader) -> None:
    """Raise if a loader's workers could not be started on any system, or not be replaced with its dataset.

    Raises:
        RuntimeError: Ray is requested and not installed.
        TypeError: the number of workers or `prefetch_factor` is no integer, or the workers of the
            multiprocessing context are not processes.
        ValueError: there are too many, or the dataset does not allow workers to be replaced.
    """
    options, number = of(loader), getattr(loader, "num_workers", 0)
    if not number:
        return
    _check_integer("num_workers", number, "os.cpu_count() // 2")
    _check_integer("prefetch_factor", getattr(loader, "prefetch_factor", None) or 2, "2")
    context = getattr(loader, "multiprocessing_context", None)
    process = getattr(context, "Process", None)
    if isinstance(process, type) and not issubclass(process, BaseProcess):
        raise TypeError(
            f"multiprocessing_context={context!r} starts workers as {process.__module__}."
            f"{process.__qualname__}, which is no process. Workers need processes, for their signals and "
            'generators: use "fork", "spawn" or "forkserver", or num_workers=0'
        )
    if missing := options.workers.missing():
        raise RuntimeError(f"workers={options.workers} needs {missing}")
    if number > WORKERS:
        raise ValueError(f"num_workers={number} is too many: use at most {WORKERS}")
    if is_iterable(loader) and options.workers.restarts(iterable=True):
        raise ValueError(
            f"{options.workers} cannot be used with an IterableDataset: a new worker would read its part "
            "from the beginning. Use max_restarts=0, or a dataset with __getitem__"
        )


def _check_integer(name: str, value: Any, example: str) -> None:
    """Raise if an argument is no integer: a quotient of CPUs is a float, which torch would refuse later."""
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} must be an integer, such as {example}")


_issued: set[str] = set()  # hints that were issued in this process


def torchs_own(loader: Loader, resumes: bool = False, asked: str = "") -> str:
    """The reason for which torch's own iterators run in place of ours, as the clause of a text; "" if ours
    run. A hint says so, once in a process, and if a patch has no effect on ours.

    Args:
        loader: the loader.
        resumes: whether the next epoch goes on from a loaded state.
        asked: a method whose result does not include what torch's iterators do; the hint names it.

    Raises:
        RuntimeError: torch's own workers run here, and lack what an argument or the loaded state requires.
    """
    patch, reason, remedy = torch_patches.found(), "", ""
    if getattr(loader, "num_workers", 0) and (lacking := calls.missing()):
        _check_torchs(loader, lacking, resumes)
        reason, remedy = f"this system or sandbox lacks {lacking}", ". With num_workers=0 it is"
    elif patch and of(loader) == _NONE and not resumes:
        reason = patch
    if asked and reason:
        text = f"{asked}: torch's own iterators run, and their work is not recorded: {reason}{remedy}"
        warn_user(text, TorchWorkers)
    elif reason:
        _issue(f"torch's own iterators run: {reason}. Batches and errors are torch's, and so is the speed")
    elif patch:
        _issue(
            f"{patch}, which has no effect here: torch's own iterators lack this loader's arguments "
            "(schedule, workers, device or errors) or its loaded state"
        )
    return reason


def _issue(text: str, kind: type[Warning] = TorchWorkers) -> None:
    if text not in _issued:
        _issued.add(text)
        warn_user(text, kind)


def _check_torchs(loader: Loader, lacking: str, resumes: bool) -> None:
    """Raise unless torch's own workers, which run because the system lacks something, support the loader's
    arguments and its loaded state."""
    options = of(loader)
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
            raise RuntimeError(
                f"{argument} cannot go with num_workers={loader.num_workers} here: this system or sandbox "
                f"lacks {lacking}, so torch's own workers run. Use num_workers=0{remedy}"
            )


def plan(
    loader: Loader,
    for_device: bool = False,
    saves: bool = False,
    grace: float = 0.0,
    interpreters: dict[str, Any] | None = None,
) -> Plan:
    """The plan of its pool of workers.

    Args:
        loader: the loader.
        for_device: whether its batches go to a device.
        saves: whether workers send their states.
        grace: seconds for which workers outlive a signal at least, see `preemption`.
        interpreters: interpreters that one pool after the other forks its workers from.
    """
    options, prefetch, iterable = of(loader), loader.prefetch_factor or 2, is_iterable(loader)
    if saves and options.schedule.save_generators and options.schedule is not LIKE_TORCHDATA:
        roots = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
        if not generators.find(roots)[1]:
            _issue(
                f"save_generators=True: {type(loader.dataset).__name__} or the collate function holds more "
                "than is searched for generators. A state has those in attributes, and in containers of up "
                "to 100 members, three levels deep",
                UserWarning,
            )
    return Plan(
        payload=Payload(
            loader.dataset,
            loader.collate_fn,
            datapipes.sharding_init_fn(loader.dataset, loader.worker_init_fn),
            fetchers(loader),
        ),
        rules=rules(loader),
        options=options,
        workers=int(loader.num_workers),
        prefetch=prefetch,
        in_order=loader.in_order,
        shared_tasks=options.is_dynamic and not iterable,
        window=Window.of(
            options.schedule,
            workers=loader.num_workers,
            prefetch=prefetch,
            iterable=iterable,
            memory_bytes=pages.installed(),
        ),
        timeout=float(loader.timeout) if isinstance(loader.timeout, np.generic) else loader.timeout,
        persistent=loader.persistent_workers,
        context=loader.multiprocessing_context,
        for_device=for_device,
        saves=saves * ("generators" if options.schedule.save_generators else "dataset"),
        grace=max(grace, getattr(options.workers, "grace_seconds", 0.0)),
        interpreters={} if interpreters is None else interpreters,
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
