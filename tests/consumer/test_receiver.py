"""Bad input: frames that are none, answers and handles that lie. They are refused and counted; nothing is
read outside the arena, allocated without bound, or unpickled, and nobody but the owner can speak at all.

What a frame must look like is in `test_messages`; lies one by one are in `test_unpacking`.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import VERSION, Answer, Epoch, Hello, Stop, Task, decode_for_consumer, encode
from fastq_loader.ipc.sockets import ConsumerSocket, WorkerSocket, endpoint, endpoint_folder, remove_folder
from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.memory.ledger import SMALLEST
from fastq_loader.packing import pickling
from fastq_loader.packing.spec import DEEPEST
from fastq_loader.packing.unpack import Unpacker
from tests.support.datasets import Opaque, assert_same
from tests.support.pair import LARGE, TOKEN, Pair, paired, put_on_device

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")

#: What a program that means harm would put where something else should be.
HOSTILE = (
    *(-1, 0, 1, 2, 7, 8, SMALLEST - 1, SMALLEST, SMALLEST + 1, 2 * SMALLEST, 1 << 31, 1 << 40, 1 << 62),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), True, False, 0.5, float("nan"), None),
    *("", "V", "O", "L", "v", "d", "x", "uint8", "quint8", "onnx", "|O", "|S0", "<f8", "(9,9)f8", "i4,O"),
    *(b"", b"\x80\x05.", (), (0,), (1 << 62,) * 3, ((), ()), ("O",), ("L", 1 << 40), ("v", 1 << 60), {}),
)


#: The second field of an answer's frame.
ANSWER_KIND = msgpack.unpackb(encode(Answer(0, 0, 0, 2, 0, 0, (), (), (), None)))[1]


def paths(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """The way to every part of nested tuples, the whole included."""
    yield path
    if isinstance(value, tuple):
        for at, part in enumerate(value):
            yield from paths(part, (*path, at))


def replaced(value: Any, path: tuple[int, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    at, *rest = path
    if not isinstance(value, tuple) or at >= len(value):  # an earlier change took it away
        return value
    return (*value[:at], replaced(value[at], tuple(rest), change), *value[at + 1 :])


CHANGES: tuple[Callable[[Any], Any], ...] = (
    *[lambda part, hostile=hostile: hostile for hostile in HOSTILE],
    lambda part: part + 1 if isinstance(part, int) else (part, part),
    lambda part: part - 1 if isinstance(part, int) else part,
    lambda part: part * 8 if isinstance(part, int) else part,
    lambda part: part[:-1] if isinstance(part, (tuple, bytes, str)) else part,
    lambda part: (*part, *part[-1:]) if isinstance(part, tuple) else part,
    lambda part: part[::-1] if isinstance(part, tuple) else part,
)


@contextmanager
def watched_pickles() -> Iterator[list[bytes]]:
    """What is unpickled in here."""
    opened: list[bytes] = []

    def loads(data: bytes) -> Any:
        opened.append(data)
        return genuine(data)

    genuine = pickle.loads
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(pickling.pickle, "loads", loads)
        yield opened


# ---- handles ----------------------------------------------------------------------------------------


class Booby:
    """Whoever unpickles it fails the test."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("something was unpickled",)


def batches(objects: bool) -> list[Any]:
    shared = torch.arange(64)
    plain = [
        [torch.rand(3), 1, "a"],
        {"x": torch.arange(LARGE), "y": np.zeros(LARGE), "z": [1, 2, 3]},
        (shared[:40], shared[20:], torch.zeros(0, 5), np.zeros((0, 2)), np.asfortranarray(np.ones((3, 4)))),
        [torch.arange(2 * LARGE)[::2], torch.zeros(4, dtype=torch.bfloat16), np.array(["a", "bc"])],
        [torch.zeros(6000) for _ in range(3)],
    ]
    return (
        [*plain, [Opaque(1), torch.rand(3), torch.arange(LARGE)], (Opaque(2), Opaque(3))]
        if objects
        else plain
    )


def genuine(pair: Pair, objects: bool) -> list[Answer]:
    answers = [pair.pack(lambda batch=batch: batch) for batch in batches(objects)]
    for answer in answers:
        pair.account(answer)
    return answers


def put_together(pair: Pair, frame: bytes) -> Any:
    """The consumer's way with a frame, and what it may look at on it."""
    to_device = pair.allocator.for_device
    unpacker = Unpacker(pair.arena, 1, TOKEN, to_device)
    answer = decode_for_consumer(frame)
    assert isinstance(answer, Answer)
    if answer.handle is None:
        return None
    handle = unpacker.learn(0, answer.handle)
    if to_device:
        return put_on_device(unpacker, pair.arena, handle)
    _, _, pickled = unpacker.open(handle)
    return unpacker.unpack(handle, pickled)


#: Under numpy 1 it is one of numpy's own names.
byte_bounds = getattr(np.lib, "array_utils", np).byte_bounds


def addresses(value: Any) -> Iterator[tuple[int, int]]:
    """Where the tensors and arrays of a batch lie: first byte, end."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from addresses(part)
    elif isinstance(value, torch.Tensor) and value.numel():
        last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        yield value.data_ptr(), value.data_ptr() + (last + 1) * value.itemsize
    elif isinstance(value, np.ndarray) and value.size:
        yield byte_bounds(value)


def look_at(pair: Pair, value: Any) -> None:
    """Every leaf lies in the workers' parts of the arena, or in memory of its own."""
    base, length = pair.arena.mapping.base, pair.arena.mapping.length
    _, end = pair.arena.mapping.region(0)
    for first, last in addresses(value):
        if base <= first < base + length:
            assert last <= base + end, "a leaf reaches behind the blocks"


@settings(deadline=None, max_examples=300)
@given(st.data(), st.booleans(), st.integers(0, 4), st.integers(1, 3))
def test_handles_that_were_tampered_with(
    data: st.DataObject, to_device: bool, which: int, edits: int
) -> None:
    with paired(to_device) as pair:
        bomb = pickle.dumps(Booby())
        answer = genuine(pair, objects=False)[which]
        pair.arena.mapping.memory[: len(bomb)] = bomb
        fields: Any = (VERSION, ANSWER_KIND, *answer)
        ways = list(paths(fields[11], (11,)))
        for _ in range(edits):
            fields = replaced(fields, data.draw(st.sampled_from(ways)), data.draw(st.sampled_from(CHANGES)))
        frame = msgpack.packb(fields)
        with watched_pickles() as opened, suppress(ProtocolError):
            look_at(pair, put_together(pair, frame))
        assert opened == []


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(5, 6))
def test_handles_with_objects_that_were_tampered_with(data: st.DataObject, which: int) -> None:
    """A pickle of the pool may be opened, and may be found cut short; nothing else is."""
    with paired() as pair:
        answer = genuine(pair, objects=True)[which]
        fields: Any = (VERSION, ANSWER_KIND, *answer)
        way = data.draw(st.sampled_from(list(paths(fields[11], (11,)))))
        frame = msgpack.packb(replaced(fields, way, data.draw(st.sampled_from(CHANGES))))
        assert answer.handle is not None
        offset, _, total = answer.handle.segments[0]
        _, _, ours = bytes(pair.arena.mapping.memory[offset : offset + total]).partition(TOKEN)
        with watched_pickles() as opened, suppress(ProtocolError, EOFError, pickle.UnpicklingError):
            look_at(pair, put_together(pair, frame))
        # Cut short, or with a tail, which pickle does not look at.
        assert all(read.startswith(ours) or ours.startswith(read) for read in opened)


NUMBERS = st.integers(0, 1 << 20) | st.sampled_from([part for part in HOSTILE if isinstance(part, int)])
ANYTHING = st.recursive(
    NUMBERS | st.sampled_from(HOSTILE) | st.binary(max_size=64),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)
LEAVES = st.tuples(
    st.sampled_from("TAQ"),
    st.sampled_from(("float32", "uint8", "bool", "complex128", "float8_e5m2", "<f4", "|b1", "<U3", "<M8[ns]"))
    | ANYTHING,
    st.lists(NUMBERS, max_size=3).map(tuple) | ANYTHING,
    st.none() | st.lists(NUMBERS, max_size=3).map(tuple) | ANYTHING,
    st.integers(0, 2) | ANYTHING,
    st.integers(0, 64) | ANYTHING,
)
TREES = st.recursive(
    st.sampled_from(("V", "O", ("L", 0), ("L", 1), ("v", 2))) | ANYTHING,
    lambda inner: (
        st.tuples(st.sampled_from("lt"), st.lists(inner, max_size=3).map(tuple))
        | st.tuples(st.just("d"), st.just(("a", 1)), st.lists(inner, min_size=2, max_size=2).map(tuple))
    ),
    max_leaves=6,
)
RANDOM_HANDLES = st.tuples(
    NUMBERS,
    st.tuples(TREES, st.lists(LEAVES, max_size=3).map(tuple), st.lists(NUMBERS, max_size=3).map(tuple))
    | st.tuples(
        TREES,
        st.lists(LEAVES, max_size=3).map(tuple),
        st.lists(NUMBERS, max_size=3).map(tuple),
        st.lists(NUMBERS | st.just(-1), max_size=3).map(tuple),
    ),
    st.lists(NUMBERS, max_size=3).map(tuple),
    st.none() | st.binary(max_size=300),
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=3).map(tuple),
)


@settings(deadline=None, max_examples=400)
@given(RANDOM_HANDLES, st.booleans())
def test_random_handles(handle: Any, to_device: bool) -> None:
    with paired(to_device) as pair:
        bomb = pickle.dumps(Booby())
        pair.arena.mapping.memory[: len(bomb)] = bomb
        try:
            frame = msgpack.packb((VERSION, ANSWER_KIND, 0, 0, 0, 0, 0, 0, (), (), (), handle))
        except (OverflowError, ValueError):
            return
        with watched_pickles() as opened:
            tracemalloc.start()
            try:
                look_at(pair, put_together(pair, frame))
            except ProtocolError:
                pass
            finally:
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
        assert opened == []
        assert peak < (1 << 20) + 200 * len(frame)


def test_a_deep_tree_travels() -> None:
    tree: Any = torch.rand(3)
    for _ in range(DEEPEST + 200):
        tree = (tree,)
    with paired() as pair:
        assert_same(tree, pair.trip(tree))


# ---- sockets ----------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[str]:
    folder = endpoint_folder()
    yield folder
    remove_folder(folder)


@contextmanager
def raw_socket(kind: int) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def junk(seed: int, count: int, *messages: Any) -> list[bytes]:
    """Frames that are noise, and frames of these messages with some bytes changed. None is a message."""
    noise = random.Random(seed)
    frames = []
    while len(frames) < count:
        frame = bytearray(encode(noise.choice(messages), TOKEN))
        if noise.random() < 0.5:
            frame = bytearray(noise.randbytes(noise.randrange(80)))
        for _ in range(noise.randrange(1, 4)):
            if frame:
                frame[noise.randrange(len(frame))] = noise.randrange(256)
        frames.append(bytes(frame))
    return frames


ANSWER = Answer(1, 2, 0, 0, 5, 6, ((0, 70000),), ((0, 81920),), (), None)
TASK = Task(1, 2, 0, [Opaque(1)], ((0, 65536),))


@pytest.mark.processes
def test_what_a_worker_sends_that_is_no_message_is_counted(folder: str) -> None:
    frames = [frame for frame in junk(1, 300, ANSWER, Hello(3)) if not decodes(frame)]
    with raw_socket(zmq.DEALER) as worker:
        worker.bind(endpoint(folder, "w0.0"))
        consumer = ConsumerSocket(folder, 1, TOKEN)
        try:
            for frame in frames:
                worker.send(frame)
            worker.send_multipart([encode(ANSWER), encode(ANSWER)])
            worker.send(encode(ANSWER))
            received = []
            while not received or received[-1][1] is None:
                assert consumer.wait_for_message(5)
                message = consumer.receive()
                if message is not None:
                    received.append(message)
            assert received == [(0, None)] * (len(frames) + 1) + [(0, ANSWER)]
            assert consumer.take_rejected() == len(frames) + 1
            assert consumer.take_rejected() == 0
        finally:
            consumer.close()
    assert len(frames) > 200


def decodes(frame: bytes) -> bool:
    try:
        decode_for_consumer(frame)
    except ProtocolError:
        return False
    return True


@pytest.mark.processes
def test_a_worker_drops_what_is_no_message(folder: str) -> None:
    worker = WorkerSocket(folder, "w0.0")
    try:
        with raw_socket(zmq.DEALER) as intruder, watched_pickles() as opened:
            intruder.connect(endpoint(folder, "w0.0"))
            for frame in junk(2, 300, TASK, Epoch(1, False, 7), Stop()):
                intruder.send(frame)
            intruder.send(b"the last one")
            intruder.send(encode(Epoch(77, False, None)))
            seen: list[Any] = []
            while Epoch(77, False, None) not in seen:
                seen.append(worker.receive(block=True))
        assert opened == []
        assert all(isinstance(message, (Task, Epoch, Stop)) for message in seen)
    finally:
        worker.close()


@pytest.mark.processes
def test_another_user_cannot_connect(folder: str) -> None:
    path = Path(folder)
    assert path.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_uid == os.getuid()
    worker = WorkerSocket(folder, "w0.0")
    try:
        assert (path / "w0.0").is_socket()
        if os.getuid() != 0:
            pytest.skip("only root can become another user")
        assert connects_as(os.getuid(), str(path / "w0.0")) == 0
        assert connects_as(65534, str(path / "w0.0")) == 13  # EACCES
    finally:
        worker.close()


def connects_as(user: int, path: str) -> int:
    """The error number with which another user's connection ends; 0 if it does not."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            # The way there is open to everybody; what keeps others out is the folder itself.
            os.chdir(os.path.dirname(os.path.dirname(path)))
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            client = socket.socket(socket.AF_UNIX)
            code = client.connect_ex(os.path.join(os.path.basename(os.path.dirname(path)), "w0.0"))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_folder_is_private_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o777)
    mask = os.umask(0)
    try:
        folder = endpoint_folder()
    finally:
        os.umask(mask)
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    remove_folder(folder)


@pytest.mark.processes
def test_a_signal_while_sockets_are_closed_leaves_nothing() -> None:
    """Two hundred times under a hail of signals: whatever is left of one is found after the test."""
    handler = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    try:
        for _ in range(200):
            folder = endpoint_folder()
            ConsumerSocket(folder, 1, TOKEN).close()
            remove_folder(folder)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
