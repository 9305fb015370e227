"""The handshake and the frames: nobody gets in without the token, and no size is believed."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.errors import ProtocolError
from fastq_loader.remote import wire
from fastq_loader.remote.wire import Accepting, Connecting, Frame, Frames, Refused, Request

TOKEN, OTHER = bytes(range(16)), bytes(16)
NONCES = b"c" * wire.NONCE_BYTES, b"s" * wire.NONCE_BYTES

requests = st.builds(
    Request,
    number=st.integers(0, 1 << 40),
    asks=st.booleans(),
    worker=st.integers(0, 4095),
    environment=st.dictionaries(st.sampled_from(["CUDA_VISIBLE_DEVICES", "A"]), st.text(max_size=20)),
)
cuts = st.lists(st.integers(1, 40), max_size=60)


def pieces(data: bytes, sizes: list[int], wanted: Callable[[], int]) -> Any:
    """The data in pieces of these sizes, none larger than what is wanted."""
    at, sizes = 0, list(sizes)
    while at < len(data) and wanted():
        size = min(sizes.pop(0) if sizes else len(data), wanted())
        yield data[at : at + size]
        at += size


def shake(client: Connecting, server: Accepting, sizes: list[int]) -> None:
    """Let both sides talk until nobody says anything."""
    to_server, to_client = client.first, b""
    while to_server or to_client:
        to_client = b"".join(server.feed(piece) for piece in pieces(to_server, sizes, lambda: server.wanted))
        to_server = b"".join(client.feed(piece) for piece in pieces(to_client, sizes, lambda: client.wanted))


@given(requests, cuts)
def test_two_sides_with_one_token_agree_however_their_bytes_are_cut(
    request: Request, sizes: list[int]
) -> None:
    server, client = Accepting(TOKEN, NONCES[1]), Connecting(TOKEN, NONCES[0], request)
    shake(client, server, sizes)
    assert server.request == request
    assert client.wanted == server.wanted == 0


def test_a_server_without_the_token_gets_no_request() -> None:
    request = Request(1, False)
    server, client = Accepting(OTHER, NONCES[1]), Connecting(TOKEN, NONCES[0], request)
    with pytest.raises(Refused, match="wrong token"):
        shake(client, server, [])
    assert server.request is None


def said_by_a_client(token: bytes = TOKEN, request: bytes = b"", length: int | None = None) -> bytes:
    mac = wire._mac(token, b"client", *NONCES, request)
    size = struct.pack("<H", len(request) if length is None else length)
    return wire.MAGIC + NONCES[0] + mac + size + request


def hear(server: Accepting, said: bytes) -> None:
    for piece in pieces(said, [], lambda: server.wanted):
        server.feed(piece)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n" * 8, "not this protocol"),
        (bytes(200), "not this protocol"),
        (said_by_a_client(OTHER, Request(1, False).pack()), "wrong token"),
        (said_by_a_client(request=Request(1, False).pack())[:-1] + b"?", "wrong token"),
        (said_by_a_client(length=0xFFFF), "a request of a forged size"),
        (said_by_a_client(length=0), "a request of a forged size"),
        (said_by_a_client(request=b"\xc1"), "a request that cannot be read"),
        (said_by_a_client(request=msgpack.packb(7)), "a request that cannot be read"),
        (said_by_a_client(request=msgpack.packb((1,))), "a request that cannot be read"),
    ],
)
def test_whoever_does_not_speak_the_protocol_is_refused_with_the_reason(said: bytes, reason: str) -> None:
    server = Accepting(TOKEN, NONCES[1])
    with pytest.raises(Refused, match=reason):
        hear(server, said)
    assert server.request is None


@given(st.binary(max_size=3000), cuts)
def test_before_the_token_is_shown_no_more_is_kept_than_a_request(said: bytes, sizes: list[int]) -> None:
    server = Accepting(TOKEN, NONCES[1])
    most = len(wire.MAGIC) + wire.NONCE_BYTES + 34 + wire.LONGEST_REQUEST
    try:
        for piece in pieces(wire.MAGIC + said, sizes, lambda: server.wanted):
            server.feed(piece)
            assert len(server._received) + server.wanted <= most
    except Refused:
        pass
    assert server.request is None


@given(st.integers(0, 200))
def test_a_client_that_stops_in_the_middle_gets_nothing(length: int) -> None:
    said = said_by_a_client(request=Request(1, False).pack())
    server = Accepting(TOKEN, NONCES[1])
    hear(server, said[: min(length, len(said) - 1)])
    assert server.request is None
    assert server.wanted > 0


def test_a_recorded_handshake_is_of_no_use_to_another_server() -> None:
    said = said_by_a_client(request=Request(1, False).pack())
    server = Accepting(TOKEN, os.urandom(wire.NONCE_BYTES))
    with pytest.raises(Refused, match="wrong token"):
        hear(server, said)


# ---- frames -----------------------------------------------------------------------------------------

frames = st.lists(
    st.tuples(st.sampled_from([wire.WELCOME, wire.MESSAGE]), st.binary(max_size=60), st.binary(max_size=90))
)


@given(frames, cuts)
def test_frames_are_the_same_however_their_bytes_are_cut(
    sent: list[tuple[int, bytes, bytes]], sizes: list[int]
) -> None:
    sent = [(kind, payload, body if kind == wire.MESSAGE else b"") for kind, payload, body in sent]
    data = b"".join(wire.header(kind, len(p), len(body)) + p + body for kind, p, body in sent)
    parser, at, sizes = Frames(wire.WELCOME, wire.MESSAGE), 0, list(sizes)
    found: list[tuple[Frame, bytearray]] = []
    while at < len(data):
        size = min(sizes.pop(0) if sizes else len(data), parser.body or parser.wanted)
        piece, at = data[at : at + size], at + size
        if parser.body:
            parser.skip(len(piece))
            found[-1][1].extend(piece)
        elif (frame := parser.feed(piece)) is not None:
            found.append((frame, bytearray()))
    assert [(f.kind, f.payload, bytes(body)) for f, body in found] == sent
    assert all(frame.body == len(body) for frame, body in found)
    assert sum(frame.nbytes for frame, _ in found) == len(data)
    assert parser.wanted > 0


@pytest.mark.parametrize(
    ("kind", "payload", "body"),
    [
        (wire.REPORT, 1, 0),
        (0, 0, 0),
        (99, 0, 0),
        (wire.WELCOME, wire.LONGEST[wire.WELCOME] + 1, 0),
        (wire.WELCOME, 0, 1),
        (wire.MESSAGE, wire.LONGEST[wire.MESSAGE] + 1, 0),
        (wire.MESSAGE, 0, wire.LARGEST_BODY + 1),
    ],
)
def test_a_kind_or_a_size_that_may_not_be_sent_is_refused_by_its_header(
    kind: int, payload: int, body: int
) -> None:
    parser = Frames(wire.WELCOME, wire.MESSAGE)
    with pytest.raises(ProtocolError, match=f"a frame of kind {kind}"):
        parser.feed(struct.pack("<BIQ", kind, payload, body))
    if kind in wire.LONGEST and kind != wire.REPORT:
        with pytest.raises(ProtocolError, match=f"a frame of kind {kind}"):
            wire.header(kind, payload, body)


def test_no_more_is_received_at_once_than_was_announced() -> None:
    parser = Frames(wire.MESSAGE)
    assert parser.wanted == 13
    parser.feed(wire.header(wire.MESSAGE, 1 << 30))
    assert parser.wanted == 1 << 18
    assert not parser._received


def test_what_differs_is_named() -> None:
    assert wire.difference({"torch": "2"}, {"torch": "2"}) == ""
    here, there = {"torch": "2.13", "numpy": "2"}, {"torch": "2.12", "numpy": "2", "python": "3.11"}
    assert wire.difference(here, there) == "python (none) here and 3.11 there, torch 2.13 here and 2.12 there"


def test_what_is_no_msgpack_is_refused() -> None:
    assert wire.unpack(msgpack.packb({"pid": 1})) == {"pid": 1}
    with pytest.raises(ProtocolError, match="not a msgpack frame"):
        wire.unpack(b"\xc1")
