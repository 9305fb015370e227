"""Saved states: one is read, compared with the loader, and only then taken by `load_state_dict()`.

Runs in the consumer. Nothing of a loader changes before all of a state was found to fit it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fastq_loader import arguments
from fastq_loader.arguments import Loader
from fastq_loader.errors import checked_names, is_int
from fastq_loader.reading import generators, position
from fastq_loader.reading.position import is_stateful
from fastq_loader.resume import samplers
from fastq_loader.resume.order import Beginning, Stopped
from fastq_loader.resume.record import Position, Saved
from fastq_loader.resume.state import LIBRARY, VERSION, Began, Now, describe, unpack
from fastq_loader.scheduling.progress import Progress, WorkerProgress
from fastq_loader.workers.kinds import Auto

#: Parts of a state by name, and the progress of all workers.
Fields = dict[str, Any]
Workers = tuple[WorkerProgress, ...]

#: What is neither compared nor under the checksum.
_BESIDES = ("_num_yielded", "_sampler_iter_yielded", "_iterator_finished", "workers", "rest", "checksum")
#: Keys that an error names, of what is no state.
_KEYS = 10


def read(state: Any, loader: Loader, ignore: Iterable[str] = ()) -> Saved:
    """Compare a state with a loader, without changing anything.

    Args:
        state: what `state_dict()` returned.
        loader: that is to go on from it.
        ignore: fields of `describe` that may differ, or "order".

    Raises:
        ValueError: it is damaged or foreign, of another version, or of a loader that iterates something else:
            names the field, what was saved and what is there. Or a name to ignore is unknown.
        TypeError, RuntimeError: `ignore` is no collection of names; torch's own workers run, which cannot.
    """
    arguments.check_ours(loader, "load_state_dict()")
    described = describe(loader)
    ignored = checked_names("ignore", ignore, [*described, "order"])
    fields = _ours(state)
    for name in (*described, *_BESIDES):
        if name not in fields:
            raise ValueError(f"field {name!r} is missing: the state was cut short")
    began, now = unpack(fields["rest"], fields["checksum"])
    _compare(fields, described, ignored)
    delivered = _delivered(fields, now)
    finished = began.resumes and fields["_iterator_finished"]  # so says Accelerate, with the last batch
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
        iterable=arguments.is_iterable(loader),
        progress=Progress(delivered, frozenset(now.beyond), saved.progress.workers),
        shared_seed=began.shared_seed,
    )


def _delivered(fields: Fields, now: Now) -> int:
    """Which Accelerate may have counted back."""
    delivered, beyond = fields["_sampler_iter_yielded"], len(now.beyond)
    if not is_int(delivered) or not (not now.drawn or beyond <= delivered <= beyond + now.drawn):
        raise ValueError(
            f"field '_sampler_iter_yielded' is {delivered!r:.60}; it should be a number from {beyond} to "
            f"{beyond + now.drawn}"
        )
    return int(delivered)


def _order(fields: Fields, began: Began, now: Now, loader: Loader, may_differ: bool) -> Stopped:
    names = {"dataset": "_index_sampler_state", "iterator": "_sampler_iter_state"}
    place = {part: fields[name] for part, name in names.items() if fields.get(name) is not None}
    if "dataset" in place and samplers.stateful_sampler(loader._index_sampler) is None:
        raise ValueError(
            "field '_index_sampler_state': the sampler said where it stands, and that of the loader has no "
            "state_dict and load_state_dict: use the one that was saved"
        )
    # The digest is of another rank's part, or the caller says that it may differ.
    mine = not may_differ and now.part == samplers.part_of_data(loader._index_sampler)
    digest = now.digest if mine else None
    beginning = Beginning(began.states, began.first, began.epochs, digest)
    exhausted, ahead = now.exhausted or fields["_iterator_finished"], fields.get("_sampler_ahead", ())
    return Stopped(beginning, now.drawn, exhausted, now.generators, place, tuple(ahead))


def _workers(fields: Fields, began: Began, now: Now, loader: Loader, ignored: Container[str]) -> Workers:
    """Nothing is known of them between two epochs, if they do not live on."""
    places = fields["workers"]
    if not (isinstance(places, list) and len(places) == len(now.workers)):
        raise ValueError(f"field 'workers' is {places!r:.60}; it should be a list of {len(now.workers)}")
    workers = []
    for number, (place, (delivered, known)) in enumerate(zip(places, now.workers, strict=True)):
        if "unknown" in known:
            raise ValueError(
                f"field 'workers.{number}': the epoch before was broken off, and worker {number} had not "
                "said where that left it. Use a state that was saved before, or after its first batch"
            )
        if place is None and delivered and is_stateful(loader.dataset):
            raise ValueError(
                f"field 'workers.{number}' is None: the dataset did not say where it stood when the state "
                "was saved"
            )
        state = known if place is None else {**known, "position": place}
        workers.append(WorkerProgress(delivered, pickle.dumps(state) if state else b""))
    return _dealt(fields, began.resumes, tuple(workers), loader, ignored) if workers or began.resumes else ()


def _ours(state: Any) -> Fields:
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is a {type(state).__name__}, and not a dict that state_dict() returned")
    if state.get("library") != LIBRARY:
        keys = ", ".join(map(repr, list(state)[:_KEYS]))
        raise ValueError(
            f"field 'library' is {state.get('library')!r}, not {LIBRARY!r}: not a state of ours. If that is "
            f"below a key of a checkpoint, give what is there: it has {keys}"
        )
    if state.get("version") != VERSION or not is_int(state["version"]):
        raise ValueError(
            f"field 'version' is {state.get('version')!r}, and this release reads {VERSION}: use the release "
            "of fastq_loader that saved it, and finish the epoch with that"
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
            continue  # what only the other sampler has
        raise ValueError(
            f"field {name!r}: {fields[name]!r:.60} was saved, and the loader has {now[name]!r}. Make the "
            f"loader as it was, or say load_state_dict(state, ignore=({name!r},)) where it may differ"
        )


def _dealt(
    fields: Fields, resumes: bool, workers: Workers, loader: Loader, ignored: Container[str]
) -> Workers:
    """The progress of the workers that there will be."""
    known = any(worker.state for worker in workers)
    if isinstance(loader.num_workers, Auto) and known:
        return workers  # the epoch goes on with as many
    saved, wanted = fields["num_workers"], max(1, loader.num_workers)
    if len(workers) == wanted and saved == loader.num_workers:
        return workers
    iterable = arguments.is_iterable(loader)
    if not (iterable or known):
        return ()  # any worker can load any batch
    reshard = getattr(loader.dataset, "reshard_state_dicts", None)
    if iterable and resumes and callable(reshard):
        return _resharded(reshard, workers, wanted)
    if "num_workers" in ignored and not (iterable and resumes):
        return ()
    raise ValueError(
        f"field 'num_workers': {saved} was saved, and the loader has {loader.num_workers}. The dataset says "
        "where it stands for each worker: use as many"
        + (", or give it a method reshard_state_dicts(states, num_workers)" if iterable else "")
    )


def _resharded(reshard: Callable[..., Any], workers: Workers, wanted: int) -> Workers:
    states = [pickle.loads(worker.state).get("position") if worker.state else None for worker in workers]
    parts = list(reshard(states, wanted))
    if len(parts) != wanted:
        raise ValueError(f"reshard_state_dicts gave {len(parts)} states for {wanted} workers")
    return tuple(
        WorkerProgress(0, pickle.dumps({"position": part}) if part is not None else b"") for part in parts
    )


def take(loaded: Saved, loader: Loader) -> None:
    """Put a loader's own generators, and its samplers, where they stood.

    Raises:
        ValueError: a sampler does not take what it said; nothing has changed.
    """
    sampler, order = loader._index_sampler, loaded.order
    own = samplers.own_generators(sampler, loader.generator, loader.dataset)
    states = [(own[name], state) for name, state in order.generators.items() if name in own]
    if not loaded.resumes and "dataset" in order.place:
        with generators.restored([*generators.GLOBAL.values(), *own.values()], states):
            _put(samplers.stateful_sampler(sampler), sampler, order)
    for generator, state in states:
        generators.set_state(generator, state)
    epochs = order.beginning.epochs
    if not loaded.resumes:  # the next one begins, which the user may have set already
        now = samplers.epochs(sampler)
        epochs = {depth: max(epoch, now.get(depth, 0)) for depth, epoch in epochs.items()}
    samplers.set_epochs(sampler, epochs)


def _put(part: Any, index_sampler: Any, order: Stopped) -> None:
    """Put a sampler where it stood between two epochs, or before the first."""
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
