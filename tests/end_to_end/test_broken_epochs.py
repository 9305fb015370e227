"""After an epoch that was broken off: torch's numbers to the bit with persistent workers, beside its loader;
and with `dynamic` the order of later epochs, which is that without workers.

torch's workers load whatever was dispatched, also what nobody will get, and draw their random numbers for it.
More than the default seeds:

    FASTQ_BROKEN_SEEDS=0:200 python -m pytest tests/end_to_end/test_broken_epochs.py -k number_of_workers
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchDataLoader

from fastq_loader import DataLoader
from tests.support.datasets import Made

SIZE = 48


def draw(index: int) -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.rand()


def draw_and_fail(index: int) -> Any:
    """Some samples raise after they have drawn."""
    value = draw(index)
    if index % 7 == 5:
        raise ValueError(f"sample {index}")
    return value


class Stream(IterableDataset[float]):
    """Each worker's part draws, and one is shorter."""

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        assert info is not None
        for _ in range(20 if info.id else 17):
            yield torch.rand(()).item()


def draw_in_collate(samples: list[Any]) -> tuple[Any, float]:
    return torch.as_tensor(samples), torch.rand(()).item()


def start_slowly(worker: int) -> None:
    """Tasks and the next epoch wait for the worker together."""
    time.sleep(0.2)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "global": (lambda: Made(draw, SIZE), {}),
    "collate": (lambda: list(range(SIZE)), {"collate_fn": draw_in_collate}),
    "errors": (lambda: Made(draw_and_fail, SIZE), {}),
    "stream": (Stream, {}),
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


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("workers", "prefetch", "stops"),
    [(1, 4, (2, 2, None)), (2, 3, (0, 4, 1, None, 2, None))],
    ids=str,
)
def test_i4_the_numbers_after_a_break_are_torchs(
    case: str, workers: int, prefetch: int, stops: Sequence[int | None]
) -> None:
    torchs, ours = (
        epochs(kind, case, stops, num_workers=workers, prefetch_factor=prefetch)
        for kind in (TorchDataLoader, DataLoader)
    )
    assert torchs == ours


def draw_slowly(index: int) -> float:
    time.sleep(0.3)
    return torch.rand(()).item()


@pytest.mark.processes
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


SAMPLERS: dict[str, Callable[[Any, torch.Generator | None], Any]] = {
    "shuffle": lambda items, g: RandomSampler(items, generator=g),
    "replacement": lambda items, g: RandomSampler(items, True, len(items) + 40, generator=g),
    "several permutations": lambda items, g: RandomSampler(items, False, 2 * len(items) + 3, generator=g),
    "weighted": lambda items, g: WeightedRandomSampler([1.0] * len(items), len(items), generator=g),
    "subset": lambda items, g: SubsetRandomSampler(items, generator=g),
    "sequential": lambda items, g: None,
    "distributed": lambda items, g: DistributedSampler(items, 2, 1),
}
SEEDS = range(*map(int, os.environ.get("FASTQ_BROKEN_SEEDS", "0:8").split(":")))


def orders(config: dict[str, Any], workers: int | str) -> list[Any]:
    """The items of each epoch."""
    torch.manual_seed(config["seed"])
    generator = torch.Generator().manual_seed(config["seed"]) if config["explicit"] else None
    items, size = range(config["length"]), config["batch_size"]
    sampler = SAMPLERS[config["sampler"]](items, generator)
    given: dict[str, Any] = {"batch_size": size, "sampler": sampler}
    if config["batches"] and sampler is not None:
        given = {"batch_sampler": BatchSampler(sampler, size, config["drop_last"])}
    persistent = config["persistent"] and workers != 0
    loader: Any = DataLoader(
        items,  # type: ignore[arg-type]
        num_workers=workers,  # type: ignore[arg-type]
        schedule="dynamic",
        generator=generator,
        persistent_workers=persistent,
        **given,
    )
    seen: list[Any] = []
    for stop in config["stops"]:
        iterator = iter(loader)
        seen.append([batch.tolist() for batch, _ in zip(iterator, range(stop), strict=False)])
        if not config["held"]:
            del iterator
    loader.close()
    return seen


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("seed", SEEDS)
def test_with_dynamic_the_order_after_a_break_does_not_depend_on_the_number_of_workers(seed: int) -> None:
    draw = random.Random(seed)
    length, batch_size = draw.choice((1, 5, 8, 23, 40, 64)), draw.choice((1, 3, 4, 8))
    stops = (0, 1, 2, draw.randrange(1, 30), length // batch_size, -(-length // batch_size), 1000)
    config = {
        "seed": seed,
        "length": length,
        "batch_size": batch_size,
        "sampler": draw.choice(["shuffle", *SAMPLERS]),
        "batches": draw.random() < 0.3,
        "drop_last": draw.random() < 0.3,
        "explicit": draw.random() < 0.8,
        "persistent": draw.random() < 0.5,
        "held": draw.random() < 0.3,
        "stops": [draw.choice(stops) for _ in range(5)],
    }
    workers = draw.choice((1, 2, 3, 4, 5, "auto"))
    assert orders(config, workers) == orders(config, 0), f"{config} with {workers} workers"
