"""How host memory is page-locked, and what is counted of copies: over a simulated device and a late one."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader import DataLoader, PinFailed, PinFallback
from fastq_loader.device.copies import Copies
from fastq_loader.device.pinning import BOUNCE, PAGEABLE, REGISTER, Buffers, Pinner, PinPolicy
from fastq_loader.statistics.counters import Counters, StagingCounters
from tests.conftest import of_kind
from tests.support.datasets import Made, identity
from tests.support.late_device import Late, image_and_label
from tests.support.simulated_device import Host, SimulatedDevice
from tests.support.staging_runs import options_for

KIB = 1024


class Pool:
    def __init__(self, in_blocks: bool, refuse: tuple[str, ...] = (), **options: Any) -> None:
        self.device = SimulatedDevice(0, refuse)
        self.device.query = lambda event: event.token.over  # type: ignore[method-assign]  # nothing runs
        self.statistics = StagingCounters("simulated")
        given = options_for(**options)
        self.copies = Copies(self.device, given.prefetch, self.statistics)
        self.policy = PinPolicy(self.statistics)
        self.policy.choose(self.device, in_blocks)
        mapping: Any = SimpleNamespace(base=0, populate=self.populate)
        self.pinner = Pinner(self.device, self.copies, mapping, self.policy)
        self.buffers = Buffers(self.device, self.copies, self.policy, given.prefetch + 1)

    def begin(self, key: int) -> Any:
        return self.copies.begin(Host(64), 64, identity, (key, key + 100))

    def populate(self, offset: int, size: int) -> None:
        self.device.seconds += 1
        self.device.populated.add(offset)


def test_what_the_driver_refused_is_not_tried_again() -> None:
    pool = Pool(in_blocks=False)
    assert (pool.statistics.pin, pool.statistics.pin_reason[:15]) == (BOUNCE, "without workers")
    pool.policy.choose(pool.device, in_blocks=True)
    assert pool.statistics.pin == REGISTER
    pool.policy.refuse(PinFailed("none today"))
    with pytest.warns(PinFallback, match="from pageable memory, which is slower: none today"):
        pool.policy.warn()
    pool.policy.warn()  # issued before: a warning would be an error
    for in_blocks in (True, False):
        pool.policy.choose(pool.device, in_blocks)
        assert (pool.statistics.pin, pool.statistics.pin_reason) == (PAGEABLE, "none today")


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
    pool, counters, reported = Pool(in_blocks=False), Counters(), list[Any]()
    counters.stage(pool.statistics)
    counters.trace = SimpleNamespace(add_copy=lambda *copy: reported.append(copy))
    pool.device.seconds = 3
    pool.begin(0)
    pool.copies.reap()
    assert not reported
    pool.device.finish()
    pool.device.seconds = 5
    pool.copies.reap()
    pool.copies.settle()
    assert reported == [(64, 3e9, 5e9)]


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
    ("workers", "reason"), [(2, "the driver refuses"), (0, "no page-locked memory today")]
)
def test_where_nothing_can_be_locked_one_warning_says_so(workers: int, reason: str, late: Late) -> None:
    late(refuse=("register", "pinned"))
    loader = DataLoader(Made(image_and_label, 20), 2, num_workers=workers, device="cuda")
    with pytest.warns(PinFallback, match=reason) as caught:
        assert [len(list(loader)) for _ in range(3)] == [10] * 3
    assert len(of_kind(caught, PinFallback)) == 1
    staging = loader.statistics().staging
    assert (staging.pin, staging.pin_reason) == (PAGEABLE, reason)


@pytest.mark.processes
@pytest.mark.filterwarnings("error::fastq_loader.PinFallback")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_fallback_that_is_an_error_comes_once_in_place_of_a_batch(
    workers: int, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the driver refuses while a later batch is copied ahead, as torch shows every warning."""
    device = late()
    for name, few in (("register", 2), ("pinned", 1)):  # the proof is the first registration
        monkeypatch.setattr(device, name, refusing_after(few, getattr(device, name)))
    with DataLoader(Made(image_and_label, 20), 2, num_workers=workers, device="cuda") as loader:
        iterator, found = iter(loader), list[int | None]()
        for _ in range(10):
            try:
                found.append(int(next(iterator)[1][0]) // 2)
            except PinFallback:
                found.append(None)
            iterator.poll()
    assert found.count(None) == 1
    assert all(batch in (None, number) for number, batch in enumerate(found))


def refusing_after(calls: int, function: Any) -> Any:
    left = iter(range(calls))

    def call(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise PinFailed("no more today")
        return function(*arguments)

    return call
