"""The wire protocol: what comes out of a frame is what went in, and other bytes are refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc import messages
from fastq_loader.ipc.messages import (
    KINDS,
    NUMBERS,
    TOKEN_BYTES,
    VERSION,
    Answer,
    BatchHandle,
    BeginEpoch,
    Bundle,
    Hello,
    Indices,
    Pickled,
    Space,
    Stop,
    Task,
    decode_for_consumer,
    decode_for_worker,
    encode,
    load_index,
)
from tests.support.datasets import assert_same
from tests.support.thorough import examples

TOKEN = bytes(range(TOKEN_BYTES))

TEXT = st.text(st.characters(), max_size=8)  # any code points: file names give lone surrogates
SMALL_INTS = st.integers(-(1 << 63), (1 << 64) - 1)
COUNTS = st.integers(0, (1 << 63) - 1)
SEEDS = st.none() | COUNTS
PLAIN = st.one_of(st.none(), st.booleans(), SMALL_INTS, st.floats(), TEXT, st.binary(max_size=8))


def tuples(*items: st.SearchStrategy[Any], size: int = 4) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.tuples(*items) if len(items) > 1 else items[0], max_size=size).map(tuple)


SPECS = st.recursive(PLAIN | COUNTS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=9)
HANDLES = st.builds(
    BatchHandle,
    COUNTS,
    SPECS,
    tuples(PLAIN),
    st.none() | st.binary(max_size=16),
    tuples(COUNTS, COUNTS, COUNTS),
)
FROM_WORKERS = st.one_of(
    st.builds(
        Answer,
        *[COUNTS] * 3,
        st.sampled_from(KINDS),
        *[COUNTS] * 2,
        tuples(COUNTS, COUNTS),
        tuples(COUNTS),
        st.none() | HANDLES,
        st.binary(max_size=8),
        *[COUNTS] * 3,
        st.binary(max_size=8),
    ),
    st.builds(Hello, COUNTS),
)
FROM_CONSUMER = st.one_of(
    st.builds(Task, *[COUNTS] * 3, PLAIN | st.lists(PLAIN, max_size=5), tuples(COUNTS, COUNTS), COUNTS),
    st.builds(BeginEpoch, COUNTS, SEEDS, SEEDS, st.binary(), COUNTS, COUNTS),
    st.builds(Space, tuples(COUNTS, COUNTS)),
    st.builds(Bundle, tuples(st.binary(max_size=9))),
    st.just(Stop()),
)


@examples(150)
@given(FROM_CONSUMER, FROM_WORKERS)
def test_messages_survive(to_worker: messages.Message, to_consumer: messages.Message) -> None:
    assert_same(to_worker, decode_for_worker(encode(to_worker)), "message")
    decoded = decode_for_consumer(encode(to_consumer))
    assert_same(to_consumer, decoded, "message")
    hash(decoded)  # raises if there is a list in it


def travel(index: Any) -> Any:
    task = decode_for_worker(encode(Task(1, 2, 3, index, ()), TOKEN))
    assert isinstance(task, Task)
    return load_index(task.index, TOKEN)


class Pair(tuple):
    def __new__(cls, *parts: int) -> Pair:
        return super().__new__(cls, parts)

    def __reduce__(self) -> Any:
        return Pair, tuple(self)


@pytest.mark.parametrize(
    "index",
    [
        *(0, 1, 1.0, -0.0, -(1 << 63), (1 << 64) - 1, 1 << 64, -(1 << 63) - 1, True, None, 1j, ...),
        *("", "\ud800 \udfff", "\ud83d\ude00", "\x00", b"\x00\xff", bytearray(b"ab")),
        *((1, 2), (1,), (), [], [True, 1, 1.0, "1", b"1", None], [2**70, 1], [[1, 2], [3]], [(1, 2)]),
        *([1, [2, (3, [4])]], {"a": 1}, {1: {2}}, {1, 2}, frozenset({1, (2, 3)}), range(3), Pair(1, 2)),
        *(slice(1, None, -2), [slice(0, 4)], msgpack.Timestamp(1, 2), Pickled(b"not a pickle")),
        *(np.int64(7), np.float64(0.5), np.bool_(True), [np.int64(7), np.float64(1)], np.arange(3)),
        *(torch.tensor([1, 2]), torch.tensor(3), (torch.tensor(1), "a")),
    ],
    ids=lambda index: f"{type(index).__name__} {index!r}"[:40],
)
def test_the_dataset_receives_the_samplers_index(index: Any) -> None:
    assert_same(index, travel(index), "index")
    assert type(travel(index)) is type(index)


opened: list[int] = []


class Trap:
    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return _open, (1,)


def _open(trace: int) -> None:
    opened.append(trace)


class Refusing:
    def __reduce__(self) -> tuple[Callable[[int, int], tuple[int, int]], tuple[int, int]]:
        return divmod, (1, 0)


def test_a_pickle_is_opened_only_behind_the_token_of_the_pool() -> None:
    opened.clear()
    task = decode_for_worker(encode(Task(0, 0, 0, Trap(), ()), TOKEN))
    assert isinstance(task, Task)
    assert type(task.index) is Pickled
    bare = pickle.dumps(Trap())
    for token in (bytes(TOKEN_BYTES), TOKEN[:-1], b""):
        with pytest.raises(ProtocolError, match="not a pickle of this pool"):
            load_index(task.index, token)
    for data in (bare, b"", TOKEN[:-1] + bare, bytes(TOKEN_BYTES) + bare):
        with pytest.raises(ProtocolError, match=f"{len(data)} bytes"):
            load_index(Pickled(data), TOKEN)
    assert opened == []
    load_index(task.index, TOKEN)
    assert opened == [1]


def test_an_index_that_cannot_be_pickled_raises_when_it_is_sent() -> None:
    for index in (lambda: None, [1, lambda: None]):
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
            encode(Task(0, 0, 0, index, ()), TOKEN)
    with pytest.raises(ZeroDivisionError):  # one that cannot be unpickled, where it is loaded
        travel(Refusing())


def packed(*fields: Any) -> bytes:
    frame: bytes = msgpack.packb(fields)
    return frame


def answer(kind: int = messages.SKIPPED, handle: Any = None, fields: int = 14) -> bytes:
    values = [1, 2, 0, kind, 5, 6, [], [], handle, b"", 7, 8, 9, b"bad"]
    return packed(VERSION, NUMBERS[Answer], *values[:fields])


MALFORMED = [
    *(b"", b"\xc1", b"\x93\x02\x03\xd4\xff\x00", b"\x91" * 5000, b"\x81\x01" * 5000),
    *(b"\x92\x03\x81\x91\x01\x02", b"\x92\x03\x81\x81\x01\x02\x03"),  # a list or a map as a key
    *(b"\xdd\xff\xff\xff\xff", b"\x92\x03\xc6\xff\xff\xff\xff"),  # lengths of 4 billion
    *(msgpack.packb(7), packed(), packed(VERSION), packed(VERSION, 17), packed(VERSION, [2])),
    *(packed(VERSION + 1, NUMBERS[Stop]), packed(None, NUMBERS[Stop]), encode(Stop()) + b"\x00"),
    encode(Task(0, 0, 0, list(range(20)), ()))[:-3],
    *(
        packed(VERSION, NUMBERS[Stop], msgpack.ExtType(9, b"")),
        encode(Task(1, 2, 3, Indices(bytes(12)), ())),
    ),
    *(packed(VERSION, NUMBERS[Task], 1, 2, 3, 4, *rest) for rest in ([[]], [[], 0, 0], [5, 0], [[5], 0])),
    *(packed(VERSION, NUMBERS[BeginEpoch], 1, None), packed(VERSION, NUMBERS[Space])),
    *(packed(VERSION, NUMBERS[Bundle], 5), packed(VERSION, NUMBERS[Stop], 1)),
    *(packed(VERSION, NUMBERS[Hello]), answer(fields=13), answer(99), answer(0, 3), answer(0, [1, None, []])),
]


def test_the_frames_that_the_malformed_ones_are_made_of_are_well_formed() -> None:
    expected = Answer(1, 2, 0, messages.SKIPPED, 5, 6, (), (), None, b"", 7, 8, 9, b"bad")
    assert decode_for_consumer(answer()) == expected
    assert decode_for_consumer(answer(0, [1, None, [], None, []]))


@pytest.mark.parametrize("frame", MALFORMED, ids=lambda frame: repr(frame)[:60])
def test_malformed_frames_are_refused(frame: bytes) -> None:
    for decode in (decode_for_worker, decode_for_consumer):
        with pytest.raises(ProtocolError):
            decode(frame)


def decodes_or_refuses(frame: bytes) -> None:
    for decode, kinds in (
        (decode_for_worker, (Task, BeginEpoch, Space, Bundle, Stop)),
        (decode_for_consumer, (Hello, Answer)),
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


@examples(300)
@given(st.integers(0, 7), st.lists(MSGPACK_VALUES, max_size=12), st.binary(max_size=40))
def test_other_frames_raise_nothing_else(kind: int, fields: list[Any], junk: bytes) -> None:
    for frame in (msgpack.packb((VERSION, kind, *fields), unicode_errors="surrogatepass"), junk):
        decodes_or_refuses(frame)
    decodes_or_refuses(bytes([0x92, VERSION]) + junk)
