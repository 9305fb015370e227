"""The wire protocol: what comes out of a frame is what went in, and bytes that are no message say so."""

from __future__ import annotations

import math
import pickle
from array import array
from collections.abc import Callable
from typing import Any, NoReturn

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc import messages
from fastq_loader.ipc.messages import (
    OUTCOMES,
    TOKEN_BYTES,
    VERSION,
    Answer,
    Bundle,
    Epoch,
    Handle,
    Hello,
    Indices,
    Pickled,
    Ping,
    Space,
    Stop,
    Task,
    decode_for_consumer,
    decode_for_worker,
    encode,
    load_index,
    packs,
    plain_index,
)
from tests.support.datasets import assert_same

TOKEN = bytes(range(TOKEN_BYTES))

# Code points without an exception: file names give lone surrogates.
TEXT = st.text(st.characters(), max_size=8)
SMALL_INTS = st.integers(-(1 << 63), (1 << 64) - 1)
COUNTS = st.integers(0, (1 << 63) - 1)
PLAIN = st.one_of(st.none(), st.booleans(), SMALL_INTS, st.floats(), TEXT, st.binary(max_size=8))
PAIRS = st.lists(st.tuples(COUNTS, COUNTS), max_size=4).map(tuple)

KEYS = st.one_of(TEXT, SMALL_INTS)
TREES = st.recursive(
    st.one_of(st.just("V"), st.just("O"), st.tuples(st.just("L"), COUNTS)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(("l", "t")), st.lists(inner, max_size=3).map(tuple)),
        st.tuples(
            st.just("d"), st.lists(KEYS, max_size=3).map(tuple), st.lists(inner, max_size=3).map(tuple)
        ),
    ),
    max_leaves=6,
)
LEAVES = st.tuples(
    st.sampled_from("TA"),
    st.sampled_from(("float32", "<M8[ns]", "|S3")),
    st.lists(COUNTS, max_size=3).map(tuple),
    st.none() | st.lists(SMALL_INTS, max_size=3).map(tuple),
    COUNTS,
    COUNTS,
)
SPECS = st.tuples(TREES, st.lists(LEAVES, max_size=3).map(tuple), st.lists(COUNTS, max_size=3).map(tuple))
HANDLES = st.builds(
    Handle,
    COUNTS,
    st.none() | SPECS,
    st.lists(PLAIN, max_size=4).map(tuple),
    st.none() | st.binary(max_size=16),
    st.lists(st.tuples(COUNTS, COUNTS, COUNTS), max_size=3).map(tuple),
)
ANSWERS = st.builds(
    Answer,
    COUNTS,
    COUNTS,
    COUNTS,
    st.sampled_from(OUTCOMES),
    COUNTS,
    COUNTS,
    PAIRS,
    PAIRS,
    st.lists(COUNTS, max_size=3).map(tuple),
    st.none() | HANDLES,
)
PINGS = st.builds(Ping)
HELLOS = st.builds(Hello, st.integers(1, 1 << 22))
TASKS = st.builds(Task, COUNTS, COUNTS, COUNTS, PLAIN | st.lists(PLAIN, max_size=5), PAIRS, PAIRS, COUNTS)
EPOCHS = st.builds(Epoch, COUNTS, st.booleans(), st.none() | COUNTS, st.none() | COUNTS)
SPACES = st.builds(Space, PAIRS)
STOPS = st.builds(Stop)


def exactly(one: Any, other: Any) -> bool:
    """Equal in type and value, all the way down; unlike `==`, NaN is NaN, and 1, 1.0 and True differ."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(exactly, one, other))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    return bool(one == other)


# ---- there and back ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=120)
@given(TASKS | EPOCHS | SPACES | STOPS | PINGS)
def test_consumers_messages_survive(message: Task | Epoch | Space | Stop | Ping) -> None:
    assert exactly(decode_for_worker(encode(message)), message)


@settings(deadline=None, max_examples=120)
@given(ANSWERS | HELLOS | PINGS)
def test_workers_messages_survive(message: Answer | Hello | Ping) -> None:
    assert exactly(decode_for_consumer(encode(message)), message)


@settings(deadline=None, max_examples=60)
@given(SPECS)
def test_a_spec_comes_back_hashable_and_equal(spec: tuple[Any, ...]) -> None:
    answer = Answer(0, 0, 0, messages.BATCH, 0, 0, (), (), (), Handle(0, spec, (), None, ()))
    decoded = decode_for_consumer(encode(answer))
    assert isinstance(decoded, Answer)
    assert decoded.handle is not None
    assert hash(decoded.handle.spec) == hash(spec)
    assert decoded.handle.spec == spec


def travel(index: Any) -> Any:
    """An index as the dataset receives it."""
    task = decode_for_worker(encode(Task(1, 2, 3, index, ()), TOKEN))
    assert isinstance(task, Task)
    return load_index(task.index, TOKEN)


@pytest.mark.parametrize(
    "index",
    [
        0,
        -(1 << 63),
        (1 << 64) - 1,
        1 << 64,
        -(1 << 63) - 1,
        2**70,
        True,
        1,
        1.0,
        -0.0,
        None,
        "",
        "\ud800 \udfff",
        "\ud83d\ude00",
        "\x00",
        b"\x00\xff",
        bytearray(b"ab"),
        (1, 2),
        (1,),
        (),
        [],
        [True, 1, 1.0, "1", b"1", None],
        [2**70, 1],
        [[1, 2], [3]],
        [(1, 2)],
        [1, [2, (3, [4])]],
        {"a": 1},
        {1: {2}},
        {1, 2},
        frozenset({1, (2, 3)}),
        slice(1, None, -2),
        [slice(0, 4)],
        range(3),
        1j,
        np.int64(7),
        np.float64(0.5),
        np.bool_(True),
        [np.int64(7), np.uint8(1)],
        np.arange(3),
        torch.tensor([1, 2]),
        torch.tensor(3),
        (torch.tensor(1), "a"),
        Ellipsis,
        msgpack.Timestamp(1, 2),
        Pickled(b"not a pickle"),
    ],
    ids=lambda index: f"{type(index).__name__} {index!r}"[:40],
)
def test_the_dataset_receives_the_samplers_index(index: Any) -> None:
    assert_same(index, travel(index), "index")


def test_float_subclasses_keep_their_type() -> None:
    assert type(travel(np.float64(1.5))) is np.float64
    assert type(travel([np.float64(1.5)])[0]) is np.float64


@settings(deadline=None, max_examples=100)
@given(
    st.recursive(
        PLAIN | st.integers() | st.complex_numbers(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(TEXT, inner, max_size=2),
        ),
        max_leaves=6,
    )
)
def test_any_index_arrives_as_it_was(index: Any) -> None:
    assert_same(index, travel(index), "index")


def test_plain_indices_travel_without_a_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> NoReturn:
        raise AssertionError("a plain index was pickled")

    monkeypatch.setattr(pickle, "dumps", refuse)
    for index in (3, "name", b"raw", 0.5, True, None, list(range(64)), ["a", 1, None]):
        frame = encode(Task(0, 0, 0, index, ()))
        task = decode_for_worker(frame)
        assert isinstance(task, Task)
        assert exactly(task.index, index)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_packed_integers_come_out_as_a_list(integers: list[int]) -> None:
    found = travel(Indices(array("q", integers).tobytes()))
    assert type(found) is list
    assert found == integers


def test_half_an_integer_is_refused() -> None:
    frame = encode(Task(1, 2, 3, Indices(bytes(12)), ()))
    with pytest.raises(ProtocolError, match="12 bytes"):
        decode_for_worker(frame)


@pytest.mark.parametrize("value", [0, True, None, "a", b"a", 0.5])
def test_plain_values(value: Any) -> None:
    assert plain_index(value)
    assert plain_index([value])


@pytest.mark.parametrize("value", [np.int64(1), (1,), {1}, slice(1), np.float64(1), bytearray()])
def test_values_that_are_not_plain(value: Any) -> None:
    assert not plain_index(value)
    assert not plain_index([value])


@settings(deadline=None, max_examples=100)
@given(st.integers(-(1 << 66), 1 << 66))
@example(-(1 << 63))
@example(-(1 << 63) - 1)
@example((1 << 64) - 1)
@example(1 << 64)
def test_packs_says_what_msgpack_takes(value: int) -> None:
    try:
        msgpack.packb(value)
    except OverflowError:
        assert not packs(value)
    else:
        assert packs(value)


# ---- pickles stay closed ----------------------------------------------------------------------------

opened: list[int] = []


class Trap:
    """Unpickling one leaves a trace."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return _open, (1,)


def _open(trace: int) -> None:
    opened.append(trace)


def test_decoding_opens_no_pickle() -> None:
    opened.clear()
    frame = encode(Task(0, 0, 0, [Trap()], ((0, 65536),)), TOKEN)
    task = decode_for_worker(frame)
    assert isinstance(task, Task)
    assert type(task.index) is Pickled
    assert task.grants == ((0, 65536),)
    with pytest.raises(ProtocolError):
        decode_for_consumer(frame)
    assert opened == []


def test_a_pickle_of_another_pool_stays_closed() -> None:
    opened.clear()
    own = decode_for_worker(encode(Task(0, 0, 0, Trap(), ()), TOKEN))
    assert isinstance(own, Task)
    bare = pickle.dumps(Trap())
    for token in (bytes(TOKEN_BYTES), TOKEN[:-1], b""):
        with pytest.raises(ProtocolError):
            load_index(own.index, token)
    for data in (bare, b"", TOKEN[:-1] + bare, bytes(TOKEN_BYTES) + bare):
        with pytest.raises(ProtocolError):
            load_index(Pickled(data), TOKEN)
    assert opened == []
    load_index(own.index, TOKEN)
    assert opened == [1]


def test_load_index_opens_it() -> None:
    task = decode_for_worker(encode(Task(0, 0, 0, Pair(1, 2), ()), TOKEN))
    assert isinstance(task, Task)
    assert load_index(task.index, TOKEN) == Pair(1, 2)


class Pair(tuple):
    def __new__(cls, *parts: int) -> Pair:
        return super().__new__(cls, parts)

    def __reduce__(self) -> Any:
        return Pair, tuple(self)


def test_an_index_that_cannot_be_pickled_raises() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        encode(Task(0, 0, 0, lambda: None, ()), TOKEN)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        encode(Task(0, 0, 0, [1, lambda: None], ()), TOKEN)


def test_a_pickle_that_fails_to_open_raises_in_load_index_only() -> None:
    task = decode_for_worker(encode(Task(0, 0, 0, Refusing(), ()), TOKEN))
    assert isinstance(task, Task)
    with pytest.raises(ZeroDivisionError):
        load_index(task.index, TOKEN)


class Refusing:
    def __reduce__(self) -> tuple[Callable[[int, int], tuple[int, int]], tuple[int, int]]:
        return divmod, (1, 0)


# ---- what is no message -----------------------------------------------------------------------------


def packed(*fields: Any) -> bytes:
    frame: bytes = msgpack.packb(fields)
    return frame


def test_a_workers_frame_is_none_of_the_consumers_and_the_other_way_round() -> None:
    for frame in (encode(Hello(1)), encode(Answer(0, 0, 0, 2, 0, 0, (), (), (), None))):
        with pytest.raises(ProtocolError, match="kind"):
            decode_for_worker(frame)
    consumers = (Stop(), Epoch(0, False, None), Space(((0, 65536),)), Task(0, 0, 0, [1], ()))
    for frame in map(encode, consumers):
        with pytest.raises(ProtocolError, match="kind"):
            decode_for_consumer(frame)


ANSWER_FIELDS = (VERSION, messages._ANSWER, 0, 0, 0, 0, 0, 0, [], [], [])
MALFORMED = {
    "nothing": b"",
    "no array": msgpack.packb(7),
    "an empty array": packed(),
    "a version alone": packed(VERSION),
    "another version": packed(VERSION + 1, 3),
    "no version": packed(None, 3),
    "an unknown kind": packed(VERSION, 17),
    "a kind that is a list": packed(VERSION, [2]),
    "a kind that is a map": packed(VERSION, {}),
    "a task without index": packed(VERSION, 0, 1, 2, 3, 0),
    "a task without grants": packed(VERSION, 0, 1, 2, 3, 4, 0),
    "a task with too much": packed(VERSION, 0, 1, 2, 3, 4, [], [], [], 0),
    "grants that are a number": packed(VERSION, 0, 1, 2, 3, 4, 5, [], 0),
    "grants that are numbers": packed(VERSION, 0, 1, 2, 3, 4, [5], [], 0),
    "a grant of three numbers": packed(VERSION, 0, 1, 2, 3, 4, [[1, 2, 3]], [], 0),
    "a grant that is a map": packed(VERSION, 0, 1, 2, 3, 4, [{1: 2, 3: 4}], [], 0),
    "grants that are a map": packed(VERSION, 0, 1, 2, 3, 4, {}, [], 0),
    "grants that are bytes": packed(VERSION, 0, 1, 2, 3, 4, [b"ab"], [], 0),
    "a grant before the arena": packed(VERSION, 0, 1, 2, 3, 4, [[-1, 2]], [], 0),
    "a grant of more than 63 bits": packed(VERSION, 0, 1, 2, 3, 4, [[1 << 63, 2]], [], 0),
    "a task whose number is true": packed(VERSION, 0, 1, True, 3, 4, [], [], 0),
    "a task whose number is half": packed(VERSION, 0, 1, 0.5, 3, 4, [], [], 0),
    "a task whose number is text": packed(VERSION, 0, 1, "2", 3, 4, [], [], 0),
    "a task before the first": packed(VERSION, 0, 1, -1, 3, 4, [], [], 0),
    "an epoch that is neither abandoned nor not": packed(VERSION, 1, 1, 0, None, None),
    "a seed that is text": packed(VERSION, 1, 1, False, "1", None),
    "a seed that is negative": packed(VERSION, 1, 1, False, None, -1),
    "a ping with too much": packed(VERSION, messages._PING, 1),
    "a task without a ticket": packed(VERSION, 0, 1, 2, 3, 4, [], []),
    "a task whose ticket is none": packed(VERSION, 0, 1, 2, 3, 4, [], [], None),
    "promises that are numbers": packed(VERSION, 0, 1, 2, 3, 4, [], [5], 0),
    "an epoch without seed": packed(VERSION, 1, 1, False),
    "an epoch with too much": packed(VERSION, 1, 1, False, None, None, None, None),
    "space without ranges": packed(VERSION, 2),
    "space with too much": packed(VERSION, 2, [], []),
    "ranges that are a number": packed(VERSION, 2, 5),
    "ranges that are numbers": packed(VERSION, 2, [5]),
    "a bundle of nothing": packed(VERSION, messages._BUNDLE),
    "a bundle that is a number": packed(VERSION, messages._BUNDLE, 5),
    "a bundle of numbers": packed(VERSION, messages._BUNDLE, [5]),
    "a bundle of text": packed(VERSION, messages._BUNDLE, ["a"]),
    "a stop with a field": packed(VERSION, messages._STOP, 1),
    "a hello without pid": packed(VERSION, messages._HELLO),
    "an answer cut short": packed(*ANSWER_FIELDS),
    "an unknown outcome": packed(VERSION, messages._ANSWER, 0, 0, 0, 99, 0, 0, [], [], [], None),
    "an outcome that is a list": packed(VERSION, messages._ANSWER, 0, 0, 0, [0], 0, 0, [], [], [], None),
    "an outcome that is true": packed(VERSION, messages._ANSWER, 0, 0, 0, True, 0, 0, [], [], [], None),
    "a time that is none": packed(VERSION, messages._ANSWER, 0, 0, 0, 2, None, 0, [], [], [], None),
    "a negative attempt": packed(VERSION, messages._ANSWER, 0, 0, -1, 2, 0, 0, [], [], [], None),
    "used blocks of one number": packed(VERSION, messages._ANSWER, 0, 0, 0, 2, 0, 0, [[1]], [], [], None),
    "used blocks that are none": packed(VERSION, messages._ANSWER, 0, 0, 0, 2, 0, 0, None, [], [], None),
    "new blocks that are true": packed(
        VERSION, messages._ANSWER, 0, 0, 0, 2, 0, 0, [], [[True, 1]], [], None
    ),
    "a returned block that is text": packed(VERSION, messages._ANSWER, 0, 0, 0, 2, 0, 0, [], [], ["a"], None),
    "returned blocks that are text": packed(VERSION, messages._ANSWER, 0, 0, 0, 2, 0, 0, [], [], "", None),
    "a pid that is text": packed(VERSION, messages._HELLO, "1"),
    "a handle with a negative spec": packed(*ANSWER_FIELDS, [-1, None, [], None, []]),
    "a handle whose values are text": packed(*ANSWER_FIELDS, [1, None, "", None, []]),
    "a handle whose parcel is text": packed(*ANSWER_FIELDS, [1, None, [], "", []]),
    "a handle with places of two numbers": packed(*ANSWER_FIELDS, [1, None, [], None, [[1, 2]]]),
    "a handle with no places": packed(*ANSWER_FIELDS, [1, None, [], None, None]),
    "a handle that is text": packed(*ANSWER_FIELDS, "abcde"),
    "a handle that is a number": packed(*ANSWER_FIELDS, 3),
    "a handle cut short": packed(*ANSWER_FIELDS, [1, None, []]),
    "bytes behind the message": encode(Stop()) + b"\x00",
    "a message cut short": encode(Task(0, 0, 0, list(range(20)), ()))[:-3],
    "an unknown extension": msgpack.packb((VERSION, msgpack.ExtType(9, b""))),
    "a broken timestamp": b"\x93\x02\x03\xd4\xff\x00",
    "an array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "bytes of 4 billion": b"\x92\x03\xc6\xff\xff\xff\xff",
    "arrays in arrays": b"\x91" * 5000,
    "maps in maps": b"\x81\x01" * 5000,
    "a list as a map's key": b"\x92\x03\x81\x91\x01\x02",
    "a map as a map's key": b"\x92\x03\x81\x81\x01\x02\x03",
    "a byte that msgpack never uses": b"\xc1",
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_frames_are_named_as_such(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_for_worker(frame)
    with pytest.raises(ProtocolError):
        decode_for_consumer(frame)


def decodes_or_refuses(frame: bytes) -> None:
    decoders: tuple[tuple[Callable[[bytes], Any], tuple[type, ...]], ...] = (
        (decode_for_worker, (Task, Epoch, Space, Bundle, Stop, Ping)),
        (decode_for_consumer, (Hello, Answer, Ping)),
    )
    for decode, kinds in decoders:
        try:
            message = decode(frame)
        except ProtocolError:
            continue
        assert isinstance(message, kinds)


@settings(deadline=None, max_examples=250)
@given(st.binary(max_size=40))
def test_random_bytes_raise_nothing_else(junk: bytes) -> None:
    decodes_or_refuses(junk)
    decodes_or_refuses(bytes([0x92, VERSION]) + junk)


MSGPACK_VALUES = st.recursive(
    PLAIN | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=2),
    max_leaves=5,
)


@settings(deadline=None, max_examples=250)
@given(st.integers(0, 7), st.lists(MSGPACK_VALUES, max_size=12))
def test_well_formed_msgpack_of_another_shape_raises_nothing_else(kind: int, fields: list[Any]) -> None:
    decodes_or_refuses(msgpack.packb((VERSION, kind, *fields), unicode_errors="surrogatepass"))


@settings(deadline=None, max_examples=250)
@given(
    TASKS | EPOCHS | SPACES | ANSWERS | HELLOS | PINGS,
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4),
    st.sampled_from(("replace", "insert", "delete")),
)
def test_frames_with_wrong_bytes_raise_nothing_else(
    message: messages.Message, edits: list[tuple[int, int]], how: str
) -> None:
    frame = bytearray(encode(message))
    for at, byte in edits:
        at %= len(frame) or 1
        if how == "insert":
            frame.insert(at, byte)
        elif frame:
            frame[at : at + 1] = b"" if how == "delete" else bytes([byte])
    decodes_or_refuses(bytes(frame))
