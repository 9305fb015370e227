"""How host memory is page-locked, and what is counted of copies: over a simulated device and a late one."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader import DataLoader, PinFailed, PinFallback, ToDevice
from fastq_loader.device.copies import Copies
from fastq_loader.device.pinning import BOUNCE, PAGEABLE, REGISTER, Buffers, Pinner, PinPolicy
from fastq_loader.statistics.counters import StagingCounters
from tests.conftest import of_kind
from tests.support.datasets import Made, identity
from tests.support.late_device import Late, image_and_label
from tests.support.simulated_device import Host, SimulatedDevice
from tests.support.staging_runs import options_for

KIB = 1024

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Pool:
    def __init__(self, in_blocks: bool, refuse: tuple[str, ...] = (), **options: Any) -> None:
        self.device = SimulatedDevice(0, refuse)
        self.device.query = lambda event: event.token.over  # type: ignore[method-assign]  # nothing runs
        self.statistics = StagingCounters("simulated")
        given = options_for(**options)
        self.copies = Copies(self.device, given.prefetch, self.statistics)
        self.policy = PinPolicy(given.pin, given.pin_limit_bytes, self.statistics)
        self.policy.choose(self.device, in_blocks)
        mapping: Any = SimpleNamespace(base=0, populate=self.populate)
        self.pinner = Pinner(self.device, self.copies, mapping, self.policy)
        self.buffers = Buffers(self.device, self.copies, self.policy, given.prefetch + 1)

    def begin(self, key: int) -> Any:
        return self.copies.begin(Host(64), 64, identity, (key, key + 100))

    def populate(self, offset: int, size: int) -> None:
        self.device.seconds += 1
        self.device.populated.add(offset)


@pytest.mark.parametrize(
    ("pin", "in_blocks", "mode", "reason"),
    [
        ("auto", True, REGISTER, "it is the fastest here"),
        ("auto", False, BOUNCE, "without workers"),
        (REGISTER, True, REGISTER, "pin='register' was asked for"),
        (REGISTER, False, BOUNCE, "without workers"),
        (BOUNCE, False, BOUNCE, "pin='bounce' was asked for"),
        (PAGEABLE, True, PAGEABLE, "pin='pageable' was asked for"),
        (PAGEABLE, False, PAGEABLE, "pin='pageable' was asked for"),
    ],
)
def test_what_was_asked_for_is_chosen(pin: str, in_blocks: bool, mode: str, reason: str) -> None:
    statistics = Pool(in_blocks, pin=pin).statistics
    assert (statistics.pin, statistics.pin_reason[: len(reason)]) == (mode, reason)


@pytest.mark.parametrize(
    ("in_blocks", "first", "other"), [(True, REGISTER, BOUNCE), (False, BOUNCE, REGISTER)]
)
def test_a_mode_that_the_driver_refused_is_not_chosen_again(in_blocks: bool, first: str, other: str) -> None:
    pool = Pool(in_blocks)
    assert pool.statistics.pin == first
    with pytest.warns(PinFallback, match="pin='pageable' from here on: none today"):
        pool.policy.refuse(PinFailed("none today"))
    pool.policy.choose(pool.device, in_blocks)
    assert (pool.statistics.pin, pool.statistics.pin_reason) == (PAGEABLE, "none today")
    pool.policy.choose(pool.device, not in_blocks)
    assert pool.statistics.pin == other
    pool.policy.choose(pool.device, in_blocks)
    pool.policy.refuse(PinFailed("none today"))  # said before: a warning would be an error


def test_seconds_are_counted() -> None:
    pool = Pool(in_blocks=True)
    pool.pinner.prepare(0, KIB, 0, 64)
    pool.pinner.prepare(0, KIB, 64, 64)
    assert (pool.statistics.populate_seconds, pool.statistics.register_seconds) == (1, 1), "once for a block"
    assert pool.device.registered == {0: KIB}
    assert pool.statistics.pinned_bytes == KIB
    pool.pinner.forget(0)
    pool.pinner.forget(0)
    assert (pool.device.registered, pool.statistics.pinned_bytes) == ({}, 0)


def test_waiting_for_a_buffer_is_counted() -> None:
    pool = Pool(in_blocks=False, prefetch=1)
    for _ in range(2):
        buffer = pool.buffers.take(100)
        buffer.copy = pool.copies.begin(buffer.memory, 100, identity)
    assert pool.statistics.copy_wait_seconds == 0
    pool.buffers.take(100)
    assert pool.statistics.copy_wait_seconds > 0


def test_buffers_do_not_keep_batches_that_were_dropped() -> None:
    pool = Pool(in_blocks=False, prefetch=1)
    buffer = pool.buffers.take(64)
    buffer.copy = pool.begin(0)
    dropped = weakref.ref(buffer.copy.memory)
    pool.buffers.drain()
    assert dropped() is None


def test_buffers_grow_and_are_locked_in_powers_of_two() -> None:
    pool = Pool(in_blocks=False, prefetch=1)
    sizes = []
    for nbytes in (0, 100, 100, 200, 128):  # nothing is locked for a batch without bytes
        buffer = pool.buffers.take(nbytes)
        sizes.append(buffer.nbytes)
    assert sizes == [0, 128, 128, 256, 128]
    assert pool.statistics.pinned_bytes == 128 + 256
    assert pool.statistics.register_seconds == 3, "the last one fits into what is there"
    pool.buffers.close()
    assert pool.statistics.pinned_bytes == 0


def test_without_blocks_a_buffer_that_is_not_locked_takes_the_place_of_one_that_was() -> None:
    pool = Pool(in_blocks=False, prefetch=1, pin_limit_bytes=300)
    for nbytes in (100, 100):
        pool.buffers.take(nbytes)
    with pytest.warns(PinFallback, match="pin_limit_bytes=300 leaves no room for buffers"):
        buffer = pool.buffers.take(1000)
    assert (buffer.nbytes, buffer.locked, buffer.memory.locked) == (1000, 0, False)
    assert pool.statistics.pinned_bytes == 128
    assert pool.buffers.take(100) is not buffer


def test_a_batch_that_is_taken_before_it_has_arrived_is_late() -> None:
    pool = Pool(in_blocks=False)
    first, second, third, _ = [pool.begin(key) for key in range(4)]
    pool.copies.take(first)
    assert pool.statistics.late_copies == 1
    pool.device.finish()
    pool.copies.take(second)
    pool.copies.reap()
    pool.copies.take(third)
    assert pool.statistics.late_copies == 1
    assert (pool.statistics.copies, pool.statistics.copied_bytes) == (4, 4 * 64)


def test_a_copy_that_has_run_is_reported_with_its_times() -> None:
    pool, reported = Pool(in_blocks=False), list[Any]()
    pool.statistics.records = reported
    pool.device.seconds = 3
    pool.begin(0)
    pool.copies.reap()
    assert not reported
    pool.device.finish()
    pool.device.seconds = 5
    pool.copies.reap()
    pool.copies.settle()
    assert reported == [("copy", None, 3e9, 5e9, 0, (), 64)]


def test_a_consumer_that_is_too_far_ahead_waits_and_the_wait_is_counted() -> None:
    pool = Pool(in_blocks=False, prefetch=1)
    for key in range(2):
        assert not pool.copies.full
        pool.begin(key)
    assert pool.statistics.block_wait_seconds == 0
    assert pool.copies.full
    pool.begin(2)
    assert pool.statistics.block_wait_seconds == pool.device.seconds > 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("workers", "refuse", "modes", "reason"),
    [
        (2, ("register", "pinned"), [PAGEABLE], "the driver refuses"),
        (0, ("register", "pinned"), [PAGEABLE], "no page-locked memory today"),
    ],
)
def test_auto_falls_back_and_says_so_once(
    workers: int, refuse: tuple[str, ...], modes: list[str], reason: str, late: Late
) -> None:
    late(refuse=refuse)
    loader = DataLoader(Made(image_and_label, 20), 2, num_workers=workers, device="cuda")
    with pytest.warns(PinFallback) as caught:
        assert [len(list(loader)) for _ in range(3)] == [10] * 3
    said = [str(warning.message) for warning in of_kind(caught, PinFallback)]
    assert [text.split("pin='")[1].split("'")[0] for text in said] == modes
    staging = loader.statistics().staging
    assert staging.pin == modes[-1]
    assert reason in staging.pin_reason


@pytest.mark.processes
@pytest.mark.filterwarnings("error::fastq_loader.PinFallback")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("limit", [0, 100_000])
def test_a_fallback_that_is_an_error_comes_once_in_place_of_a_batch(
    limit: int, workers: int, late: Late
) -> None:
    """Also if it is raised while a later batch is copied ahead, as torch shows every warning."""
    late()
    device = ToDevice("cuda", pin_limit_bytes=limit, prefetch=2)
    with DataLoader(Made(image_and_label, 20), 2, num_workers=workers, device=device) as loader:
        iterator, found = iter(loader), list[int | None]()
        for _ in range(10):
            try:
                found.append(int(next(iterator)[1][0]) // 2)
            except PinFallback:
                found.append(None)
            iterator.poll()  # does not try again what was raised
    assert found.count(None) == 1
    assert all(batch in (None, number) for number, batch in enumerate(found))


@pytest.mark.processes
@pytest.mark.parametrize(("pin", "workers"), [("register", 2), ("register", 0), ("bounce", 0)])
def test_a_mode_by_name_raises_rather_than_degrade(pin: str, workers: int, late: Late) -> None:
    late(refuse=("register", "pinned"))
    loader = DataLoader(Made(image_and_label, 8), 2, num_workers=workers, device=ToDevice("cuda", pin=pin))
    for _ in range(2):
        with pytest.raises(PinFailed, match=f"pin='{pin}' cannot be kept"):
            next(iter(loader))


@pytest.mark.parametrize("workers", [1, "auto"])
def test_workers_blocks_are_not_copied_to_buffers(workers: Any, late: Late) -> None:
    late()
    device, schedule = ToDevice("cuda", pin=BOUNCE), "dynamic"
    with pytest.raises(ValueError, match=r"pin='bounce'.*slower than pin='pageable'"):
        DataLoader(range(4), num_workers=workers, schedule=schedule, device=device)
    loader = DataLoader(range(4), schedule=schedule, device=device)
    loader.num_workers = 1
    with pytest.raises(ValueError, match="pageable"):
        iter(loader)
