"""What the group of workers sees of those on other machines; `end_to_end/test_remote` has whole loaders."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader.remote import backend as module
from fastq_loader.remote.backend import RemoteBackend
from fastq_loader.remote.control import Place, Traffic, create_traffic
from fastq_loader.remote.link import Address, Lost
from fastq_loader.remote.places import Tie
from fastq_loader.statistics.counters import Counters
from tests.support.worker_setup import make_plan

PLACE = Place(4, Address("10.0.0.2", 80), "node-2")


def backend(monkeypatch: pytest.MonkeyPatch, says: Any) -> RemoteBackend:
    """One with a worker that was lost; its host says this."""

    def ask(*_: Any) -> Any:
        if says is None:
            raise Lost("silence")
        return says

    monkeypatch.setattr(module.link, "ask", ask)
    placement: Any = SimpleNamespace(
        death=lambda number: f"place {number} burned down" if number == 4 else ""
    )
    return RemoteBackend(make_plan(range(3)), placement)


@pytest.mark.parametrize(
    ("says", "number", "how"),
    [
        ({"alive": False, "text": "was killed by SIGKILL", "pid": 9}, 4, "it was killed by SIGKILL"),
        ({"alive": True, "text": "stacks", "pid": 9}, 4, "its connection broke"),
        (None, 4, "place 4 burned down"),
        (None, 5, "its host does not answer"),
    ],
)
def test_how_a_far_worker_was_lost_is_said_with_its_machine(
    says: Any, number: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = backend(monkeypatch, says)
    pipe: Any = None
    tie = Tie(pipe, PLACE._replace(number=number), pid=9, why="reset by peer")
    assert pool._how_lost(tie) == f"was lost with its process on node-2 (pid 9; reset by peer): {how},"


def test_one_that_found_no_place_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe: Any = None
    assert "found no place on another machine: torch 1" in backend(monkeypatch, None)._how_lost(
        Tie(pipe, why="torch 1 here and 2 there")
    )


def test_stacks_come_with_the_process_and_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = backend(monkeypatch, {"alive": True, "text": "in dawdle", "pid": 9})
    assert "it has found no room on another machine yet" in pool.stacks(0)
    pipe: Any = None
    pool._ties[0] = Tie(pipe, PLACE)
    assert pool.stacks(0) == "  (pid 9 on node-2)\nin dawdle"


@pytest.mark.processes
def test_one_that_was_never_started_can_be_stopped() -> None:
    closed: list[bool] = []
    placement: Any = SimpleNamespace(close=lambda: closed.append(True))
    pool = RemoteBackend(make_plan(range(3)), placement)
    pool.stop(lambda worker: 0, pool)
    assert pool.ended
    assert closed == [True]


# ---- what users see -------------------------------------------------------------------------------


class Counted:
    """Three workers on two hosts, and what these say: a number, or None that takes them all the time.

    Attributes:
        asked: hosts, by their ports, in the order in which they were asked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.says: dict[int, int | None] = {80: 1, 81: 20}
        self.asked: list[int] = []
        monkeypatch.setattr(module.link, "ask_refused", self.ask)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        placement: Any = None
        self.pool = RemoteBackend(make_plan(range(3), workers=4), placement)
        fd = create_traffic(4)
        self.pool._traffic = Traffic(fd, 4)
        os.close(fd)
        pipe: Any = SimpleNamespace(closed=True)
        for worker in range(3):  # and the fourth was not started yet
            place = Place(worker, Address("10.0.0.2", 80 + worker % 2), f"node-{worker % 2}")
            self.pool._ties[worker] = Tie(pipe, place, worker, pid=812)
        self.counters = Counters()
        self.pool.count_in(self.counters)

    def ask(self, address: Address, token: bytes, tls: Any, patience: float) -> int:
        self.asked.append(address.port)
        said = self.says[address.port]
        if said is None:
            self.now += patience
            raise Lost("silence")
        return said

    def refused(self) -> int:
        """What a snapshot says, a minute later."""
        self.now += 60
        self.asked.clear()
        return self.counters.snapshot().refused_connections


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_a_snapshot_says_where_workers_are_and_what_came_from_there(counted: Counted) -> None:
    counted.pool._traffic.add(1, 500)  # type: ignore[union-attr]
    counted.pool._ties[2].place, counted.pool._ties[2].pid = None, 0  # its successor has found none yet
    found = counted.counters.snapshot()
    shown = [(worker.pid, worker.node, worker.wire_bytes) for worker in found.workers]
    assert shown == [(812, "node-0", 0), (812, "node-1", 500), (0, None, 0), (0, None, 0)]
    assert found.wire_bytes == 500


def test_each_host_is_asked_once_whom_it_refused_and_once_a_second_at_most(counted: Counted) -> None:
    assert counted.counters.snapshot().refused_connections == 21
    counted.now += 0.9
    assert counted.counters.snapshot().refused_connections == 21
    assert sorted(counted.asked) == [80, 81]
    counted.says[80] = 4
    assert counted.refused() == 24


def test_a_host_that_hangs_takes_the_others_none_of_their_time_but_once(counted: Counted) -> None:
    counted.refused()
    first = counted.asked[0]
    counted.says[first] = None
    before = counted.now + 60
    assert counted.refused() == 21, "what is known stays"
    assert counted.now == before + module._REFUSED, "all together have this time"
    assert counted.asked == [first]
    counted.says[161 - first] = 30
    assert counted.refused() == 30 + (1 if first == 80 else 20)
    assert counted.asked == [161 - first, first]


def test_a_host_whose_connection_is_lost_is_not_asked(counted: Counted) -> None:
    counted.refused()
    counted.pool._ties[0].waits = True
    counted.pool._ties[2].why = "the connection broke"
    counted.says[80] = 7
    assert counted.refused() == 21, "what is known stays"
    assert counted.asked == [81]


def test_when_the_pool_ends_hosts_are_asked_once_more(counted: Counted) -> None:
    counted.refused()
    counted.says[80] = 7
    counted.pool._placement = SimpleNamespace(close=counted.says.clear)  # type: ignore[assignment]
    counted.pool._give_back()
    assert counted.refused() == 27
    assert counted.asked == []


def test_a_stand_in_is_known_by_its_process(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted.pool, "pid", lambda worker: 90 + worker)
    counted.pool._ties[2].place, counted.pool._ties[2].pid = None, 0
    found = [counted.counters.far_worker(90 + worker) for worker in range(4)]
    assert found == [(812, "node-0"), (812, "node-1"), (0, ""), None]


def test_a_forked_copy_asks_nobody(counted: Counted) -> None:
    counted.refused()
    counted.pool.forget()
    counted.pool.forget()
    counted.refused()
    assert counted.asked == []
