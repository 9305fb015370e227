"""A connection over loopback: frames with bodies come as they were sent, and whoever is wrong is told why."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from fastq_loader.errors import ProtocolError
from fastq_loader.remote import link, wire
from fastq_loader.remote.link import Address, Connection, Lost
from fastq_loader.remote.wire import Accepting, Refused, Request

TOKEN, OTHER = bytes(range(16)), bytes(16)
REQUEST = Request(3, False)

Served = Callable[..., Address]


@pytest.fixture
def served() -> Iterator[Served]:
    """A host that lets one client in, and then does something with the connection."""
    ends: list[Callable[[], None]] = []

    def serve(token: bytes, then: Callable[[socket.socket], Any]) -> Address:
        listener = link.listen("127.0.0.1")

        def run() -> None:
            sock, _ = listener.accept()
            with sock:
                handshake = Accepting(token, os.urandom(wire.NONCE_BYTES))
                while handshake.wanted:
                    data = sock.recv(handshake.wanted)
                    if not data:
                        return
                    sock.sendall(handshake.feed(data))
                then(sock)

        thread = threading.Thread(target=run)
        thread.start()
        ends.extend((thread.join, listener.close))
        return Address(*listener.getsockname())

    yield serve
    for end in ends:
        end()


def welcome(sock: socket.socket) -> Connection:
    connection = Connection(sock, wire.MESSAGE)
    connection.send(wire.WELCOME, b"come in")
    return connection


def test_frames_and_bodies_of_many_buffers_come_as_they_were_sent(served: Served) -> None:
    parts = [bytes([at % 256]) * (at % 7) for at in range(2000)] + [os.urandom(3 << 20)]

    def echo(sock: socket.socket) -> None:
        connection = welcome(sock)
        frame = connection.receive()
        assert frame is not None
        body = bytearray(frame.body)
        connection.receive_body(memoryview(body))
        connection.send(wire.MESSAGE, frame.payload, [body])

    address = served(TOKEN, echo)
    connection, frame = link.connect(address, TOKEN, REQUEST, wire.WELCOME, wire.MESSAGE)
    assert frame == (wire.WELCOME, b"come in", 0)
    assert connection.receive(block=False) is None
    connection.send(wire.MESSAGE, b"payload", parts)
    answer = connection.receive()
    body = bytearray(sum(map(len, parts)))
    assert answer == (wire.MESSAGE, b"payload", len(body))
    with memoryview(body) as view:
        connection.receive_body(view[:1000])
        connection.receive_body(view[1000:])
    assert body == b"".join(parts)
    with pytest.raises(Lost, match="closed the connection"):
        connection.receive()
    connection.close()


def test_each_side_notices_a_silent_other_one(served: Served) -> None:
    address = served(TOKEN, welcome)
    connection, _ = link.connect(address, TOKEN, REQUEST, wire.WELCOME)
    tcp = socket.IPPROTO_TCP
    options = (socket.TCP_NODELAY, socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPCNT)
    assert [connection._socket.getsockopt(tcp, option) for option in options] == [1, 4000, 1, 4]
    assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert connection._socket.gettimeout() is None
    connection.close()


def test_a_host_of_another_pool_is_refused(served: Served) -> None:
    with pytest.raises(Refused, match="wrong token"):
        link.connect(served(OTHER, welcome), TOKEN, REQUEST, wire.WELCOME)


def test_a_refusal_comes_with_its_reason(served: Served) -> None:
    def refuse(sock: socket.socket) -> None:
        Connection(sock).send(wire.REFUSED, b"torch 1 here and 2 there")

    with pytest.raises(Refused, match="torch 1 here and 2 there"):
        link.connect(served(TOKEN, refuse), TOKEN, REQUEST, wire.WELCOME)


def test_a_kind_of_frame_that_was_not_asked_for_is_refused(served: Served) -> None:
    with pytest.raises(ProtocolError, match="must not send"):
        link.connect(served(TOKEN, welcome), TOKEN, REQUEST, wire.REPORT)


def test_somebody_else_who_listens_there_is_no_host() -> None:
    with link.listen("127.0.0.1") as listener:
        address = Address(*listener.getsockname())
        with pytest.raises(Lost, match="does not answer: timed out"):
            link.connect(address, TOKEN, REQUEST, patience=0.05)
    with pytest.raises(Lost, match="cannot be reached"):
        link.connect(address, TOKEN, REQUEST)


def test_a_host_says_what_it_is_asked(served: Served) -> None:
    def report(sock: socket.socket) -> None:
        Connection(sock).send(wire.REPORT, msgpack.packb({"pid": 7}))

    assert link.ask(served(TOKEN, report), TOKEN, REQUEST, None, 5) == {"pid": 7}


def test_it_listens_at_the_first_port_that_is_free() -> None:
    with link.listen("127.0.0.1") as first:
        taken = first.getsockname()[1]
        with link.listen("127.0.0.1", (taken, 0)) as second:
            assert second.getsockname()[1] != taken
        with pytest.raises(OSError, match="in use"):
            link.listen("127.0.0.1", (taken,))
    with pytest.raises(OSError, match="no port"):
        link.listen("127.0.0.1", ())
