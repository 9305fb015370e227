"""Copies over a simulated device: what is counted. Waits and blocks are in test_staging."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from fastq_loader.device.copies import Copies
from fastq_loader.statistics.counters import StagingCounters
from tests.support.simulated_device import Host, SimulatedDevice
from tests.support.staging_runs import options_for


class Pool:
    """Copies to a device that runs nothing until something waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.device = SimulatedDevice(0)
        monkeypatch.setattr(self.device, "query", lambda event: event.token.over)
        self.statistics = StagingCounters("simulated")
        self.copies = Copies(self.device, options_for(**options), self.statistics)

    def begin(self, key: int) -> Any:
        return self.copies.begin(key, Host(64), 64, (key, key + 100))


def test_a_batch_that_is_taken_before_it_has_arrived_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch)
    for key in range(4):
        pool.begin(key)
    pool.copies.take(0)
    assert pool.statistics.late_copies == 1
    pool.device.finish()
    pool.copies.take(1)
    pool.copies.reap()
    pool.copies.take(2)
    assert pool.statistics.late_copies == 1
    assert (pool.statistics.copies, pool.statistics.copied_bytes) == (4, 4 * 64)


def test_an_observer_is_told_of_each_copy_from_its_begin_to_when_it_was_seen_to_be_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, told = Pool(monkeypatch), MagicMock()
    pool.statistics.observer = told
    for key, second in enumerate((3, 4, 5)):
        pool.device.seconds = second
        pool.begin(key)
    pool.device.seconds = 7
    pool.copies.reap()
    assert not told.copied.called
    pool.device.finish()
    pool.copies.reap()
    assert [call.args for call in told.copied.call_args_list] == [
        (64, begun * 10**9, 7 * 10**9) for begun in (3, 4, 5)
    ]


def test_a_consumer_that_is_too_far_ahead_waits_and_the_wait_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(monkeypatch, prefetch=1)
    for key in range(2):
        assert not pool.copies.full
        pool.begin(key)
    assert pool.statistics.block_wait_seconds == 0
    assert pool.copies.full
    pool.begin(2)
    assert pool.statistics.block_wait_seconds == pool.device.seconds > 0
