"""What is known of a run."""

from __future__ import annotations

import pytest

from fastq_loader.insight.evidence import Evidence, is_enough
from fastq_loader.insight.model import Costs, Setting
from fastq_loader.statistics.snapshots import EpochStatistics, WorkerStatistics

EPOCH = EpochStatistics(1, batches=100, seconds=10.0, consumer_seconds=4.0, workers_seconds=6.0)


def test_shares_add_up() -> None:
    shares = Evidence(EPOCH).shares
    assert (shares["consumer"], shares["workers"], sum(shares.values())) == (0.4, 0.6, 1.0)
    assert set(Evidence(EpochStatistics()).shares.values()) == {0.0}


@pytest.mark.parametrize(("workers", "busy"), [(0, 0.0), (1, 1.0), (2, 0.75), (4, 0.375)])
def test_how_busy_the_workers_were_follows_from_what_batches_cost(workers: int, busy: float) -> None:
    evidence = Evidence(EPOCH, Costs((0.1, 0.16), pack=0.02), Setting(workers))
    assert evidence.busy == pytest.approx(busy)


def test_without_costs_nobody_was_busy() -> None:
    assert Evidence(EPOCH, None, Setting(2)).busy == 0.0


def test_new_memory_is_a_part_of_all_workers_work() -> None:
    workers = (
        WorkerStatistics(0, 70, work_seconds=3.0, new_memory_seconds=1.0),
        WorkerStatistics(1, 71, work_seconds=1.0, new_memory_seconds=0.0),
    )
    assert Evidence(EPOCH, workers=workers).new_memory == 0.25
    assert Evidence(EPOCH).new_memory == 0.0


@pytest.mark.parametrize(
    ("batches", "seconds", "enough"), [(8, 0.05, True), (7, 9.0, False), (9000, 0.049, False)]
)
def test_a_few_batches_say_nothing(batches: int, seconds: float, enough: bool) -> None:
    assert is_enough(EpochStatistics(1, batches, seconds)) is enough
