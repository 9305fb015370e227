"""Make Accelerate and transformers' Trainer keep our loader: `import fastq_loader.integrations.accelerate`.

Runs in the consumer. Accelerate rebuilds a loader from torch's arguments, and wraps it. Once this module is
imported, a loader that it rebuilds from ours has our class, with the same schedule, workers, device and
errors. Accelerate's wrappers stay; only their methods for states are replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import accelerate
import torch.utils.data
from accelerate import data_loader

from fastq_loader import options
from fastq_loader.epoch import resources
from fastq_loader.epoch.fields import Resumable
from fastq_loader.extras.frameworks.installing import assert_active, attributes_of, put
from fastq_loader.extras.prefetcher.prefetcher import Prefetcher
from fastq_loader.loader import DataLoader

KNOWN = (1, 2), (2, 0)

#: Our loader that Accelerate is rebuilding; None outside of that.
_given: ContextVar[DataLoader[Any] | None] = ContextVar("given", default=None)


def prepare(accelerator: Any, *objects: Any) -> Any:
    """Call `accelerator.prepare(*objects)`, and check that loaders of our class keep it.

    The wrapper forwards their methods (`statistics`, `close`, ...). Its `state_dict()` counts the batches
    that it has handed out; `position` counts one batch more, because the wrapper requests one ahead.

    Raises:
        TypeError: an object is a `Prefetcher`, which Accelerate would neither divide nor synchronise.
        AssertionError: Accelerate put another class in place of ours.

    >>> accelerator = accelerate.Accelerator(cpu=True)
    >>> loader = prepare(accelerator, DataLoader(range(8), 2, schedule="dynamic"))
    >>> loader.schedule
    'dynamic'
    """
    for each in objects:
        if isinstance(each, Prefetcher):
            raise TypeError(
                "Accelerate divides DataLoaders among processes, not Prefetchers: prepare the loader "
                "itself, made with DataLoader(..., device=accelerator.device)"
            )
    prepared = accelerator.prepare(*objects)
    results = prepared if len(objects) > 1 else (prepared,)
    for given, result in zip(objects, results, strict=True):
        if isinstance(given, DataLoader):
            assert_active(result)
    return prepared


def _made(dataset: Any, **arguments: Any) -> Any:
    """Replaces torch's `DataLoader` in `accelerate.data_loader`: builds our class where ours is rebuilt."""
    given = _given.get()
    if given is None:
        return torch.utils.data.DataLoader(dataset, **arguments)
    if resources.of(given).saved is not None:
        raise ValueError(
            "a state was loaded into the loader, and would be lost when Accelerate rebuilds it: load it into "
            "the loader that prepare() returns, and do not call skip_first_batches() after that"
        )
    made: Any = type(given).__new__(type(given))  # its constructor may have other arguments
    resolved = options.of(given)
    DataLoader.__init__(
        made, dataset, **{**arguments, **vars(resolved), "errors": resolved.errors or "raise"}
    )
    short_forms = {name: value for name, value in vars(given).items() if name in options.ARGUMENTS}
    vars(made).update({**given.__getstate__(), **vars(made), **short_forms})
    resources.forget(made)
    return made


def _keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function with which Accelerate rebuilds a loader, so that ours keeps its class."""

    @functools.wraps(function)
    def keeps(dataloader: Any, *args: Any, **options: Any) -> Any:
        inner = getattr(dataloader, "base_dataloader", dataloader)
        if not isinstance(inner, DataLoader):
            return function(dataloader, *args, **options)
        stateful = options.pop("use_stateful_dataloader", False)
        if stateful and not isinstance(inner, Resumable):
            raise TypeError(
                f"use_stateful_dataloader=True needs a fastq_loader.StatefulDataLoader, and this is a "
                f"{type(inner).__name__}"
            )
        token = _given.set(inner)
        try:
            made = function(dataloader, *args, **options)
        finally:
            _given.reset(token)
        if stateful:  # where one process loads for all, the others have nothing to save
            loads = not isinstance(made, data_loader.DataLoaderDispatcher) or made.state.process_index == 0
            made.use_stateful_dataloader = loads
        return made

    return keeps


def _adjust(self: Any) -> None:
    """Replaces `DataLoaderDispatcher.adjust_state_dict_for_prefetch`: with our loader, the state is that from
    before the batches that are requested together, one for each process."""
    if not isinstance(self.base_dataloader, DataLoader):
        _adjust_theirs(self)
        return
    together = 1 if self.split_batches or self.submesh_tp else self.state.num_processes
    if self.end_of_dataloader or self.base_dataloader.position.batch % together == 0:
        self._state_before = self.dl_state_dict
    self.dl_state_dict = vars(self).get("_state_before", self.dl_state_dict)


def _update(self: Any) -> None:
    """Replaces `DataLoaderAdapter._update_state_dict`, which is called for every batch: defers an error to
    `state_dict()`, so that loops that never save do not fail. With `use_stateful_dataloader` it raises."""
    try:
        _update_theirs(self)
    except RuntimeError as error:
        if self.use_stateful_dataloader or not isinstance(self.base_dataloader, DataLoader):
            raise
        self.dl_state_dict = error.with_traceback(None)


def _state_dict(self: Any) -> Any:
    """Replaces `DataLoaderAdapter.state_dict`: raises the error that `_update` deferred."""
    if isinstance(self.dl_state_dict, RuntimeError):
        raise self.dl_state_dict
    return self.dl_state_dict


if not KNOWN[0] <= tuple(map(int, accelerate.__version__.split(".")[:2])) < KNOWN[1]:
    raise ImportError(
        f"fastq_loader supports accelerate 1.2 to 1.x, and this is {accelerate.__version__}: it would put "
        "torch's DataLoader in place of ours; divide the data with a DistributedSampler instead"
    )
for _function in (data_loader.prepare_data_loader, data_loader.skip_first_batches):
    put(_keeping(_function), attributes_of(_function))
data_loader.DataLoader = _made
_adjust_theirs = data_loader.DataLoaderDispatcher.adjust_state_dict_for_prefetch
data_loader.DataLoaderDispatcher.adjust_state_dict_for_prefetch = _adjust
_update_theirs = data_loader.DataLoaderAdapter._update_state_dict
data_loader.DataLoaderAdapter._update_state_dict = _update
data_loader.DataLoaderAdapter.state_dict = _state_dict
