"""A host: whom it lets in, what it says of its workers, and when it ends."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fastq_loader.ipc.messages import Epoch, Stop, Task, encode
from fastq_loader.remote import link, wire
from fastq_loader.remote.host import Serving
from fastq_loader.remote.host_process import Host
from fastq_loader.remote.link import Address, Connection, Lost
from fastq_loader.remote.spec import HostSpec, versions
from fastq_loader.remote.wire import Refused, Request
from tests.conftest import descendants, wait_until
from tests.support.pair import TOKEN
from tests.support.worker_setup import make_plan

pytestmark = pytest.mark.processes

SECONDS = 10  # against hanging


def slow(index: int) -> int:
    time.sleep(60)
    return index


class Asked:
    def __getitem__(self, index: Any) -> Any:
        if index == "CUDA_VISIBLE_DEVICES":
            return "devices: " + os.environ[index]
        return slow(index) if index == "slow" else index


@pytest.fixture(scope="module", name="host")
def started_host() -> Iterator[Host]:
    host = Host(pickle.dumps(HostSpec.of(make_plan(Asked()), TOKEN)), "127.0.0.1")
    yield host
    host.close()


@pytest.fixture(scope="module")
def address(host: Host) -> Address:
    return host.address()


def connect(address: Address, number: int) -> tuple[Connection, int]:
    connection, frame = link.connect(address, TOKEN, Request(number, False), wire.WELCOME, wire.MESSAGE)
    return connection, wire.unpack(frame.payload)


def report(address: Address, number: int = 0) -> Any:
    return link.ask(address, TOKEN, Request(number, True), None, SECONDS)


def tell(connection: Connection, *messages: Any) -> None:
    for message in messages:
        connection.send(wire.MESSAGE, encode(message))


def test_a_worker_for_each_connection_answers_and_ends_when_it_is_told(address: Address, host: Host) -> None:
    first, pid = connect(address, 1)
    second, other = connect(address, 2)
    assert {pid, other} <= descendants(host.pid).keys()
    links = [os.readlink(f"/proc/{other}/fd/{fd}") for fd in os.listdir(f"/proc/{other}/fd")]
    assert sum(link.startswith("socket:") for link in links) == 1, "what is others' would stay open with it"
    for connection in (first, second):
        tell(connection, Epoch(1, None), Task(1, 0, 0, 7, (), ()))
        assert connection.receive() is not None
    tell(first, Stop())
    with pytest.raises(Lost):
        first.receive()
    assert report(address, 1) == {**report(address), "pid": pid, "text": "exited with code 0"}
    assert report(address, 2)["alive"]
    for connection in (first, second):
        connection.close()
    assert wait_until(lambda: not descendants(host.pid), SECONDS), "its stand-in is gone"


def test_of_a_worker_that_is_killed_it_says_so_when_its_connection_ends(address: Address) -> None:
    connection, pid = connect(address, 3)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Lost):
        connection.receive()
    assert "killed by SIGKILL" in report(address, 3)["text"]
    connection.close()


def test_it_has_a_worker_write_its_stacks(address: Address) -> None:
    connection, pid = connect(address, 4)
    tell(connection, Epoch(1, None), Task(1, 0, 0, "slow", (), ()))
    assert wait_until(lambda: "in slow" in report(address, 4)["text"], SECONDS)
    assert report(address, 4)["pid"] == pid
    connection.close()


def test_another_version_is_refused_with_what_differs() -> None:
    spec = replace(HostSpec.of(make_plan(Asked()), TOKEN), versions={**versions(), "torch": "0.1"})
    host = Host(pickle.dumps(spec), "127.0.0.1")
    there = host.address()
    with pytest.raises(Refused, match=r"torch \S+ here and 0.1 there"):
        connect(there, 5)
    assert report(there)["refused"]["another version"] == 1
    host.close()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "left in the middle of the handshake"),
        (b"GET / HTTP/1.1\r\n\r\n", "not this protocol"),
        (wire.MAGIC + bytes(64) + b"\x01\x00!", "wrong token"),
    ],
)
def test_strangers_are_refused_and_counted_by_the_reason(said: bytes, reason: str, address: Address) -> None:
    before = report(address)["refused"].get(reason, 0)
    with socket.create_connection(address) as stranger:
        stranger.sendall(said)
        if not said:
            stranger.close()
        assert wait_until(lambda: report(address)["refused"].get(reason, 0) == before + 1, SECONDS)


def test_whom_it_refused_is_a_number_that_anybody_of_the_pool_may_ask_for(address: Address) -> None:
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert wait_until(lambda: "not this protocol" in report(address)["refused"], SECONDS)
    assert link.ask_refused(address, TOKEN, None, SECONDS) == sum(report(address)["refused"].values()) > 0
    with pytest.raises(Refused):
        link.ask_refused(address, bytes(16), None, SECONDS)


def test_many_at_once_do_not_keep_anybody_out(address: Address) -> None:
    strangers = [socket.create_connection(address) for _ in range(100)]
    assert report(address)["refused"]["too many at once"] >= 36
    for stranger in strangers:
        stranger.close()


def test_who_says_nothing_in_time_is_refused() -> None:
    spec = HostSpec.of(make_plan(Asked()), TOKEN)
    lifeline, other_end = os.pipe()
    with link.listen("127.0.0.1") as listener:
        serving = Serving(spec, listener)
        running = threading.Thread(target=serving.run, args=(lifeline,))
        running.start()
        with socket.create_connection(("127.0.0.1", serving.port)):
            assert wait_until(lambda: bool(serving._guests), SECONDS)
            next(iter(serving._guests.values())).deadline = 0
            assert wait_until(lambda: serving.refused["said nothing in time"] == 1, SECONDS)
        os.close(other_end)
        running.join()
    os.close(lifeline)
    serving._stacks.close()


def test_with_it_its_workers_end(address: Address) -> None:
    for how in ("killed", "closed"):
        host = Host(pickle.dumps(HostSpec.of(make_plan(Asked()), TOKEN)), "127.0.0.1")
        connection, pid = connect(host.address(), 1)
        assert pid in descendants(host.pid)
        tell(connection, Epoch(1, None), Task(1, 0, 0, "slow", (), ()))
        if how == "killed":
            os.kill(host.pid, signal.SIGKILL)
        else:
            host.close()
        with pytest.raises(Lost):
            connection.receive()
        assert wait_until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"), SECONDS)  # type: ignore[misc]
        connection.close()
        host.close()
        assert not host.alive


def test_a_worker_has_the_variables_that_its_stand_in_says(address: Address) -> None:
    request = Request(6, False, environment={"CUDA_VISIBLE_DEVICES": "3"})
    connection, _ = link.connect(address, TOKEN, request, wire.WELCOME, wire.MESSAGE)
    tell(connection, Epoch(1, None), Task(1, 0, 0, "CUDA_VISIBLE_DEVICES", (), ()))
    frame = connection.receive()
    assert frame is not None
    assert b"devices: 3" in frame.payload
    connection.close()
