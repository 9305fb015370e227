"""What `load_state_dict()` takes: a state is read, checked, and only then taken.

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
from fastq_loader.reading import generators
from fastq_loader.reading.position import is_stateful
from fastq_loader.resume import samplers
from fastq_loader.resume.order import Beginning, Snapshot
from fastq_loader.resume.record import Position, Saved
from fastq_loader.resume.state import LIBRARY, VERSION, describe
from fastq_loader.scheduling.progress import Progress, WorkerProgress
from fastq_loader.workers.kinds import Auto

#: Parts of a state by name, and the progress of all workers.
Fields = dict[str, Any]
Workers = tuple[WorkerProgress, ...]

#: Seeds and positions are int64 elsewhere.
_WHOLE = range(2**63)
#: The fields of a state, each of a type or a number in a range; `object` is anything.
_ALWAYS: Fields = {
    **dict.fromkeys(("epoch", "batches", "_num_yielded", "_sampler_iter_yielded"), _WHOLE),
    **dict.fromkeys(("num_workers", "base_seed"), _WHOLE),
    **dict.fromkeys(("lives_on", "resumes", "_iterator_finished"), bool),
    **dict.fromkeys(("generators", "order"), dict),
}
#: Keys that an error names, of what is no state.
_KEYS = 10
_OF_BAD_SAMPLES: Fields = {**dict.fromkeys(("in_epoch", "read", "total"), _WHOLE), "last": list}
_OF_ORDER: Fields = {"epochs": dict, "attributes": dict}
_OF_ORDER_IN_EPOCH: Fields = {
    "starts": range(1, 3),
    "drawn": _WHOLE,
    **dict.fromkeys(("seeded", "short", "exhausted"), bool),
    **dict.fromkeys(("states", "first"), dict),
    "digest": object,
}


def _check(values: Any, fields: dict[Any, Any], where: str = "") -> Fields:
    """The values, which must have these fields."""
    for name, kind in fields.items():
        if name not in values:
            raise ValueError(f"field '{where}{name}' is missing: the state was cut short")
        value = values[name]
        if isinstance(kind, range):
            fits, wanted = is_int(value) and value in kind, f"a number from {kind.start} to {kind.stop - 1}"
        else:
            fits, wanted = kind in (object, type(value)), f"of type {kind.__name__}"
        if not fits:
            raise ValueError(f"field '{where}{name}' is {value!r:.60}; it should be {wanted}")
    return dict(values)


def read(state: Any, loader: Loader, ignore: Iterable[str] = ()) -> Saved:
    """Check a state, without changing anything.

    Args:
        state: what `state_dict()` returned.
        loader: that is to go on from it.
        ignore: fields of `describe` that may differ, or "order".

    Raises:
        ValueError: it is damaged or foreign, of another version, or of a loader that iterates something else:
            names the field, what was saved and what is there. Or a name to ignore is unknown.
        TypeError: `ignore` is no collection of names.
    """
    now = describe(loader)
    ignored = checked_names("ignore", ignore, [*now, "order"])
    fields = _check(_ours(state), {**dict.fromkeys(now, object), **_ALWAYS})
    _compare(fields, now, ignored)
    own = samplers.own_generators(loader._index_sampler, loader.generator, loader.dataset)
    torchs = own.keys() & str(fields["generator"]).split("/")
    order = _check(fields["order"], _OF_ORDER, "order.")
    between = Saved(
        state=state,
        position=Position(fields["epoch"], 0, fields["batches"]),
        base_seed=fields["base_seed"],
        generators=_states(fields["generators"], "generators.", own, torchs),
        lives_on=fields["lives_on"],
        built=samplers.attributes(loader._index_sampler),
        beginning=_beginning(order, 0),
        bad_samples=_bad_samples(fields),
    )
    if not fields["resumes"]:
        _check(fields, {"_index_sampler_state": object})
        shared = _states(fields.get("shared", {}), "shared.", generators.GLOBAL)
        return replace(between, shared=shared, progress=Progress(workers=_workers(fields, loader, ignored)))
    (epoch, _, batches), delivered = between.position, fields["_sampler_iter_yielded"]
    if fields["_iterator_finished"]:  # Accelerate says it when the last batch was handed out
        return replace(between, position=Position(epoch + 1, 0, batches + delivered))
    _check(fields, {"beyond": list, "shared_seed": object if fields.get("shared_seed") is None else _WHOLE})
    beginning = _beginning_of_epoch(order, loader, own, torchs, ignored)
    progress = _progress(fields, beginning.drawn, _workers(fields, loader, ignored))
    beginning.snapshots.update(_snapshots(fields, loader, progress.head))
    return replace(
        between,
        position=Position(epoch, delivered, batches + delivered),
        resumes=True,
        iterable=arguments.is_iterable(loader),
        progress=progress,
        beginning=beginning,
        shared_seed=fields["shared_seed"],
    )


def _bad_samples(fields: Fields) -> Fields:
    if "bad_samples" not in fields:
        return {}
    found = _check(_check(fields, {"bad_samples": dict})["bad_samples"], _OF_BAD_SAMPLES, "bad_samples.")
    for sample in found["last"]:
        if type(sample) is not list or len(sample) != 5:
            raise ValueError(f"field 'bad_samples.last' has {sample!r:.60}, and not a list of five values")
    return copy.deepcopy(found)


def _beginning(order: Fields, which: int) -> Beginning:
    """What is known of an order with the attributes that samplers had now (0), or when it began (1)."""
    set_before = _check(order["epochs"], dict.fromkeys(order["epochs"], _WHOLE), "order.epochs.")
    moved = _check(order["attributes"], dict.fromkeys(order["attributes"], list), "order.attributes.")
    values = {name: values[which] for name, values in moved.items() if len(values) > which}
    return Beginning(epochs=set_before, attributes=values)


def _beginning_of_epoch(
    order: Fields, loader: Loader, own: Fields, torchs: Iterable[str], ignored: Container[str]
) -> Beginning:
    _check(order, _OF_ORDER_IN_EPOCH, "order.")
    return replace(
        _beginning(order, 1),
        **{name: order[name] for name in ("starts", "seeded", "drawn", "short", "exhausted")},
        states=_states(order["states"], "order.states.", {**generators.GLOBAL, **own}, torchs),
        first=_states(order["first"], "order.first.", generators.GLOBAL),
        digest=_digest(
            order["digest"], None if "order" in ignored else samplers.ranks(loader._index_sampler)
        ),
        inner=copy.deepcopy(order.get("inner")),
    )


def _digest(digest: Any, part: str | None) -> tuple[int, int] | None:
    """None: of another rank's part, or the caller says that it may differ."""
    if digest is None:
        return None
    if type(digest) is not list or len(digest) != 3 or not all(map(is_int, digest[:2])):
        raise ValueError(f"field 'order.digest' is {digest!r:.60}, and not two numbers and a text")
    return (digest[0], digest[1]) if digest[2] == part else None


def _snapshots(fields: Fields, loader: Loader, head: int) -> dict[int, Snapshot]:
    names = "_index_sampler_state", "_sampler_iter_state"
    if samplers.asked_sampler(loader._index_sampler) is None and names[0] not in fields:
        return {}
    _check(fields, dict.fromkeys(names, object))
    return {head: copy.deepcopy((fields[names[0]], fields[names[1]]))}


def _progress(fields: Fields, drawn: int, workers: Workers) -> Progress:
    beyond, name = fields["beyond"], "_sampler_iter_yielded"
    _check(fields, {name: range(len(beyond) + drawn + 1)})
    head = fields[name] - len(beyond)
    if not all(is_int(position) and head < position < drawn for position in beyond):
        raise ValueError(f"field 'beyond' is {beyond!r:.60}, not batches from {head + 1} to {drawn - 1}")
    return Progress(fields[name], frozenset(beyond), workers)


def _workers(fields: Fields, loader: Loader, ignored: Container[str]) -> Workers:
    """Nothing is known of them between two epochs, if they do not live on."""
    if not (fields["resumes"] or fields.get("workers")):
        return ()
    said = dict(enumerate(_check(fields, {"workers": list})["workers"]))
    _check(said, dict.fromkeys(said, dict), "workers.")
    workers = [_worker(number, worker, loader.dataset) for number, worker in said.items()]
    return _dealt(fields, tuple(workers), loader, ignored)


def _ours(state: Any) -> Fields:
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is a {type(state).__name__}, and not a dict that state_dict() returned")
    if "_snapshot" in state or ("_sampler_iter_state" in state and "library" not in state):
        raise ValueError(
            "field 'library' is missing: this state was saved by torchdata's StatefulDataLoader, whose "
            "shuffles are drawn in another way. Finish the epoch with it, or begin it anew"
        )
    if state.get("library") != LIBRARY:
        keys = ", ".join(map(repr, list(state)[:_KEYS]))
        raise ValueError(
            f"field 'library' is {state.get('library')!r}, not {LIBRARY!r}: not a state of ours. If that is "
            f"below a key of a checkpoint, give what is there: it has {keys}"
        )
    if state.get("version") != VERSION or not is_int(state["version"]):
        raise ValueError(
            f"field 'version' is {state.get('version')!r}, and this release reads {VERSION}: use the release "
            "of fastq_loader that saved it, or a later one"
        )
    return dict(state)


def _states(texts: Any, where: str, known: Fields, needed: Iterable[str] = ()) -> Fields:
    """Generators by name → their states. Those that are known are checked, and those needed are there."""
    read = {}
    for name, text in _check(texts, dict.fromkeys(needed, object), where).items():
        try:
            read[name] = generators.load(text)
        except ValueError as error:
            raise ValueError(f"field '{where}{name}' is damaged: {error}") from error
        why = generators.fits(known[name], read[name]) if name in known else ""
        if why:
            raise ValueError(f"field '{where}{name}' does not fit the generator: {why}")
    return read


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


def _worker(number: int, worker: Fields, dataset: Any) -> WorkerProgress:
    if "unknown" in worker:
        raise ValueError(
            f"field 'workers.{number}': the epoch before was broken off, and worker {number} had not said "
            "where that left it. Use a state that was saved before, or after its first batch"
        )
    where, needed = f"workers.{number}.", {"delivered": _WHOLE}
    delivered = _check(worker, needed, where)["delivered"]
    state: Fields = {name: worker[name] for name in ("over", "position") if name in worker}
    if "position" in state or (delivered and is_stateful(dataset)):
        place, fields = _check(worker, {"position": dict}, where)["position"], {"ended": bool}
        says = "iterator" not in place and is_stateful(dataset)
        _check(place, fields | {"dataset": object} if says else fields, f"{where}position.")
    if "generators" in worker:
        state["generators"] = _states(worker["generators"], f"{where}generators.", generators.GLOBAL)
    return WorkerProgress(delivered, pickle.dumps(state) if state else b"")


def _dealt(fields: Fields, workers: Workers, loader: Loader, ignored: Container[str]) -> Workers:
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
    if iterable and fields["resumes"] and callable(reshard):
        return _resharded(reshard, workers, wanted)
    if "num_workers" in ignored and not (iterable and fields["resumes"]):
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
    own = samplers.own_generators(loader._index_sampler, loader.generator, loader.dataset)
    if not loaded.resumes:
        _take_sampler(loaded, loader._index_sampler, own)
    for name, state in loaded.generators.items():
        if name in own:
            generators.set_state(own[name], state)
    saved = loaded.beginning.epochs
    if not loaded.resumes:  # the next one begins, which the user may have set already
        now = samplers.epochs(loader._index_sampler)
        saved = {depth: max(epoch, now.get(depth, 0)) for depth, epoch in saved.items()}
    samplers.set_epochs(loader._index_sampler, saved)
    samplers.set_attributes(loader._index_sampler, loaded.beginning.attributes)


def _take_sampler(loaded: Saved, index_sampler: Any, own: Fields) -> None:
    sampler, state = samplers.stateful_sampler(index_sampler), loaded.state.get("_index_sampler_state")
    if sampler is None or state is None:
        return
    before = samplers.said(sampler)
    drawn = {name: each for name, each in own.items() if name in loaded.generators}
    states = [(each, loaded.generators[name]) for name, each in drawn.items()]
    with generators.restored([*generators.GLOBAL.values(), *drawn.values()], states):
        try:
            sampler.load_state_dict(copy.deepcopy(state))
            if loaded.state["_iterator_finished"]:
                samplers.let_end(sampler, state)
        except Exception as error:
            if not isinstance(before, Exception):
                sampler.load_state_dict(before)
            raise ValueError(
                f"field '_index_sampler_state' is {state!r:.60}, which {type(sampler).__name__} refuses: "
                f"{type(error).__name__}: {error}"
            ) from error
