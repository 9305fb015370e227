"""The handshake and frames, over loopback: only what has the token and its place gets in."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.errors import ProtocolError
from fastq_loader.extras.remote import connection as module
from fastq_loader.extras.remote.connection import (
    LARGEST_BODY,
    LONGEST,
    MAGIC,
    MESSAGE,
    NONCE_BYTES,
    REPORT,
    WELCOME,
    Address,
    Connection,
    Lost,
    Refused,
    Request,
    admit,
    ask_for_stacks,
    connect,
    header,
    listen,
)
from fastq_loader.system.calls import readable
from tests.support.thorough import examples

TOKEN, OTHER = bytes(range(16)), bytes(16)
NONCES = b"c" * NONCE_BYTES, b"s" * NONCE_BYTES
REQUEST = Request(False, 5)
cuts = st.lists(st.integers(1, 40), max_size=60)


# ---- the handshake --------------------------------------------------------------------------------------


def said_by_a_client(token: bytes = TOKEN, nonces: Any = NONCES) -> bytes:
    request = module._REQUEST.pack(*REQUEST)
    return MAGIC + nonces[0] + module._mac(token, b"client", *nonces, request) + request


def heard(said: bytes, sizes: Sequence[int] = ()) -> Request:
    """What a server makes of these bytes, which come in pieces; then the client leaves."""
    mine, its = socket.socketpair()

    def speak() -> None:
        left = said
        for size in (*sizes, len(said)):
            its.sendall(left[:size])
            left = left[size:]
        its.shutdown(socket.SHUT_WR)

    with mine, its:
        client = threading.Thread(target=speak)
        client.start()
        try:
            return admit(Connection(mine), TOKEN, NONCES[1])
        finally:
            client.join()


@examples(100)
@given(cuts)
def test_a_client_with_the_token_is_let_in_however_its_bytes_are_cut(sizes: list[int]) -> None:
    assert heard(said_by_a_client(), sizes) == REQUEST


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n" * 8, "not this protocol"),
        (bytes(200), "not this protocol"),
        (said_by_a_client().replace(MAGIC, b"FQLr1"), "another version of it: b'FQLr1', and here"),
        (said_by_a_client(OTHER), "wrong token"),
        (said_by_a_client()[:-1] + b"?", "wrong token"),
        (said_by_a_client(nonces=(NONCES[0], b"r" * NONCE_BYTES)), "wrong token"),  # recorded elsewhere
    ],
)
def test_a_client_that_does_not_speak_the_protocol_is_refused(said: bytes, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        heard(said)


def test_before_the_token_is_shown_no_more_is_received_than_the_lines_have() -> None:
    mine, its = socket.socketpair()
    with mine, its:
        its.sendall(said_by_a_client(OTHER) + b"more")
        with pytest.raises(Refused, match="wrong token"):
            admit(Connection(mine), TOKEN, NONCES[1])
        assert mine.recv(100) == b"more"


@examples(100)
@given(st.binary(max_size=3000), cuts)
def test_a_client_that_says_anything_else_is_not_let_in(said: bytes, sizes: list[int]) -> None:
    with pytest.raises((Refused, Lost)):
        heard(MAGIC + said, sizes)


# ---- connections ----------------------------------------------------------------------------------------

Served = Callable[..., Address]


@pytest.fixture
def served() -> Iterator[Served]:
    """A far worker that lets one client in, and then does something with the connection."""
    ends: list[Callable[[], None]] = []

    def serve(token: bytes, then: Callable[[Connection], Any], worker: int = REQUEST.worker) -> Address:
        listener = listen("127.0.0.1")

        def run() -> None:
            sock, _ = listener.accept()
            with sock, suppress(Lost, Refused):
                client = Connection(sock, MESSAGE)
                assert admit(client, token, os.urandom(NONCE_BYTES)).worker == worker
                then(client)

        thread = threading.Thread(target=run)
        thread.start()
        ends.extend((thread.join, listener.close))
        return Address(*listener.getsockname())

    yield serve
    for end in ends:
        end()


def welcome(connection: Connection) -> None:
    connection.send(WELCOME, b"come in")


def test_frames_and_bodies_of_many_buffers_come_as_they_were_sent(served: Served) -> None:
    parts = [bytes([at % 256]) * (at % 7) for at in range(2000)] + [os.urandom(3 << 20)]

    def echo(connection: Connection) -> None:
        welcome(connection)
        frame = connection.receive()
        assert frame is not None
        body = bytearray(frame.body)
        connection.receive_body(memoryview(body))
        connection.send(MESSAGE, frame.payload, [body])

    connection, frame = connect(served(TOKEN, echo), TOKEN, REQUEST, WELCOME, MESSAGE)
    assert frame == (WELCOME, b"come in", 0)
    assert not readable([connection.fileno()], 0)
    connection.send(MESSAGE, b"payload", parts)
    answer = connection.receive()
    body = bytearray(sum(map(len, parts)))
    assert answer == (MESSAGE, b"payload", len(body))
    assert answer.nbytes == len(header(MESSAGE, 0)) + 7 + len(body)
    with memoryview(body) as view:
        connection.receive_body(view[:1000])
        connection.receive_body(view[1000:])
    assert body == b"".join(parts)
    with pytest.raises(Lost, match="closed the connection"):
        connection.receive()
    connection.close()


@pytest.mark.parametrize(
    ("token", "then", "kinds", "error", "reason"),
    [
        (TOKEN, welcome, [REPORT], ProtocolError, "must not send"),
        (OTHER, welcome, [WELCOME], Refused, "wrong token"),
    ],
)
def test_a_connection_that_is_of_no_use_says_why(
    token: bytes, then: Any, kinds: list[int], error: type[Exception], reason: str, served: Served
) -> None:
    with pytest.raises(error, match=reason):
        connect(served(token, then), TOKEN, REQUEST, *kinds)


def test_a_server_that_is_no_far_worker_is_given_up() -> None:
    with listen("127.0.0.1") as listener:
        address = Address(*listener.getsockname())
        with pytest.raises(Lost, match="does not answer: timed out"):
            connect(address, TOKEN, REQUEST, patience=0.5)
    with pytest.raises(Lost, match="cannot be reached"):
        connect(address, TOKEN, REQUEST)


def test_stacks_are_text(served: Served) -> None:
    address = served(TOKEN, lambda its: its.send(REPORT, b"in \xff()"), 0)
    assert ask_for_stacks(address, TOKEN, 5) == "in \ufffd()"


def test_it_listens_at_the_first_port_that_is_free() -> None:
    with listen("127.0.0.1") as first:
        taken = first.getsockname()[1]
        with listen("127.0.0.1", (taken, 0)) as second:
            assert second.getsockname()[1] != taken
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", (taken,))
    with pytest.raises(OSError, match="no port"):
        listen("127.0.0.1", ())


@pytest.mark.parametrize(
    ("kind", "payload", "body"),
    [
        (REPORT, 1, 0),
        (0, 0, 0),
        (99, 0, 0),
        (WELCOME, LONGEST[WELCOME] + 1, 0),
        (WELCOME, 0, 1),
        (MESSAGE, LONGEST[MESSAGE] + 1, 0),
        (MESSAGE, 0, LARGEST_BODY + 1),
    ],
)
def test_a_kind_or_a_size_that_may_not_be_sent_is_refused_by_its_header(
    kind: int, payload: int, body: int
) -> None:
    mine, other = socket.socketpair()
    with mine, other:
        mine.sendall(struct.pack("<BIQ", kind, payload, body))
        with pytest.raises(ProtocolError, match=f"a frame of kind {kind}"):
            Connection(other, WELCOME, MESSAGE).receive()
        if kind in (WELCOME, MESSAGE):
            with pytest.raises(ProtocolError, match=f"a frame of kind {kind}"):
                header(kind, payload, body)
