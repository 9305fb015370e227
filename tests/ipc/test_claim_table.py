"""Who loads which batch: the table of claims under contention, and the worker's list of tasks."""

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
from fastq_loader.ipc.messages import Task
from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.workers.task_queue import TaskQueue

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


# ---- the worker's list of tasks ---------------------------------------------------------------------


def task(seq: int, attempt: int = 0, epoch: int = 1) -> Task:
    """An attempt at a batch, with a ticket of its own."""
    return Task(epoch, seq, attempt, seq, (), (), 100 * epoch + 50 * attempt + seq)


def offered(shared: Shared, worker: int, *seqs: int) -> TaskQueue:
    """A worker that knows of tasks in this order, and all of them are anyone's."""
    tasks = TaskQueue(shared.other(), True, worker)
    tasks.begin_epoch()
    for seq in seqs:
        shared.claims.offer(100 + seq)
        tasks.add(task(seq))
    return tasks


def taken(tasks: TaskQueue) -> list[int]:
    seqs = []
    while (one := tasks.take()) is not None:
        seqs.append(one.seq)
    return seqs


def test_addressed_tasks_are_taken_in_the_order_in_which_they_came(shared: Shared) -> None:
    tasks = TaskQueue(shared.claims, False, 0)
    for seq in (0, 3, 1, 2):  # lost ones of a dead worker come in theirs
        tasks.add(task(seq))
    assert len(tasks) == 4
    assert taken(tasks) == [0, 3, 1, 2]


def test_claimed_tasks_are_taken_from_the_lowest(shared: Shared) -> None:
    tasks = offered(shared, 0, 4, 5, 6, 2, 3)
    assert taken(tasks) == [2, 3, 4, 5, 6]
    assert shared.claims.holder(102) == 1, "worker 0, which is not nobody"


def test_what_others_have_is_passed_over_and_forgotten(shared: Shared) -> None:
    one = offered(shared, 0, 0, 1, 2)
    other = TaskQueue(shared.other(), True, 1)
    other.begin_epoch()
    for seq in range(3):
        other.add(task(seq))
    first, second = one.take(), other.take()
    assert first is not None
    assert second is not None
    assert (first.seq, second.seq) == (0, 1)
    assert taken(one) == [2]
    assert taken(other) == []
    assert len(one) == len(other) == 0


def test_of_two_attempts_only_the_one_on_offer_is_taken(shared: Shared) -> None:
    tasks = offered(shared, 0, 0, 1)
    assert shared.other().claim(100, 9)  # it dies
    shared.claims.offer(150)
    tasks.add(task(0, attempt=1))
    again = tasks.take()
    assert again is not None
    assert (again.seq, again.attempt) == (0, 1)
    assert taken(tasks) == [1]


@pytest.mark.parametrize("claimed", [True, False])
def test_what_a_worker_works_on_is_known_until_it_has_answered(shared: Shared, claimed: bool) -> None:
    tasks = TaskQueue(shared.other(), claimed, 5)
    tasks.begin_epoch()
    for seq in (0, 1):
        shared.claims.offer(100 + seq)
        tasks.add(task(seq))
    assert shared.claims.begun(5) is None
    for seq in (0, 1):
        assert tasks.take() is not None
        assert shared.claims.begun(5) == 100 + seq
    assert shared.claims.begun(4) is shared.claims.begun(6) is None
    tasks.answered()
    assert shared.claims.begun(5) is None
    assert tasks.take() is None
    assert shared.claims.begun(5) is None


def test_what_a_worker_works_on_is_no_claim(shared: Shared) -> None:
    """The first and the last of either kind lie apart."""
    for worker, ticket in ((0, 0), (WORKERS - 1, WORDS - 1)):
        shared.claims.offer(ticket)
        shared.claims.begin(worker, ticket)
    assert shared.claims.holder(0) is shared.claims.holder(WORDS - 1) is None
    assert shared.claims.claim(0, 1)
    assert shared.claims.claim(WORDS - 1, 1)
    assert (shared.claims.begun(0), shared.claims.begun(WORKERS - 1)) == (0, WORDS - 1)


def test_a_busy_task_is_kept_for_the_next_look(shared: Shared) -> None:
    tasks = offered(shared, 0, 0, 1)
    with locked(shared, 100):
        assert taken(tasks) == [1]
        assert len(tasks) == 1
        assert tasks.take() is None
    assert taken(tasks) == [0]


def test_addressed_tasks_of_an_old_epoch_wait_for_an_answer_and_claimed_ones_do_not(shared: Shared) -> None:
    addressed = TaskQueue(shared.claims, False, 0)
    addressed.add(task(0))
    assert addressed.drop() == [task(0)]
    assert addressed.drop() == []
    claimed = offered(shared, 0, 0, 1)
    assert claimed.drop() == []
    assert taken(claimed) == []


def test_the_same_number_in_another_epoch_is_another_ticket(shared: Shared) -> None:
    tasks = offered(shared, 0, 0)
    assert taken(tasks) == [0]
    tasks.drop()
    tasks.begin_epoch()
    tasks.add(task(0, epoch=2))
    assert tasks.take() is None, "nobody has offered it"
    shared.claims.offer(200)
    tasks.add(task(0, epoch=2))
    assert taken(tasks) == [0]


def test_who_cannot_work_leaves_claimed_tasks_to_the_others(shared: Shared) -> None:
    tasks = offered(shared, 0, 0, 1)
    tasks.retire()
    assert taken(tasks) == []
    tasks.add(task(2))
    assert len(tasks) == 0
    assert shared.claims.holder(100) is None


def test_who_cannot_work_says_so_again_in_the_next_epoch(shared: Shared) -> None:
    """Its first word may have been for an epoch that was abandoned, and nobody heard it."""
    tasks = offered(shared, 0, 0)
    tasks.retire()
    tasks.drop()
    tasks.begin_epoch()
    shared.claims.offer(200)
    tasks.add(task(0, epoch=2))
    assert taken(tasks) == [0]


def test_who_cannot_work_answers_for_all_that_is_its_own(shared: Shared) -> None:
    tasks = TaskQueue(shared.claims, False, 0)
    tasks.add(task(0))
    tasks.retire()
    tasks.add(task(1))
    assert taken(tasks) == [0, 1]
