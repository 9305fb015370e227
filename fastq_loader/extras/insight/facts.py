"""The facts about a run that follow from a loader's arguments.

Runs in the consumer, on the thread that asks for a diagnosis. Reads names of classes and functions, and runs
no code of the user's.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data._utils.collate import default_collate, default_convert

from fastq_loader.api import options
from fastq_loader.extras.insight.model import LoaderFacts, RunProfile, Setting

#: Types whose instances have a `__qualname__` that can be read without running user code.
_FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType)


def facts(loader: Any) -> RunProfile:
    """The profile of a loader before anything of a run is added."""
    mine, sampler = options.of(loader), loader._index_sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    iterable = options.is_iterable(loader)
    any_worker = not loader.in_order or (mine.is_dynamic and not iterable)
    arguments = LoaderFacts(
        iterable=iterable,
        persistent=loader.persistent_workers,
        in_order=loader.in_order,
        shuffles=type(sampler) is RandomSampler,
        sampler=type(sampler).__qualname__,
        collate=_name(loader.collate_fn),
        transform=_name(mine.device and mine.device.transform),
        pins=loader.pin_memory,
        batch_size=loader.batch_size or 0,
    )
    setting = Setting(0, loader.prefetch_factor or 2, any_worker, mine.schedule.window)
    return RunProfile(setting=setting, loader=arguments)


def _name(function: Any) -> str:
    """The name of a user's function; "" for torch's own functions."""
    if any(function is each for each in (None, default_collate, default_convert)):
        return ""
    kind = type(function)
    return str(function.__qualname__ if kind in _FUNCTIONS else kind.__qualname__)
