"""The loop of a proxy, without its process: the far worker and the consumer are played by the tests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection as PipeEnd
from multiprocessing.connection import Pipe
from typing import Any

import pytest

from fastq_loader.errors import ProtocolError
from fastq_loader.extras.remote import proxy as module
from fastq_loader.extras.remote.connection import MESSAGE, Address, Connection, header
from fastq_loader.extras.remote.proxy import Place, Proxy, Status
from fastq_loader.ipc.decoding import decode_for_worker
from fastq_loader.ipc.messages import (
    BATCH,
    ENDED,
    Answer,
    BatchHandle,
    Epoch,
    Ping,
    Task,
    encode,
)
from fastq_loader.memory.allocator import Allocator
from fastq_loader.memory.arena import AVAILABLE, Arena
from fastq_loader.memory.blocks import SMALLEST
from fastq_loader.system import calls
from tests.support.simulation import Table
from tests.support.worker_setup import make_setup

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")

EPOCH = Epoch(1, None, 5)
PLACE = Place(Address("127.0.0.1", 1), 4, "node")
WAITS = Status(waits=True)


class PlayedSocket:
    """The consumer's messages wait in `messages`; what it is sent is in `sent`."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.sent: list[Any] = []
        self.greetings = 0

    def receive(self, block: bool) -> Any:
        return self.messages.pop(0) if self.messages else None

    def send(self, message: Any) -> None:
        assert self.greetings, "no way back yet"
        self.sent.append(message)

    def say_hello(self) -> None:
        self.greetings += 1

    def wait(self, descriptors: list[int], block: bool) -> list[int]:
        return calls.readable(descriptors, 5 if block and not self.messages else 0)


class Scene:
    """A proxy, and the ends that others have: `far` is the far worker's, `pipe` the consumer's."""

    def __init__(self, shared: bool = True) -> None:
        self.arena = Arena(2)
        self.socket = PlayedSocket()
        self.claims = Table(1000)
        self.blocks = Allocator(self.arena.mapping, 1)
        self.pipe: PipeEnd[Any, Any]
        self.pipe, its = Pipe()
        self.its = its
        self.traffic = [0, 0]
        setup = make_setup(self.arena, None, worker=1, workers=2, shared_tasks=shared)
        self.proxy = Proxy(setup, its, self.traffic, self.socket, self.claims, self.blocks)  # type: ignore[arg-type]
        self.ends: list[socket.socket] = []
        self.connect()

    def connect(self) -> None:
        mine, other = socket.socketpair()
        self.ends += (mine, other)
        self.proxy._far = Connection(mine, MESSAGE)
        self.proxy._greeted, self.socket.greetings = True, 1
        self.far = Connection(other, MESSAGE)

    def tell(self, *messages: Any) -> None:
        """The consumer says something, and the proxy does what it can without waiting."""
        for message in messages:
            if isinstance(message, Task):
                self.claims.offer(message.ticket)
            self.socket.messages.append(message)
        self.proxy._read_messages()
        self.proxy._forward()

    def heard(self) -> list[Any]:
        """What the far worker has been told since it was asked last."""
        found = []
        while calls.readable([self.far.fileno()], 0):
            found.append(decode_for_worker(self.far.receive().payload))
        return found

    def answer(self, answer: Answer, *body: bytes) -> Any:
        """The far worker answers; what the consumer hears of it."""
        self.far.send(MESSAGE, encode(answer), body)
        self.proxy._receive(self.proxy._far)  # type: ignore[arg-type]
        return self.socket.sent.pop()

    def said(self) -> list[Any]:
        """What the backend has been told."""
        found = []
        while self.pipe.poll():
            found.append(self.pipe.recv())
        return found

    def close(self) -> None:
        for end in (*self.ends, self.pipe, self.its):
            end.close()
        self.arena.retire([])


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


@pytest.fixture
def assigned() -> Iterator[Scene]:
    scene = Scene(shared=False)
    yield scene
    scene.close()


def task(seq: int, *grants: tuple[int, int], index: Any = 0) -> Task:
    return Task(1, seq, 0, index, grants, 100 + seq)


def forwarded(task: Task) -> Task:
    """As the far worker hears of it: it has blocks of its own, and claims nothing."""
    return task._replace(grants=(), ticket=0)


def answer(seq: int, *segments: tuple[int, int, int], **fields: Any) -> Answer:
    handle = BatchHandle(0, "spec", (), None, segments)
    return Answer(1, seq, 0, BATCH, 1_000, 5_000, (), (), handle)._replace(**fields)


def test_one_task_is_claimed_and_the_next_when_the_head_of_an_answer_has_come(scene: Scene) -> None:
    scene.tell(EPOCH, task(0), task(1), task(2))
    assert scene.heard() == [EPOCH, forwarded(task(0))]
    assert [scene.claims.holder(100 + seq) for seq in range(3)] == [1, None, None]
    assert scene.claims.begun(1) == 100
    size = 3 * SMALLEST
    whole = header(MESSAGE, len(encode(answer(0, (0, size, 0)))), size)
    scene.far._socket.sendall(whole + encode(answer(0, (0, size, 0))))  # the head alone
    receiving = threading.Thread(target=scene.proxy._receive, args=(scene.proxy._far,))
    receiving.start()
    frame = scene.far.receive()
    assert frame is not None
    assert decode_for_worker(frame.payload) == forwarded(task(1))
    assert scene.claims.begun(1) == 101, "what it would die of is what it loads"
    assert scene.socket.sent == [], "no answer before its last byte"
    scene.far._socket.sendall(bytes(size))
    receiving.join()
    assert scene.socket.sent[0][:3] == (1, 0, 0)
    assert scene.claims.holder(102) is None, "two at a time"


def test_bytes_lie_where_the_answer_says_in_granted_blocks_and_new_ones(scene: Scene) -> None:
    far_off = 100 * SMALLEST
    scene.tell(EPOCH, task(0, (far_off, SMALLEST), (2 * far_off, SMALLEST)))
    sent = scene.answer(answer(0, (0, 500, 500), (0, 2 * SMALLEST, 0)), b"p" * 500, b"i" * 2 * SMALLEST)
    (first, _, packet), (second, size, into) = sent.handle.segments
    assert (first, packet, size, into) == (far_off, 500, 2 * SMALLEST, 0)
    assert bytes(scene.arena.mapping.read(first, 500)) == b"p" * 500
    assert bytes(scene.arena.mapping.read(second, 2 * SMALLEST)) == b"i" * 2 * SMALLEST
    assert sent.fresh == ((second, 2 * SMALLEST),)
    assert sent.returned == (2 * far_off,)
    assert sent.handle.spec == "spec"
    start, end = scene.arena.mapping.region(1)
    assert start <= second < end, "its own part of the arena"
    assert scene.claims.begun(1) is None


def test_an_answer_without_a_batch_gives_its_blocks_back_and_its_times_are_of_this_clock(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: 90_000)
    scene.tell(EPOCH, task(0, (SMALLEST, SMALLEST)))
    sent = scene.answer(answer(0, kind=ENDED, fetched=2_000, collated=4_000, handle=None))
    assert (sent.kind, sent.handle, sent.returned) == (ENDED, None, (SMALLEST,))
    assert (sent.started, sent.fetched, sent.collated, sent.finished) == (86_000, 87_000, 89_000, 90_000)
    scene.tell(task(1))
    assert scene.answer(answer(1, handle=None)).fetched == 0


@pytest.mark.parametrize(
    ("wrong", "body", "reason"),
    [
        (encode(answer(7)), 0, "did not send an answer to its task"),
        (encode(answer(0)._replace(attempt=1)), 0, "did not send an answer to its task"),
        (encode(Ping()), 0, "did not send an answer to its task"),
        (encode(answer(0, (0, 10, 0))), 9, "a body of 9 bytes"),
        (encode(answer(0)), 1, "a body of 1 bytes"),
        (b"garbage", 0, "not a"),
    ],
)
def test_a_message_that_is_no_answer_is_refused(wrong: bytes, body: int, reason: str, scene: Scene) -> None:
    scene.tell(EPOCH, task(0))
    scene.far.send(MESSAGE, wrong, [bytes(body)])
    with pytest.raises(ProtocolError, match=reason):
        scene.proxy._receive(scene.proxy._far)  # type: ignore[arg-type]
    assert scene.socket.sent == []


# ---- without a far worker ---------------------------------------------------------------------------


def test_where_another_worker_would_draw_other_numbers_it_dies_without_a_claim(assigned: Scene) -> None:
    assigned.tell(EPOCH)
    with pytest.raises(SystemExit):
        assigned.proxy._lose("the cable was pulled")


def test_places_where_nobody_listens_are_given_back_and_the_third_is_the_last(assigned: Scene) -> None:
    assigned.proxy._far = None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(*listener.getsockname())
    for _ in range(2):
        assigned.pipe.send(PLACE._replace(address=address))
        assigned.proxy._take_place()
        assert assigned.said() == [WAITS]
    assigned.pipe.send(PLACE._replace(address=address))
    with pytest.raises(SystemExit):
        assigned.proxy._take_place()
    assert "cannot be reached" in assigned.said()[0].why
