"""Frames become messages again: whole ones do, and other bytes are refused."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc import messages
from fastq_loader.ipc.decoding import decode_for_consumer, decode_for_worker
from fastq_loader.ipc.messages import (
    VERSION,
    Answer,
    Bundle,
    Epoch,
    Hello,
    Indices,
    Ping,
    Space,
    Stop,
    Task,
    encode,
)
from tests.ipc.test_messages import PLAIN


def packed(*fields: Any) -> bytes:
    frame: bytes = msgpack.packb(fields)
    return frame


def task(*fields: Any) -> bytes:
    return packed(VERSION, messages.TASK, *fields)


def answer(at: int | None = None, value: Any = None, *, fields: int = 17) -> bytes:
    """The frame of an answer, with one field changed, or not all of them."""
    values = [1, 2, 0, messages.SKIPPED, 5, 6, [], [], None, b"", 7, 8, 9, 10, 11, 12, 13]
    if at is not None:
        values[at] = value
    return packed(VERSION, messages.ANSWER, *values[:fields])


MALFORMED = [
    *(b"", b"\xc1", b"\x93\x02\x03\xd4\xff\x00", b"\x91" * 5000, b"\x81\x01" * 5000),
    *(b"\x92\x03\x81\x91\x01\x02", b"\x92\x03\x81\x81\x01\x02\x03"),  # a list or a map as a key
    *(b"\xdd\xff\xff\xff\xff", b"\x92\x03\xc6\xff\xff\xff\xff"),  # lengths of 4 billion
    *(
        msgpack.packb(7),
        packed(),
        packed(VERSION),
        packed(VERSION, 17),
        packed(VERSION, [2]),
        packed(VERSION, {}),
    ),
    *(packed(VERSION + 1, messages.STOP), packed(None, messages.STOP), encode(Stop()) + b"\x00"),
    encode(Task(0, 0, 0, list(range(20)), ()))[:-3],
    *(
        packed(VERSION, messages.STOP, msgpack.ExtType(9, b"")),
        encode(Task(1, 2, 3, Indices(bytes(12)), ())),
    ),
    *(task(1, 2, 3, 4, [], []), task(1, 2, 3, 4, [], [], 0, 0), task(1, 2, 3, 4, [], [5], 0)),
    *(task(1, 2, 3, 4, grants, [], 0) for grants in (5, [5], [[1, 2, 3]], [{1: 2, 3: 4}], {}, [b"ab"], "")),
    *(task(1, 2, 3, 4, [[number, 2]], [], 0) for number in (-1, 1 << 63)),
    *(task(1, number, 3, 4, [], [], 0) for number in (True, 0.5, "2", -1, None, 1 << 63)),
    task(1, 2, 3, 4, [], [], None),
    *(packed(VERSION, messages.EPOCH, *seeds) for seeds in ((1, None), (1, None, None, None))),
    *(packed(VERSION, messages.EPOCH, 1, *seeds) for seeds in (("1", None), (None, -1))),
    *(packed(VERSION, messages.SPACE, *ranges) for ranges in ((), ([], []), ([5],))),
    *(packed(VERSION, messages.BUNDLE, *frames) for frames in ((), (5,), ([5],), (["a"],))),
    *(packed(VERSION, messages.STOP, 1), packed(VERSION, messages.PING, 1)),
    *(packed(VERSION, messages.HELLO), packed(VERSION, messages.HELLO, "1")),
    *(answer(fields=fields) for fields in (8, 16, 10)),
    *(answer(10, -1), answer(15, None), answer(12, 0.5)),
    *(
        packed(VERSION, messages.ANSWER, 0, 0, 0, 2, 0, 0, [], [], None, [], *range(each))
        for each in (0, 6, 7)
    ),
    *(answer(3, outcome) for outcome in (99, [0], True, -1, None)),
    *(answer(4, None), answer(2, -1)),
    *(answer(6, fresh) for fresh in ([[1]], None, [[True, 1]], "", b"ab")),
    *(answer(7, returned) for returned in (["a"], "", b"ab", None, {1: 2}, [-1])),
    *(answer(8, handle) for handle in ("abcde", 3, [1, None, []], [-1, None, [], None, []])),
    *(answer(8, [1, None, values, packet, []]) for values, packet in (("", None), ([], ""))),
    *(answer(8, [1, None, [], None, segments]) for segments in ([[1, 2]], None)),
]


def test_the_frames_that_the_malformed_ones_are_made_of_are_well_formed() -> None:
    assert decode_for_worker(task(1, 2, 3, 4, [[0, 8]], [], 0)) == Task(1, 2, 3, 4, ((0, 8),))
    costs = 7, 8, 9, 10, 11, 12, 13
    expected = Answer(1, 2, 0, messages.SKIPPED, 5, 6, (), (), None, (), b"", *costs)
    assert decode_for_consumer(answer()) == expected
    assert decode_for_consumer(answer(8, [1, None, [], None, []]))


@pytest.mark.parametrize("frame", MALFORMED, ids=lambda frame: repr(frame)[:60])
def test_malformed_frames_are_refused(frame: bytes) -> None:
    for decode in (decode_for_worker, decode_for_consumer):
        with pytest.raises(ProtocolError):
            decode(frame)


def test_each_side_refuses_the_messages_of_its_own() -> None:
    for message in (Hello(1), Answer(0, 0, 0, 2, 0, 0, (), (), None)):
        with pytest.raises(ProtocolError, match="kind"):
            decode_for_worker(encode(message))
    for other in (Stop(), Epoch(0, None), Space(((0, 65536),)), Task(0, 0, 0, [1], ()), Bundle(())):
        with pytest.raises(ProtocolError, match="kind"):
            decode_for_consumer(encode(other))


def decodes_or_refuses(frame: bytes) -> None:
    for decode, kinds in (
        (decode_for_worker, (Task, Epoch, Space, Bundle, Stop, Ping)),
        (decode_for_consumer, (Hello, Answer, Ping)),
    ):
        try:
            assert isinstance(decode(frame), kinds)  # type: ignore[operator]
        except ProtocolError:
            continue


MSGPACK_VALUES = st.recursive(
    PLAIN | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=2),
    max_leaves=5,
)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 7), st.lists(MSGPACK_VALUES, max_size=12), st.binary(max_size=40))
def test_other_frames_raise_nothing_else(kind: int, fields: list[Any], junk: bytes) -> None:
    for frame in (msgpack.packb((VERSION, kind, *fields), unicode_errors="surrogatepass"), junk):
        decodes_or_refuses(frame)
    decodes_or_refuses(bytes([0x92, VERSION]) + junk)
