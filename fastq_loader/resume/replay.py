"""Replay of one batch: drawn and loaded again as it was, on the calling thread.

Runs in the consumer. A copy of the loader without workers, with copies of its samplers and generators, is
resumed right before the batch, so the loader, its samplers and the process's generators do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from fastq_loader import arguments
from fastq_loader.errors import is_int, warn_user
from fastq_loader.reading import generators
from fastq_loader.resume import samplers, saved
from fastq_loader.resume.order import Stopped
from fastq_loader.resume.record import EpochRecord, Position, Saved
from fastq_loader.scheduling.progress import Progress

#: Attributes that are copied with a loader, because a draw changes them.
_DRAWING = ("sampler", "batch_sampler", "generator")


def replay(loader: Any, batch: int, epoch: int | None, state: Mapping[str, Any] | None) -> Any:
    """See `DataLoader.replay`."""
    if arguments.is_iterable(loader):
        raise TypeError("replay() needs a map-style dataset: an iterable one is read from its beginning")
    if not is_int(batch) or batch < 0:
        raise ValueError(f"batch={batch!r} must be the number of a batch, 0 or more")
    if state is None:
        arguments.check_ours(loader, "replay() without a state")
    again = _alone(loader)
    begun = _remembered(loader, epoch) if state is None else _of_state(state, again, epoch)
    asked = samplers.asked_sampler(again._index_sampler) is not None
    head = begun.progress.head if asked else batch
    if head > batch:
        raise ValueError(
            f"batch={batch}: the sampler has state_dict(), and this state was saved after batch "
            f"{head - 1}: use a state that was saved before the batch"
        )
    going_on = replace(begun, progress=Progress(head), position=Position(begun.position.epoch, head, head))
    again._resources.place = None, going_on
    if not arguments.is_dynamic(loader):
        warn_user(
            "This batch has the same samples as before, but other random numbers: with a round_robin "
            "schedule they depend on the batches that the worker had loaded before. With "
            "schedule='dynamic' each batch has random numbers of its own.",
            UserWarning,
        )
    with generators.put_back():
        iterator = iter(again)
        for _ in islice(iterator._sampler_iter, batch - head):
            continue
        iterator._order.progress = Progress(batch)
        found = next(iterator, None)
    if again.position.batch != batch + 1:
        raise IndexError(f"batch={batch}: the epoch had fewer batches, or this one was left out")
    return found


def _alone(loader: Any) -> Any:
    again = copy.copy(loader)
    drawing = {name: vars(loader).get(name) for name in _DRAWING}
    try:
        copied = copy.deepcopy(drawing, {id(loader.dataset): loader.dataset})
    except Exception as error:
        raise TypeError(f"replay() cannot copy the loader's sampler: {error}") from error
    vars(again).update({**arguments.WITHOUT_WORKERS, **copied, "_iterator": None})
    if again.errors != "raise":  # its bad samples were counted, limited and written down before
        vars(again)["errors"] = replace(again.errors, limit=None, path=None)
    return again


def _remembered(loader: Any, epoch: int | None) -> Saved:
    """The start of one of the last epochs, as a state saved before its first batch."""
    records: dict[int, EpochRecord] = {record.began.epoch: record for record in loader._resources.begun}
    record = records.get(max(records, default=0) if epoch is None else epoch)
    if record is None:
        raise ValueError(
            f"epoch={epoch!r} is not one of the epochs that this loader remembers "
            f"({', '.join(map(str, records))}): pass a state= that was saved in it"
        )
    if record.order.traits.asked is not None:
        raise ValueError("the sampler has state_dict(): pass a state= that was saved before the batch")
    order = Stopped(copy.deepcopy(record.order.beginning), *record.order.drawn[:2])
    return Saved({}, record.began, record.base_seed, resumes=True, order=order)


def _of_state(state: Mapping[str, Any], again: Any, epoch: int | None) -> Saved:
    found = saved.read(state, again, ignore=("num_workers",))
    if not found.resumes or epoch not in (None, found.position.epoch):
        where = "in the middle of" if found.resumes else "before"
        raise ValueError(
            f"epoch={epoch!r}: this state was saved {where} epoch {found.position.epoch}; use one that was "
            "saved in the middle of the epoch of the batch"
        )
    return found
