"""The group of workers, with processes and sockets that are played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader.consumer.deaths import Deaths
from fastq_loader.errors import InvalidTransition
from fastq_loader.ipc.messages import Epoch, Hello, Ping
from fastq_loader.scheduling.progress import START
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.workers import WorkerCounters
from fastq_loader.workers import group as module
from fastq_loader.workers.group import WorkerGroup
from fastq_loader.workers.worker import Worker
from tests.support.simulation import Table


class Socket:
    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []

    def send(self, worker: int, message: Any) -> None:
        self.sent.append((worker, message))

    def send_all(self, *frames: bytes, but: Any = ()) -> None: ...

    def unwatch(self, descriptor: int) -> None: ...

    disconnect = unwatch


class Played:
    """The process of a worker, which is killed or ends."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor = pid
        self.killed = False

    def kill(self) -> None:
        self.killed = True


class PlayedPool:
    def __init__(self) -> None:
        self.workers = [Worker(number) for number in range(2)]
        for worker in self.workers:
            self.launch(worker, "/")

    def launch(self, worker: Worker, folder: str, space: Any = None) -> None:
        worker.child = Played(700 + worker.number)  # type: ignore[assignment]
        worker.begin(folder)

    def death(self, worker: Worker) -> tuple[str, str]:
        return "was killed", "torch's text"

    def stacks(self, worker: Worker) -> str:
        return f"  stacks of {worker.number}"


def group() -> tuple[WorkerGroup, Any, Any]:
    """Two workers that are up, their socket, and the plan."""
    memory: Any = SimpleNamespace(clear_space=lambda worker: ())
    plan: Any = SimpleNamespace(
        workers=2,
        shared_tasks=True,
        window=SimpleNamespace(widest=1),
        make_pool=lambda plan: PlayedPool(),
        timeout=5,
        dynamic=False,
        in_order=True,
    )
    counters = Counters()
    counters.workers = tuple(WorkerCounters(number, 700 + number) for number in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_UNREAD", 1)
        made = WorkerGroup(plan, memory, counters)
    socket: Any = Socket()
    table: Any = Table(100)
    made._socket, made._claims = socket, table
    for worker in range(2):
        made._backlog.begin(worker)
        made.receive_other(worker, Hello(5))
    return made, socket, plan


def killed(workers: WorkerGroup) -> list[int]:
    return [worker.number for worker in workers.workers if worker.child is not None and worker.child.killed]


def restart(workers: WorkerGroup, number: int, folder: str = "") -> Worker:
    """Another process, which is not up yet."""
    worker = workers.workers[number]
    worker.die("", "")
    workers._pool.launch(worker, folder)
    return worker


def test_a_worker_whose_folder_was_removed_before_it_was_up_is_reported_with_it(tmp_path: Path) -> None:
    workers, _, _ = group()
    for number, folder in enumerate((str(tmp_path), "/nonexistent")):
        restart(workers, number, folder)
    assert workers.mark_dead(0).cause == "was killed"
    assert workers.mark_dead(1).cause == (
        "was killed, because the folder of its socket, /nonexistent, was removed,"
    )


def test_a_ping_that_a_worker_was_not_sent_ends_it() -> None:
    workers, socket, _ = group()
    workers.offer({1: b"a task"})
    pings = [worker for worker, message in socket.sent if message == Ping()]
    assert pings == [0, 1]
    for worker in (0, 1, 0):
        workers.receive_other(worker, Ping())
    assert killed(workers) == [0], "its second one"
    assert workers._counters.rejected_frames == 1


def test_the_texts_name_the_worker_its_batch_and_its_stacks() -> None:
    workers, _, plan = group()
    indices: Any = SimpleNamespace(index_of={7: 3, 8: [4, 5]}.get)
    delivery: Any = SimpleNamespace(progress=START)
    deaths = Deaths(plan, workers, indices, delivery)
    late = "DataLoader timed out after 5 seconds: worker 0 (pid 700) has not answered batch 7 (indices 3). "
    for doing, stacks in (
        ("between batches", "  stacks of 0"),
        ("before it was up", "  (it is still starting)"),
    ):
        assert str(deaths.timed_out(0, 7).error) == f"{late}Its Python stacks:\n{stacks}"
        dead = workers.mark_dead(0)
        assert deaths.sentence(dead, None).endswith(f"worker 0 was killed {doing}")
        workers._pool.launch(dead, "/")
    assert str(deaths.timed_out(None, 7).error).endswith("no worker has started batch 7 (indices 3) yet")
    assert deaths.sentence(workers.mark_dead(1), 8) == (
        "DataLoader worker (pid(s) 701) exited unexpectedly: "
        "worker 1 was killed before it answered batch 8 (indices [4, 5])"
    )


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
    worker = restart(workers, 1)
    for is_up in (False, False, True, False, False, False):
        assert worker.failed_starts < 3
        if is_up:
            workers.receive_other(1, Hello(5))
        if hangs:
            workers.evict(1, "it did not answer")
        workers.mark_dead(1)
        if worker.failed_starts < 3:
            workers._pool.launch(worker, "")
    with pytest.raises(OSError, match="3 processes in a row ended before they were up"):
        workers.replace(1, Epoch(1, None))


@pytest.mark.parametrize("up", [True, False])
def test_a_worker_moves_by_the_table_only(up: bool) -> None:
    worker = Worker(3)
    with pytest.raises(InvalidTransition, match="a worker is new: event 'die' is not allowed"):
        worker.move("die")
    worker.begin("")
    if up:
        worker.move("hello")
    with pytest.raises(InvalidTransition, match=r"a worker is (ready|starting): event 'start'"):
        worker.move("start")
    worker.die("", "")
    worker.specs[0] = "a spec of the one that died"
    worker.begin("")
    assert (worker.generation, worker.is_up, len(worker.specs)) == (1, False, 0)
