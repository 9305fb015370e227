"""After an epoch that was broken off: torch's numbers to the bit with persistent workers, beside its loader;
and with `dynamic` the batches of later epochs, which are those without workers.

torch's workers load whatever was dispatched, also what nobody will get, and draw their random numbers for it.
More than the default seeds:

    FASTQ_BROKEN_SEEDS=0:200 python -m pytest tests/end_to_end/test_broken_epochs.py -k number_of_workers
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data import DataLoader as TorchDataLoader

from fastq_loader import DataLoader
from fastq_loader.reading import generators
from tests.conftest import torchs_segments_removed
from tests.end_to_end.test_resume import Config, plain
from tests.support.datasets import Made, Stream
from tests.support.loaders import MANY_WORKERS

pytestmark = pytest.mark.processes
SIZE = 48


def draw(index: int) -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.rand()


def draw_and_fail(index: int) -> Any:
    """Some samples raise after they have drawn."""
    value = draw(index)
    if index % 7 == 5:
        raise ValueError(f"sample {index}")
    return value


def draw_in_collate(samples: list[Any]) -> tuple[Any, float]:
    return torch.as_tensor(samples), torch.rand(()).item()


def start_slowly(worker: int) -> None:
    """Tasks and the next epoch wait for the worker together."""
    time.sleep(0.2)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "global": (lambda: Made(draw, SIZE), {}),
    "collate": (lambda: list(range(SIZE)), {"collate_fn": draw_in_collate}),
    "errors": (lambda: Made(draw_and_fail, SIZE), {}),
    "stream": (lambda: Stream("drawn", (17, 20)), {}),
    "slow start": (lambda: Made(draw, SIZE), {"worker_init_fn": start_slowly}),
}


def epochs(kind: type, case: str, stops: Sequence[int | None], **arguments: Any) -> list[Any]:
    """What each epoch gave, broken off after so many batches (None: not at all)."""
    dataset, more = CASES[case]
    torch.manual_seed(7)
    loader: Any = kind(dataset(), 2, persistent_workers=True, **arguments, **more)
    seen: list[Any] = []
    for stop in stops:
        iterator = iter(loader)
        batches: list[Any] = []
        while stop is None or len(batches) < stop:
            try:
                batches.append(repr(next(iterator)))
            except StopIteration:
                break
            except ValueError as error:
                error.with_traceback(None)  # with torch it keeps the iterator, and so the workers
                batches.append(type(error))
        seen.append(batches)
    loader._iterator = None
    return seen


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("workers", "prefetch", "stops"), [(1, 4, (2, 2, None)), (2, 3, (0, 4, 1, None, 2, None))], ids=str
)
def test_i4_the_numbers_after_a_break_are_torchs(
    case: str, workers: int, prefetch: int, stops: Sequence[int | None]
) -> None:
    options = {"num_workers": workers, "prefetch_factor": prefetch}
    with torchs_segments_removed():
        torchs = epochs(TorchDataLoader, case, stops, **options)
    assert epochs(DataLoader, case, stops, **options) == torchs


def draw_slowly(index: int) -> float:
    time.sleep(0.3)
    return torch.rand(()).item()


@pytest.mark.parametrize("schedule", ["round_robin", "dynamic"])
def test_i4_workers_that_load_what_nobody_will_get_can_be_closed_and_with_dynamic_there_are_none(
    schedule: str,
) -> None:
    options: dict[str, Any] = {"prefetch_factor": 16, "persistent_workers": True, "schedule": schedule}
    loader = DataLoader(Made(draw_slowly, 64), 1, num_workers=2, **options)
    next(iter(loader))
    start = time.monotonic()
    iterator = iter(loader)
    if schedule == "dynamic":
        next(iterator)
    loader.close()
    assert time.monotonic() - start < 3, "16 samples of 0.3 s were waited for"


SEEDS = range(*map(int, os.environ.get("FASTQ_BROKEN_SEEDS", "0:8").split(":")))
PERMUTATIONS = ["shuffle", "shuffled batches", "several permutations"]
ORDERS = [*PERMUTATIONS, "replacement", "weighted", "subset", "sequential", "distributed"]


def given(config: Config, stops: Sequence[int], held: bool) -> list[Any]:
    """The batches of each epoch, and where that leaves the user's generator."""
    torch.manual_seed(config.seed)
    loader = config.loader(config.seed)
    seen: list[Any] = []
    for stop in stops:
        iterator = iter(loader)
        seen.append([plain(batch) for batch in itertools.islice(iterator, stop)])
        if not held:
            del iterator
    loader.close()
    return [*seen, config.explicit and loader.generator.get_state().tolist()]


@MANY_WORKERS
@pytest.mark.parametrize("seed", SEEDS)
def test_with_dynamic_batches_after_a_break_do_not_depend_on_the_number_of_workers(seed: int) -> None:
    draw, config = random.Random(seed), Config.drawn(seed)
    config = replace(
        config,
        dataset="Augmented",
        length=draw.choice((1, 5, 8, 23, 40, 64)),
        sampler=draw.choice(ORDERS),
        schedule="dynamic",
        num_workers=draw.choice((1, 2, 3, 4, 5, "auto")),
    )
    size = config.batch_size or 1
    whole = (config.length // size, -(-config.length // size))
    stops = [*(draw.choice((0, 1, 2, draw.randrange(1, 30), *whole, 1000)) for _ in range(5)), 1000]
    held = draw.random() < 0.3
    expected = given(replace(config, num_workers=0), stops, held)
    assert given(config, stops, held) == expected, f"{config}, {stops}, {held}"


class Shard:
    """One rank's part of each batch, as of Accelerate's `BatchSamplerShard` with `split_batches=True`."""

    def __init__(self, batch_sampler: Any, rank: int) -> None:
        self.batch_sampler, self.rank = batch_sampler, rank

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batch_sampler:
            yield batch[self.rank :: 2]


@dataclass
class Drawing:
    """Draws each index, or all at once when it is begun, from a generator of its own."""

    generator: Any
    at_once: bool = False

    def __len__(self) -> int:
        return SIZE

    def _draw(self) -> int:
        if isinstance(self.generator, torch.Generator):
            return int(torch.randint(SIZE, (), generator=self.generator))
        return int(self.generator.choice(range(SIZE)))

    def __iter__(self) -> Iterator[int]:
        drawn = (self._draw() for _ in range(SIZE))
        return iter(list(drawn)) if self.at_once else drawn


OWN: dict[str, Callable[[int], dict[str, Any]]] = {
    "a shard of batches": lambda rank: {
        "batch_sampler": Shard(BatchSampler(RandomSampler(range(SIZE), generator=seeded()), 4, False), rank)
    },
    "torch's generator": lambda rank: {"sampler": Drawing(seeded()), "batch_size": 4},
    "the loader's, too": lambda rank: {
        "sampler": Drawing(drawn := seeded()),
        "batch_size": 4,
        "generator": drawn,
    },
    "numpy's": lambda rank: {"sampler": Drawing(np.random.default_rng(3)), "batch_size": 4},
    "Python's": lambda rank: {"sampler": Drawing(random.Random(3)), "batch_size": 4},
    "all at once": lambda rank: {"sampler": Drawing(seeded(), at_once=True), "batch_size": 4},
}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def standing(loader: DataLoader[Any]) -> Any:
    """Where the generators stand, for whoever saves them or sends them to other ranks."""
    found = generators.find({"loader": [loader.batch_sampler, loader.sampler]})
    return {name: repr(generators.state_of(each)) for name, each in found.items()}


def broken(case: str, rank: int, workers: int, stops: Sequence[int], held: bool, persistent: bool) -> Any:
    """What each epoch gave, and where each step left the sampler's generators."""
    torch.manual_seed(7)
    options: dict[str, Any] = {"persistent_workers": True} if persistent and workers else {}
    seen: list[Any] = []
    with DataLoader(
        range(SIZE), num_workers=workers, schedule="dynamic", **OWN[case](rank), **options
    ) as loader:
        for stop in stops:
            iterator = iter(loader)
            for _ in range(stop):
                try:
                    seen.append((next(iterator).tolist(), standing(loader)))
                except StopIteration:
                    seen.append(("the end", standing(loader)))
                    break
            if not held:
                del iterator
    return seen


@MANY_WORKERS
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", OWN)
def test_with_dynamic_a_users_sampler_is_where_it_is_without_workers(case: str, seed: int) -> None:
    """Its generators are, after each batch; and both ranks draw the same permutation after a break."""
    draw = random.Random(seed)
    stops = [draw.choice((0, 1, 3, 11, 12, 13, 100)) for _ in range(4)] + [100]
    held, persistent = draw.random() < 0.3, draw.random() < 0.5
    for rank in (0, 1):
        workers = draw.choice((1, 2, 3))
        expected = broken(case, rank, 0, stops, held, persistent)
        found = broken(case, rank, workers, stops, held, persistent)
        assert found == expected, f"{workers} workers, {stops}, held={held}, persistent={persistent}"
