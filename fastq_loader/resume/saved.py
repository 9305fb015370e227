"""What `load_state_dict()` takes: a state is read, checked, and only then taken.

Runs in the consumer. Nothing of a loader changes before all of a state was found to fit it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastq_loader import arguments
from fastq_loader.errors import is_int
from fastq_loader.reading import generators
from fastq_loader.reading.position import is_stateful, put_at_end
from fastq_loader.resume.order import Beginning, Snapshot
from fastq_loader.resume.record import Position
from fastq_loader.resume.samplers import (
    asked_sampler,
    attributes,
    epochs,
    let_end,
    own_generators,
    ranks,
    said,
    set_attributes,
    set_epochs,
    stateful_sampler,
)
from fastq_loader.resume.state import COMPARED, LIBRARY, VERSION, describe
from fastq_loader.scheduling.progress import START, Progress, WorkerProgress
from fastq_loader.workers.config import Rules
from fastq_loader.workers.kinds import Auto

if TYPE_CHECKING:
    from fastq_loader.loader import DataLoader


@dataclass(frozen=True)
class Saved:
    """A state that was read, and fits its loader.

    Attributes:
        state: as it was given.
        position: where the loader stands with it.
        resumes: whether the next epoch goes on in the middle.
        iterable: whether the dataset is one.
        progress, beginning, base_seed, shared_seed: of that epoch.
        shared: states of shared generators that a first epoch begins from.
        generators: name → state that the loader's own generators had.
        built: the samplers' attributes before anything was loaded.
        lives_on: whether its workers would have gone on with the next epoch.
    """

    state: dict[str, Any]
    position: Position
    base_seed: int
    generators: dict[str, Any]
    lives_on: bool
    built: dict[str, Any] = field(default_factory=dict)
    resumes: bool = False
    iterable: bool = False
    progress: Progress = START
    beginning: Beginning = field(default_factory=Beginning)
    shared_seed: int | None = None
    shared: dict[str, Any] = field(default_factory=dict)


def read(state: Any, loader: DataLoader[Any], ignore: Iterable[str] = ()) -> Saved:
    """Check a state, without changing anything.

    Args:
        state: what `state_dict()` returned.
        loader: that is to go on from it.
        ignore: fields of `COMPARED` that may differ.

    Raises:
        ValueError: it is damaged or foreign, of another version, or of a loader that iterates something else:
            names the field, what was saved and what is there. Or a name to ignore is unknown.
        TypeError: `ignore` is no collection of names.
    """
    ignored, fields = _names(ignore), _Fields(_ours(state))
    _compare(fields, describe(loader), ignored)
    own = own_generators(loader._index_sampler, loader.generator, loader.dataset)
    torchs = own.keys() & str(fields.present("generator")).split("/")
    _ = fields.number("num_workers"), fields.number("_num_yielded")
    noted = _Fields(fields.mapping("order"), "order.")
    told = {depth: noted.whole(f"epochs.{depth}", epoch) for depth, epoch in noted.mapping("epochs").items()}
    between = Saved(
        state=state,
        position=Position(fields.number("epoch"), 0, fields.number("batches")),
        base_seed=fields.number("base_seed"),
        generators=fields.states("generators", own, torchs),
        lives_on=fields.flag("lives_on"),
        built=attributes(loader._index_sampler),
        beginning=Beginning(epochs=told, attributes=_attributes(noted, 0)),
    )
    delivered, over = fields.number("_sampler_iter_yielded"), fields.flag("_iterator_finished")
    if not fields.flag("resumes"):
        fields.present("_index_sampler_state")
        shared = fields.states("shared", generators.GLOBAL) if "shared" in fields.values else {}
        return replace(between, shared=shared, progress=_between_epochs(fields, loader, ignored))
    epoch, _, batches = between.position
    if over:  # Accelerate says it when the last batch was handed out
        return replace(between, position=Position(epoch + 1, 0, batches + delivered))
    part = None if "order" in ignored else ranks(loader._index_sampler)
    beginning = _beginning(noted, told, own, torchs, part)
    progress = _progress(fields, beginning.drawn, loader, ignored)
    beginning.snapshots.update(_snapshots(fields, loader, progress.head))
    return replace(
        between,
        position=Position(epoch, delivered, batches + delivered),
        resumes=True,
        iterable=arguments.is_iterable(loader),
        progress=progress,
        beginning=beginning,
        shared_seed=None if fields.present("shared_seed") is None else fields.number("shared_seed"),
    )


def _beginning(
    noted: _Fields, told: dict[str, int], own: dict[str, Any], torchs: Iterable[str], part: str | None
) -> Beginning:
    return Beginning(
        starts=noted.number("starts", 1, 2),
        seeded=noted.flag("seeded"),
        drawn=noted.number("drawn"),
        short=noted.flag("short"),
        exhausted=noted.flag("exhausted"),
        epochs=told,
        states=noted.states("states", {**generators.GLOBAL, **own}, torchs),
        first=noted.states("first", generators.GLOBAL),
        attributes=_attributes(noted, 1),
        digest=_digest(noted, part),
        inner=copy.deepcopy(noted.values.get("inner")),
    )


def _attributes(noted: _Fields, which: int) -> dict[str, Any]:
    told = _Fields(noted.mapping("attributes"), "order.attributes.")
    return {name: told.sequence(name)[which] for name in told.values if len(told.sequence(name)) > which}


def _digest(noted: _Fields, part: str | None) -> tuple[int, int] | None:
    """None: of another rank's part, or whoever loads it says that it may differ."""
    told = noted.get("digest", list, type(None))
    found = (noted.whole("digest", told[0]), noted.whole("digest", told[1 % len(told)])) if told else None
    return found if told and told[-1] == part else None


def _snapshots(fields: _Fields, loader: DataLoader[Any], head: int) -> dict[int, Snapshot]:
    if asked_sampler(loader._index_sampler) is None and "_index_sampler_state" not in fields.values:
        return {}
    names = "_index_sampler_state", "_sampler_iter_state"
    return {head: copy.deepcopy((fields.present(names[0]), fields.present(names[1])))}


def _progress(fields: _Fields, drawn: int, loader: DataLoader[Any], ignored: frozenset[str]) -> Progress:
    beyond = frozenset(fields.whole("beyond", at) for at in fields.sequence("beyond"))
    workers = _workers(fields, loader, ignored)
    progress = Progress(fields.number("_sampler_iter_yielded", 0, len(beyond) + drawn), beyond, workers)
    if not all(progress.head < position < drawn for position in beyond):
        raise ValueError(
            f"field 'beyond' is {sorted(beyond)!r:.60}, not batches from {progress.head + 1} to {drawn - 1}"
        )
    return progress


def _between_epochs(fields: _Fields, loader: DataLoader[Any], ignored: frozenset[str]) -> Progress:
    known = "workers" in fields.values and fields.sequence("workers")
    return Progress(workers=_workers(fields, loader, ignored)) if known else START


def _workers(fields: _Fields, loader: DataLoader[Any], ignored: frozenset[str]) -> tuple[WorkerProgress, ...]:
    workers = tuple(
        _read_worker(number, worker, loader.dataset)
        for number, worker in enumerate(fields.sequence("workers"))
    )
    return _dealt(fields, workers, loader, ignored)


def _names(ignore: Any) -> frozenset[str]:
    if isinstance(ignore, str):
        raise TypeError(f"ignore={ignore!r} must be a collection of names: ignore=({ignore!r},)")
    names = frozenset(ignore)
    known = *COMPARED, "order"
    if unknown := names.difference(known):
        raise ValueError(f"ignore={sorted(map(str, unknown))} is unknown: use some of {', '.join(known)}")
    return names


def _ours(state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is a {type(state).__name__}, and not a dict that state_dict() returned")
    if "_snapshot" in state or ("_sampler_iter_state" in state and "library" not in state):
        raise ValueError(
            "field 'library' is missing: this state was saved by torchdata's StatefulDataLoader, whose "
            "shuffles are drawn in another way. Finish the epoch with it, or begin it anew"
        )
    if state.get("library") != LIBRARY:
        raise ValueError(f"field 'library' is {state.get('library')!r}, not {LIBRARY!r}: not a state of ours")
    if state.get("version") != VERSION or not is_int(state["version"]):
        raise ValueError(
            f"field 'version' is {state.get('version')!r}, and this release reads {VERSION}: use the release "
            "of fastq_loader that saved it, or a later one"
        )
    return dict(state)


#: Seeds and positions are int64 elsewhere.
_MOST = 2**63 - 1


class _Fields:
    """The values of a dict, of the types that they must have."""

    def __init__(self, values: dict[str, Any], where: str = "") -> None:
        self.values = values
        self._where = where

    def present(self, name: str) -> Any:
        if name not in self.values:
            raise ValueError(f"field {self._where + name!r} is missing: the state was cut short")
        return self.values[name]

    def get(self, name: str, *types: type) -> Any:
        value = self.present(name)
        if type(value) not in types:
            wanted = " or ".join(kind.__name__ for kind in types)
            raise ValueError(f"field {self._where + name!r} is {value!r:.60}; it should be of type {wanted}")
        return value

    def flag(self, name: str) -> bool:
        return bool(self.get(name, bool))

    def mapping(self, name: str) -> dict[Any, Any]:
        return dict(self.get(name, dict))

    def sequence(self, name: str) -> list[Any]:
        return list(self.get(name, list))

    def number(self, name: str, least: int = 0, most: int = _MOST) -> int:
        return self.whole(name, self.get(name, int), least, most)

    def whole(self, name: str, value: Any, least: int = 0, most: int = _MOST) -> int:
        if not is_int(value) or not least <= value <= most:
            raise ValueError(
                f"field {self._where + name!r} is {value!r:.60}, and not a number from {least} to {most}"
            )
        return int(value)

    def states(self, name: str, known: dict[str, Any], needed: Iterable[str] = ()) -> dict[str, Any]:
        """Generators by name → their states. Those that are known are checked, and those needed are there."""
        told = _Fields(self.mapping(name), f"{self._where}{name}.")
        read = {key: told.present(key) for key in needed}
        for key, text in self.mapping(name).items():
            try:
                read[key] = generators.load(text)
            except ValueError as error:
                raise ValueError(f"field '{self._where}{name}.{key}' is damaged: {error}") from error
            why = generators.fits(known[key], read[key]) if key in known else ""
            if why:
                raise ValueError(f"field '{self._where}{name}.{key}' does not fit the generator: {why}")
        return read


def _compare(fields: _Fields, now: dict[str, Any], ignored: frozenset[str]) -> None:
    for name in COMPARED:
        if name == "num_workers" or name in ignored:
            continue
        saved = fields.get(name, int, str, bool, type(None))
        if "sampler" in ignored and None in (saved, now[name]):
            continue  # what only the other sampler has
        if saved != now[name]:
            raise ValueError(
                f"field {name!r}: {saved!r} was saved, and the loader has {now[name]!r}. Make the loader as "
                f"it was, or say load_state_dict(state, ignore=({name!r},)) where you know that it may differ"
            )


def _read_worker(number: int, worker: Any, dataset: Any) -> WorkerProgress:
    where = f"workers.{number}."
    if not isinstance(worker, dict):
        raise ValueError(f"field 'workers.{number}' is {worker!r:.60}; it should be of type dict")
    told = _Fields(worker, where)
    state: dict[str, Any] = {}
    delivered = told.number("delivered")
    if "unknown" in worker:
        raise ValueError(
            f"field 'workers.{number}': the epoch before was broken off, and worker {number} had not said "
            "where that left it. Use a state that was saved before, or after its first batch"
        )
    if "over" in worker:
        state["over"] = told.flag("over")
    if "position" in worker or (delivered and is_stateful(dataset)):
        state["position"] = told.mapping("position")
        place = _Fields(state["position"], f"{where}position.")
        place.flag("ended")
        if "iterator" not in place.values and is_stateful(dataset):
            place.present("dataset")
    if "generators" in worker:
        state["generators"] = told.states("generators", generators.GLOBAL)
    return WorkerProgress(delivered, pickle.dumps(state) if state else b"")


def _dealt(
    fields: _Fields, workers: tuple[WorkerProgress, ...], loader: DataLoader[Any], ignored: frozenset[str]
) -> tuple[WorkerProgress, ...]:
    """The progress of the workers that there will be."""
    if isinstance(loader.num_workers, Auto) and any(worker.state for worker in workers):
        return workers  # the epoch goes on with as many
    wanted = max(1, loader.num_workers)
    if len(workers) == wanted and fields.number("num_workers") == loader.num_workers:
        return workers
    iterable = arguments.is_iterable(loader)
    if not iterable and not any(worker.state for worker in workers):
        return ()  # any worker can load any batch
    reshard = getattr(loader.dataset, "reshard_state_dicts", None)
    if iterable and fields.flag("resumes") and callable(reshard):
        return _resharded(reshard, workers, wanted)
    if "num_workers" in ignored and not (iterable and fields.flag("resumes")):
        return ()
    raise ValueError(
        f"field 'num_workers': {fields.number('num_workers')} was saved, and the loader has "
        f"{loader.num_workers}. The dataset says where it stands for each worker: use as many"
        + (", or give it a method reshard_state_dicts(states, num_workers)" if iterable else "")
    )


def _resharded(
    reshard: Callable[..., Any], workers: tuple[WorkerProgress, ...], wanted: int
) -> tuple[WorkerProgress, ...]:
    told = [pickle.loads(worker.state).get("position") if worker.state else None for worker in workers]
    parts = list(reshard(told, wanted))
    if len(parts) != wanted:
        raise ValueError(f"reshard_state_dicts gave {len(parts)} states for {wanted} workers")
    return tuple(
        WorkerProgress(0, pickle.dumps({"position": part}) if part is not None else b"") for part in parts
    )


def take(loaded: Saved, loader: DataLoader[Any]) -> None:
    """Put a loader's own generators, and its samplers, where they stood.

    Raises:
        ValueError: a sampler does not take what it said; nothing has changed.
    """
    own = own_generators(loader._index_sampler, loader.generator, loader.dataset)
    if not loaded.resumes:
        _take_sampler(loaded, loader._index_sampler, own)
        if loader.num_workers == 0:
            _take_dataset(loaded, loader)
    for name, state in loaded.generators.items():
        if name in own:
            generators.set_state(own[name], state)
    told = epochs(loader._index_sampler)
    if loaded.resumes:
        told = loaded.beginning.epochs
    else:  # the next one begins, of which the user may have told them already
        told = {depth: max(epoch, told.get(depth, 0)) for depth, epoch in loaded.beginning.epochs.items()}
    set_epochs(loader._index_sampler, told)
    set_attributes(loader._index_sampler, loaded.beginning.attributes)


def _take_dataset(loaded: Saved, loader: DataLoader[Any]) -> None:
    """Put the dataset where it stood between two epochs, so that the next one begins from there."""
    for worker in loaded.progress.workers:
        state = pickle.loads(worker.state) if worker.state else {}
        if state.get("over"):
            rules = vars(Rules(True, loader._auto_collation, loader.drop_last))
            put_at_end(state["position"], loader.dataset, collate=loader.collate_fn, **rules)
        elif state:
            loader.dataset.load_state_dict(state["position"]["dataset"])  # type: ignore[attr-defined]


def _take_sampler(loaded: Saved, index_sampler: Any, own: dict[str, Any]) -> None:
    sampler, state = stateful_sampler(index_sampler), loaded.state.get("_index_sampler_state")
    if sampler is None or state is None:
        return
    before = said(sampler)
    drawn = {name: each for name, each in own.items() if name in loaded.generators}
    states = [(each, loaded.generators[name]) for name, each in drawn.items()]
    with generators.restored([*generators.GLOBAL.values(), *drawn.values()], states):
        try:
            sampler.load_state_dict(copy.deepcopy(state))
            if loaded.state["_iterator_finished"]:
                let_end(sampler, state)
        except Exception as error:
            if not isinstance(before, Exception):
                sampler.load_state_dict(before)
            raise ValueError(
                f"field '_index_sampler_state' is {state!r:.60}, which {type(sampler).__name__} refuses: "
                f"{type(error).__name__}: {error}"
            ) from error
