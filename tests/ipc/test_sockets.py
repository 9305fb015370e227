"""Both ends of the sockets in one process, what keeps others out, and connections that break."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
import zmq

from fastq_loader.ipc import sockets
from fastq_loader.ipc.messages import TOKEN_BYTES, Answer, BeginEpoch, Bundle, Hello, InBlock, Stop, encode
from fastq_loader.ipc.sockets import ConsumerSocket, Line, WorkerSocket
from fastq_loader.system.calls import readable
from tests.conftest import open_descriptors, wait_until
from tests.support.forking import end_of, fork

pytestmark = pytest.mark.processes

TOKEN = bytes(range(TOKEN_BYTES))
ANSWER = Answer(1, 2, 0, 0, 5, 6, ((0, 81920),), (), None)
EPOCHS = [BeginEpoch(number, None) for number in range(9)]


#: What stands for shared memory.
MEMORY = bytearray(1 << 20)


def in_memory(answer: Answer, nbytes: int) -> InBlock:
    frame = encode(answer)
    assert len(frame) == nbytes
    MEMORY[:nbytes] = frame
    return InBlock(0, nbytes)


def read(offset: int, nbytes: int) -> bytes:
    return bytes(MEMORY[offset : offset + nbytes])


#: The connections of a test, by worker.
LINES: dict[int, Line] = {}


def open_ends(consumer: ConsumerSocket, worker: int = 0) -> dict[str, int]:
    """The ends of a worker that the consumer has connected to."""
    line = LINES[worker] = Line(worker)
    ends = {name: os.dup(end) for name, end in line.ends.items()}
    line.close_ends("answers")
    consumer.connect(line)
    return ends


def start(consumer: ConsumerSocket, worker: int = 0) -> WorkerSocket:
    return WorkerSocket(open_ends(consumer, worker), os.getpid(), in_memory, 2)


@pytest.fixture
def consumer() -> Iterator[ConsumerSocket]:
    before = open_descriptors().keys()
    with closing(ConsumerSocket(TOKEN, read)) as consumer:
        yield consumer
    assert open_descriptors().keys() <= before


@pytest.fixture
def worker(consumer: ConsumerSocket) -> Iterator[WorkerSocket]:
    with closing(start(consumer)) as worker:
        yield worker


@pytest.fixture
def other(consumer: ConsumerSocket) -> Iterator[WorkerSocket]:
    with closing(start(consumer, 1)) as worker:
        yield worker


@contextmanager
def raw_socket() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 1000)
        yield raw


def received(consumer: ConsumerSocket) -> tuple[int, Any]:
    while (message := consumer.receive()) is None:
        assert consumer.wait(60)[1], "no message has come"
    return message


def broken(consumer: ConsumerSocket, timeout: float) -> list[int]:
    found: list[int] = []

    def look() -> bool:
        consumer.wait(0)
        assert consumer.receive() is None
        found.extend(consumer.broken())
        return bool(found)

    wait_until(look, timeout)
    return found


def test_messages_reach_the_worker_that_they_are_for(
    consumer: ConsumerSocket, worker: WorkerSocket, other: WorkerSocket
) -> None:
    consumer.send(LINES[0], EPOCHS[0])
    consumer.send_all(LINES.values(), encode(EPOCHS[1]), encode(EPOCHS[2]))
    consumer.send(LINES[0], EPOCHS[3])
    consumer.send(LINES[1], EPOCHS[4])
    consumer.send_all(LINES.values(), encode(Stop()))
    assert [worker.receive(block=True) for _ in range(5)] == [*EPOCHS[:4], Stop()]
    assert [other.receive(block=True) for _ in range(4)] == [EPOCHS[1], EPOCHS[2], EPOCHS[4], Stop()]
    assert worker.receive(block=False) is None
    worker.send(Hello(7))
    assert received(consumer) == (0, Hello(7))
    other.send(ANSWER)
    assert received(consumer) == (1, ANSWER)
    assert consumer.receive() is None


def test_nothing_reaches_the_process_that_replaces_a_worker_but_what_is_its_own(
    consumer: ConsumerSocket,
) -> None:
    dead = start(consumer)
    dead.send(ANSWER)
    consumer.send(LINES[0], EPOCHS[0])
    assert consumer.wait_for_message(60)
    consumer.disconnect(LINES[0])
    dead.close()
    ends = open_ends(consumer)
    consumer.send(LINES[0], EPOCHS[1])  # it is not up yet
    with closing(WorkerSocket(ends, os.getpid(), in_memory, 2)) as successor:
        assert successor.receive(block=True) == EPOCHS[1]
        successor.send(Hello(1))
        assert received(consumer) == (0, Hello(1)), "what the dead one sent is nobody's"
        assert broken(consumer, 0.05) == [], "the dead one's connection is nobody's"


def test_one_wait_serves_messages_descriptors_and_a_wake_up(
    consumer: ConsumerSocket, worker: WorkerSocket
) -> None:
    assert consumer.wait(0) == ([], False)
    read_end, write_end = os.pipe()
    consumer.watch(read_end)
    os.write(write_end, b"!")
    assert consumer.wait(None) == ([read_end], True)
    consumer.unwatch(read_end)
    consumer.unwatch(read_end)
    os.close(read_end)
    os.close(write_end)
    worker.send(Hello(1))
    assert consumer.wait(60) == ([], True)
    consumer.receive()
    thread = threading.Thread(target=consumer.wake)
    thread.start()
    assert consumer.wait(None)[1]
    thread.join()
    assert consumer.woken
    assert consumer.wait(None)[1], "from now on"
    consumer.close()
    consumer.wake()  # its descriptor may be another's


def test_a_forked_child_of_a_worker_cannot_use_its_socket(
    consumer: ConsumerSocket, worker: WorkerSocket
) -> None:
    def use() -> None:
        worker.close()
        with pytest.raises(SystemExit):
            worker.send(Hello(1))

    assert end_of(fork(use)) == 0
    worker.send(Hello(2))
    assert received(consumer) == (0, Hello(2))


#: Not messages of a worker's, nor of a consumer's.
GARBAGE = [
    b"junk",
    encode(Bundle(()))[:-1],
    encode(ANSWER)[1:],
    encode(InBlock(1, -2)),
    encode(InBlock(0, 9)),
]


@pytest.mark.parametrize("garbage", [*GARBAGE, b""])
def test_garbage_from_a_worker_is_named_and_the_last_that_is_read(
    garbage: bytes, consumer: ConsumerSocket
) -> None:
    consumer._read = None
    ends = open_ends(consumer)
    os.close(ends["tasks"])
    with socket.socket(fileno=ends["answers"]) as worker:
        for frame in [encode(ANSWER), garbage, encode(ANSWER)]:
            worker.send(frame)
        assert received(consumer) == (0, ANSWER)
        if garbage:
            assert received(consumer) == (0, None)
        assert broken(consumer, 0.05) == ([] if garbage else [0]), "an empty one is the end"


@pytest.mark.parametrize("room", [2304, sockets._ROOM])
def test_answers_of_any_length_come_in_order(
    room: int, consumer: ConsumerSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many: one for which there is no room leaves as soon as there is."""
    monkeypatch.setattr(sockets, "_ROOM", room)
    with closing(start(consumer)) as worker:
        answers = [ANSWER._replace(seq=seq, state=bytes([seq % 256]) * (seq % 90)) for seq in range(3000)]
        thread = threading.Thread(target=lambda: [worker.send(answer) for answer in answers])
        thread.start()
        assert [received(consumer) for _ in answers] == [(0, answer) for answer in answers]
        thread.join()
        for nbytes in (400, 30_000, 40_000, 900_000):
            worker.send(ANSWER._replace(state=bytes(nbytes)))
            assert received(consumer) == (0, ANSWER._replace(state=bytes(nbytes)))


def test_a_worker_that_waits_for_room_goes_on_when_the_consumer_is_gone(
    consumer: ConsumerSocket, worker: WorkerSocket
) -> None:
    """Nobody reads, and there is no room for so many answers. Others may hold the consumer's end."""
    sent: list[None] = []
    thread = threading.Thread(target=lambda: [sent.append(worker.send(ANSWER)) for _ in range(9999)])
    held = os.dup(LINES[0].descriptor)
    thread.start()
    assert wait_until(lambda: len(sent) > 100, 60)
    assert len(sent) < 9999
    consumer.close()
    thread.join(60)
    os.close(held)
    assert len(sent) == 9999


@pytest.mark.parametrize("begins", [True, False])
def test_a_worker_whose_line_is_closed_before_it_is_up_ends(begins: bool, consumer: ConsumerSocket) -> None:
    line = Line(0)
    ends = {name: os.dup(end) for name, end in line.ends.items()}
    if begins:
        consumer.connect(line)
    line.close()
    line.close()
    if begins:
        with closing(WorkerSocket(ends, os.getpid(), in_memory, 2)) as worker:
            worker.send(ANSWER)  # into the void
        return
    with pytest.raises(SystemExit):
        WorkerSocket(ends, os.getpid(), in_memory, 2)
    os.close(ends["tasks"])


def test_a_forked_child_of_the_consumer_leaves_its_lines_alone_and_keeps_what_a_worker_needs(
    consumer: ConsumerSocket, worker: WorkerSocket
) -> None:
    started, starting = LINES[0], Line(1)
    names = {os.readlink(f"/proc/self/fd/{end}") for end in starting.ends.values()}
    others = {os.readlink(f"/proc/self/fd/{line.descriptor}") for line in (started, starting)}

    def look() -> None:
        here = set(open_descriptors().values())
        assert names <= here
        assert not others & here
        started.close()
        starting.close()

    assert end_of(fork(look)) == 0
    worker.send(Hello(3))
    assert received(consumer) == (0, Hello(3)), "the child has shut nothing down"
    starting.close()


def test_a_worker_drops_garbage(consumer: ConsumerSocket, worker: WorkerSocket) -> None:
    for frame in [*GARBAGE, encode(EPOCHS[1])]:
        consumer.send_all([LINES[0]], frame)
    assert worker.receive(block=True) == EPOCHS[1]


def test_where_each_peer_is_taken_for_the_process_that_asks_the_consumer_can_connect(
    consumer: ConsumerSocket,
) -> None:
    """As gVisor answers SO_PEERCRED."""
    with closing(WorkerSocket(open_ends(consumer), 1, in_memory, 2)) as worker:
        consumer.send(LINES[0], EPOCHS[1])
        assert worker.receive(block=True) == EPOCHS[1]


def test_a_worker_accepts_no_process_but_its_consumer(consumer: ConsumerSocket) -> None:
    """Not even one that is earlier, or has the name."""
    line = Line(0)
    ends = {name: os.dup(end) for name, end in line.ends.items()}

    def intrude() -> None:
        with socket.socket(socket.AF_UNIX) as plain, suppress(ConnectionError):
            plain.connect(b"\0" + line.name)
            plain.sendall(b"GET / HTTP/1.1")
            assert plain.recv(1) == b""
        with raw_socket() as peer:
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(line.endpoint)
            peer.send(encode(EPOCHS[0]))
            assert not peer.poll(200)

    intruders = [fork(intrude)]
    consumer.connect(line)
    intruders.append(fork(intrude))
    with closing(WorkerSocket(ends, os.getpid(), in_memory, 2)) as worker:
        assert [end_of(intruder) for intruder in intruders] == [0, 0]
        assert worker.receive(block=False) is None
        consumer.send(line, EPOCHS[1])
        assert worker.receive(block=True) == EPOCHS[1]


def test_a_stranger_gets_no_connection_at_the_address_of_a_dead_worker(consumer: ConsumerSocket) -> None:
    start(consumer).close()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(b"\0" + LINES[0].name)
        stranger.listen()
        consumer.send(LINES[0], EPOCHS[0])
        assert not readable([stranger.fileno()], 0.4), "zmq connects again after 0.1 s, unless told not to"


def test_a_broken_connection_is_named_once(
    consumer: ConsumerSocket, worker: WorkerSocket, other: WorkerSocket
) -> None:
    for end in (consumer, worker):
        assert end._socket.getsockopt(zmq.HANDSHAKE_IVL) == 0, "it may be stopped for longer while it starts"
    assert broken(consumer, 0) == []
    other.close()
    assert broken(consumer, 60) == [1]
    assert broken(consumer, 0.1) == []
    worker.send(ANSWER)
    assert received(consumer) == (0, ANSWER)
