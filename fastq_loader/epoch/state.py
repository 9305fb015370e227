"""Layout of `state_dict()`: an epoch as a plain dict.

Runs in the consumer. Some fields describe the loader, and are compared when a state is loaded. The states of
users' samplers and datasets have fields of their own, which `json.dumps` accepts if it accepts those states.
All the rest is one text with a checksum, so `load_state_dict` detects missing or changed parts. Four of the
keys are torchdata's (`StatefulDataLoader`), because Accelerate reads and edits them: `_num_yielded` and
`_sampler_iter_yielded` (batches delivered), `_iterator_finished` (whether the epoch is over), and
`_index_sampler_state` (the sampler's state).
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from zlib import crc32

from fastq_loader import options
from fastq_loader.epoch import resources, samplers
from fastq_loader.epoch.order import Beginning, Drawn
from fastq_loader.epoch.record import EpochRecord, Position
from fastq_loader.options import Loader
from fastq_loader.reading import generators, position
from fastq_loader.scheduling.progress import START, Progress

T = TypeVar("T")

VERSION = 3
LIBRARY = "fastq_loader"


@dataclass(frozen=True)
class Began:
    """Fields that stay the same throughout an epoch, and are not compared with the loader.

    Attributes:
        epoch, batches: number of epochs that are over, and of batches delivered in them.
        resumes: whether the epoch continues in the middle.
        base_seed, shared_seed, lives_on: see `EpochRecord`.
        states, first, epochs: see `order.Beginning`.
        shared: see `Resources`.
    """

    epoch: int
    batches: int
    resumes: bool = False
    base_seed: int = 0
    shared_seed: int | None = None
    lives_on: bool = False
    states: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Now:
    """Fields that change with each batch, besides torchdata's four keys.

    Attributes:
        beyond: see `Progress`.
        generators, drawn, exhausted: see `order.ResumePoint`.
        digest, part: see `order.Beginning`, and `samplers.part_of_data` for the part that it belongs to.
        workers: for each reader, the number of delivered batches, and its state without the dataset's.
        bad_samples: result of `BadSamples.state`, or {}.
    """

    generators: dict[str, Any]
    beyond: tuple[int, ...] = ()
    drawn: int = 0
    exhausted: bool = False
    digest: tuple[int, int] | None = None
    part: str = ""
    workers: tuple[tuple[int, dict[str, Any]], ...] = ()
    bad_samples: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Constant:
    """The part of a state that stays the same throughout an epoch: compared fields, and `Began` as text."""

    fields: dict[str, Any]
    began: str


def unpack(text: Any, checksum: Any) -> tuple[Began, Now]:
    """Decode the text `rest` of a state.

    Raises:
        ValueError: it is damaged.
    """
    if type(text) is not str or checksum != crc32(text.encode()):
        raise ValueError("field 'rest' is damaged, or was changed: its checksum differs")
    began, now = generators.load(text)
    return Began(**began), Now(**now)


def describe(loader: Loader) -> dict[str, Any]:
    """Describe the data. When a state is loaded, the description must be the same; `num_workers` only where
    it matters."""
    return {**dict.fromkeys(("dataset_kind", "dataset_length")), **_described(loader), **_length(loader)}


def _described(loader: Loader) -> dict[str, Any]:
    """The same without the length: `len(dataset)` is called only when a state is requested."""
    parts = loader._index_sampler, loader.generator, loader.dataset
    return {
        "dataset_kind": "iterable" if options.is_iterable(loader) else "map",
        "batch_size": loader.batch_size,
        **samplers.compared(loader._index_sampler),
        "generator": "/".join(samplers.torchs_generators(*parts)),
        "schedule": "dynamic" if options.of(loader).is_dynamic else "round_robin",
        "num_workers": int(loader.num_workers),
    }


def _length(loader: Loader) -> dict[str, Any]:
    try:
        return {"dataset_length": None if options.is_iterable(loader) else len(loader.dataset)}
    except Exception:  # no length, or `__len__` fails
        return {"dataset_length": None}


def now(loader: Loader) -> dict[str, Any]:
    """Return the state of a loader. May be called on any thread, and in a signal handler."""
    mine = resources.of(loader)
    while True:  # once, unless another thread begins an epoch meanwhile
        held, place = mine.held, mine.place
        if held is None and place == (None, None):
            mine.shared = mine.shared or _shared(loader)
        state = _of_place(loader) if held is None else held()
        if mine.held is held and mine.place is place:
            return state if "dataset_length" in state else {**state, **_length(loader)}


def begun(loader: Loader, begin: Callable[[], T]) -> T:
    """Begin an epoch. Meanwhile the loader's state is the previous one. If a state was requested before the
    first epoch, this epoch draws as it would have drawn at that time."""
    mine = resources.of(loader)
    with contextlib.suppress(Exception):  # raised by user code; `now` raises it again
        mine.held = _hold(loader)
    try:
        with generators.as_at(mine.shared):
            iterator = begin()
        mine.shared = {}
        return iterator
    finally:
        mine.held = None


def _hold(loader: Loader) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the current state while an epoch begins. It is rarely called, so the
    parts that cannot change are read only in the call."""
    record, loaded = resources.of(loader).place
    if record and not loaded and record.over and not record.shown and record.order.traits.still:
        seen = record.order.seen()
        return lambda: state_of(loader, record, seen)
    state = _of_place(loader)
    return lambda: copy.deepcopy(state)


def _of_place(loader: Loader) -> dict[str, Any]:
    record, loaded = resources.of(loader).place
    if loaded is not None:
        return copy.deepcopy(loaded.state)
    return state_of(loader, record) if record is None or record.shown is None else record.shown[0]()


def _shared(loader: Loader) -> dict[str, Any]:
    """States of the shared generators that an epoch draws from when it begins."""
    names = set(samplers.shared_generators(loader._index_sampler))
    if loader.generator is None:
        names.add("torch")
    return {name: generators.state_of(generators.GLOBAL[name]) for name in names}


def state_of(loader: Loader, record: EpochRecord | None, seen: Drawn | None = None) -> dict[str, Any]:
    """Return the state of a loader, as a new dict.

    Args:
        loader: the loader.
        record: record of its newest epoch; None before the first.
        seen: what the record's order had `seen()` at the moment to be saved; None for now.
    """
    if record is None:
        own = samplers.own_generators(loader._index_sampler, loader.generator, loader.dataset)
        now = Now(generators.states_of(own))
        return _between_epochs(loader, None, START, now, _before_first(loader))
    order = record.order
    if order.progress.over:
        states = (seen or order.seen())[2]
        workers = [_worker(*worker) for worker in order.progress.workers if record.persistent]
        return _between_epochs(loader, record, order.progress, Now(states), workers)
    place: dict[str, Any] = {}
    ahead: list[Any] = []
    while True:  # once, unless another thread takes batches meanwhile
        # Read before the draws: if another thread draws meanwhile, they include at least what was digested.
        digest, progress, drawn = order.beginning.digest, order.progress, seen or order.seen()
        if order.is_asked:
            progress, drawn, place, ahead = order.asked()
        first = dict(order.beginning.first) if drawn[0] else order.pending or order.shared_now()
        if order.progress is progress and (drawn[0] or not order.drawn[0]):
            break
    # This may be called after every step, and must cost next to nothing: the constant part is cached.
    constant = record.constant
    if constant is None:
        constant = _constant(loader, record, first)
        record.constant = constant if drawn[0] else None
    workers = [_worker(*worker) for worker in progress.workers]
    now = Now(
        generators=drawn[2],
        beyond=tuple(sorted(progress.beyond)),
        drawn=max(drawn[0], progress.head),
        exhausted=drawn[1],
        digest=digest,
        part=samplers.part_of_data(loader._index_sampler),
    )
    return {**_whole(constant, progress, now, workers, record), **_said(place), "_sampler_ahead": ahead}


def _between_epochs(
    loader: Loader, record: EpochRecord | None, progress: Progress, now: Now, workers: list[Any]
) -> dict[str, Any]:
    sampler = loader._index_sampler
    asked = samplers.stateful_sampler(sampler)
    began = Began(
        **_position(record, progress), epochs=samplers.epochs(sampler), shared=resources.of(loader).shared
    )
    constant = Constant(_described(loader), generators.dump(vars(began)))
    place = {} if asked is None else copy.deepcopy(position.place_of(asked, None))
    return {**_whole(constant, progress, now, workers, record), **_said(place)}


def _constant(loader: Loader, record: EpochRecord, first: dict[str, Any]) -> Constant:
    beginning: Beginning = record.order.beginning
    began = Began(
        **_position(record, record.progress),
        resumes=True,
        states=beginning.states,
        first=first,
        epochs=beginning.epochs,
    )
    fields = {**_described(loader), **record.order.traits.compared}
    return Constant(fields, generators.dump(vars(began)))


def _position(record: EpochRecord | None, progress: Progress) -> dict[str, Any]:
    if record is None:
        return {"epoch": 0, "batches": 0}
    position: Position = record.position_at(progress)
    seeds = {"base_seed": record.base_seed, "shared_seed": record.shared_seed, "lives_on": record.lives_on}
    return {"epoch": position.epoch, "batches": position.batches - position.batch, **seeds}


def _whole(
    constant: Constant, progress: Progress, now: Now, workers: list[Any], record: EpochRecord | None
) -> dict[str, Any]:
    bad = {} if record is None or record.bad_samples is None else record.bad_samples()
    own = {**vars(now), "workers": [(count, state) for count, state, _ in workers], "bad_samples": bad}
    rest = f"[{constant.began}, {generators.dump(own)}]"
    return {
        "library": LIBRARY,
        "version": VERSION,
        **constant.fields,
        "_num_yielded": progress.delivered,
        "_sampler_iter_yielded": progress.delivered,
        "_iterator_finished": progress.over,
        "workers": [place for *_, place in workers],
        "rest": rest,
        "checksum": crc32(rest.encode()),
    }


def _said(place: dict[str, Any]) -> dict[str, Any]:
    """The states of a sampler and its iterator, under torchdata's names."""
    return {"_index_sampler_state": place.get("dataset"), "_sampler_iter_state": place.get("iterator")}


def _before_first(loader: Loader) -> list[Any]:
    """Without workers, the dataset's state before the first epoch, if it has one without an iterator."""
    with contextlib.suppress(Exception):  # raised by user code, which may succeed later
        if loader.num_workers == 0 and (place := position.place_of(loader.dataset, None)):
            return [(0, {}, copy.deepcopy({"ended": False, **place}))]
    return []


def _worker(delivered: int, state: bytes) -> tuple[int, dict[str, Any], Any]:
    worker = pickle.loads(state) if state else {}
    place = worker.pop("position", None)
    if place is not None and "error" in place:
        raise RuntimeError(f"the dataset's state_dict(), or its iterator's, cannot be used: {place['error']}")
    return delivered, worker, place
