"""What a proxy makes of the answers of its far worker, without its process; both sides are played."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from typing import Any

import pytest

from fastq_loader.errors import ProtocolError
from fastq_loader.extras.remote.connection import MESSAGE, Connection
from fastq_loader.extras.remote.proxy import Proxy
from fastq_loader.ipc.messages import BATCH, Answer, BatchHandle, BeginEpoch, Stop, Task, encode
from fastq_loader.memory.allocator import Allocator
from fastq_loader.memory.arena import AVAILABLE, Arena
from tests.support.simulation import Table
from tests.support.worker_setup import make_setup

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")


class PlayedSocket:
    """The consumer's messages wait in `messages`; what it is sent is in `sent`."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.sent: list[Any] = []

    def receive(self, block: bool) -> Any:
        return self.messages.pop(0) if self.messages else None

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Scene:
    """A proxy that has forwarded task 0 of some. `far`: the far worker's end."""

    def __init__(self) -> None:
        self.arena, self.socket, self.claims = Arena(2), PlayedSocket(), Table(1000)
        self.pipes, self.ends = Pipe(), socket.socketpair()
        setup = make_setup(self.arena, None, worker=1, workers=2, shared_tasks=True)
        blocks: Any = Allocator(self.arena.mapping, 1)
        self.proxy = Proxy(setup, self.pipes[1], [0, 0], self.socket, self.claims, blocks)  # type: ignore[arg-type]
        self.proxy._far = Connection(self.ends[0], MESSAGE)
        self.far = Connection(self.ends[1], MESSAGE)

    def tell(self, *tasks: Task) -> None:
        for task in tasks:
            self.claims.offer(task.ticket)
        self.socket.messages = [BeginEpoch(1, None, 5), *tasks]
        self.proxy._read_messages()
        self.proxy._forward()

    def receive(self) -> None:
        assert self.proxy._far is not None
        self.proxy._receive(self.proxy._far)

    def close(self) -> None:
        for end in (*self.ends, *self.pipes):
            end.close()
        self.arena.retire([])


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def task(seq: int, *grants: tuple[int, int]) -> Task:
    return Task(1, seq, 0, 0, grants, 100 + seq)


def answer(seq: int, *segments: tuple[int, int, int], **fields: Any) -> Answer:
    handle = BatchHandle(0, "layout", (), None, segments)
    return Answer(1, seq, 0, BATCH, 1_000, 5_000, (), (), handle)._replace(**fields)


@pytest.mark.parametrize(
    ("wrong", "body", "reason"),
    [
        (encode(answer(7)), 0, "did not send an answer to its task"),
        (encode(answer(0)._replace(attempt=1)), 0, "did not send an answer to its task"),
        (encode(answer(0, (0, 10, 0))), 9, "a body of 9 bytes"),
        (encode(answer(0)), 1, "a body of 1 bytes"),
        (encode(Stop()), 0, "unknown message"),
        (b"garbage", 0, "not a"),
    ],
)
def test_a_message_that_is_no_answer_is_refused(wrong: bytes, body: int, reason: str, scene: Scene) -> None:
    scene.tell(task(0))
    scene.far.send(MESSAGE, wrong, [bytes(body)])
    with pytest.raises(ProtocolError, match=reason):
        scene.receive()
    assert scene.socket.sent == []
