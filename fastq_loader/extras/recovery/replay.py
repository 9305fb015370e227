"""Replay of one batch: drawn and loaded again as it was, on the calling thread.

Runs in the consumer. A copy of the loader without workers, with copies of its samplers and generators, is
resumed right before the batch, so the loader, its samplers and the process's generators do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastq_loader import options
from fastq_loader.epoch import resources
from fastq_loader.epoch.epoch import Epoch
from fastq_loader.epoch.fields import Resumable
from fastq_loader.errors import is_int, warn_user
from fastq_loader.extras.bad_samples.policies import Tolerance
from fastq_loader.extras.resume import samplers, saved
from fastq_loader.extras.resume.fields import EpochSnapshot, Saved
from fastq_loader.reading import generators
from fastq_loader.scheduling.progress import Progress

#: Attributes that are copied with a loader, because a draw changes them.
_DRAWING = ("sampler", "batch_sampler", "generator")


def replay(loader: Any, batch: int, epoch: int | None, state: Mapping[str, Any] | None) -> Any:
    """See `DataLoader.replay`."""
    if options.is_iterable(loader):
        raise TypeError("replay() needs a map-style dataset: an iterable one is read from its beginning")
    if not is_int(batch) or batch < 0:
        raise ValueError(f"batch={batch!r} must be the number of a batch, 0 or more")
    if not (state is None or isinstance(loader, Resumable)):
        raise TypeError(f"replay(state=) needs a StatefulDataLoader, and this is a {type(loader).__name__}")
    again = _alone(loader)
    begun = _remembered(loader, epoch) if state is None else _of_state(state, again, epoch)
    asked = samplers.asked_sampler(again._index_sampler) is not None
    head = begun.progress.head if asked else batch
    if head > batch:
        raise ValueError(
            f"batch={batch}: the sampler has state_dict(), and this state was saved after batch "
            f"{head - 1}: use a state that was saved before the batch"
        )
    resources.of(again).current = None, replace(begun, progress=Progress(head))
    if not options.of(loader).is_dynamic:
        warn_user(
            "This batch has the same samples as before, but other random numbers: with a round_robin "
            "schedule they depend on the batches that the worker had loaded before. With "
            "schedule='dynamic' each batch has random numbers of its own.",
            UserWarning,
        )
    with generators.restored():
        iterator = iter(again)
        iterator.skip_to(batch)
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
    vars(again)["_iterator"] = None
    options.put(again, {**options.WITHOUT_WORKERS, **copied})
    errors = options.of(again).errors
    if isinstance(errors, Tolerance):  # its bad samples were counted, limited and written down before
        options.put(again, {"errors": replace(errors, limit=None, path=None)})
    return again


def _remembered(loader: Any, epoch: int | None) -> Saved:
    """The start of one of the last epochs, as a state saved before its first batch."""
    records: dict[int, Epoch] = {record.start.epoch: record for record in resources.of(loader).begun}
    record = records.get(max(records, default=0) if epoch is None else epoch)
    if record is None:
        raise ValueError(
            f"epoch={epoch!r} is not one of the epochs that this loader remembers "
            f"({', '.join(map(str, records))}): pass a state= that was saved in it"
        )
    if samplers.asked_sampler(record.info.sampler) is not None:
        raise ValueError(
            "the sampler has state_dict(): use a StatefulDataLoader, and pass a state= that it saved before "
            "the batch"
        )
    start = replace(record.start, shared_seed=None)
    return Saved({}, start, EpochSnapshot(drawn=record.drawn, exhausted=record.ended, digest=record.digest))


def _of_state(state: Mapping[str, Any], again: Any, epoch: int | None) -> Saved:
    found = saved.read(state, again, ignore=("num_workers",))
    if found.other_size:
        raise ValueError(
            f"batch_size={samplers.batch_size(again._index_sampler)}: the state was saved with "
            f"{found.state['batch_size']}, so its batches "
            "have other samples; use a loader with the same"
        )
    if not found.start.resumes or epoch not in (None, found.position.epoch):
        where = "in the middle of" if found.start.resumes else "before"
        raise ValueError(
            f"epoch={epoch!r}: this state was saved {where} epoch {found.position.epoch}; use one that was "
            "saved in the middle of the epoch of the batch"
        )
    return found
