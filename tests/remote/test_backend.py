"""What the group of workers sees of those on other machines; `end_to_end/test_remote` has whole loaders."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader.remote import backend as module
from fastq_loader.remote.backend import RemoteBackend, StandInProcess
from fastq_loader.remote.control import Place
from fastq_loader.remote.link import Address, Lost
from fastq_loader.remote.places import Tie
from fastq_loader.system.calls import readable
from fastq_loader.workers.children import Child
from tests.support.worker_setup import make_plan

PLACE = Place(4, Address("10.0.0.2", 80), "node-2")


def launch(sentinel: int) -> int:
    """A program that ends when it is told to."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[sentinel])
    process.returncode = 0  # it is multiprocessing's to wait for
    return process.pid


@pytest.mark.processes
def test_a_program_is_a_process_like_any_other() -> None:
    child = Child(StandInProcess(launch))
    child.start()
    assert child.process.is_alive()
    assert child.process.daemon
    assert readable([child.descriptor, child.process.sentinel], 0) == []
    child.kill()
    assert readable([child.process.sentinel], 5)
    assert child.death()[0].startswith("was killed by SIGKILL")
    child.release()


@pytest.mark.processes
def test_one_that_cannot_be_started_leaves_nothing() -> None:
    def fail(sentinel: int) -> int:
        raise OSError("processes are used up")

    child = Child(StandInProcess(fail))
    with pytest.raises(OSError, match="used up"):
        child.start()
    child.release()


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
    assert "nobody on another machine" in pool.stacks(0)
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
