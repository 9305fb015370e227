"""The group of workers, with processes and sockets that are played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader.ipc.messages import BeginEpoch, Hello
from fastq_loader.statistics.counters import Counters, WorkerCounters
from fastq_loader.workers import group as module
from fastq_loader.workers.group import WorkerGroup
from fastq_loader.workers.worker import Worker
from tests.support.simulation import Table


class Socket:
    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []

    def send_all(self, lines: list[Any], *frames: bytes) -> None:
        self.sent += [(line.worker, frame) for line in lines for frame in frames]

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
            self.launch(worker)

    def launch(self, worker: Worker, space: Any = None) -> None:
        worker.child = Played(700 + worker.number)  # type: ignore[assignment]
        worker.line = SimpleNamespace(worker=worker.number)  # type: ignore[assignment]
        worker.begin()

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
        options=SimpleNamespace(
            workers=SimpleNamespace(make_pool=lambda plan: PlayedPool()), is_dynamic=False
        ),
        timeout=5,
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
        made.receive_other(worker, Hello(5))
    return made, socket, plan


def test_a_busy_worker_that_has_much_to_read_is_passed_over_until_it_answers() -> None:
    """It would collect the tasks of all batches that the other one loads meanwhile."""
    workers, socket, _ = group()
    workers.claims.begin(0, 5)
    for ticket in range(10):
        workers.offer({ticket: b"%d" % ticket})
        workers.workers[1].answered_at = workers.offered
    assert [frame for worker, frame in socket.sent if worker == 0] == [b"0", b"1"]
    assert len([frame for worker, frame in socket.sent if worker == 1]) == 10
    assert (workers.some_behind, workers.reading_again()) == (True, [])
    workers.claims.begin(0, None)
    assert ([line.worker for line in workers.reading_again()], workers.some_behind) == ([0], False)
    workers.offer({11: b"11"})
    assert socket.sent[-2:] == [(0, b"11"), (1, b"11")]
    workers.claims.begin(0, 6)
    for number in (0, 1):  # nobody is passed over who is not sent anything
        workers.mark_dead(number)
    workers.offer({12: b"12", 13: b"13", 14: b"14"})
    workers.offer({15: b"15"})
    assert not workers.some_behind


def killed(workers: WorkerGroup) -> list[int]:
    return [worker.number for worker in workers.workers if worker.child is not None and worker.child.killed]


def restart(workers: WorkerGroup, number: int) -> Worker:
    """Another process, which is not up yet."""
    worker = workers.workers[number]
    worker.die("", "")
    workers._worker_pool.launch(worker)
    return worker


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
            workers._worker_pool.launch(worker)
    with pytest.raises(OSError, match="3 processes in a row ended before they were up"):
        workers.replace(1, BeginEpoch(1, None))
