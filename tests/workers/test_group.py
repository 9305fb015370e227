"""The group of workers, with processes and sockets that are played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader.ipc.messages import Epoch, Hello, Ping
from fastq_loader.statistics.counters import Counters
from fastq_loader.workers import group as module
from fastq_loader.workers.group import WorkerGroup
from tests.support.simulation import Table


class Socket:
    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []

    def send(self, worker: int, message: Any) -> None:
        self.sent.append((worker, message))

    def send_all(self, *frames: bytes, but: Any = ()) -> None: ...

    def unwatch(self, descriptor: int) -> None: ...

    disconnect = unwatch


def group() -> tuple[WorkerGroup, Any, list[int]]:
    """Two workers, their socket, and those that were killed."""
    killed: list[int] = []
    pool = SimpleNamespace(
        descriptors=(10, 11),
        processes=(10, 11),
        kill=killed.append,
        start_next=lambda: False,
        killed=killed.__contains__,
        death=lambda worker: ("was killed", "torch's text"),
        pid=lambda worker: 700 + worker,
        stacks=lambda worker: f"  stacks of {worker}",
    )
    memory: Any = None
    plan: Any = SimpleNamespace(
        workers=2, shared_tasks=True, window=SimpleNamespace(widest=1), make_pool=lambda plan: pool
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_UNREAD", 1)
        made: Any = WorkerGroup(plan, memory, Counters())
    made._socket = Socket()
    made._claims = Table(100)
    for worker in range(2):
        made._backlog.begin(worker)
    return made, made._socket, killed


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
