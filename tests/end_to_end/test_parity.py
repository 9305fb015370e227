"""torch's DataLoader and ours side by side, under configurations drawn from a seed.

`draw_config(seed)` draws one, `check_config` runs both loaders under the same random state and compares
everything that can be seen: batches to the bit, their number, `len()`, every generator's state after `iter()`
and after every `next()`, warnings and exceptions. More than the default seeds:

    python -m pytest tests/end_to_end/test_parity.py -k drawn_configuration --seeds 0:5000
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from fastq_loader import DataLoader, LoaderHint
from tests.conftest import torchs_segments_removed
from tests.support import datasets
from tests.support.datasets import (
    BatchedDataset,
    Drawing,
    FaultyDataset,
    FaultyStream,
    MapDataset,
    SizedStream,
    Stream,
    UnbatchedDataset,
    UnevenBatches,
    describe,
    difference,
)
from tests.support.loaders import Wrapped, seed_all, torch_has
from tests.support.thorough import seeds

MOST_BATCHES = 300
"""No configuration has as many batches in an epoch; a loader that never ends stops here."""


@dataclass(frozen=True)
class Config:
    """One configuration in plain values, so that a failure prints all there is to know."""

    dataset: str = "tensors"
    size: int = 23
    lengths: tuple[int, ...] = (5, 2, 4)
    told: int = 11
    batch_size: int | None = 4
    sampler: str = "default"
    collate: str = "default"
    subclass: str = "none"
    num_workers: int = 2
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    start_method: str | None = None
    generator: str = "global"
    drop_last: bool = False
    in_order: bool = True
    init: str | None = None
    timeout: int = 0
    pin_memory: bool = False
    epochs: int = 1
    stop_after: tuple[int | None, ...] = (None, None, None)
    ask_len: bool = True
    keep: bool = False
    scribble: bool = False
    seed: int = 0

    def __str__(self) -> str:
        """Only what differs from the defaults."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"Config({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def unordered(self) -> bool:
        """Whether the order of batches depends on which worker is quicker."""
        return not self.in_order and self.num_workers >= 2


MAP_DATASETS: dict[str, Callable[[Config], Dataset]] = {
    **{kind: lambda c, kind=kind: MapDataset(kind, c.size) for kind in datasets.SAMPLES},
    "batched": lambda c: BatchedDataset("dict", c.size),
    "batched and drawn": lambda c: BatchedDataset("drawn", c.size),
    "unbatched": lambda c: UnbatchedDataset("namedtuple", c.size),
    "subset": lambda c: Subset(BatchedDataset("tensors", 2 * c.size), range(c.size - 1, -1, -1)),
    "concat": lambda c: ConcatDataset([MapDataset("tensors", c.size - c.size // 3)] * 2),
    "tensor dataset": lambda c: TensorDataset(
        torch.arange(3.0 * c.size).reshape(-1, 3), torch.arange(c.size)
    ),
    "table": lambda c: Subset(
        TensorDataset(
            torch.arange(6000.0 * c.size).reshape(c.size, -1, 3), *[torch.arange(c.size) % 2 > 0] * 9
        ),
        [index - c.size * (index % 7 == 3) for index in range(c.size)],
    ),
    "list": lambda c: list(range(100, 100 + c.size)),
    "broken": lambda c: FaultyDataset("tensors", c.size, frozenset({0, 7, 8, c.size - 1}), ValueError),
    "no key": lambda c: FaultyDataset("dict", c.size, frozenset({3, 11}), KeyError),
}

STREAMS: dict[str, Callable[[Config], Dataset]] = {
    "stream": lambda c: Stream("tensors", c.lengths),
    "stream of dicts": lambda c: Stream("dict", c.lengths),
    "stream of large": lambda c: Stream("large", c.lengths),
    "stream of drawn": lambda c: Stream("drawn", c.lengths),
    "sized stream": lambda c: SizedStream("numpy", c.lengths, c.told),
    "broken stream": lambda c: FaultyStream("tensors", c.lengths),
    "pipe": lambda c: IterableWrapper(range(c.size)).shuffle().sharding_filter(),
}

DRAWING_DATASETS = {"drawn", "batched and drawn"}
"""Map-style: a batch depends on which worker makes it."""

SAMPLERS: dict[str, Callable[[Config, torch.Generator | None], Any]] = {
    "backwards": lambda c, g: datasets.Backwards(c.size),
    "drawing": lambda c, g: Drawing(c.size),
    "weighted": lambda c, g: WeightedRandomSampler([1.0 + i % 3 for i in range(c.size)], 17, generator=g),
    "subset": lambda c, g: SubsetRandomSampler(range(0, c.size, 2), generator=g),
    "replacement": lambda c, g: RandomSampler(
        range(c.size), replacement=True, num_samples=2 * c.size, generator=g
    ),
    "list": lambda c, g: [i * 7 % c.size for i in range(c.size)],
    "numpy": lambda c, g: np.arange(c.size)[::-1],
    "begun": lambda c, g: Begun(range(c.size)),
}
BATCH_SAMPLERS: dict[str, Callable[[Config], Any]] = {
    "uneven batches": lambda c: UnevenBatches(c.size),
    "list of batches": lambda c: [[i, (i + 1) % c.size] for i in range(0, c.size, 2)],
    "tuples": lambda c: [tuple(range(i, min(i + 3, c.size))) for i in range(0, c.size, 3)],
}

COLLATES: dict[str, Callable[[Any], Any] | None] = {
    "default": None,
    "identity": datasets.identity,
    "wrap": datasets.wrap,
    "alias": datasets.alias,
    "wrap and draw": datasets.wrap_and_draw,
    "storages": datasets.storages,
}


def wrapped(kind: Any) -> Any:
    class Mine(kind):
        def _get_iterator(self) -> Any:
            return Wrapped(super()._get_iterator(), lambda batch: ("wrapped", batch))

    return Mine


def generating(kind: Any) -> Any:
    class Mine(kind):
        def __iter__(self) -> Any:
            iterator = super().__iter__()
            return (("generated", batch) for batch in iterator)

    return Mine


def resampled(kind: Any) -> Any:
    class Mine(kind):
        """Sets its sampler past the class, and draws for every index."""

        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            name = "sampler" if self.batch_sampler is None else "batch_sampler"
            object.__setattr__(self, name, Drawn(getattr(self, name)))

    return Mine


class Begun:
    """Draws when it is iterated, so that the states of the generators show how often it is."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        torch.rand(1)
        return iter(self.sampler)


class Drawn(Begun):
    """Draws for each index."""

    def __iter__(self) -> Iterator[Any]:
        for index in self.sampler:
            torch.rand(1)
            yield index


SUBCLASSES: dict[str, Callable[[Any], Any]] = {
    "none": lambda kind: kind,
    **{function.__name__: function for function in (wrapped, generating, resampled)},
}


def seed_anew(worker: int) -> None:
    """An init function that overrides every seed."""
    seed_all(90 + worker, 91 + worker, 92 + worker)


def draw_and_change_the_dataset(worker: int) -> None:
    """An init function that uses up random numbers and edits the worker's copy of the dataset."""
    info = get_worker_info()
    assert info is not None
    if (kind := getattr(info.dataset, "kind", None)) in ("tensors", "dict"):
        info.dataset.kind = "tuple" if kind == "tensors" else "tensors"
    _ = torch.rand(3), random.random(), np.random.rand()


INITS: dict[str, Callable[[int], None]] = {
    "seed": seed_anew,
    "draw": draw_and_change_the_dataset,
}


#: Not drawn. torch's data pipes are frozen, and its loader still seeds, shuffles and shards them.
DIRECTED_ONLY = {"pipe", "begun"}


def draw_config(seed: int) -> Config:
    """The configuration of a seed; what torch refuses (in words, which are compared) is drawn as well."""
    rng = random.Random(seed)
    stream = rng.random() < 0.25
    dataset = rng.choice(sorted({*(STREAMS if stream else MAP_DATASETS)} - DIRECTED_ONLY))
    workers = rng.choice([0, 1, 2, 2, 3])
    config = Config(
        dataset=dataset,
        size=rng.choice([0, 1, *rng.choices(range(10, 61), k=8)]),
        lengths=tuple(rng.randrange(0, 14) for _ in range(rng.choice([1, 2, 3, 3, 4]))),
        told=rng.choice([0, 5, 11, 40]),
        batch_size=rng.choice([None, None, 1, 2, 3, 4, 5, 8]),
        collate=rng.choice(["default"] * 4 + ["identity", "wrap", "alias", "wrap and draw"]),
        num_workers=workers,
        generator=rng.choice(["global", "global", "loader", "shared", "sampler"]),
        epochs=rng.choice([1, 1, 2, 2, 3]),
        ask_len=rng.random() < 0.7,
        keep=rng.random() < 0.3,
        scribble=rng.random() < 0.3 and dataset not in ("tensor dataset", "table"),
        pin_memory=rng.random() < 0.03,
        seed=rng.randrange(2**32),
    )
    if not stream:
        others = [name for kind in (SAMPLERS, BATCH_SAMPLERS) for name in sorted({*kind} - DIRECTED_ONLY)]
        kinds = ["default"] * 2 + ["shuffle"] * 4 + others
        config = replace(config, sampler=rng.choice(kinds))
        if config.sampler in BATCH_SAMPLERS:
            config = replace(config, batch_size=1)
        if config.size == 0 and config.sampler not in ("default", "shuffle"):
            config = replace(config, size=9)
    if config.batch_size is not None and config.sampler not in BATCH_SAMPLERS:
        config = replace(config, drop_last=rng.random() < 0.3)
    if dataset in ("ragged", "objects") and config.collate == "default" and rng.random() < 0.8:
        config = replace(config, collate="wrap")  # the default collate refuses these
    if workers:
        config = replace(
            config,
            persistent_workers=rng.random() < 0.4,
            prefetch_factor=rng.choice([None, 1, 2, 3, 4]),
            start_method=rng.choices([None, "fork", "spawn", "forkserver"], [50, 47, 1.5, 1.5])[0],
            in_order=rng.random() < 0.8,
            init=rng.choice([None, None, None, "seed", "draw"]),
            timeout=rng.choice([0, 0, 0, 60]),
        )
    if config.unordered and not stream:
        # Which worker makes a batch depends on the time it takes: nothing may depend on the worker.
        config = replace(config, init=None)
        if dataset in DRAWING_DATASETS:
            config = replace(config, dataset="tensors")
        if config.collate == "wrap and draw":
            config = replace(config, collate="wrap")
    if not config.unordered:
        stops = [rng.choice([None, None, None, 0, 1, 2, 5]) for _ in range(3)]
        draws = dataset in {*DRAWING_DATASETS, "stream of drawn"} or config.collate == "wrap and draw"
        if draws and config.persistent_workers:  # after a break these draw other numbers than torch's
            stops[:2] = None, None
        config = replace(config, stop_after=tuple(stops))
    if rng.random() < 0.15 and config.collate in ("default", "wrap"):
        config = replace(config, collate="storages")
    subclass = rng.choice(["none", "none", *sorted(SUBCLASSES)])
    if subclass == "generating" and config.unordered:  # a generator ends at an error, whichever comes first
        subclass = "none"
    if subclass == "resampled" and stream and workers > 1:  # torch draws when a worker's end arrives
        subclass = "none"
    return replace(config, subclass=subclass)


Trace = list[tuple[str, Any]]
"""What was seen, in order: what it is, and its description."""

#: Python 3.12 says the first of any fork beside a thread. Not every torch says the second.
NOT_COMPARED = ["use of fork() may lead to deadlocks"]
if not torch_has("no accelerator is found"):
    NOT_COMPARED.append("no accelerator is found")


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=6).hexdigest()


def random_states(generators: dict[str, torch.Generator]) -> dict[str, str]:
    """A digest of each generator's state, the three global ones included."""
    kind, keys, position, *_ = np.random.get_state()
    return {
        "torch": _digest(torch.get_rng_state().numpy().tobytes()),
        "random": _digest(repr(random.getstate()).encode()),
        "numpy": _digest(repr((kind, keys.tobytes(), position)).encode()),
        **{name: _digest(g.get_state().numpy().tobytes()) for name, g in generators.items()},
    }


def describe_error(error: Exception) -> Any:
    """Type, and of the text what the dataset put in: the rest may differ (torch adds the traceback)."""
    # torch's frames hold the error, which holds the frames, which hold the iterator: a worker forked later
    # could collect its copy of them, and shut down in the wrong process.
    error.with_traceback(None)
    own = re.search(r"broken sample \d+", str(error))
    return (type(error).__name__, own.group() if own else "")


@contextmanager
def recorded(trace: Trace, what: str) -> Iterator[None]:
    """Add the warnings of a block to the trace."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [
        (warning.category.__name__, str(warning.message))
        for warning in caught
        if not issubclass(warning.category, LoaderHint)  # torch gives none
        and not any(text in str(warning.message) for text in NOT_COMPARED)
    ]
    trace.append((f"{what}: warnings", found))


def make_arguments(config: Config, generators: dict[str, torch.Generator]) -> dict[str, Any]:
    """The constructor's arguments, made anew for each loader."""
    if config.generator != "global":
        name = "sampler" if config.generator == "sampler" else "loader"
        generators[name] = torch.Generator().manual_seed(config.seed + 1)
    for_sampler = generators.get("loader" if config.generator == "shared" else "sampler")
    arguments: dict[str, Any] = {
        "dataset": {**MAP_DATASETS, **STREAMS}[config.dataset](config),
        "num_workers": config.num_workers,
        "collate_fn": COLLATES[config.collate],
        "generator": generators.get("loader"),
        "prefetch_factor": config.prefetch_factor,
        "persistent_workers": config.persistent_workers,
        "multiprocessing_context": config.start_method,
        "in_order": config.in_order,
        "worker_init_fn": INITS[config.init] if config.init else None,
        "timeout": config.timeout,
        "pin_memory": config.pin_memory,
    }
    if config.sampler in BATCH_SAMPLERS:
        arguments["batch_sampler"] = BATCH_SAMPLERS[config.sampler](config)
        return arguments
    arguments |= {"batch_size": config.batch_size, "drop_last": config.drop_last}
    if config.sampler == "shuffle":
        arguments["shuffle"] = True
    elif config.sampler != "default":
        arguments["sampler"] = SAMPLERS[config.sampler](config, for_sampler)
    return arguments


def scribble(batch: Any) -> None:
    """Overwrite every tensor of a batch: it is the user's own."""
    if isinstance(batch, torch.Tensor):
        batch.zero_()
    elif isinstance(batch, dict | list | tuple):
        for value in batch.values() if isinstance(batch, dict) else batch:
            scribble(value)


def observe(kind: type, config: Config) -> Trace:
    """Run one loader and write down all that can be seen of it."""
    trace: Trace = []
    seed_all(config.seed)
    generators: dict[str, torch.Generator] = {}
    try:
        with recorded(trace, "constructor"):
            loader = SUBCLASSES[config.subclass](kind)(**make_arguments(config, generators))
    except Exception as error:
        trace.append(("constructor: error", (type(error).__name__, str(error))))
        return trace
    try:
        for epoch in range(config.epochs):
            if config.ask_len:
                try:
                    trace.append((f"epoch {epoch}: len", len(loader)))
                except TypeError as error:
                    trace.append((f"epoch {epoch}: len", str(error)))
            run_epoch(loader, config, f"epoch {epoch}", config.stop_after[epoch], generators, trace)
            trace.append((f"epoch {epoch}: states after its end", random_states(generators)))
    finally:
        if hasattr(loader, "close"):
            loader.close()
    return trace


def run_epoch(
    loader: Any,
    config: Config,
    name: str,
    stop_after: int | None,
    generators: dict[str, torch.Generator],
    trace: Trace,
) -> None:
    """One epoch, to its end or until `stop_after` batches have come."""
    arrived: list[Any] = []
    kept: list[tuple[Any, Any]] = []
    try:
        with recorded(trace, f"{name}: iter()"):
            iterator = iter(loader)
    except Exception as error:
        trace.append((f"{name}: iter() error", describe_error(error)))
        return
    trace.append((f"{name}: states after iter()", random_states(generators)))
    with recorded(trace, f"{name}: next()"):
        while len(arrived) < (MOST_BATCHES if stop_after is None else stop_after):
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except Exception as error:
                arrived.append(("error", describe_error(error)))
            else:
                arrived.append(described := describe(batch))
                if config.scribble:
                    scribble(batch)
                elif config.keep:
                    kept.append((batch, described))
                del batch
            trace.append((f"{name}: states after {len(arrived)} batches", random_states(generators)))
        else:
            arrived.append("stopped")
        del iterator
    if config.unordered:
        arrived.sort(key=repr)
    trace.append((f"{name}: number of batches", len(arrived)))
    for position, described in enumerate(arrived):
        trace.append((f"{name}: batch {position}", described))
    changed = [position for position, (batch, described) in enumerate(kept) if describe(batch) != described]
    trace.append((f"{name}: kept batches that changed later", changed))


def check_config(config: Config) -> None:
    """Run both loaders and fail at the first thing seen that differs."""
    with torchs_segments_removed():
        expected = observe(TorchDataLoader, config)
    actual = observe(DataLoader, config)
    for (what, one), (other_what, other) in itertools.zip_longest(
        expected, actual, fillvalue=("the end", None)
    ):
        assert what == other_what, f"{config}\ntorch: {what}: {one}\nours:  {other_what}: {other}"
        found = difference(one, other, what)
        assert found is None, f"{config}\n{found}"


STOPPED = (2, None, None)
LONGER: dict[str, Any] = {"dataset": "sized stream", "lengths": (9, 9), "told": 4, "batch_size": 3}
STAY: dict[str, Any] = {"persistent_workers": True, "epochs": 3}
BROKEN_OFF: dict[str, dict[str, Any]] = {
    "seeded": {"dataset": "numpy", "sampler": "shuffle", "init": "seed"},
    "broken": {"dataset": "broken"},
    "stream": {"dataset": "stream", "lengths": (17, 20)},
}
FEW_BREAKS: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 4, "stop_after": (2, 2, None), **STAY}
DIRECTED: dict[str, Config] = {
    "no workers, shuffled": Config(num_workers=0, sampler="shuffle", epochs=2),
    "no workers, generator": Config(num_workers=0, sampler="shuffle", generator="loader", epochs=2),
    "no workers, drawn": Config(num_workers=0, dataset="drawn", sampler="drawing", epochs=2),
    "no workers, stopped": Config(num_workers=0, sampler="replacement", stop_after=STOPPED),
    "shuffled by a generator": Config(sampler="shuffle", generator="loader", epochs=2),
    "drawn in persistent workers": Config(dataset="drawn", **STAY),
    "drawn in the sampler": Config(sampler="drawing", prefetch_factor=3, stop_after=STOPPED),
    "unbatched, no workers": Config(batch_size=None, dataset="numpy", num_workers=0),
    "broken samples": Config(dataset="broken", batch_size=1, **STAY),
    "broken samples, no workers": Config(dataset="broken", num_workers=0, batch_size=2, epochs=2),
    "stream, no workers": Config(dataset="stream", num_workers=0, batch_size=2, epochs=2),
    "stream, last ones dropped": Config(dataset="stream", num_workers=3, batch_size=2, drop_last=True),
    "stream longer than it says, no workers": Config(**LONGER, num_workers=0),
    "broken stream": Config(dataset="broken stream", lengths=(7, 4), batch_size=2),
    "stream stopped early": Config(dataset="stream", lengths=(30, 30), stop_after=STOPPED),
    "pipe, shuffled by a generator": Config(dataset="pipe", sampler="shuffle", generator="loader", **STAY),
    "pipe, no workers": Config(dataset="pipe", sampler="shuffle", num_workers=0, epochs=2),
    **{
        f"{name}, after breaks": Config(size=48, batch_size=2, **given, **FEW_BREAKS)
        for name, given in BROKEN_OFF.items()
        if name in ("seeded", "stream")
    },
    "begun, no workers": Config(sampler="begun", num_workers=0, epochs=3),
    "begun, workers stay": Config(sampler="begun", **STAY),
}


@pytest.mark.processes
@seeds(3, 25)
def test_drawn_configuration_equals_torch(seed: int) -> None:
    check_config(draw_config(seed))


@pytest.mark.processes
@pytest.mark.parametrize("name", DIRECTED)
def test_directed_configuration_equals_torch(name: str) -> None:
    check_config(DIRECTED[name])
