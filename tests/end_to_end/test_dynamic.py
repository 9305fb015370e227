"""schedule="dynamic": the same bits whichever worker loads them, and a window that no batch holds up."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from fastq_loader import DataLoader, Dynamic
from tests.support.datasets import SAMPLES, Drawing, Made, MapDataset, Stream
from tests.support.gates import Gates, once
from tests.support.loaders import MANY_WORKERS, WORKERS, distinct, seed_all
from tests.support.samplers import FailsAt3
from tests.support.thorough import thorough

SIZE = 26

pytestmark = [pytest.mark.processes, MANY_WORKERS]


def draw_late(index: int) -> Any:
    """After a moment whose length no seed decides."""
    time.sleep(random.Random().random() * 0.004)
    return SAMPLES["drawn"](index)


DRAWS, LATE_DRAWS = MapDataset("drawn", SIZE), Made(draw_late, SIZE)


def as_lists(batch: Any) -> Any:
    return [leaf.tolist() for leaf in batch]


def epochs(
    count: int, dataset: Any, workers: int, stop: int | None = None, **options: Any
) -> list[list[Any]]:
    """What some epochs gave, from one seed of the consumer's generators; the first ends at `stop`."""
    seed_all(11)
    arguments = {"shuffle": "sampler" not in options, "schedule": "dynamic", **options}
    with DataLoader(dataset, batch_size=3, num_workers=workers, **arguments) as loader:
        first = [as_lists(batch) for batch in itertools.islice(iter(loader), stop)]
        return [distinct(first), *(distinct(map(as_lists, loader), 9) for _ in range(count - 1))]


@thorough(after=2)
@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (3, {"prefetch_factor": 4}),
        (2, {"stop": 2, "persistent_workers": True}),
        (2, {"worker_init_fn": seed_all, "sampler": Drawing(SIZE)}),
        (2, {"multiprocessing_context": "forkserver", "persistent_workers": True}),  # they start slowly
        *((3, {"schedule": Dynamic(window=window)}) for window in (1, 5, 64)),
    ],
    ids=lambda value: str(getattr(value, "keys", lambda: value)()),
)
def test_bits_do_not_depend_on_workers_options_or_time(workers: int, options: dict[str, Any]) -> None:
    """Nor on what an init function seeds, or on an epoch that was broken off before."""
    asked = {name: options[name] for name in ("sampler", "stop") if name in options}
    assert epochs(2, LATE_DRAWS, workers, **options) == epochs(2, DRAWS, 0, **asked)


def test_without_order_the_batches_are_the_same_ones_and_epochs_differ() -> None:
    free, ordered = epochs(2, LATE_DRAWS, 3, in_order=False), epochs(2, DRAWS, 0)
    assert [*map(sorted, free)] == [*map(sorted, ordered)]
    assert [row[1:] for row in ordered[0]] != [row[1:] for row in ordered[1]]


@WORKERS
def test_the_error_of_a_sampler_takes_a_number_as_its_batch_would(workers: int) -> None:
    def start(sampler: Any, workers: int) -> Iterator[str]:
        torch.manual_seed(0)
        return map(repr, DataLoader(DRAWS, None, sampler=sampler, num_workers=workers, schedule="dynamic"))

    expected, found = [*start(range(6), 0)], start(FailsAt3(6), workers)
    assert [next(found) for _ in range(3)] == expected[:3]
    with pytest.raises(KeyError):
        next(found)
    assert [*found] == expected[4:]


class LateStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        return map(draw_late, self.numbers())


@thorough(after=1)
@pytest.mark.parametrize("persistent", [True, False])
def test_a_stream_keeps_torchs_interleave_and_does_not_depend_on_time(persistent: bool) -> None:
    numbers = ("drawn", (7, 7, 7))
    found = epochs(2, LateStream(*numbers), 3, shuffle=False, persistent_workers=persistent)
    assert found == epochs(2, Stream(*numbers), 3, shuffle=False)
    for epoch in found:
        assert [batch[0][0] // 1000 for batch in epoch] == [0, 1, 2] * 3
    assert found[0] != found[1]


def late(loaded: torch.Tensor, gates: Gates, index: int) -> tuple[int, int]:
    """The index and who loaded it, when it is noted as loaded; the first sample waits at a gate."""
    if index == 0:
        gates.wait_at(0)
    loaded[index] = 1
    info = get_worker_info()
    assert info is not None
    return index, info.id


def test_the_head_of_the_line_is_never_queued_behind_another_batch(tmp_path: Path) -> None:
    """One worker is held up by batch 0; the other one loads everything else."""
    gates, loaded = Gates(tmp_path), torch.zeros(14).share_memory_()
    dataset = Made(functools.partial(late, loaded, gates), 14)
    with once(lambda: loaded.sum() == 13, lambda: gates.open(0)):
        rows = list(DataLoader(dataset, batch_size=None, num_workers=2, schedule=Dynamic(window=14)))
    assert [index for index, _ in rows] == list(range(14))
    assert {worker for _, worker in rows[1:]} == {1 - rows[0][1]}


class DrawsAlone(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return (torch.rand(1).item() for _ in range(4))


def test_no_two_workers_of_a_stream_draw_the_same_numbers() -> None:
    drawn = [float(number) for number in DataLoader(DrawsAlone(), None, num_workers=2, schedule="dynamic")]
    assert len(set(drawn)) == len(drawn) == 8
