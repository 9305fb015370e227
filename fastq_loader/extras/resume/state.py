"""Layout of `state_dict()`: an epoch as a plain dict.

Runs in the consumer. Some fields describe the loader, and are compared when a state is loaded. The states of
users' samplers and datasets have fields of their own, which `json.dumps` accepts if it accepts those states.
All the rest is one text with a checksum, so `load_state_dict` detects missing or changed parts. Four of the
keys are torchdata's (`StatefulDataLoader`), because Accelerate reads and edits them: `_num_yielded` and
`_sampler_iter_yielded` (batches delivered), `_iterator_finished` (whether the epoch is over), and
`_index_sampler_state` (the sampler's state).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from zlib import crc32

from fastq_loader import options
from fastq_loader.epoch.fields import EpochStart, Position
from fastq_loader.epoch.resources import of as resources_of
from fastq_loader.epoch.samplers import epochs, own_generators
from fastq_loader.errors import LoaderHint, warn_user
from fastq_loader.extras.resume import samplers, text
from fastq_loader.extras.resume.fields import EpochSnapshot
from fastq_loader.options import Loader
from fastq_loader.reading import generators, position
from fastq_loader.scheduling.progress import START, Progress

T = TypeVar("T")

#: The rules that a state was made by. Since 5 the state of a sampler is that before its first index that was
#: not delivered.
VERSION = 5
LIBRARY = "fastq_loader"


def unpack(rest: Any, checksum: Any) -> tuple[EpochStart, EpochSnapshot]:
    """Decode the `rest` of a state.

    Raises:
        ValueError: it is damaged.
    """
    if type(rest) is not str or checksum != crc32(rest.encode()):
        raise ValueError("field 'rest' is damaged, or was changed: its checksum differs")
    start, now = text.load(rest)
    return EpochStart(**start), EpochSnapshot(**now)


def describe(loader: Loader) -> dict[str, Any]:
    """Describe the data. When a state is loaded, the description must be the same; `num_workers` only where
    it matters."""
    return {**dict.fromkeys(("dataset_kind", "dataset_length")), **_described(loader), **_length(loader)}


def _described(loader: Loader) -> dict[str, Any]:
    """The same without the length: `len(dataset)` is called only when a state is requested."""
    parts = loader._index_sampler, loader.generator, loader.dataset
    return {
        "dataset_kind": "iterable" if options.is_iterable(loader) else "map",
        "batch_size": samplers.batch_size(loader._index_sampler),
        **samplers.compared(loader._index_sampler),
        "generator": "/".join(samplers.torchs_generators(*parts)),
        "schedule": "dynamic" if options.of(loader).is_dynamic else "round_robin",
        "num_workers": int(loader.num_workers),
    }


def _length(loader: Loader) -> dict[str, Any]:
    dataset: Any = loader.dataset
    try:
        return {"dataset_length": None if options.is_iterable(loader) else len(dataset)}
    except Exception:  # no length, or `__len__` fails
        return {"dataset_length": None}


def _state_of_dataset(loader: Loader) -> dict[str, Any]:
    """The state of a map-style dataset that has one; None if it cannot be copied. It may be large, and is
    read only when a state is requested.

    Raises:
        RuntimeError: its `state_dict` raised.
    """
    dataset: Any = loader.dataset
    if position.has_methods(dataset) and not position.is_stateful(dataset):
        _hint_left_out(loader, "its state_dict() needs arguments")
    if options.is_iterable(loader) or not position.is_stateful(dataset):
        return {}
    try:
        state = dataset.state_dict()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"the dataset's state_dict() cannot be used: {why}") from error
    try:
        return {"dataset_state": copy.deepcopy(state)}
    except Exception as error:
        _hint_left_out(loader, f"its state cannot be copied ({type(error).__name__}: {error})")
        return {"dataset_state": None}


def _hint_left_out(loader: Loader, why: str) -> None:
    """Issue the hint that the state of the dataset is not saved, once."""
    hinted = resources_of(loader).hinted
    if LoaderHint not in hinted:
        hinted.add(LoaderHint)
        name, reads = type(loader.dataset).__name__, " and is read from its beginning in a resumed epoch"
        warn_user(
            f"The state of {name} is not part of the loader's: {why}. So it does not go on where it stood"
            f"{reads if options.is_iterable(loader) else ''}; "
            "give it a state_dict() without arguments that returns plain values",
            LoaderHint,
        )


def now(loader: Loader) -> dict[str, Any]:
    """Return the state of a loader. May be called on any thread, and in a signal handler.

    Raises:
        RuntimeError: called while `iter()` runs, by a signal handler or by user code.
    """
    resources = resources_of(loader)
    with resources.lock:
        if resources.beginning:
            raise RuntimeError("state_dict() was called inside of iter(): call it after iter() has returned")
        record, loaded = resources.current
        if loaded is not None:
            state = copy.deepcopy(loaded.state)
        elif record is None or record.shown is None:
            state = state_of(loader, record)
        else:
            state = record.shown[0]()
    asked = {} if "dataset_length" in state else {**_length(loader), **_state_of_dataset(loader)}
    return {**state, **asked}


def begun(loader: Loader, begin: Callable[[], T]) -> T:
    """Begin an epoch, while other threads wait for the state."""
    resources = resources_of(loader)
    with resources.lock:
        resources.beginning = True
        try:
            return begin()
        finally:
            resources.beginning = False


def state_of(loader: Loader, record: Any) -> dict[str, Any]:
    """Return the state of a loader, as a new dict. `record`: of its newest epoch; None before the first."""
    if record is None or record.progress.over:
        return _between_epochs(loader, record)
    # The states from which the first index will be drawn, unless it was.
    first = record.first_states or record.shared_now()
    progress, draws = record.snapshot()
    assert not isinstance(draws.sampler_state, Exception)
    # This may be called after every step, and must cost next to nothing: the constant part is cached.
    constant = record.constant
    if constant is None:
        start = record.start if draws.drawn else replace(record.start, first={**record.start.first} or first)
        constant = {**_described(loader), **record.compared}, text.dump(vars(start))
        record.constant = constant if draws.drawn else None
    drawn = min(draws.drawn, 1) if options.is_iterable(loader) else draws.drawn
    now = EpochSnapshot(
        generators=draws.states,
        beyond=tuple(sorted(progress.beyond)),
        # Whether an iterable dataset's epoch has begun to draw, and not how far its workers were ahead.
        drawn=max(drawn, progress.head),
        exhausted=draws.exhausted,
        digest=draws.digest,
        part=samplers.part_of_data(loader._index_sampler),
    )
    workers = [_worker(loader, *worker) for worker in progress.workers]
    sampler_state = _of_sampler(copy.deepcopy(draws.sampler_state))
    return {**_whole(constant, progress, now, workers, record), **sampler_state}


def _between_epochs(loader: Loader, record: Any) -> dict[str, Any]:
    """The state of a loader whose newest epoch is over, or that had none."""
    sampler = loader._index_sampler
    if record is None:
        own = own_generators(sampler, loader.generator, loader.dataset)
        states, workers, progress = generators.states_of(own), list[Any](), START
        before, at = EpochStart(), Position()
    else:
        states, progress = generators.states_of(record.info.own), record.progress
        workers = [_worker(loader, *worker) for worker in progress.workers if record.persistent]
        before, at = record.start, record.position
    start = EpochStart(
        *(at.epoch, at.batches, False, before.base_seed, before.shared_seed, before.lives_on),
        epochs=epochs(sampler),
    )
    constant = _described(loader), text.dump(vars(start))
    asked = samplers.stateful_sampler(sampler)
    sampler_state = {} if asked is None else copy.deepcopy(position.state_of(asked, None))
    return {
        **_whole(constant, progress, EpochSnapshot(states), workers, record),
        **_of_sampler(sampler_state),
    }


def _whole(
    constant: tuple[dict[str, Any], str],
    progress: Progress,
    now: EpochSnapshot,
    workers: list[Any],
    record: Any,
) -> dict[str, Any]:
    fields, start = constant
    bad = {} if record is None or record.bad_samples is None else record.bad_samples.state()
    own = {**vars(now), "workers": [(count, state) for count, state, _ in workers], "bad_samples": bad}
    rest = f"[{start}, {text.dump(own)}]"
    return {
        "library": LIBRARY,
        "version": VERSION,
        **fields,
        "_num_yielded": progress.delivered,
        "_sampler_iter_yielded": progress.delivered,
        "_iterator_finished": progress.over,
        "workers": [dataset_state for *_, dataset_state in workers],
        "rest": rest,
        "checksum": crc32(rest.encode()),
    }


def _of_sampler(sampler_state: dict[str, Any]) -> dict[str, Any]:
    """The states of a sampler and its iterator, under torchdata's names."""
    return {
        "_index_sampler_state": sampler_state.get("dataset"),
        "_sampler_iter_state": sampler_state.get("iterator"),
    }


def _worker(loader: Loader, delivered: int, state: bytes) -> tuple[int, dict[str, Any], Any]:
    worker = pickle.loads(state) if state else {}
    dataset_state = worker.pop("position", None)
    if dataset_state is not None and "error" in dataset_state:
        raise RuntimeError(
            f"the dataset's state_dict(), or its iterator's, cannot be used: {dataset_state['error']}"
        )
    if "left_out" in worker:
        _hint_left_out(loader, f"its state cannot be copied ({worker['left_out']})")
    return delivered, worker, dataset_state
