"""Loading of saved states: a state is read, compared with the loader, and only then applied.

Runs in the consumer, in `load_state_dict()`. A loader does not change before the whole state is known to fit.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fastq_loader import options
from fastq_loader.epoch import samplers
from fastq_loader.epoch.order import Beginning, ResumePoint
from fastq_loader.epoch.record import Position, Saved
from fastq_loader.epoch.state import LIBRARY, VERSION, Began, Now, describe, unpack
from fastq_loader.errors import checked_names, is_int
from fastq_loader.options import Loader
from fastq_loader.reading import generators, position
from fastq_loader.reading.position import is_stateful
from fastq_loader.scheduling.progress import Progress, WorkerProgress
from fastq_loader.workers.kinds import Auto

#: Parts of a state by name, and the progress of all workers.
Fields = dict[str, Any]
Workers = tuple[WorkerProgress, ...]

#: Keys that a state must have, besides the fields of `describe`.
_BESIDES = ("_num_yielded", "_sampler_iter_yielded", "_iterator_finished", "workers", "rest", "checksum")
#: Keys listed, at most, in the error for a dict that is not a state.
_KEYS = 10


def read(state: Any, loader: Loader, ignore: Iterable[str] = ()) -> Saved:
    """Compare a state with a loader, without changing anything.

    Args:
        state: returned by `state_dict()`.
        loader: the loader to be restored from it.
        ignore: fields of `describe` that may differ, or "order".

    Raises:
        ValueError: the state is damaged or does not fit the loader, or a name to ignore is unknown.
        TypeError: `ignore` is not a collection of names.
        RuntimeError: torch's own workers run, which do not support it.
    """
    options.check_ours(loader, "load_state_dict()")
    described = describe(loader)
    ignored = checked_names("ignore", ignore, [*described, "order"])
    fields = _ours(state)
    for name in (*described, *_BESIDES):
        if name not in fields:
            raise ValueError(f"field {name!r} is missing: the state was cut short")
    began, now = unpack(fields["rest"], fields["checksum"])
    _compare(fields, described, ignored)
    delivered = _delivered(fields, now)
    finished = began.resumes and fields["_iterator_finished"]  # Accelerate sets it with the last batch
    own = samplers.own_generators(loader._index_sampler, loader.generator, loader.dataset)
    _fit(now.generators, own)
    saved = Saved(
        state=state,
        position=Position(began.epoch, 0, began.batches),
        base_seed=began.base_seed,
        lives_on=began.lives_on,
        bad_samples=now.bad_samples,
        shared=began.shared,
        progress=Progress(workers=() if finished else _workers(fields, began, now, loader, ignored)),
        order=_order(fields, began, now, loader, "order" in ignored),
    )
    if finished:
        return replace(saved, position=Position(began.epoch + 1, 0, began.batches + delivered))
    if not began.resumes:
        return saved
    _fit(began.states, own)
    _fit(began.first, own)
    return replace(
        saved,
        position=Position(began.epoch, delivered, began.batches + delivered),
        resumes=True,
        iterable=options.is_iterable(loader),
        progress=Progress(delivered, frozenset(now.beyond), saved.progress.workers),
        shared_seed=began.shared_seed,
    )


def _delivered(fields: Fields, now: Now) -> int:
    """Number of delivered batches, which Accelerate may have reduced."""
    delivered, beyond = fields["_sampler_iter_yielded"], len(now.beyond)
    if not is_int(delivered) or not (not now.drawn or beyond <= delivered <= beyond + now.drawn):
        raise ValueError(
            f"field '_sampler_iter_yielded' is {delivered!r:.60}; it should be a number from {beyond} to "
            f"{beyond + now.drawn}"
        )
    return int(delivered)


def _order(fields: Fields, began: Began, now: Now, loader: Loader, may_differ: bool) -> ResumePoint:
    names = {"dataset": "_index_sampler_state", "iterator": "_sampler_iter_state"}
    place = {part: fields[name] for part, name in names.items() if fields.get(name) is not None}
    if "dataset" in place and samplers.stateful_sampler(loader._index_sampler) is None:
        raise ValueError(
            "field '_index_sampler_state': the sampler's state was saved, and the loader's sampler has no "
            "state_dict and load_state_dict: use the sampler that was saved"
        )
    # No digest if it is of another rank's part, or the caller allows another order.
    mine = not may_differ and now.part == samplers.part_of_data(loader._index_sampler)
    digest = now.digest if mine else None
    beginning = Beginning(began.states, began.first, began.epochs, digest)
    exhausted, ahead = now.exhausted or fields["_iterator_finished"], fields.get("_sampler_ahead", ())
    return ResumePoint(beginning, now.drawn, exhausted, now.generators, place, tuple(ahead))


def _workers(fields: Fields, began: Began, now: Now, loader: Loader, ignored: Container[str]) -> Workers:
    """Progress of the workers; empty between two epochs, unless they live on."""
    places = fields["workers"]
    if not (isinstance(places, list) and len(places) == len(now.workers)):
        raise ValueError(f"field 'workers' is {places!r:.60}; it should be a list of {len(now.workers)}")
    workers = []
    for number, (place, (delivered, known)) in enumerate(zip(places, now.workers, strict=True)):
        if "unknown" in known:
            raise ValueError(
                f"field 'workers.{number}': the epoch before was broken off, and the position of worker "
                f"{number} after that was unknown. Use a state from before that, or from after its next batch"
            )
        if place is None and delivered and is_stateful(loader.dataset):
            raise ValueError(
                f"field 'workers.{number}' is None: the state has no position of the dataset, which has "
                "state_dict. Use a state that was saved with this dataset"
            )
        state = known if place is None else {**known, "position": place}
        workers.append(WorkerProgress(delivered, pickle.dumps(state) if state else b""))
    return _dealt(fields, began.resumes, tuple(workers), loader, ignored) if workers or began.resumes else ()


def _ours(state: Any) -> Fields:
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is a {type(state).__name__}, not a dict returned by state_dict()")
    if state.get("library") != LIBRARY:
        keys = ", ".join(map(repr, list(state)[:_KEYS]))
        raise ValueError(
            f"field 'library' is {state.get('library')!r}, not {LIBRARY!r}: this is not a loader's state. If "
            f"it is a checkpoint that contains one, pass that entry: its keys are {keys}"
        )
    if state.get("version") != VERSION or not is_int(state["version"]):
        raise ValueError(
            f"field 'version' is {state.get('version')!r}, and this release reads {VERSION}: finish the "
            "epoch with the release of fastq_loader that saved it"
        )
    return dict(state)


def _fit(states: Fields, own: Fields) -> None:
    for name in states.keys() & own.keys():
        if why := generators.fits(own[name], states[name]):
            raise ValueError(f"field 'generator': the state of {name!r} does not fit the loader's: {why}")


def _compare(fields: Fields, now: Fields, ignored: Container[str]) -> None:
    for name in now:
        if name == "num_workers" or name in ignored or fields[name] == now[name]:
            continue
        if "sampler" in ignored and None in (fields[name], now[name]):
            continue  # a field that only one of the two samplers has
        raise ValueError(
            f"field {name!r}: {fields[name]!r:.60} was saved, and the loader has {now[name]!r}. Make the "
            f"loader as it was, or allow the difference with load_state_dict(state, ignore=({name!r},))"
        )


def _dealt(
    fields: Fields, resumes: bool, workers: Workers, loader: Loader, ignored: Container[str]
) -> Workers:
    """Divide the saved progress among the loader's workers."""
    known = any(worker.state for worker in workers)
    if isinstance(loader.num_workers, Auto) and known:
        return workers  # the epoch resumes with the saved number of workers
    saved, wanted = fields["num_workers"], max(1, loader.num_workers)
    if len(workers) == wanted and saved == loader.num_workers:
        return workers
    iterable = options.is_iterable(loader)
    if not (iterable or known):
        return ()  # any worker can load any batch
    reshard = getattr(loader.dataset, "reshard_state_dicts", None)
    if iterable and resumes and callable(reshard):
        return _resharded(reshard, workers, wanted)
    if "num_workers" in ignored and not (iterable and resumes):
        return ()
    raise ValueError(
        f"field 'num_workers': {saved} was saved, and the loader has {loader.num_workers}. The state has a "
        "part for each worker: use the same number"
        + (", or give the dataset a method reshard_state_dicts(states, num_workers)" if iterable else "")
    )


def _resharded(reshard: Callable[..., Any], workers: Workers, wanted: int) -> Workers:
    states = [pickle.loads(worker.state).get("position") if worker.state else None for worker in workers]
    parts = list(reshard(states, wanted))
    if len(parts) != wanted:
        raise ValueError(f"reshard_state_dicts returned {len(parts)} states for {wanted} workers")
    return tuple(
        WorkerProgress(0, pickle.dumps({"position": part}) if part is not None else b"") for part in parts
    )


def take(loaded: Saved, loader: Loader) -> None:
    """Set a loader's own generators and its samplers to their saved states.

    Raises:
        ValueError: a sampler refuses its own state; nothing has changed.
    """
    sampler, order = loader._index_sampler, loaded.order
    own = samplers.own_generators(sampler, loader.generator, loader.dataset)
    if not loaded.resumes and "dataset" in order.place:
        with generators.restored({**generators.GLOBAL, **own}, order.generators):
            _put(samplers.stateful_sampler(sampler), sampler, order)
    generators.set_states(own, order.generators)
    epochs = order.beginning.epochs
    if not loaded.resumes:  # an epoch begins, whose number the user may have set already
        now = samplers.epochs(sampler)
        epochs = {depth: max(epoch, now.get(depth, 0)) for depth, epoch in epochs.items()}
    samplers.set_epochs(sampler, epochs)


def _put(part: Any, index_sampler: Any, order: ResumePoint) -> None:
    """Set a sampler to its state from between two epochs, or before the first."""
    before, said = None, order.place["dataset"]
    iterated = index_sampler if order.exhausted else ()
    try:
        before = copy.deepcopy(part.state_dict())
        place = {"dataset": said, "ended": order.exhausted}
        position.begun_at(place, part, lambda: iter(iterated), lambda iterator: iterator)
    except Exception as error:
        if before is not None:
            part.load_state_dict(before)
        raise ValueError(
            f"field '_index_sampler_state' is {said!r:.60}, which {type(part).__name__} refuses: "
            f"{type(error).__name__}: {error}"
        ) from error
