"""Both ends of the sockets in one process, what keeps others out, connections that break, and limits."""

from __future__ import annotations

import _thread
import errno
import os
import resource
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from fastq_loader.ipc import endpoints, sockets
from fastq_loader.ipc.endpoints import (
    endpoint,
    endpoint_folder,
    expect_descriptors,
    remove_folder,
    require_threads,
    socket_name,
)
from fastq_loader.ipc.messages import TOKEN_BYTES, Answer, Bundle, Epoch, Hello, InBlock, Stop, encode
from fastq_loader.ipc.sockets import ConsumerSocket, WorkerSocket
from tests.conftest import open_descriptors, wait_until
from tests.support.forking import end_of, fork

pytestmark = pytest.mark.processes

TOKEN = bytes(range(TOKEN_BYTES))
ANSWER = Answer(1, 2, 0, 0, 5, 6, ((0, 81920),), (), None)
EPOCHS = [Epoch(number, None) for number in range(9)]


@pytest.fixture
def folder() -> Iterator[str]:
    folder = endpoint_folder()
    yield folder
    remove_folder(folder)
    assert not os.path.exists(folder)


@pytest.fixture
def worker(folder: str) -> Iterator[WorkerSocket]:
    with closing(end_of_worker(folder, 0)) as end:
        yield end


def end_of_worker(folder: str, worker: int, generation: int = 0) -> WorkerSocket:
    return WorkerSocket(folder, socket_name(worker, generation), os.getpid(), in_memory, 2)


#: What stands for shared memory.
MEMORY = bytearray(1 << 20)


def in_memory(answer: Answer, nbytes: int) -> InBlock:
    frame = encode(answer)
    assert len(frame) == nbytes
    MEMORY[:nbytes] = frame
    return InBlock(0, nbytes)


def read(offset: int, nbytes: int) -> bytes:
    return bytes(MEMORY[offset : offset + nbytes])


@contextmanager
def connected(folder: str, workers: int = 1) -> Iterator[tuple[ConsumerSocket, list[WorkerSocket]]]:
    with ExitStack() as stack:
        ends = [stack.enter_context(closing(end_of_worker(folder, worker))) for worker in range(workers)]
        consumer = stack.enter_context(closing(ConsumerSocket(folder, workers, TOKEN, read)))
        for number, end in enumerate(ends):
            end.say_hello()
            assert received(consumer) == (number, Hello(os.getpid()))
        yield consumer, ends


@contextmanager
def raw_socket() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.LINGER, 1000)
        yield raw


def received(consumer: ConsumerSocket) -> tuple[int, Any]:
    while (message := consumer.receive()) is None:
        assert consumer.wait(5)[1], "no message has come"
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


def test_messages_reach_the_worker_that_they_are_for(folder: str) -> None:
    with connected(folder, 2) as (consumer, (one, other)):
        consumer.send(0, EPOCHS[0])
        consumer.send_all(encode(EPOCHS[1]), encode(EPOCHS[2]))
        consumer.send_all(encode(EPOCHS[3]), but={1})
        consumer.send_frames(1, [encode(EPOCHS[4])])
        consumer.send_frames(1, [])
        consumer.send_all(encode(Stop()))
        assert [one.receive(block=True) for _ in range(5)] == [*EPOCHS[:4], Stop()]
        assert [other.receive(block=True) for _ in range(4)] == [EPOCHS[1], EPOCHS[2], EPOCHS[4], Stop()]
        assert one.receive(block=False) is None
        one.send(Hello(7))
        assert received(consumer) == (0, Hello(7))
        other.send(ANSWER)
        assert received(consumer) == (1, ANSWER)
        assert consumer.receive() is None


def test_nothing_reaches_the_process_that_replaces_a_worker_but_what_is_its_own(folder: str) -> None:
    with connected(folder) as (consumer, (dead,)):
        dead.send(ANSWER)
        assert consumer.wait_for_message(5)
        consumer.disconnect(0)
        dead.close()
        consumer.connect(folder, 0, 1)
        consumer.send(0, Stop())
        with closing(end_of_worker(folder, 0, 1)) as successor:
            assert successor.receive(block=True) == Stop()
            successor.say_hello()
            assert received(consumer) == (0, Hello(os.getpid())), "what the dead one sent is nobody's"
            assert broken(consumer, 0.05) == [], "the dead one's connection is nobody's"


def test_one_wait_serves_messages_descriptors_and_a_wake_up(folder: str) -> None:
    with connected(folder) as (consumer, (worker,)):
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
        assert consumer.wait(5) == ([], True)
        consumer.receive()
        thread = threading.Thread(target=consumer.wake)
        thread.start()
        assert consumer.wait(None)[1]
        thread.join()
        assert consumer.woken
        assert consumer.wait(None)[1], "from now on"
    consumer.wake()  # it is closed, and its descriptor may be another's


def test_a_worker_can_wait_for_more_than_messages(folder: str) -> None:
    with connected(folder) as (consumer, (worker,)):
        read, write = os.pipe()
        assert worker.wait([read], block=False) == []
        os.write(write, b"!")
        assert worker.wait([read], block=True) == [read]
        os.read(read, 1)
        consumer.send_frames(0, [encode(epoch) for epoch in EPOCHS])
        assert worker.wait([read], block=True) == []
        assert worker.receive(block=False) == EPOCHS[0]
        assert worker.wait([read], block=True) == [], "the rest of a bundle was received already"
        for end in (read, write):
            os.close(end)


def test_a_forked_child_of_a_worker_cannot_use_its_socket(folder: str) -> None:
    with connected(folder) as (consumer, (worker,)):

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
def test_garbage_from_a_worker_is_named_and_the_last_that_is_read(garbage: bytes, folder: str) -> None:
    with (
        closing(ConsumerSocket(folder, 1, TOKEN)) as consumer,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker,
    ):
        worker.connect(f"{folder}/aw0.0")
        for frame in [encode(ANSWER), garbage, encode(ANSWER)]:
            worker.send(frame)
        assert received(consumer) == (0, ANSWER)
        if garbage:
            assert received(consumer) == (0, None)
        assert broken(consumer, 0.05) == ([] if garbage else [0]), "an empty one is the end"


@pytest.mark.parametrize("room", [2304, sockets._ROOM])
def test_answers_of_any_length_come_in_order(room: int, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many: one for which there is no room leaves as soon as there is."""
    monkeypatch.setattr(sockets, "_ROOM", room)
    with connected(folder) as (consumer, (worker,)):
        answers = [ANSWER._replace(seq=seq, state=bytes([seq % 256]) * (seq % 90)) for seq in range(3000)]
        thread = threading.Thread(target=lambda: [worker.send(answer) for answer in answers])
        thread.start()
        assert [received(consumer) for _ in answers] == [(0, answer) for answer in answers]
        thread.join()
        for nbytes in (400, 30_000, 40_000, 900_000):
            worker.send(ANSWER._replace(state=bytes(nbytes)))
            assert received(consumer) == (0, ANSWER._replace(state=bytes(nbytes)))


def test_a_worker_that_waits_for_room_goes_on_when_the_consumer_is_gone(
    folder: str, worker: WorkerSocket
) -> None:
    """Nobody reads, and there is no room for so many answers."""
    sent: list[None] = []
    thread = threading.Thread(target=lambda: [sent.append(worker.send(ANSWER)) for _ in range(9999)])
    with closing(ConsumerSocket(folder, 1, TOKEN, read)) as consumer:
        worker.say_hello()
        assert received(consumer) == (0, Hello(os.getpid()))
        thread.start()
        assert wait_until(lambda: len(sent) > 100, 60)
        assert len(sent) < 9999
    thread.join(60)
    assert len(sent) == 9999


def test_a_worker_drops_garbage(folder: str, worker: WorkerSocket) -> None:
    with raw_socket() as consumer:
        consumer.connect(endpoint(folder, "w0.0"))
        for frame in [*GARBAGE, encode(EPOCHS[1])]:
            consumer.send(frame)
        assert worker.receive(block=True) == EPOCHS[1]


def test_where_each_peer_is_taken_for_the_process_that_asks_the_consumer_can_connect(folder: str) -> None:
    """As gVisor answers SO_PEERCRED."""
    with (
        closing(WorkerSocket(folder, "w0.0", 1, in_memory, 2)) as worker,
        closing(ConsumerSocket(folder, 1, TOKEN)) as consumer,
    ):
        worker.say_hello()
        assert received(consumer) == (0, Hello(os.getpid()))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("user", "error"), [(0, 0), (65534, 13)])  # EACCES
def test_another_user_cannot_connect(user: int, error: int, folder: str, worker: WorkerSocket) -> None:
    assert Path(folder).stat().st_mode & 0o777 == 0o700

    def connect() -> None:
        # The way there is open to everybody; what keeps others out is the folder itself.
        os.chdir(os.path.dirname(folder))
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        with socket.socket(socket.AF_UNIX) as client:
            assert client.connect_ex(f"{os.path.basename(folder)}/w0.0") == error

    assert end_of(fork(connect)) == 0


def test_a_worker_accepts_no_process_but_its_consumer(folder: str, worker: WorkerSocket) -> None:
    """Not even one of the same user: it would get every second answer."""

    def intrude() -> None:
        with socket.socket(socket.AF_UNIX) as plain, suppress(ConnectionError):
            plain.connect(f"{folder}/w0.0")
            plain.sendall(b"GET / HTTP/1.1")
            assert plain.recv(1) == b""
        with raw_socket() as peer:
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(endpoint(folder, "w0.0"))
            peer.send(encode(EPOCHS[0]))
            assert not peer.poll(200)

    intruders = [fork(intrude)]
    with closing(ConsumerSocket(folder, 1, TOKEN)) as consumer:
        intruders.append(fork(intrude))
        worker.say_hello()
        for _ in range(9):
            worker.send(ANSWER)
        assert received(consumer) == (0, Hello(os.getpid()))
        assert [received(consumer) for _ in range(9)] == [(0, ANSWER)] * 9
        assert [end_of(intruder) for intruder in intruders] == [0, 0]
        assert worker.receive(block=False) is None


def test_the_folder_is_private_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o777)
    mask = os.umask(0)
    try:
        folder = endpoint_folder()
    finally:
        os.umask(mask)
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    Path(folder, "w0.0").touch()
    remove_folder(folder)
    assert not Path(folder).exists()
    remove_folder(folder)  # it is gone already


@pytest.mark.parametrize("parent", ["/tmp/" + "x" * 150, "/tmp/\udcff", "/nonexistent"])
def test_p9_a_folder_that_cannot_be_used_is_passed_over(parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", parent)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    folder = endpoint_folder()
    remove_folder(folder)
    assert os.path.dirname(folder) == "/tmp"
    longest = endpoint(folder, socket_name(12345, 123456)).removeprefix("ipc://")
    assert len(longest) <= endpoints._LONGEST_PATH


def test_a_broken_connection_is_named_once(folder: str) -> None:
    with connected(folder, 2) as (consumer, ends):
        for end in ends:
            assert end._socket.getsockopt(zmq.HANDSHAKE_IVL) == 0, (
                "it may be stopped for longer while it starts"
            )
        assert consumer._socket.getsockopt(zmq.HANDSHAKE_IVL) == 0
        assert broken(consumer, 0) == []
        ends[1].close()
        assert broken(consumer, 5) == [1]
        assert broken(consumer, 0.1) == []
        ends[0].send(ANSWER)
        assert received(consumer) == (0, ANSWER)


def test_a_removed_file_is_remade(folder: str, worker: WorkerSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_LOOK_MS", 1)
    path = Path(folder, "w0.0")
    path.unlink()
    thread = threading.Thread(target=worker.say_hello)
    thread.start()
    assert wait_until(path.exists, 5)
    with closing(ConsumerSocket(folder, 1, TOKEN)) as consumer:
        assert received(consumer) == (0, Hello(os.getpid()))
        thread.join()


def test_without_a_folder_it_ends(folder: str, worker: WorkerSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_LOOK_MS", 1)
    remove_folder(folder)
    with pytest.raises(zmq.ZMQError, match="No such file"):
        worker.say_hello()


def tasks() -> set[str]:
    """Threads of this process, as the kernel counts them."""
    return set(os.listdir("/proc/self/task"))


def test_too_few_descriptors_are_an_error_that_says_how_to_get_more() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before) + 8, limits[1]))
    try:
        expect_descriptors(5)
        with pytest.raises(OSError, match=r"needs 500 descriptors .* `ulimit -n`") as caught:
            expect_descriptors(500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.errno == errno.EMFILE
    assert open_descriptors().keys() == before.keys()


def test_a_folder_that_a_cleaner_has_removed_is_named_with_what_to_do() -> None:
    folder = endpoint_folder()
    remove_folder(folder)
    with pytest.raises(FileNotFoundError, match=r"removed while they start .* set TMPDIR") as raised:
        ConsumerSocket(folder, 1, TOKEN)
    assert raised.value.filename == folder


def test_what_runs_on_this_thread_is_no_thread_and_the_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with gevent's greenlets, which run while this thread sleeps."""
    waiting: list[Any] = []

    class Lock:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: Any) -> None: ...

        def acquire(self) -> None: ...

        def release(self) -> None: ...

    monkeypatch.setattr(_thread, "allocate_lock", Lock)
    monkeypatch.setattr(_thread, "start_new_thread", lambda run, _: waiting.append(run))
    monkeypatch.setattr(
        endpoints.time, "sleep", lambda _: waiting.pop()() if waiting else pytest.fail("spins")
    )
    with pytest.raises(RuntimeError, match=r"gevent.*num_workers=0"):
        require_threads(3)
