"""Who loads which batch: the table of claims under contention."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from fastq_loader.ipc.claim_table import CONSUMER, WORKERS, Busy, ClaimTable
from fastq_loader.memory.arena import AVAILABLE

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")

WORDS = 1 << 12  # of claims
TICKETS = 3000
GO = WORDS - 1  # a word that no ticket of these tests has: the children may start


class Shared:
    """A table of claims, as an arena has it, and who is to be let at it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("claims", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, (WORDS + WORKERS) * 8)
        self.memory = mmap.mmap(self.fd, (WORDS + WORKERS) * 8)
        self.words = memoryview(self.memory).cast("Q")
        self.claims = ClaimTable(self.fd, self.words)

    def other(self) -> ClaimTable:
        """Another process's access: a lock belongs to an open file."""
        return ClaimTable(self.fd, self.words)

    def close(self) -> None:
        self.claims.close()
        self.words.release()
        self.memory.close()
        os.close(self.fd)


@pytest.fixture
def shared() -> Iterator[Shared]:
    table = Shared()
    yield table
    table.close()


@contextmanager
def locked(shared: Shared, ticket: int) -> Iterator[None]:
    """Somebody is in the middle of a claim."""
    fd = os.open(f"/proc/self/fd/{shared.fd}", os.O_RDWR)
    try:
        lock_byte(fd, ticket)
        yield
    finally:
        os.close(fd)


def lock_byte(fd: int, ticket: int) -> None:
    fcntl.fcntl(fd, getattr(fcntl, "F_OFD_SETLK", 37), struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, ticket, 1, 0))


def test_a_claim_is_had_once(shared: Shared) -> None:
    shared.claims.offer(7)
    assert shared.claims.holder(7) is None
    assert shared.claims.claim(7, 3)
    assert shared.claims.holder(7) == 3
    assert not shared.other().claim(7, 4)
    assert not shared.claims.claim(7, 3)
    assert shared.claims.holder(7) == 3


def test_what_was_not_offered_cannot_be_claimed(shared: Shared) -> None:
    assert not shared.claims.claim(7, 3)
    assert shared.claims.holder(7) is None


def test_another_ticket_than_the_one_on_offer_cannot_be_claimed(shared: Shared) -> None:
    shared.claims.offer(7)
    for other in (7 - WORDS, 7 + WORDS, 7 + 5 * WORDS):
        assert not shared.claims.claim(other, 4)
        assert shared.claims.holder(other) is None
    assert shared.claims.claim(7, 4)


def test_a_slot_that_a_later_ticket_took_over_reads_as_unknown(shared: Shared) -> None:
    shared.claims.offer(7)
    assert shared.claims.claim(7, 3)
    shared.claims.offer(7 + WORDS)
    assert shared.claims.holder(7) is None
    assert not shared.claims.claim(7, 4)
    assert shared.claims.claim(7 + WORDS, 4)
    assert shared.claims.holder(7 + WORDS) == 4
    assert shared.claims.holder(7) is None


def test_the_largest_numbers_fit_a_word(shared: Shared) -> None:
    ticket = (1 << 48) - 1
    shared.claims.offer(ticket)
    assert shared.claims.claim(ticket, CONSUMER)
    assert shared.claims.holder(ticket) == CONSUMER


def test_a_ticket_that_somebody_is_claiming_is_busy(shared: Shared) -> None:
    shared.claims.offer(7)
    shared.claims.offer(8)
    with locked(shared, 7):
        with pytest.raises(Busy):
            shared.claims.claim(7, 3)
        assert shared.claims.holder(7) is None
        assert shared.claims.claim(8, 3)
    assert shared.claims.claim(7, 3)


def test_a_claim_leaves_no_lock_behind(shared: Shared) -> None:
    other = shared.other()
    for claims, who in ((shared.claims, 1), (other, 2)):
        for ticket in range(4):
            claims.offer(ticket)
            assert claims.claim(ticket, who)
    other.close()


def test_an_error_of_the_system_is_no_busy_ticket(shared: Shared) -> None:
    other = shared.other()
    other.offer(7)
    os.close(other._fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        other.claim(7, 3)
    other._fd = -1


def test_closing_it_twice_closes_nobody_elses_descriptor(shared: Shared) -> None:
    other = shared.other()
    other.close()
    reused = os.dup(shared.fd)
    other.close()
    os.fstat(reused)
    os.close(reused)


# ---- among processes --------------------------------------------------------------------------------


def fork(child: Callable[[], None]) -> int:
    """A child process that runs `child` and nothing else."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        child()
        code = 0
    finally:
        os._exit(code)


def ends(pids: Iterable[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@pytest.mark.processes
def test_every_ticket_is_had_once_and_lowest_first(shared: Shared, tmp_path: Path) -> None:
    for ticket in range(TICKETS):
        shared.claims.offer(ticket)

    def claim_all(who: int) -> None:
        claims, mine = shared.other(), []
        while not shared.words[GO]:
            time.sleep(0)
        left = list(range(TICKETS))
        while left:
            for ticket in left[:]:
                with suppress(Busy):
                    if claims.claim(ticket, who):
                        mine.append(ticket)
                    left.remove(ticket)
        (tmp_path / str(who)).write_text(" ".join(map(str, mine)))

    pids = [fork(lambda who=who: claim_all(who)) for who in (1, 2, 3)]  # type: ignore[misc]
    shared.words[GO] = 1
    assert ends(pids) == [0, 0, 0]
    had = {who: list(map(int, (tmp_path / str(who)).read_text().split())) for who in (1, 2, 3)}
    assert sorted(ticket for mine in had.values() for ticket in mine) == list(range(TICKETS))
    for who, mine in had.items():
        assert all(shared.claims.holder(ticket) == who for ticket in mine)
        # One that was busy for a moment may come later, nothing else.
        assert sum(one > other for one, other in pairwise(mine)) < TICKETS // 20


@pytest.mark.processes
def test_who_is_killed_in_the_middle_of_a_claim_has_claimed_nothing(shared: Shared) -> None:
    shared.claims.offer(7)
    read_end, write_end = os.pipe()

    def hold() -> None:
        fd = os.open(f"/proc/self/fd/{shared.fd}", os.O_RDWR)
        lock_byte(fd, 7)
        os.write(write_end, b"!")
        signal.pause()

    pid = fork(hold)
    assert os.read(read_end, 1) == b"!"
    with pytest.raises(Busy):
        shared.claims.claim(7, 3)
    os.kill(pid, signal.SIGKILL)
    assert ends([pid]) == [-signal.SIGKILL]
    assert shared.claims.holder(7) is None
    assert shared.claims.claim(7, 3)
    os.close(read_end)
    os.close(write_end)


@pytest.mark.processes
@pytest.mark.parametrize("milliseconds", [1, 2, 3, 5, 8])
def test_whenever_it_is_killed_its_claims_are_known(shared: Shared, milliseconds: int) -> None:
    for ticket in range(TICKETS):
        shared.claims.offer(ticket)

    def claim_all() -> None:
        claims = shared.other()
        shared.words[GO] = 1
        for ticket in range(TICKETS):
            claims.claim(ticket, 5)

    pid = fork(claim_all)
    while not shared.words[GO]:
        time.sleep(0.0001)
    time.sleep(milliseconds / 1000)
    os.kill(pid, signal.SIGKILL)
    ends([pid])
    holders = [shared.claims.holder(ticket) for ticket in range(TICKETS)]
    had = holders.count(5)
    assert holders == [5] * had + [None] * (TICKETS - had)
    assert all(shared.claims.claim(ticket, 6) for ticket in range(had, TICKETS))


# ---- what a worker works on ---------------------------------------------------------------------------


def test_what_a_worker_works_on_is_no_claim(shared: Shared) -> None:
    """The first and the last of either kind lie apart."""
    for worker, ticket in ((0, 0), (WORKERS - 1, WORDS - 1)):
        shared.claims.offer(ticket)
        shared.claims.begin(worker, ticket)
    assert shared.claims.holder(0) is shared.claims.holder(WORDS - 1) is None
    assert shared.claims.claim(0, 1)
    assert shared.claims.claim(WORDS - 1, 1)
    assert (shared.claims.begun(0), shared.claims.begun(WORKERS - 1)) == (0, WORDS - 1)
