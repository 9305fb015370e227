"""Layout of `state_dict()`: an epoch as a plain dict.

Runs in the consumer. Two loaders are compared by fields of it, and what users' samplers and datasets say has
fields of its own, which pass through `json.dumps` where that does. All the rest is one text with a checksum,
so `load_state_dict` finds out whether a part is missing or was changed. Four of the keys are torchdata's
(`StatefulDataLoader`), because Accelerate reads and edits them: `_num_yielded`, `_sampler_iter_yielded` are
the batches that were handed out, `_iterator_finished` says that the epoch is over, `_index_sampler_state` is
what the sampler said.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from zlib import crc32

from fastq_loader import arguments
from fastq_loader.arguments import Loader
from fastq_loader.reading import generators, position
from fastq_loader.resume import samplers
from fastq_loader.resume.order import Beginning, Drawn
from fastq_loader.resume.record import EpochRecord, Position
from fastq_loader.scheduling.progress import START, Progress

T = TypeVar("T")

VERSION = 3
LIBRARY = "fastq_loader"


@dataclass(frozen=True)
class Began:
    """Fields that stay the same from batch to batch of an epoch, and that no loader is compared with.

    Attributes:
        epoch, batches: epochs that are over, and batches that were handed out in them.
        resumes: whether the epoch goes on in the middle.
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
    """Fields that change with each batch, besides the four keys of torchdata's.

    Attributes:
        beyond: see `Progress`.
        generators, drawn, exhausted: see `order.Stopped`.
        digest, part: see `order.Beginning`, and of which part of the data it is.
        workers: of each reader, how many of its batches were handed out, and its state without what the
            dataset says.
        bad_samples: what `BadSamples.state` returned, or {}.
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
    """The part of a state that stays the same from batch to batch: the fields, and `Began` as a text."""

    fields: dict[str, Any]
    began: str


def unpack(text: Any, checksum: Any) -> tuple[Began, Now]:
    """The blob that lies in a state besides the fields.

    Raises:
        ValueError: it is damaged.
    """
    if type(text) is not str or checksum != crc32(text.encode()):
        raise ValueError("field 'rest' is damaged, or was changed: its checksum is another one")
    began, now = generators.load(text)
    return Began(**began), Now(**now)


def describe(loader: Loader) -> dict[str, Any]:
    """Description of the data, which must be the same when a state is loaded; `num_workers` only where it
    matters."""
    return {**dict.fromkeys(("dataset_kind", "dataset_length")), **_described(loader), **_length(loader)}


def _described(loader: Loader) -> dict[str, Any]:
    """The same without the length, for which the dataset is asked only where somebody wants a state."""
    parts = loader._index_sampler, loader.generator, loader.dataset
    return {
        "dataset_kind": "iterable" if arguments.is_iterable(loader) else "map",
        "batch_size": loader.batch_size,
        **samplers.compared(loader._index_sampler),
        "generator": "/".join(samplers.torchs_generators(*parts)),
        "schedule": "dynamic" if arguments.is_dynamic(loader) else "round_robin",
        "num_workers": int(loader.num_workers),
    }


def _length(loader: Loader) -> dict[str, Any]:
    try:
        return {"dataset_length": None if arguments.is_iterable(loader) else len(loader.dataset)}
    except Exception:  # it has none, or cannot say it
        return {"dataset_length": None}


def now(loader: Loader) -> dict[str, Any]:
    """The state of a loader. May be called on any thread, and in a handler of a signal."""
    resources = loader._resources
    while True:  # once, unless another thread begins an epoch meanwhile
        held, place = resources.held, resources.place
        if held is None and place == (None, None):
            resources.shared = resources.shared or _shared(loader)
        state = _of_place(loader) if held is None else held()
        if resources.held is held and resources.place is place:
            return state if "dataset_length" in state else {**state, **_length(loader)}


def begun(loader: Loader, begin: Callable[[], T]) -> T:
    """Begin an epoch. Meanwhile the state of the loader is that of before; and if it was asked for before
    the first epoch, this draws what it would have drawn then."""
    resources = loader._resources
    with contextlib.suppress(Exception):  # of user code; `now` raises it
        resources.held = _hold(loader)
    try:
        with generators.as_at(resources.shared):
            iterator = begin()
        resources.shared = {}
        return iterator
    finally:
        resources.held = None


def _hold(loader: Loader) -> Callable[[], dict[str, Any]]:
    """Return the function that gives the current state while an epoch begins. Few ask then: what cannot
    change is read later."""
    record, loaded = loader._resources.place
    if record and not loaded and record.over and not record.shown and record.order.traits.still:
        seen = record.order.seen()
        return lambda: state_of(loader, record, seen)
    state = _of_place(loader)
    return lambda: copy.deepcopy(state)


def _of_place(loader: Loader) -> dict[str, Any]:
    record, loaded = loader._resources.place
    if loaded is not None:
        return copy.deepcopy(loaded.state)
    return state_of(loader, record) if record is None or record.shown is None else record.shown[0]()


def _shared(loader: Loader) -> dict[str, Any]:
    """The states of the shared generators that an epoch draws from when it begins."""
    names = set(samplers.shared_generators(loader._index_sampler))
    if loader.generator is None:
        names.add("torch")
    return {name: generators.state_of(generators.GLOBAL[name]) for name in names}


def state_of(loader: Loader, record: EpochRecord | None, seen: Drawn | None = None) -> dict[str, Any]:
    """The state of a loader, in a dict of its own.

    Args:
        loader: whose.
        record: of its newest epoch; None before the first.
        seen: what `record.order.seen()` gave at the moment whose state is wanted; None: now.
    """
    if record is None:
        own = samplers.own_generators(loader._index_sampler, loader.generator, loader.dataset)
        now = Now({name: generators.state_of(each) for name, each in own.items()})
        return _between_epochs(loader, None, START, now, _before_first(loader))
    order = record.order
    if order.progress.over:
        states = (seen or order.seen())[2]
        workers = [_worker(*worker) for worker in order.progress.workers if record.persistent]
        return _between_epochs(loader, record, order.progress, Now(states), workers)
    place: dict[str, Any] = {}
    ahead: list[Any] = []
    while True:  # once, unless another thread takes batches meanwhile
        # Before what was drawn, where another thread may draw: it has drawn at least what was digested.
        digest, progress, drawn = order.beginning.digest, order.progress, seen or order.seen()
        if order.is_asked:
            progress, drawn, place, ahead = order.asked()
        first = dict(order.beginning.first) if drawn[0] else order.pending or order.shared_now()
        if order.progress is progress and (drawn[0] or not order.drawn[0]):
            break
    # Called after every step, this must cost next to nothing: what stays is kept.
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
        **_position(record, progress), epochs=samplers.epochs(sampler), shared=loader._resources.shared
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
    """Where a sampler and its iterator stand, by torchdata's names."""
    return {"_index_sampler_state": place.get("dataset"), "_sampler_iter_state": place.get("iterator")}


def _before_first(loader: Loader) -> list[Any]:
    """Without workers, where the dataset stands before the first epoch, if it says so without an iterator."""
    with contextlib.suppress(Exception):  # of user code: it may say so later
        if loader.num_workers == 0 and (place := position.place_of(loader.dataset, None)):
            return [(0, {}, copy.deepcopy({"ended": False, **place}))]
    return []


def _worker(delivered: int, state: bytes) -> tuple[int, dict[str, Any], Any]:
    worker = pickle.loads(state) if state else {}
    place = worker.pop("position", None)
    if place is not None and "error" in place:
        raise RuntimeError(f"the dataset's state_dict(), or its iterator's, cannot be used: {place['error']}")
    return delivered, worker, place
