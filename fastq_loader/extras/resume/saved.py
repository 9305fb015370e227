"""Loading of saved states: a state is read, compared with the loader, and only then applied.

Runs in the consumer, in `load_state_dict()`. A loader does not change before the whole state is known to fit.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fastq_loader import options
from fastq_loader.epoch.epoch import derived_seed
from fastq_loader.epoch.fields import EpochStart
from fastq_loader.epoch.samplers import epochs as epochs_of
from fastq_loader.epoch.samplers import own_generators
from fastq_loader.errors import checked_names, is_int
from fastq_loader.extras.resume import samplers
from fastq_loader.extras.resume.fields import EpochSnapshot, Saved
from fastq_loader.extras.resume.state import LIBRARY, VERSION, describe, unpack
from fastq_loader.extras.resume.text import fits
from fastq_loader.options import Loader
from fastq_loader.reading import generators, position, sampling
from fastq_loader.reading.position import is_stateful
from fastq_loader.scheduling.progress import Progress, WorkerProgress
from fastq_loader.workers.kinds import Auto

#: Parts of a state by name, and the progress of all workers.
Fields = dict[str, Any]
Workers = tuple[WorkerProgress, ...]

#: Keys that a state must have, besides the fields of `describe`.
_BESIDES = ("_num_yielded", "_sampler_iter_yielded", "_iterator_finished", "workers", "rest", "checksum")
#: Key of the state of a map-style dataset; only there if it has one.
_DATASET = "dataset_state"
#: How to go on without a state that does not fit, by hand and where a framework loads it.
_ANEW = (
    "To begin the epoch anew, load {}; with Accelerate, os.remove(f'{folder}/dl_state_dict.bin') before "
    "load_state(folder); with Lightning, in on_load_checkpoint(), "
    "checkpoint['loops']['fit_loop']['state_dict'].pop('combined_loader'); with the Trainer of "
    "transformers, ignore_data_skip=True"
)
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
    """
    described = describe(loader)
    ignored = checked_names("ignore", ignore, [*described, "order"])
    fields = _ours(state)
    for name in (*described, *_BESIDES):
        if name not in fields:
            raise ValueError(f"field {name!r} is missing: the state was cut short")
    start, now = unpack(fields["rest"], fields["checksum"])
    delivered = _delivered(fields, now)
    other_size = _counts_samples(fields, loader, now)
    if other_size:
        if start.resumes:
            start, now, delivered = _with_another_size(fields, loader, start, now, delivered)
        ignored = [*ignored, "batch_size"]
    _compare(fields, described, ignored)
    finished = start.resumes and fields["_iterator_finished"]  # Accelerate sets it with the last batch
    own = own_generators(loader._index_sampler, loader.generator, loader.dataset)
    _fit(now.generators, own)
    progress = Progress(workers=() if finished else _workers(fields, start, now, loader, ignored))
    sampler_state = _sampler_state(fields, loader)
    _check_dataset(fields, loader)
    # No digest if it is of another rank's part, or the caller allows another order.
    same_order = "order" not in ignored and now.part == samplers.part_of_data(loader._index_sampler)
    exhausted = now.exhausted or fields["_iterator_finished"]
    now = replace(now, digest=now.digest if same_order else None, exhausted=exhausted)
    if finished:
        start = replace(start, epoch=start.epoch + 1, batches=start.batches + delivered, resumes=False)
    elif start.resumes:
        _fit(start.states, own)
        _fit(start.first, own)
        progress = Progress(delivered, frozenset(now.beyond), progress.workers)
    seed = None if samplers.INITIAL_SEED in ignored else fields[samplers.INITIAL_SEED]
    return Saved(state, start, now, progress, sampler_state, seed, other_size)


def _delivered(fields: Fields, now: EpochSnapshot) -> int:
    """Number of delivered batches, which Accelerate may have reduced."""
    delivered, beyond = fields["_sampler_iter_yielded"], len(now.beyond)
    if not is_int(delivered) or not (not now.drawn or beyond <= delivered <= beyond + now.drawn):
        raise ValueError(
            f"field '_sampler_iter_yielded' is {delivered!r:.60}; it should be a number from {beyond} to "
            f"{beyond + now.drawn}"
        )
    return int(delivered)


def _counts_samples(fields: Fields, loader: Loader, now: EpochSnapshot) -> bool:
    """Whether only the batch size differs, and the order of the samples does not depend on it."""
    sizes = fields["batch_size"], samplers.batch_size(loader._index_sampler)
    differ = all(map(is_int, sizes)) and sizes[0] != sizes[1]
    return differ and not now.beyond and samplers.counts_samples(loader._index_sampler)


def _with_another_size(
    fields: Fields, loader: Loader, start: EpochStart, now: EpochSnapshot, delivered: int
) -> tuple[EpochStart, EpochSnapshot, int]:
    """The same position with the loader's batch size: the batches begin where the delivered samples end."""
    saved, size = fields["batch_size"], samplers.batch_size(loader._index_sampler) or 1
    samples = start.passed + delivered * saved
    drawn = start.passed + (now.drawn + now.exhausted) * saved  # at least as many
    passed = samples % size
    digest = now.digest if sampling.is_shuffle(loader._index_sampler) else None  # else of the batches
    now = replace(now, drawn=max(min(now.drawn, 1), -(-(drawn - passed) // size)), digest=digest)
    # Its batches have the numbers of others, and with "dynamic" their random numbers follow from these.
    seed = derived_seed(start.base_seed, samples)
    batches = start.batches + delivered - samples // size
    return replace(start, passed=passed, base_seed=seed, batches=batches), now, samples // size


def _sampler_state(fields: Fields, loader: Loader) -> Fields:
    """The states of the sampler and of its iterator, where they were saved."""
    names = {"dataset": "_index_sampler_state", "iterator": "_sampler_iter_state"}
    sampler_state = {part: fields[name] for part, name in names.items() if fields.get(name) is not None}
    if "dataset" in sampler_state and samplers.stateful_sampler(loader._index_sampler) is None:
        raise ValueError(
            "field '_index_sampler_state': the sampler's state was saved, and the loader's sampler has no "
            "state_dict and load_state_dict: use the sampler that was saved"
        )
    return sampler_state


def _is_stateful(loader: Loader, iterable: bool) -> bool:
    return options.is_iterable(loader) == iterable and is_stateful(loader.dataset)


def _check_dataset(fields: Fields, loader: Loader) -> None:
    """Check that a map-style dataset can take the state that was saved of it."""
    stateful = _is_stateful(loader, iterable=False)
    if stateful != (_DATASET in fields):
        only = "the loader's dataset has" if stateful else "the dataset that was saved had"
        raise ValueError(
            f"field {_DATASET!r}: only {only} state_dict and load_state_dict: use the dataset that was saved"
        )


def _workers(
    fields: Fields, start: EpochStart, now: EpochSnapshot, loader: Loader, ignored: Container[str]
) -> Workers:
    """Progress of the workers; empty between two epochs, unless they live on."""
    states = fields["workers"]
    if not (isinstance(states, list) and len(states) == len(now.workers)):
        raise ValueError(f"field 'workers' is {states!r:.60}; it should be a list of {len(now.workers)}")
    workers = []
    for number, (dataset_state, (delivered, known)) in enumerate(zip(states, now.workers, strict=True)):
        if "unknown" in known:
            raise ValueError(
                f"field 'workers.{number}': the epoch before was broken off, and the position of worker "
                f"{number} after that was unknown. Use a state from before that, or from after its next batch"
            )
        left_out = known.pop("left_out", "")  # such a dataset is read again, like one without the methods
        if dataset_state is None and delivered and not left_out and _is_stateful(loader, iterable=True):
            raise ValueError(
                f"field 'workers.{number}' is None: the state has no position of the dataset, which has "
                "state_dict. Use a state that was saved with this dataset"
            )
        state = known if dataset_state is None else {**known, "position": dataset_state}
        workers.append(WorkerProgress(delivered, pickle.dumps(state) if state else b""))
    return _dealt(fields, start.resumes, tuple(workers), loader, ignored) if workers or start.resumes else ()


def _ours(state: Any) -> Fields:
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is a {type(state).__name__}, not a dict returned by state_dict()")
    if state.get("library") != LIBRARY:
        keys = ", ".join(map(repr, list(state)[:_KEYS]))
        raise ValueError(
            f"field 'library' is {state.get('library')!r}, not {LIBRARY!r}: this is not a loader's state. If "
            f"it is a checkpoint that contains one, pass that entry: its keys are {keys}. {_ANEW}"
        )
    if state.get("version") != VERSION or not is_int(state["version"]):
        raise ValueError(
            f"field 'version' is {state.get('version')!r}, and this release reads {VERSION}: it computes "
            "some orders by another rule. Finish the epoch with the release of fastq_loader that saved it"
        )
    return dict(state)


def _fit(states: Fields, own: Fields) -> None:
    for name in states.keys() & own.keys():
        if why := fits(own[name], states[name]):
            raise ValueError(f"field 'generator': the state of {name!r} does not fit the loader's: {why}")


def _compare(fields: Fields, now: Fields, ignored: Container[str]) -> None:
    for name in now:
        if name == "num_workers" or name in ignored or fields[name] == now[name]:
            continue
        if name == samplers.INITIAL_SEED and None not in (fields[name], now[name]):
            continue  # `take` sets it
        if "sampler" in ignored and None in (fields[name], now[name]):
            continue  # a field that only one of the two samplers has
        raise ValueError(
            f"field {name!r}: {fields[name]!r:.60} was saved, and the loader has {now[name]!r}. Make the "
            f"loader as it was, or allow the difference with load_state_dict(state, ignore=({name!r},)). "
            f"{_ANEW}"
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
    if "num_workers" in ignored and not (iterable and resumes):
        return ()
    raise ValueError(
        f"field 'num_workers': {saved} was saved, and the loader has {loader.num_workers}. The state has a "
        f"part for each worker: use the same number"
    )


def take(loaded: Saved, loader: Loader) -> None:
    """Set a loader's own generators, its samplers and a map-style dataset to their saved states.

    Raises:
        ValueError: a sampler refuses its own state; nothing has changed.
        Exception: whatever `load_state_dict` of the dataset raises.
    """
    sampler = loader._index_sampler
    dataset: Any = loader.dataset
    own = own_generators(sampler, loader.generator, dataset)
    resumes, states, epochs = loaded.start.resumes, loaded.now.generators, loaded.start.epochs
    if not resumes and "dataset" in loaded.sampler_state:
        with generators.restored({**generators.GLOBAL, **own}, states):
            _put(samplers.stateful_sampler(sampler), sampler, loaded)
    if loaded.state.get(_DATASET) is not None:
        dataset.load_state_dict(copy.deepcopy(loaded.state[_DATASET]))
    generators.set_states(own, states)
    if loaded.initial_seed is not None:
        samplers.set_initial_seed(sampler, loaded.initial_seed)
    if not resumes:  # an epoch begins, whose number the user may have set already
        now = epochs_of(sampler)
        epochs = {depth: max(epoch, now.get(depth, 0)) for depth, epoch in epochs.items()}
    samplers.set_epochs(sampler, epochs)


def _put(part: Any, index_sampler: Any, loaded: Saved) -> None:
    """Set a sampler to its state from between two epochs, or before the first."""
    before, state, exhausted = None, loaded.sampler_state["dataset"], loaded.now.exhausted
    iterated = index_sampler if exhausted else ()
    try:
        before = copy.deepcopy(part.state_dict())
        sampler_state = {"dataset": state, "ended": exhausted}
        position.begun_at(sampler_state, part, lambda: iter(iterated), lambda iterator: iterator)
    except Exception as error:
        if before is not None:
            part.load_state_dict(before)
        raise ValueError(
            f"field '_index_sampler_state' is {state!r:.60}, which {type(part).__name__} refuses: "
            f"{type(error).__name__}: {error}"
        ) from error
