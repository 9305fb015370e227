"""What a loader knows of its runs, as evidence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import BatchSampler, SequentialSampler, default_collate

import fastq_loader
from fastq_loader import DataLoader, Dynamic, RoundRobin, ToDevice
from fastq_loader.insight import diagnosing
from fastq_loader.insight.model import Setting
from fastq_loader.statistics.snapshots import StagingStatistics
from tests.support.datasets import Stream
from tests.support.limited import Naps


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the verdict would be about."""
    monkeypatch.setattr(diagnosing, "verdict", lambda evidence: evidence)
    return lambda loader, epoch=None: diagnosing.diagnose(loader, epoch)


def run(**arguments: Any) -> DataLoader[Any]:
    loader: DataLoader[Any] = DataLoader(**{"dataset": range(10), **arguments})
    list(loader)
    return loader


class Mine(SequentialSampler):
    pass


class MyBatches(BatchSampler):
    pass


def add(samples: list[int]) -> int:
    return sum(samples)


def double(batch: Any) -> Any:
    return 2 * batch


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {},
            {
                "sampler": "SequentialSampler",
                "shuffles": False,
                "pins": False,
            },
        ),
        ({"shuffle": True}, {"sampler": "RandomSampler", "shuffles": True}),
        ({"sampler": Mine(range(10))}, {"sampler": "Mine", "shuffles": False}),
        ({"batch_sampler": MyBatches(range(10), 2, False)}, {"sampler": "MyBatches", "shuffles": False}),
        ({"batch_sampler": BatchSampler(Mine(range(10)), 2, False)}, {"sampler": "Mine"}),
        ({"batch_size": None}, {"sampler": "SequentialSampler", "collate": ""}),
        ({"collate_fn": add}, {"collate": "add"}),
        ({"collate_fn": default_collate}, {"collate": ""}),
        ({"device": ToDevice("cpu", transform=double)}, {"transform": "double", "staging": None}),
        ({"device": "cpu"}, {"transform": ""}),
        ({"dataset": Stream("tensors", [5])}, {"iterable": True}),
        ({"persistent_workers": False, "in_order": True}, {"persistent": False, "in_order": True}),
    ],
)
def test_arguments_that_matter(evidence: Any, arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    found = evidence(run(**arguments))
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.setting.num_workers == 0
    assert found.cpus > 0
    assert found.costs is not None
    assert found.workers == ()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({}, Setting(2, 2)),
        ({"prefetch_factor": 5, "schedule": RoundRobin(window=3)}, Setting(2, 5, False, 3)),
        ({"schedule": "dynamic"}, Setting(2, 2, True)),
        ({"schedule": Dynamic(window=7)}, Setting(2, 2, True, 7)),
        ({"in_order": False}, Setting(2, 2, True)),
        ({"schedule": "dynamic", "dataset": Stream("tensors", [5, 5])}, Setting(2, 2, False)),
    ],
)
def test_the_setting_is_that_of_the_run(evidence: Any, arguments: dict[str, Any], setting: Setting) -> None:
    with run(num_workers=2, **arguments) as loader:
        found = evidence(loader)
        assert found.setting == setting
        assert len(found.workers) == 2
        loader.num_workers = 0
        list(loader)
        found = evidence(loader, 2)
        assert (found.setting.num_workers, found.workers) == (0, ()), "of an epoch without workers"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("some avg10=77.89 avg60=63.82 avg300=41.62 total=1\nfull avg10=0.00 avg60=0.00 total=0\n", 0.7789),
        ("some\n", 0.0),
        ("some avg10=?\n", 0.0),
        (None, 0.0),
    ],
)
def test_the_kernel_says_how_much_processes_wait_for_cpus(
    tmp_path: Path, text: str | None, found: float
) -> None:
    file = tmp_path / "cpu"
    if text is not None:
        file.write_text(text)
    assert diagnosing.contention(file) == pytest.approx(found)


def test_before_the_first_epoch_nothing_is_known() -> None:
    assert DataLoader(range(3)).diagnose() == fastq_loader.Diagnosis("unknown", 0.0)


def test_a_loader_whose_constructor_never_ran_says_nothing() -> None:
    assert DataLoader.__new__(DataLoader).diagnose().limit == "unknown"


def test_the_newest_epoch_that_was_long_enough_is_taken_unless_another_is_asked_for(evidence: Any) -> None:
    loader: DataLoader[Any] = DataLoader(Naps(0.01), sampler=range(8))
    list(loader)
    list(loader)
    next(iter(loader))
    assert evidence(loader).epoch.epoch == 2
    assert evidence(loader, 3).epoch.epoch == 3
    together = evidence(loader, 0)
    assert (together.epoch.epoch, together.epoch.batches) == (0, 17)
    assert len(together.costs.loads) == 8, "of the one that was long enough"
    for unknown in (4, -1):
        text = f"epoch={unknown} is unknown: use the number of the epochs 1 to 3, 0 for all"
        with pytest.raises(ValueError, match=text):
            loader.diagnose(unknown)


def test_late_batches_are_those_of_the_epoch(evidence: Any) -> None:
    loader = run()
    list(loader)
    for epoch in (1, 2):
        loader._resources.counters.held_up(epoch, 10 * epoch, 10**9)
    found = {epoch: [late.batch for late in evidence(loader, epoch).late] for epoch in (0, 1, 2)}
    assert found == {0: [10, 20], 1: [10], 2: [20]}


def test_where_batches_go_to_a_device_nothing_else_pins_them(
    evidence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = run()
    loader.pin_memory = True
    assert evidence(loader).pins
    staged = replace(loader.statistics(), staging=StagingStatistics("cuda"))
    monkeypatch.setattr(loader, "statistics", lambda: staged)
    assert not evidence(loader).pins


def test_an_epoch_that_cannot_be_there_yet() -> None:
    with pytest.raises(ValueError, match="epoch=1 is unknown: use the number of an epoch, once there is one"):
        DataLoader(range(3)).diagnose(1)
