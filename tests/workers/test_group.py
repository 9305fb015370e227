"""The group of workers, with processes and sockets that are played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader.ipc.messages import Answer, Epoch, Hello, Ping, encode
from fastq_loader.scheduling.in_flight import PendingTasks
from fastq_loader.scheduling.states import Batch
from fastq_loader.statistics.counters import Counters
from fastq_loader.workers import group as module
from fastq_loader.workers.group import WorkerGroup
from tests.support.simulation import Table

ANSWER = Answer(1, 0, 0, 3, 0, 0, (), (), None)


class Socket:
    def __init__(self) -> None:
        self.sent: list[tuple[int | None, Any]] = []
        self.cut: list[int] = []  # workers whose connection has broken

    def broken(self) -> list[int]:
        return self.cut

    def send(self, worker: int, message: Any) -> None:
        self.sent.append((worker, message))

    def send_all(self, *frames: bytes, but: Any = ()) -> None:
        self.sent.extend((worker, [*frames]) for worker in range(2) if worker not in but)

    def unwatch(self, descriptor: int) -> None: ...

    disconnect = unwatch


def group(shared_tasks: bool = True) -> tuple[WorkerGroup, Any, list[int]]:
    """Two workers, their socket, and those that were killed."""
    window = SimpleNamespace(widest=1)
    killed: list[int] = []
    pool = SimpleNamespace(
        descriptors=(10, 11),
        processes=(10, 11),
        start_next=lambda: False,
        kill=killed.append,
        killed=killed.__contains__,
        death=lambda worker: ("was killed", "torch's text"),
        pid=lambda worker: 700 + worker,
        stacks=lambda worker: f"  stacks of {worker}",
    )
    memory: Any = None
    made_by = {"make_pool": lambda plan: pool}
    plan: Any = SimpleNamespace(workers=2, shared_tasks=shared_tasks, window=window, **made_by)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_UNREAD", 1)
        made: Any = WorkerGroup(plan, memory, Counters())
    made._socket = Socket()
    made._claims = Table(100)
    for worker in range(2):
        made._backlog.begin(worker)
    return made, made._socket, killed


def test_a_worker_that_sends_garbage_is_ended() -> None:
    workers, _, killed = group()
    for worker, message in ((0, Hello(5)), (1, None), (1, None)):
        workers.heard(worker, message)
    assert killed == [1]
    assert workers._counters.rejected_frames == 2
    assert workers.is_ready(0)
    assert not workers.is_ready(1)
    assert workers.death(0) == ("was killed", "torch's text")
    assert workers.death(1)[0].startswith("was ended, because its connection to this process broke")


@pytest.mark.parametrize("leaves", [False, True])
def test_a_worker_whose_connection_breaks_is_ended(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, socket, killed = group()
    workers._processes.descriptors = [70, 71]
    monkeypatch.setattr("fastq_loader.system.calls.readable", lambda asked, seconds: asked if leaves else [])
    assert workers.ended([71]) == [1]
    socket.cut = [0]
    assert workers.ended([]) == []
    assert killed == ([] if leaves else [0])
    assert workers.death(0)[0] == "was killed" if leaves else "because its connection" in workers.death(0)[0]


def test_a_worker_whose_folder_was_removed_before_it_was_up_is_told_of_with_it(tmp_path: Path) -> None:
    workers, _, _ = group()
    workers._expected = {str(tmp_path): {0}, "/nonexistent": {1}}
    assert workers.death(0)[0] == "was killed"
    assert workers.death(1)[0] == "was killed, because the folder of its socket, /nonexistent, was removed,"


def test_a_ping_that_a_worker_was_not_sent_ends_it() -> None:
    workers, socket, killed = group()
    workers.offer({1: b"a task"})
    pings = [worker for worker, message in socket.sent if message == Ping()]
    assert pings == [0, 1]
    for worker in (0, 1, 0):
        workers.heard(worker, Ping())
    assert killed == [0], "its second one"
    assert workers._counters.rejected_frames == 1


def test_the_texts_name_the_worker_its_batch_and_its_stacks() -> None:
    workers, _, _ = group()
    assert workers.report(1, "was killed", 7, [4, 5]) == (
        "DataLoader worker (pid(s) 701) exited unexpectedly: "
        "worker 1 was killed before it answered batch 7 (indices [4, 5])"
    )
    assert workers.report_late(None, 7, 3) == "no worker has come to batch 7 (indices 3) yet"
    late = "worker 0 (pid 700) has not answered batch 7 (indices 3). Its Python stacks:\n  "
    for doing, stacks in (("before it was up", "(it is still starting)"), ("between batches", "stacks of 0")):
        assert workers.report(0, "was killed", None, None).endswith(f"worker 0 was killed {doing}")
        assert workers.report_late(0, 7, 3) == late + stacks
        workers.heard(0, Hello(5))


def test_assigned_tasks_need_no_pings() -> None:
    workers, socket, _ = group(shared_tasks=False)
    for number in range(9):
        workers.begin_epoch(Epoch(number, None))
    assert socket.sent == [(worker, [encode(Epoch(at, None))]) for at in range(9) for worker in range(2)]


def test_what_a_dead_worker_had_claimed_is_known() -> None:
    workers, _, _ = group()
    outstanding = PendingTasks(100)
    for seq in range(4):
        outstanding.add(1, batch := Batch(seq, None, None))
        workers.claims.offer(batch.ticket)
        if seq != 2:
            workers.claims.claim(batch.ticket, seq % 2)
    workers.claims.begin(1, 4)
    assert workers.claimed_by(1, outstanding, 1) == (3, frozenset([2, 4]))
    assert workers.claimed_by(1, outstanding, 2) == (None, frozenset([2, 4]))
    assert workers.claimed_by(0, outstanding, 1) == (None, frozenset([1]))


def test_tasks_are_taken_back_as_far_as_they_are_unclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, _, _ = group()
    monkeypatch.setattr(module, "_CLAIMING", 0.01)
    claims: Any = workers.claims
    for ticket in (1, 2, 3):
        claims.offer(ticket)
    claims.claim(2, 1)
    claims.busy = {3: 1}
    assert workers.take_back([1, 2, 3]) == ({1}, {2: 1})
    assert not claims.claim(1, 0)


def test_the_worker_to_end_has_the_ticket_or_claims_it_or_has_nothing_to_do() -> None:
    workers, _, _ = group()
    claims: Any = workers.claims
    claims.offer(7)
    assert workers.late_for(7) == 0
    claims.begin(0, 3)
    assert workers.late_for(7) == 1, "it has nothing to do"
    claims.begin(1, 4)
    assert workers.late_for(7) == 0
    claims.busy = {7: 1}
    assert workers.late_for(7) == 1
    claims.busy = {}
    claims.claim(7, 1)
    assert workers.late_for(7) == 1
    workers.mark_dead(1)
    assert workers.late_for(7) == 0
    workers.mark_dead(0)
    assert workers.late_for(7) is None


@pytest.mark.parametrize("hangs", [True, False])
def test_a_worker_that_does_not_get_up_three_times_in_a_row_is_given_up(hangs: bool) -> None:
    workers, _, _ = group()

    def end(is_up: bool) -> None:
        workers._is_up = {1} if is_up else set()
        if hangs:
            workers.kill(1)
        workers.mark_dead(1)

    for is_up in (False, False, True, False, False, False):
        assert workers._failed_starts[1] < 3
        end(is_up)
    with pytest.raises(OSError, match="3 processes in a row ended before they were up"):
        workers.replace(1, Epoch(1, None))
