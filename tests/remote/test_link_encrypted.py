"""Encrypted connections: both sides show a certificate, and two threads may use one connection."""

from __future__ import annotations

import os
import pickle
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from fastq_loader.ipc.messages import Epoch, Task, encode
from fastq_loader.remote import link, wire
from fastq_loader.remote.host_process import Host
from fastq_loader.remote.link import Connection, Lost, Tls
from fastq_loader.remote.spec import HostSpec
from fastq_loader.remote.wire import Request
from tests.support import certificates
from tests.support.pair import TOKEN
from tests.support.worker_setup import make_plan

pytestmark = pytest.mark.skipif(not certificates.AVAILABLE, reason="there is no program openssl")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certificates.make_tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certificates.make_tls(tmp_path_factory.mktemp("tls"), "others")


@pytest.fixture
def pair(tls: Tls) -> Iterator[tuple[Connection, Connection]]:
    """Both ends of an encrypted connection."""
    mine, its = socket.socketpair()
    ends: list[ssl.SSLSocket] = []
    server = tls.context(server=True)
    accepting = threading.Thread(target=lambda: ends.append(server.wrap_socket(its, server_side=True)))
    accepting.start()
    ends.append(tls.context(server=False).wrap_socket(mine))
    accepting.join()
    one, other = (Connection(end, wire.MESSAGE) for end in ends)
    yield one, other
    one.close()
    other.close()


def test_frames_come_as_they_were_sent_while_both_sides_send(pair: tuple[Connection, Connection]) -> None:
    body, right = os.urandom(5 << 20), []

    def send(connection: Connection) -> None:
        for at in range(4):
            connection.send(wire.MESSAGE, b"%d" % at, [body, b"", b"end"])

    def receive(connection: Connection) -> None:
        for at in range(4):
            frame, received = connection.receive(), bytearray(len(body) + 3)
            connection.receive_body(memoryview(received))
            right.append((frame, received) == ((wire.MESSAGE, b"%d" % at, len(received)), body + b"end"))

    threads = [threading.Thread(target=use, args=(end,)) for end in pair for use in (send, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 8


def test_without_waiting_there_may_be_nothing_and_a_wait_may_be_limited(
    pair: tuple[Connection, Connection],
) -> None:
    one, other = pair
    assert one.receive(block=False) is None
    one.settimeout(0.01)
    with pytest.raises(Lost, match="timed out"):
        one.receive()
    other.close()
    with pytest.raises(Lost):
        one.receive()


@pytest.mark.processes
def test_a_host_lets_in_who_has_a_certificate_and_counts_the_others(tls: Tls, others: Tls) -> None:
    host = Host(pickle.dumps(HostSpec.of(make_plan([5, 6]), TOKEN, tls)), "127.0.0.1")
    address, request = host.address(), Request(1, False)
    for wrong in (None, others):
        with pytest.raises(Lost):
            link.connect(address, TOKEN, request, wire.WELCOME, tls=wrong)
    connection, _ = link.connect(address, TOKEN, request, wire.WELCOME, wire.MESSAGE, tls=tls)
    for message in (Epoch(1, None), Task(1, 0, 0, 1, (), ())):
        connection.send(wire.MESSAGE, encode(message))
    assert connection.receive() is not None
    report = link.ask(address, TOKEN, Request(1, True), tls, 10)
    assert report["alive"]
    assert report["refused"] == {"no TLS, or no certificate of the authority": 2}
    connection.close()
    host.close()


def test_a_file_that_is_not_there_is_an_error(tls: Tls) -> None:
    with pytest.raises(OSError, match="No such file"):
        tls._replace(certificate="/nonexistent").context(server=True)
