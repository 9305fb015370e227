"""After an epoch that was broken off: with `dynamic` later epochs give what they give without workers.

With persistent workers the random numbers are torch's to the bit (`test_parity.py`, "after breaks"): torch's
workers load whatever was dispatched, even if nobody will get it, and draw their random numbers for it.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from fastq_loader import DataLoader
from fastq_loader.reading import generators
from tests.end_to_end.test_resume import Config, plain
from tests.support.datasets import Made
from tests.support.loaders import MANY_WORKERS
from tests.support.samplers import Own
from tests.support.thorough import seeds, thorough

pytestmark = [pytest.mark.processes, MANY_WORKERS]
SIZE = 48


def draw_slowly(index: int) -> float:
    time.sleep(0.1)
    return torch.rand(()).item()


@pytest.mark.parametrize("schedule", ["round_robin", "dynamic"])
def test_i4_workers_that_load_what_nobody_will_get_can_be_closed_and_with_dynamic_there_are_none(
    schedule: str,
) -> None:
    options: dict[str, Any] = {"prefetch_factor": 64, "persistent_workers": True, "schedule": schedule}
    loader = DataLoader(Made(draw_slowly, 256), 1, num_workers=2, **options)
    next(iter(loader))
    start = time.monotonic()
    iterator = iter(loader)
    if schedule == "dynamic":
        next(iterator)
    loader.close()
    assert time.monotonic() - start < 3, "64 samples of 0.1 s were waited for"


def standing(loader: DataLoader[Any]) -> Any:
    """The states of the generators, which a user may save or send to other ranks."""
    found = generators.find({"loader": [loader.batch_sampler, loader.sampler, loader.generator]})
    return {name: repr(generators.state_of(each)) for name, each in found.items()}


def given(loader: DataLoader[Any], stops: Sequence[int], held: bool) -> list[Any]:
    """What epochs gave, each broken off after so many batches, and where each batch left the generators."""
    seen: list[Any] = []
    with loader:
        for stop in stops:
            iterator = iter(loader)
            seen += [(plain(batch), standing(loader)) for batch in itertools.islice(iterator, stop)]
            seen.append(standing(loader))
            if not held:
                del iterator
    return seen


PERMUTATIONS = ["shuffle", "shuffled batches", "several permutations"]
ORDERS = [*PERMUTATIONS, "replacement", "weighted", "subset", "sequential", "distributed"]


def test_with_dynamic_the_epoch_after_a_break_is_that_without_workers() -> None:
    """Torch's sampler draws 32 numbers at a time. Two workers are 10 batches ahead, so it has drawn twice."""
    found = []
    for options in ({}, {"num_workers": 2, "prefetch_factor": 4}):
        sampler = RandomSampler(range(SIZE), replacement=True, generator=seeded())
        loader = DataLoader(range(SIZE), 4, sampler=sampler, schedule="dynamic", **options)
        found.append(given(loader, [3, 1000], False))
    assert found[0] == found[1]


@seeds(1, 8)
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
    found = []
    for each in (replace(config, num_workers=0), config):
        torch.manual_seed(seed)
        found.append(given(each.loader(seed), stops, held))
    assert found[0] == found[1], f"{config}, {stops}, {held}"


class Shard:
    """One rank's part of each batch, as of Accelerate's `BatchSamplerShard` with `split_batches=True`."""

    def __init__(self, batch_sampler: Any, rank: int) -> None:
        self.batch_sampler, self.rank = batch_sampler, rank

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batch_sampler:
            yield batch[self.rank :: 2]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


OWN: dict[str, Callable[[int], dict[str, Any]]] = {
    "a shard of batches": lambda rank: {
        "batch_sampler": Shard(BatchSampler(RandomSampler(range(SIZE), generator=seeded()), 4, False), rank)
    },
    "the loader's, too": lambda rank: {"sampler": Own(SIZE, drawn := seeded()), "generator": drawn},
    "torch's generator": lambda rank: {"sampler": Own(SIZE, seeded())},
    "numpy's": lambda rank: {"sampler": Own(SIZE, np.random.default_rng(3))},
    "Python's": lambda rank: {"sampler": Own(SIZE, random.Random(3))},
    "all at once": lambda rank: {"sampler": Own(SIZE, seeded(), at_once=True)},
}


@seeds(1, 8)
@thorough(but={"case": "a shard of batches"})
@pytest.mark.parametrize("case", OWN)
def test_with_dynamic_a_users_sampler_is_where_it_is_without_workers(case: str, seed: int) -> None:
    """Its generators are, after each batch; and both ranks draw the same permutation after a break."""
    draw = random.Random(seed)
    stops = [draw.choice((0, 1, 3, 11, 12, 13, 100)) for _ in range(4)] + [100]
    held, persistent = draw.random() < 0.3, draw.random() < 0.5
    for rank in (0, 1):
        workers, found = draw.choice((1, 2, 3)), []
        for options in ({}, {"num_workers": workers, "persistent_workers": persistent}):
            torch.manual_seed(7)
            options = {"schedule": "dynamic", **OWN[case](rank), **options}
            options |= {} if "batch_sampler" in options else {"batch_size": 4}
            found.append(given(DataLoader(range(SIZE), **options), stops, held))
        assert found[0] == found[1], f"{workers} workers, {stops}, held={held}, persistent={persistent}"
