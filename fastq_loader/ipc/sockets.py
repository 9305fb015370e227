"""Sockets: one ROUTER in the consumer, one DEALER in each worker, and the folder where they meet.

`ConsumerSocket` runs in the consumer, `WorkerSocket` in a worker; both on one thread each. Each worker binds
an ipc endpoint of its own and the consumer connects to it under the worker's number as routing id, so tasks
can be queued before the worker is up. A worker that replaces a dead one has a new endpoint and routing id, so
nothing that was meant for the dead one reaches it. The folder is private to the user (0700), and is removed
as soon as every worker is connected.

A worker accepts a connection from the consumer's process and from no other. A connection is made once: zmq
tells the consumer when it breaks, and what was under way is lost then.

One `wait` serves everything: the socket, its broken connections, the workers' process descriptors, a wake-up.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import threading
from collections import deque
from collections.abc import Container, Iterator, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.decoding import decode_for_consumer, decode_for_worker
from fastq_loader.ipc.messages import (
    Answer,
    Bundle,
    Epoch,
    Hello,
    Message,
    Ping,
    Space,
    Stop,
    Task,
    encode,
)
from fastq_loader.ipc.probes import expect_descriptors, expect_threads
from fastq_loader.system import calls, process_id
from fastq_loader.system.interrupts import without_signals

#: sun_path of <sys/un.h> holds 108 bytes with the closing NUL.
_LONGEST_PATH = 107
#: Milliseconds between attempts to reach a worker that is not up yet, and their bound.
_RECONNECT_MS, _RECONNECT_MAX_MS = 2, 100
#: As numbers: the enum's own `|` takes a microsecond.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE = int(zmq.RCVMORE)
#: Descriptors that zmq takes (its threads' epolls and mailboxes; a connection and an attempt at one for each
#: worker). Without them it ends the process, or tries to connect in silence for ever.
_OWN_DESCRIPTORS, _DESCRIPTORS_PER_WORKER = 14, 2
#: Threads of a context of zmq.
THREADS = 2
#: Milliseconds after which a worker to which nobody has connected looks for its socket's file.
_LOOK_MS = 500

_STOP = encode(Stop())


def endpoint_folder() -> str:
    """A fresh 0700 folder whose socket paths are short enough, whatever TMPDIR says.

    Raises:
        OSError: no folder could be made anywhere.
    """
    failure: OSError | None = None
    parents = (_temp_folder(), os.environ.get("XDG_RUNTIME_DIR"), "/tmp", "/var/tmp", "/dev/shm")
    for parent in parents:
        # mkdtemp adds eight characters to the prefix; the socket's name is the longest there could be.
        try:
            # zmq takes endpoints as UTF-8.
            if not parent or len(parent.encode()) + len("/fastq-12345678/w12345.123456") > _LONGEST_PATH:
                continue
            return tempfile.mkdtemp(prefix="fastq-", dir=parent)
        except UnicodeEncodeError:
            continue
        except OSError as error:
            failure = error
    raise failure or OSError(f"no folder with a path short enough for a socket in any of {parents}")


def _temp_folder() -> str | None:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # no folder that can be written to: there are others to try
        return None


def _configure(socket: zmq.Socket[bytes]) -> None:
    for option in (
        zmq.LINGER,
        zmq.SNDHWM,  # the scheduler's window is the bound
        zmq.RCVHWM,
        zmq.HANDSHAKE_IVL,  # a process may be stopped for as long as it likes
    ):
        socket.setsockopt(option, 0)


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def endpoint(folder: str, name: str) -> str:
    return f"ipc://{folder}/{name}"


def socket_name(worker: int, generation: int) -> str:
    """What the socket of a worker is called; `generation` counts those that had its number before."""
    return f"w{worker}.{generation}"


def remove_folder(folder: str) -> None:
    """Remove a folder of sockets, as far as that is possible."""
    # Not shutil.rmtree: when a handler of a signal cuts it short, it closes a descriptor twice.
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _together(frames: Sequence[bytes]) -> bytes:
    return frames[0] if len(frames) == 1 else encode(Bundle(tuple(frames)))


def _drop_rest(socket: zmq.Socket[bytes]) -> None:
    """Receive the rest of a message that has more parts than ours."""
    while socket.getsockopt(_RCVMORE):
        socket.recv()


@contextlib.contextmanager
def _yielding_threads() -> Iterator[None]:
    """Threads that are started in here do not preempt others: they wait for a free core or their turn. (zmq's
    own option for this ends the process where the system does not allow it.)"""
    yielding = False
    with contextlib.suppress(OSError, AttributeError):  # a sandbox; a system without these
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            yielding = True
    try:
        yield
    finally:
        if yielding:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class ConsumerSocket:
    """The consumer's end, for all workers of one pool.

    Args:
        folder: where the workers bind.
        workers: how many there are.
        token: the pool's, see `messages`.

    Attributes:
        woken: `wake` was called.
    """

    def __init__(self, folder: str, workers: int, token: bytes) -> None:
        expect_descriptors(_OWN_DESCRIPTORS + _DESCRIPTORS_PER_WORKER * workers)
        expect_threads(THREADS)
        self.woken = False
        self._token = token
        self._waking = threading.RLock()  # no wake-up is written to a descriptor that was closed
        self._wake = calls.wake_up()
        self._context = zmq.Context(io_threads=1)
        # A message that comes while all cores are busy should not interrupt a worker or a training step.
        # zmq's thread finds several at once later, with half as many switches. (A worker's socket has to be
        # quick: its answer would be sent after the next batch.)
        with _yielding_threads():
            self._socket = self._context.socket(zmq.ROUTER)
        # pyzmq's core: its subclass passes every call on.
        self._send, self._recv = super(zmq.Socket, self._socket).send, super(zmq.Socket, self._socket).recv
        with without_signals():  # pyzmq gives the call up when one interrupts it
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._newest = 0  # the worker that has sent something last
        self._names: dict[int, bytes] = {}  # worker → its routing id
        self._numbers: dict[bytes, int] = {}
        self._endpoints: dict[int, str] = {}
        try:
            _configure(self._socket)
            self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
            for worker in range(workers):
                self.connect(folder, worker, 0)
        except BaseException:
            self.close()
            raise
        for source in (self._socket, self._monitor, self._wake):
            self._poller.register(source, zmq.POLLIN)

    def connect(self, folder: str, worker: int, generation: int) -> None:
        """Expect a worker. What is sent to it before it is up waits."""
        name = socket_name(worker, generation)
        self._endpoints[worker] = endpoint(folder, name)
        self._names[worker] = name.encode()
        self._numbers[self._names[worker]] = worker
        self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, self._names[worker])
        self._socket.connect(self._endpoints[worker])

    def disconnect(self, worker: int) -> None:
        """`worker` is dead: nothing is sent to it any more, and nothing that it sent is received."""
        del self._numbers[self._names.pop(worker)]
        with contextlib.suppress(zmq.ZMQError):  # zmq has noticed its end already
            self._socket.disconnect(self._endpoints.pop(worker))

    def send(self, worker: int, message: Message) -> None:
        """Queue a message.

        Raises:
            Exception: whatever pickling raises for the index of a task.
        """
        self.send_frame(worker, encode(message, self._token))

    def send_frame(self, worker: int, frame: bytes) -> None:
        """Queue an encoded message."""
        self._send(self._names[worker], _NOBLOCK_MORE)
        self._send(frame, _NOBLOCK)

    def send_frames(self, worker: int, frames: Sequence[bytes]) -> None:
        """Queue encoded messages, in one go."""
        if frames:
            self.send_frame(worker, _together(frames))

    def send_all(self, *frames: bytes, but: Container[int] = ()) -> None:
        """Queue the same encoded messages for every worker `but` some, in one go."""
        frame = _together(frames)
        for worker, name in self._names.items():
            if worker not in but:
                self._send(name, _NOBLOCK_MORE)
                self._send(frame, _NOBLOCK)

    def receive(self) -> tuple[Any, Hello | Answer | Ping | None] | None:
        """The worker that sent the next message, and it; None if there is none now. None stands for a frame
        that is not a message, and for a worker that is dead."""
        try:
            name = self._recv(_NOBLOCK)
        except zmq.Again:
            return None
        worker = self._numbers.get(name)
        if worker is not None:
            self._newest = worker
            try:
                return worker, decode_for_consumer(self._recv())
            except ProtocolError:
                return worker, None
        # Looked for here, and not after every frame: a message with more parts than ours.
        if not self._socket.getsockopt(_RCVMORE):
            return self._newest, None
        _drop_rest(self._socket)
        return None, None

    def broken(self, ready: Sequence[object]) -> list[int]:
        """The workers whose connection has broken, by what `wait` found readable; each is named once."""
        found: list[int] = []
        while self._monitor in ready and self._monitor.poll(0):
            endpoint = recv_monitor_message(self._monitor)["endpoint"].decode()
            found += [worker for worker, its in self._endpoints.items() if its == endpoint]
        return found

    def watch(self, descriptor: int) -> None:
        """Let `wait` return when `descriptor` becomes readable (a process descriptor: has ended)."""
        self._poller.register(descriptor, zmq.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._poller.unregister(descriptor)

    def wait(self, timeout: float | None) -> Sequence[object]:
        """Sleep until a message, a watched descriptor or `wake`, at most `timeout` seconds.

        Returns:
            What is readable: the watched descriptors among it as numbers. Empty after the timeout.
        """
        milliseconds = None if timeout is None else _milliseconds(timeout)
        return [ready for ready, _ in self._poller.poll(milliseconds)]

    def wait_for_message(self, timeout: float) -> bool:
        """Sleep until a message has come, at most `timeout` seconds."""
        return bool(self._socket.poll(_milliseconds(timeout)))

    def wake(self) -> None:
        """Let `wait` return now and from now on; may be called on any thread."""
        with self._waking:
            self.woken = True
            if self._wake >= 0:
                calls.wake(self._wake)

    def close(self) -> None:
        # Not left to the context: it finds its sockets through weak references. These are dead when the
        # garbage collector ends a loader, and the context would wait for the socket for ever.
        self._poller = zmq.Poller()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        with without_signals():  # else it is given up, and the context's thread and descriptors are left
            self._context.term()
        with self._waking:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)


#: In a forked child of a worker: sockets that must not be closed there, not even by the garbage collector.
_inherited: list[WorkerSocket] = []


class WorkerSocket:
    """A worker's end. Made in the worker process, because a context of zmq does not survive a fork. A child
    that user code forked there ends when it uses the socket.

    Args:
        folder: where it binds.
        name: of the socket.
        consumer: process id of the consumer.

    Raises:
        OSError: descriptors or threads are used up.
    """

    def __init__(self, folder: str, name: str, consumer: int) -> None:
        expect_descriptors(_OWN_DESCRIPTORS)
        expect_threads(THREADS)
        self._pid = process_id.current()
        self._context = zmq.Context(io_threads=1)
        self._frames: deque[bytes] = deque()  # received, or of a bundle, as far as they were not read
        self._socket = self._context.socket(zmq.DEALER)
        self._send, self._recv = super(zmq.Socket, self._socket).send, super(zmq.Socket, self._socket).recv
        _configure(self._socket)
        for process in (consumer, self._pid):  # a sandbox may take each peer for the process that asks
            self._socket.setsockopt(zmq.IPC_FILTER_PID, process)
        self._path = os.path.join(folder, name)
        self._socket.bind(endpoint(folder, name))

    def say_hello(self) -> None:
        """Wait for the consumer to connect, and say that this worker is up. If the socket's file is removed
        meanwhile, it is made anew.

        Raises:
            ZMQError: the folder is gone, too.
        """
        while not self._socket.poll(_LOOK_MS, zmq.POLLOUT):
            if not os.path.exists(self._path):
                self._socket.bind(f"ipc://{self._path}")
        self.send(Hello(self._pid))

    def send(self, message: Message) -> None:
        if process_id.pid != self._pid:
            process_id.stay_in(self._pid)
        self._send(encode(message))

    def receive(self, block: bool) -> Task | Epoch | Space | Stop | Ping | None:
        """The next message; without `block` None if there is none now. A frame that is not a message is
        dropped."""
        if process_id.pid != self._pid:
            process_id.stay_in(self._pid)
        while True:
            try:
                frame = self._frames.popleft() if self._frames else self._recv(0 if block else _NOBLOCK)
                message = decode_for_worker(frame)
            except zmq.Again:
                return None
            except ProtocolError:
                continue
            if not isinstance(message, Bundle):
                return message
            self._frames.extendleft(reversed(message.frames))

    def wait(self, descriptors: Sequence[int], block: bool) -> list[object]:
        """Sleep until a message has come or a descriptor is readable, or only look without `block`; the
        descriptors that are."""
        sources: list[Any] = [(source, zmq.POLLIN) for source in (self._socket, *descriptors)]
        ready = zmq.zmq_poll(sources, -1 if block and not self._frames else 0)
        return [source for source, _ in ready if source is not self._socket]

    def told_to_stop(self) -> bool:
        """Whether a Stop has come and was not read; it stays there."""
        process_id.stay_in(self._pid)
        with contextlib.suppress(zmq.Again):
            while True:
                self._frames.append(self._socket.recv(_NOBLOCK))
        return _STOP in self._frames

    def close(self) -> None:
        if self._pid == process_id.current():
            self._socket.close(linger=0)
            self._context.term()
        else:
            _inherited.append(self)
