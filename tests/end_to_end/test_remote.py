"""Workers on other machines give what local ones give, to the bit. Those machines are programs on this one.

Far workers, connections, handshakes and frames are the real ones, over loopback; only their start is played.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from fastq_loader import DataLoader, UnpicklableError, empty
from fastq_loader.workers.kinds import WorkerKind
from tests.conftest import descendants, wait_until
from tests.support.crimes import CrimeAt, FailsToUnpickle, raise_os_error
from tests.support.datasets import SAMPLES, Made, MapDataset, Record, Stream, assert_same, identity
from tests.support.far_workers import LocalPlacement, far, far_pids
from tests.support.late_device import late_device
from tests.support.loaders import MANY_WORKERS, Trainer, distinct, seed_all
from tests.support.thorough import thorough
from tests.support.traces import check as check_trace
from tests.support.traces import read, tracks

pytestmark = [pytest.mark.processes, MANY_WORKERS, pytest.mark.usefixtures("warm_far_workers")]


def taken(workers: str | WorkerKind, dataset: Any, stops: tuple[int | None, ...], options: Any) -> list[Any]:
    """What some epochs give, each broken off after so many batches; and what the consumer draws after."""
    seed_all(7)
    loader = DataLoader(dataset, num_workers=2, workers=workers, **options)
    found = []
    for stop in stops:
        batches = list(itertools.islice(loader, stop))
        found += batches if stop in (0, 1) else distinct(batches)
    loader.close()
    return [*found, torch.rand(1)]


def check(dataset: Any, *stops: int | None, **options: Any) -> None:
    """The same comes from workers of this machine and of others; the stops are as in `taken`."""
    options = {"batch_size": 4, **options}
    stops = stops or (None,)
    here = taken("processes", dataset, stops, options)
    assert_same(taken(far(nodes=2), dataset, stops, options), here)


def everything(index: int) -> Any:
    return [SAMPLES[kind](index) for kind in ("dict", "large", "numpy", "objects", "text")]


def stacked(samples: list[Any]) -> dict[str, Any]:
    """Writes its result to memory that the worker gave it."""
    images = torch.stack([image for image, _ in samples], out=empty((len(samples), 3, 64, 96)))
    info = get_worker_info()
    assert info is not None
    return {"images": images, "drawn": torch.rand(2), "seed": info.seed}


def defined_here() -> Any:
    class Local(Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, key: Any) -> Any:
            return (lambda key: Record(repr(key), key))(key)

    return Local()


KEYS = [2**70, np.int64(3), (1, "a"), slice(1, 2), "text", frozenset({4})]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "functions and seeds, large batches": (
        MapDataset("large", 192),
        {"batch_size": 64, "collate_fn": stacked, "worker_init_fn": seed_all},
    ),
    "any index, a class in a function": (
        defined_here(),
        {"batch_size": None, "sampler": KEYS, "schedule": "dynamic"},
    ),
}


@thorough(after=1)
@pytest.mark.parametrize("name", CASES)
def test_users_objects_give_the_same_there(name: str) -> None:
    dataset, options = CASES[name]
    check(dataset, **options)


SCHEDULES = ["dynamic", "round_robin"]
STAY: dict[str, Any] = {"persistent_workers": True}
EPOCHS: dict[str, tuple[Any, tuple[int | None, ...], dict[str, Any]]] = {
    # Random numbers of persistent workers may differ after a break.
    "breaks": (MapDataset("dict", 60), (None, 3, 0, 1, None), {"shuffle": True, **STAY}),
    # No part has ended when the epoch is broken off: as in torch, it depends on the time whether another task
    # was given out for one.
    "a stream": (Stream("large", [23, 18, 5]), (None, 2, None), STAY),
    "drawn": (MapDataset("drawn", 41), (None, None), {"shuffle": True, **STAY}),
    "large": (MapDataset("large", 41), (None,), {"shuffle": True}),
}


@thorough(after=1)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [*zip(EPOCHS, SCHEDULES * 2, strict=True), *zip(EPOCHS, SCHEDULES[::-1] * 2, strict=True)],
)
def test_epochs_are_the_same(name: str, schedule: str) -> None:
    dataset, stops, options = EPOCHS[name]
    check(dataset, *stops, schedule=schedule, **options)


@thorough(after=1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batches_for_a_device_lie_in_one_block(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device(monkeypatch):
        check(MapDataset("large", 40), schedule=schedule, device="cuda", shuffle=True)
        check(Made(everything, 12), collate_fn=identity, schedule=schedule, device="cuda")


@dataclass(frozen=True)
class Together(Dataset[int]):
    """From one index on a sample waits until two workers are at one: each leaves a file in a folder."""

    folder: str
    length: int
    first: int = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index >= self.first:
            Path(self.folder, str(os.getpid())).touch()
            assert wait_until(lambda: len(os.listdir(self.folder)) > 1, 100)
        return index


def test_more_workers_than_places_wait_until_a_machine_joins(tmp_path: Path) -> None:
    """For long: those that wait have a ping to send back by then."""
    dataset = Together(str(tmp_path), 660, first=640)
    loader = DataLoader(dataset, 2, num_workers=3, workers=far(nodes=1, room=1), schedule="dynamic")
    seen = set()
    for number, batch in enumerate(loader):
        seen.update(batch.tolist())
        if number == 250:
            assert [worker.batches > 0 for worker in loader.statistics().workers].count(True) == 1
            LocalPlacement.made[-1].add_node()
    assert seen == set(range(660))
    assert [worker.batches > 0 for worker in loader.statistics().workers].count(True) >= 2


@thorough(after=1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_errors_come_at_their_positions_with_type_attributes_and_traceback(schedule: str) -> None:
    def outcomes(workers: Any) -> Iterator[Any]:
        dataset = CrimeAt(raise_os_error, 5, 12)
        with DataLoader(dataset, 2, num_workers=2, workers=workers, schedule=schedule) as loader:
            iterator = iter(loader)
            yield [next(iterator) for _ in range(2)]
            with pytest.raises(OSError, match=r"shard-5\.tar") as raised:
                next(iterator)
            yield raised.value.args, raised.value.filename, "in raise_os_error" in str(raised.value.__cause__)
            yield list(iterator)

    assert_same(list(outcomes(far())), list(outcomes("processes")))


def test_a_dataset_that_cannot_be_sent_or_opened_there_is_one_error_at_once() -> None:
    locked = DataLoader(Made(threading.Lock().acquire, 4), num_workers=1, workers=far())
    with pytest.raises(UnpicklableError, match="dataset cannot be sent to another machine"):
        iter(locked)
    loader = DataLoader(FailsToUnpickle(), 2, num_workers=2, workers=far(), schedule="dynamic")
    with pytest.raises(ValueError, match="this dataset does not survive the journey"):
        next(iter(loader))


def test_statistics_and_a_trace_have_the_machine_of_each_worker_and_the_bytes_from_there(
    tmp_path: Path,
) -> None:
    options: Any = {"batch_size": 4, "num_workers": 2, "schedule": "dynamic", "persistent_workers": True}
    (met := tmp_path / "met").mkdir()
    data = DataLoader(Together(str(met), 40), workers=far(nodes=2), **options)
    with data.trace(tmp_path / "a.json"):
        list(data)
    before = data.statistics()
    pids = {worker.pid: worker.node for worker in before.workers}
    assert sorted(pids) == sorted(far_pids(LocalPlacement.made[-1]))
    assert set(pids.values()) == {"node-0", "node-1"}
    assert before.wire_bytes == sum(worker.wire_bytes for worker in before.workers) > before.bytes > 0
    data.close()
    assert data.statistics().workers == before.workers
    list(data)
    again = data.statistics()
    assert again.wire_bytes == before.wire_bytes + sum(worker.wire_bytes for worker in again.workers)
    events = read(tmp_path / "a.json")
    check_trace(events)
    names = {name for name in tracks(events) if name.startswith("worker")}
    for worker in before.workers:
        if worker.batches:
            assert f"worker {worker.id} (pid {worker.pid} on {worker.node})" in names
    data.close()


def test_torch_warns_of_more_workers_than_cpus_only_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "This DataLoader will create")
        data = DataLoader(range(8), num_workers=2, workers=far())
        assert len(list(data)) == 8
        assert data.num_workers == 2
        with pytest.raises(UserWarning, match="will create 2 worker processes"):
            DataLoader(range(8), num_workers=2)


def test_workers_of_a_loader_in_a_cycle_end_when_the_collector_runs() -> None:
    before = set(descendants())
    trainer = Trainer(DataLoader, workers=far(nodes=1), persistent_workers=True)
    watched = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert watched() is None
    assert wait_until(lambda: set(descendants()) <= before, 30)
