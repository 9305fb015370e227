"""What `state_dict()` returns: an epoch as a plain dict.

Runs in the consumer. The dict passes through `json.dumps` where the user's own states in it do. Four of its
keys are torchdata's (`StatefulDataLoader`), because Accelerate reads and edits them: `_num_yielded` and
`_sampler_iter_yielded` are the batches that were handed out, `_iterator_finished` says that the epoch is
over, `_index_sampler_state` is what the sampler said.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from fastq_loader import arguments
from fastq_loader.arguments import Loader
from fastq_loader.reading import generators
from fastq_loader.resume import samplers
from fastq_loader.resume.order import Beginning, Drawn
from fastq_loader.resume.record import EpochRecord, Position
from fastq_loader.scheduling.progress import START, Progress

T = TypeVar("T")

VERSION = 2
LIBRARY = "fastq_loader"


def describe(loader: Loader) -> dict[str, Any]:
    """What a loader iterates, which must be the same when a state is loaded; `num_workers` only where it
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
    """What gives the state of now while an epoch begins. Few ask then: what cannot change is read later."""
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
        state = _state(loader, {name: generators.state_of(each) for name, each in own.items()})
        shared = _texts(loader._resources.shared)
        return {**state, **_between_epochs(loader, {}), "workers": _before_first(loader), "shared": shared}
    order_now, beginning = record.order, record.order.beginning
    while True:  # once, unless another thread takes batches meanwhile
        # Before what was drawn, where another thread may draw: it has drawn at least what was digested.
        moved, digest = order_now.moved(), beginning.digest
        progress, (drawn, short, exhausted, own_states) = order_now.progress, seen or order_now.seen()
        snapshot = beginning.snapshots.get(progress.head)
        first = dict(beginning.first) if drawn else order_now.pending or order_now.shared_now()
        if order_now.progress is progress and (drawn or not order_now.drawn[0]):
            break
    if progress.over:
        workers = [_worker(*worker) for worker in progress.workers if record.persistent]
        state = _state(loader, own_states, record, progress)
        return {**state, **_between_epochs(loader, moved), "workers": workers}
    # Called after every step, this must cost next to nothing: what stays is copied, what moves is set.
    constant = record.constant if drawn else None
    if constant is None:
        constant = _state(loader, own_states, record, progress)
        constant["resumes"], constant["order"] = True, _order(beginning, first)
        record.constant = constant if drawn else None
    state = constant.copy()
    state["_num_yielded"] = state["_sampler_iter_yielded"] = progress.delivered
    state["beyond"] = sorted(progress.beyond)
    state["generators"] = _texts(own_states)
    state["order"] = order = state["order"].copy()
    order["attributes"], order["digest"] = moved, digest and [*digest, samplers.ranks(loader._index_sampler)]
    order["drawn"] = max(drawn, progress.head)
    order["short"], order["exhausted"] = short, exhausted
    for name in ("epochs", "states", "first"):
        order[name] = order[name].copy()
    if beginning.inner is not None:
        order["inner"] = _for_user(beginning.inner)
    if snapshot is not None:
        state["_index_sampler_state"], state["_sampler_iter_state"] = map(_for_user, snapshot)
    state["workers"] = [_worker(*worker) for worker in progress.workers]
    return {**state, **_bad_samples(record)}


def _order(beginning: Beginning, first: dict[str, Any]) -> dict[str, Any]:
    return {
        "starts": beginning.starts,
        "seeded": beginning.seeded,
        "epochs": beginning.epochs,
        "states": _texts(beginning.states),
        "first": _texts(first),
    }


def _between_epochs(loader: Loader, moved: dict[str, Any]) -> dict[str, Any]:
    sampler = loader._index_sampler
    return {
        "order": {"epochs": samplers.epochs(sampler), "attributes": moved},
        "_index_sampler_state": _for_user(samplers.said(samplers.stateful_sampler(sampler))),
    }


def _before_first(loader: Loader) -> list[dict[str, Any]]:
    """Without workers, where the dataset stands before the first epoch, if it says so without an iterator."""
    said = samplers.said(loader.dataset) if loader.num_workers == 0 else None
    if said is None or isinstance(said, Exception):
        return []
    return [{"delivered": 0, "position": {"ended": False, "dataset": said}}]


def _for_user(said: Any) -> Any:
    if isinstance(said, Exception):
        raise said
    return copy.deepcopy(said)


def _state(
    loader: Loader,
    own_states: dict[str, Any],
    record: EpochRecord | None = None,
    progress: Progress = START,
) -> dict[str, Any]:
    """What stays the same from batch to batch of an epoch, and what does not as it is now."""
    position = Position() if record is None else record.position_at(progress)
    return {
        "library": LIBRARY,
        "version": VERSION,
        **_described(loader),
        **({} if record is None or progress.over else record.order.traits.compared),
        "epoch": position.epoch,
        "batches": position.batches - position.batch,
        "_num_yielded": progress.delivered,
        "_sampler_iter_yielded": progress.delivered,
        "_iterator_finished": progress.over,
        "generators": _texts(own_states),
        "lives_on": record is not None and record.lives_on,
        "base_seed": 0 if record is None else record.base_seed,
        "shared_seed": None if record is None else record.shared_seed,
        "resumes": False,
        **_bad_samples(record),
    }


def _bad_samples(record: EpochRecord | None) -> dict[str, Any]:
    return {} if record is None or record.bad_samples is None else {"bad_samples": record.bad_samples()}


def _texts(states: dict[str, Any]) -> dict[str, str]:
    return {name: generators.dump(state) for name, state in states.items()}


def _worker(delivered: int, state: bytes) -> dict[str, Any]:
    worker: dict[str, Any] = {"delivered": delivered}
    if state:
        worker.update(pickle.loads(state))
    if error := worker.get("position", {}).get("error"):
        raise RuntimeError(f"the dataset's state_dict(), or its iterator's, cannot be used: {error}")
    if "generators" in worker:
        worker["generators"] = _texts(worker["generators"])
    return worker
