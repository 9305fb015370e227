"""The table of claims, alone and among processes."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import pairwise

import pytest

from fastq_loader.ipc.claim_table import WORKERS, Busy, ClaimTable, slots
from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.system import locks
from tests.support.forking import end_of, fork

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")

SLOTS, TICKETS = 1 << 12, 2000
_LOCK = getattr(fcntl, "F_OFD_SETLK", 37)
GO = SLOTS - 1  # a slot that no ticket of these tests has: the children may start


class SharedTable:
    def __init__(self, size: int = SLOTS) -> None:
        self.fd = os.memfd_create("claims", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, (size + WORKERS) * 8)
        self._memory = mmap.mmap(self.fd, (size + WORKERS) * 8)
        self.words = memoryview(self._memory).cast("Q")
        self.claims = ClaimTable(self.fd, self.words)

    def other(self) -> ClaimTable:
        """Another process's access: a lock belongs to an open file."""
        return ClaimTable(self.fd, self.words)

    @contextmanager
    def locked(self, ticket: int) -> Iterator[None]:
        """Worker 5 is in the middle of a claim, in another process."""
        start = (ticket % SLOTS) << 16
        with open(f"/proc/self/fd/{self.fd}", "r+b") as file:
            fcntl.fcntl(file, _LOCK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, start, 5 + 1, 0))
            yield

    def close(self) -> None:
        self.claims.close()
        self.words.release()
        self._memory.close()
        os.close(self.fd)


@pytest.fixture
def shared() -> Iterator[SharedTable]:
    with closing(SharedTable()) as table:
        yield table


def test_a_ticket_that_was_taken_back_is_no_workers(shared: SharedTable) -> None:
    claims = shared.claims
    assert not any((claims.take_back(7), claims.claim(7, 3))), "it was not offered"
    for ticket in (7, 8):
        claims.offer(ticket)
    assert claims.claim(8, 3)
    assert (claims.take_back(7), claims.take_back(7), claims.take_back(8)) == (True, False, False)
    assert not claims.claim(7, 4)
    assert not claims.on_offer(7)
    assert (claims.holder(7), claims.holder(8)) == (None, 3)


def test_a_slot_serves_one_ticket_at_a_time(shared: SharedTable) -> None:
    claims = shared.claims
    assert slots(shared.words) == SLOTS
    claims.offer(7)
    for other in (7 - SLOTS, 7 + SLOTS, 7 + 5 * SLOTS):
        assert not claims.on_offer(other)
        assert not claims.claim(other, 4)
        assert claims.holder(other) is None
    assert claims.claim(7, 3)
    claims.offer(7 + SLOTS)
    assert claims.holder(7) is None
    assert not claims.claim(7, 4)
    assert claims.claim(7 + SLOTS, 4)
    assert (claims.holder(7 + SLOTS), claims.holder(7)) == (4, None)
    claims.offer(largest := (1 << 48) - 1)
    assert claims.claim(largest, WORKERS - 1)
    assert claims.holder(largest) == WORKERS - 1


def test_a_ticket_that_was_claimed_just_before_the_lock_is_taken(
    shared: SharedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.claims.offer(7)
    lock, other = locks.try_lock, shared.other()

    def lock_later(*place: int) -> bool:
        monkeypatch.setattr(locks, "try_lock", lock)
        assert other.claim(7, 5)
        return lock(*place)

    monkeypatch.setattr(locks, "try_lock", lock_later)
    assert not shared.claims.claim(7, 3)
    assert shared.claims.holder(7) == 5


def test_a_ticket_that_another_process_is_claiming_is_busy(shared: SharedTable) -> None:
    for ticket in (7, 8):
        shared.claims.offer(ticket)
    with shared.locked(7):
        with pytest.raises(Busy):
            shared.claims.claim(7, 3)
        with pytest.raises(Busy):
            shared.claims.take_back(7)
        assert shared.claims.holder(7) is None
        assert shared.claims.claiming(7) == shared.claims.claiming(7 + SLOTS) == 5
        assert shared.claims.claiming(8) is None
        assert shared.claims.claim(8, 3)
    assert shared.claims.claiming(7) is None
    assert shared.claims.claim(7, 3)


@pytest.mark.processes
def test_every_ticket_is_claimed_once_and_lowest_first(shared: SharedTable) -> None:
    for ticket in range(TICKETS):
        shared.claims.offer(ticket)

    def claim_all(worker: int) -> None:
        claims, mine = shared.other(), []
        while not shared.words[GO]:
            time.sleep(0)
        left = list(range(TICKETS))
        while left:
            for ticket in left[:]:
                with suppress(Busy):
                    if claims.claim(ticket, worker):
                        mine.append(ticket)
                    left.remove(ticket)
        # A ticket that was busy for a moment may come later; no other does.
        assert sum(one > other for one, other in pairwise(mine)) < TICKETS // 20
        claims.begin(worker, len(mine))

    pids = [fork(lambda worker=worker: claim_all(worker)) for worker in range(3)]  # type: ignore[misc]
    shared.words[GO] = 1
    assert [end_of(pid) for pid in pids] == [0, 0, 0]
    holders = [shared.claims.holder(ticket) for ticket in range(TICKETS)]
    assert [holders.count(worker) for worker in range(3)] == [
        shared.claims.begun(worker) for worker in range(3)
    ]
    assert None not in holders


@pytest.mark.processes
def test_a_worker_that_is_killed_in_the_middle_of_a_claim_has_claimed_nothing(shared: SharedTable) -> None:
    shared.claims.offer(7)

    def hold() -> None:
        with shared.locked(7):
            shared.words[GO] = 1
            signal.pause()

    pid = fork(hold)
    while not shared.words[GO]:
        time.sleep(0.0001)
    with pytest.raises(Busy):
        shared.claims.claim(7, 3)
    os.kill(pid, signal.SIGKILL)
    assert end_of(pid) == -signal.SIGKILL
    assert shared.claims.holder(7) is None
    assert shared.claims.claim(7, 3)
