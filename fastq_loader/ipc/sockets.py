"""Sockets: tasks go out over ZeroMQ, answers come back over a connection of the kernel's own.

`ConsumerSocket` runs in the consumer, `WorkerSocket` in a worker; both on one thread each. Each worker binds
an ipc endpoint of its own, and the consumer's ROUTER connects to it under the worker's number as routing id,
so tasks can be queued before the worker is up. A worker that replaces a dead one has a new endpoint and
routing id, so nothing that was meant for the dead one reaches it. The folder is private to the user (0700),
and is removed as soon as every worker is connected.

For the way back the consumer listens in the same folder, once for each worker, which connects when it is up.
A ZeroMQ message passes two more threads, one at each end, which cost a small batch as much as loading half of
its samples. Here a worker writes its answer where the consumer reads it (`SOCK_SEQPACKET`: in order, each
message whole). A finished answer leaves at once, and what was sent can be read when the worker has ended;
then the connection breaks. The frame of a long answer lies in a block, and the message says where. So as many
answers as a worker may be ahead have room. Only one that is hundreds ahead of a consumer that does not read
waits for it: as little is lost by that as by any other limit of how far to read ahead.

The consumer takes the descriptors when it begins to expect a worker: that of the listener, and one that is
closed for the connection. If zmq lacks one by then, it gets the listener's.

A worker accepts a connection from the consumer's process and from no other. Each connection is made once: the
consumer finds out when one breaks, and what was under way is lost then.

One `wait` serves everything: answers, broken connections, the workers' process descriptors, a wake-up.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket as unix
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.decoding import Read, decode_for_consumer, decode_for_worker
from fastq_loader.ipc.endpoints import (
    endpoint,
    expect_descriptors,
    expect_threads,
    naming_the_limit,
    socket_name,
    way_back,
)
from fastq_loader.ipc.messages import (
    Answer,
    Bundle,
    Epoch,
    Hello,
    InBlock,
    Message,
    Ping,
    Space,
    Stop,
    Task,
    encode,
)
from fastq_loader.system import calls, process_id
from fastq_loader.system.interrupts import without_signals

#: Milliseconds between attempts to reach a worker that is not up yet, and their bound.
_RECONNECT_MS, _RECONNECT_MAX_MS = 2, 100
#: As numbers: the enum's own `|` takes a microsecond.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
#: Descriptors that zmq needs (its threads' epolls and mailboxes; a connection and an attempt at one for each
#: worker; without them it ends the process, or tries to connect in silence for ever), and the way back.
_OWN_DESCRIPTORS, _DESCRIPTORS_PER_WORKER = 14, 3
#: Bytes of the longest frame that is sent as it is.
_LONGEST = 1 << 15
#: Bytes below which a frame is never put into a block.
_LEAST = 512
#: Bytes of answers that may wait to be read, so far as the system allows it (mostly 416 KiB with overhead).
_ROOM = 1 << 20
#: Threads of a context of zmq.
THREADS = 2
#: Milliseconds after which a worker to which nobody has connected looks for its socket's file.
_LOOK_MS = 500

_STOP = encode(Stop())


def _configure(socket: zmq.Socket[bytes]) -> None:
    for option in (
        zmq.LINGER,
        zmq.SNDHWM,  # the scheduler's window is the bound
        zmq.RCVHWM,
        zmq.HANDSHAKE_IVL,  # a process may be stopped for as long as it likes
    ):
        socket.setsockopt(option, 0)


def _together(frames: Sequence[bytes]) -> bytes:
    return frames[0] if len(frames) == 1 else encode(Bundle(tuple(frames)))


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


class _Line:
    """The consumer's way to one worker, and back.

    Attributes:
        worker: its number.
        endpoint, name: where zmq connects to it, and its routing id there.
        descriptor: of the listener, and of the connection then; -1: nothing is read from it any more.
        spare: until then, a descriptor that is closed for the connection; -1 after that.
        is_broken: it has ended, one way or the other.
    """

    def __init__(self, worker: int, endpoint: str, name: bytes, descriptor: int, spare: int) -> None:
        self.worker, self.endpoint, self.name = worker, endpoint, name
        self.descriptor, self.spare, self.is_broken = descriptor, spare, False

    def close(self) -> None:
        descriptors = {self.descriptor, self.spare} - {-1}
        self.descriptor = self.spare = -1
        for descriptor in descriptors:
            os.close(descriptor)


class ConsumerSocket:
    """The consumer's end, for all workers of one pool. Expects that THREADS more threads can be started.

    Args:
        folder: where the workers bind.
        workers: how many there are.
        token: the pool's, see `messages`.
        read: see `decode_for_consumer`.

    Attributes:
        woken: `wake` was called.
    """

    def __init__(self, folder: str, workers: int, token: bytes, read: Read | None = None) -> None:
        expect_descriptors(_OWN_DESCRIPTORS + _DESCRIPTORS_PER_WORKER * workers)
        self.woken = False
        self._token, self._read = token, read
        self._waking = threading.RLock()  # no wake-up is written to a descriptor that was closed
        self._wake = calls.wake_up()
        self._context = zmq.Context(io_threads=1)
        # A task that is sent while all cores are busy should not interrupt a worker or a training step.
        # zmq's thread finds several at once later, with half as many switches.
        with _yielding_threads():
            self._socket = self._context.socket(zmq.ROUTER)
        # pyzmq's core: its subclass passes every call on.
        self._send = super(zmq.Socket, self._socket).send
        with without_signals():  # pyzmq gives the call up when one interrupts it
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor.poll(0)  # its descriptor says only what comes after a look
        self._lines: dict[int, _Line] = {}  # by worker; none for a dead one
        self._at: dict[int, _Line] = {}  # by descriptor, so far as they can be read from
        self._epoll = select.epoll()
        for source in (self._wake, self._monitor):
            self._epoll.register(source, select.EPOLLIN)
        self._ready: list[_Line] = []  # those that were found readable
        self._broken: list[int] = []  # workers whose line has broken, until they are named
        self._buffer = memoryview(bytearray(_LONGEST))
        try:
            _configure(self._socket)
            self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
            for worker in range(workers):
                self.connect(folder, worker, 0)
        except BaseException:
            self.close()
            raise

    def connect(self, folder: str, worker: int, generation: int) -> None:
        """Expect a worker. What is sent to it before it is up waits.

        Raises:
            OSError: descriptors are used up, or the folder is gone.
        """
        if generation:
            expect_descriptors(_DESCRIPTORS_PER_WORKER)
        name = socket_name(worker, generation)
        # Descriptors and not sockets: those would warn where a forked child drops its copies.
        with unix.socket(unix.AF_UNIX, unix.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(way_back(folder, name))
            except FileNotFoundError as error:
                text = (
                    "the folder of the workers' sockets was removed while they start (by a cleaner of /tmp?):"
                    " set TMPDIR to a folder that is left alone"
                )
                raise FileNotFoundError(error.errno, text, folder) from None
            listener.listen(1)
            spare = os.dup(listener.fileno())
            line = _Line(worker, endpoint(folder, name), name.encode(), listener.detach(), spare)
        self._lines[worker] = line
        self._listen(line)
        self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, line.name)
        self._socket.connect(line.endpoint)

    def _listen(self, line: _Line) -> None:
        self._at[line.descriptor] = line
        self._epoll.register(line.descriptor, select.EPOLLIN)

    def _accept(self, line: _Line) -> None:
        """A worker has connected.

        Raises:
            OSError: descriptors are used up, though one was kept for it: another thread was quicker.
        """
        with without_signals():
            listener = unix.socket(fileno=line.descriptor)
            spare, line.spare = line.spare, -1
            os.close(spare)
            try:
                with naming_the_limit(_DESCRIPTORS_PER_WORKER):
                    connection = listener.accept()[0].detach()
            finally:
                listener.detach()
                self._drop(line)
            os.set_blocking(connection, False)
            line.descriptor = connection
            self._listen(line)
            self._ready.append(line)

    def _drop(self, line: _Line) -> None:
        """Read from it no more."""
        if line.descriptor >= 0:
            del self._at[line.descriptor]
            self._epoll.unregister(line.descriptor)  # a forked child may hold it, too
            line.close()

    def disconnect(self, worker: int) -> None:
        """`worker` is dead: nothing is sent to it any more, and nothing that it sent is received."""
        line = self._lines.pop(worker)
        with contextlib.suppress(zmq.ZMQError):  # zmq has noticed its end already
            self._socket.disconnect(line.endpoint)
        self._drop(line)
        self._ready, self._broken = [], [other for other in self._broken if other != worker]

    def send(self, worker: int, message: Message) -> None:
        """Queue a message.

        Raises:
            Exception: whatever pickling raises for the index of a task.
        """
        self.send_frame(worker, encode(message, self._token))

    def send_frame(self, worker: int, frame: bytes) -> None:
        """Queue an encoded message."""
        self._send(self._lines[worker].name, _NOBLOCK_MORE)
        self._send(frame, _NOBLOCK)

    def send_frames(self, worker: int, frames: Sequence[bytes]) -> None:
        """Queue encoded messages, in one go."""
        if frames:
            self.send_frame(worker, _together(frames))

    def send_all(self, *frames: bytes, but: Container[int] = ()) -> None:
        """Queue the same encoded messages for every worker `but` some, in one go."""
        frame = _together(frames)
        for worker, line in self._lines.items():
            if worker not in but:
                self._send(line.name, _NOBLOCK_MORE)
                self._send(frame, _NOBLOCK)

    def receive(self) -> tuple[int, Hello | Answer | Ping | None] | None:
        """The worker that sent the next message, and it; None if there is none now. None for the message:
        something else came, and nothing more will be read from this worker."""
        while True:
            if not self._ready:
                self._find(0)
                if not self._ready:
                    return None
            line = self._ready.pop()
            try:
                size = os.readv(line.descriptor, [self._buffer])
            except BlockingIOError:
                continue
            except ConnectionError:
                size = 0
            if not size:
                self._drop(line)
                self._note_broken(line)
                continue
            try:
                return line.worker, decode_for_consumer(self._buffer[:size], self._read)
            except ProtocolError:
                self._drop(line)
                return line.worker, None

    def _find(self, timeout: float | None) -> tuple[list[int], bool]:
        """Wait until something can be read. Returns what is not ours, and whether anything has happened."""
        others, at = list[int](), self._at
        self._ready = ready = []
        events = self._epoll.poll(timeout)
        for descriptor, _ in events:
            if descriptor in at:
                line = at[descriptor]
                ready.append(line) if line.spare < 0 else self._accept(line)
            elif descriptor == self._monitor.fileno():
                self._read_monitor()
            else:
                others.append(descriptor)
        return others, bool(events)

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            its = recv_monitor_message(self._monitor)["endpoint"].decode()
            for line in [line for line in self._lines.values() if line.endpoint == its]:
                self._note_broken(line)

    def _note_broken(self, line: _Line) -> None:
        if not line.is_broken:
            line.is_broken = True
            self._broken.append(line.worker)

    def broken(self) -> list[int]:
        """The workers whose connection has broken; each is named once."""
        broken, self._broken = self._broken, []
        return broken

    def watch(self, descriptor: int) -> None:
        """Let `wait` return when `descriptor` becomes readable (a process descriptor: has ended)."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # it is not watched
            self._epoll.unregister(descriptor)

    def wait(self, timeout: float | None) -> tuple[list[int], bool]:
        """Sleep until a message, a watched descriptor or `wake`, at most `timeout` seconds.

        Returns:
            The watched descriptors that are readable, and whether anything has happened at all.
        """
        nothing_known = not (self._ready or self._broken)
        others, happened = self._find(timeout if nothing_known else 0)
        return others, happened or not nothing_known

    def wait_for_message(self, timeout: float) -> bool:
        """Sleep until a message has come, at most `timeout` seconds."""
        return bool(calls.readable([at for at, line in self._at.items() if line.spare < 0], timeout))

    def wake(self) -> None:
        """Let `wait` return now and from now on; may be called on any thread."""
        with self._waking:
            self.woken = True
            if self._wake >= 0:
                calls.wake(self._wake)

    def close(self) -> None:
        # Not left to the context: it finds its sockets through weak references. These are dead when the
        # garbage collector ends a loader, and the context would wait for the socket for ever.
        while self._at:
            self._at.popitem()[1].close()
        self._epoll.close()
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
        in_block: puts an answer, whose frame has so many bytes, into a block.
        ahead: answers that may wait to be read.

    Raises:
        OSError: descriptors or threads are used up.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        consumer: int,
        in_block: Callable[[Answer, int], InBlock],
        ahead: int,
    ) -> None:
        expect_descriptors(_OWN_DESCRIPTORS)
        expect_threads(THREADS)
        self._pid = process_id.current()
        self._context = zmq.Context(io_threads=1)
        self._frames: deque[bytes] = deque()  # received, or of a bundle, as far as they were not read
        self._in_block = in_block
        self._socket = self._context.socket(zmq.DEALER)
        self._recv = super(zmq.Socket, self._socket).recv
        _configure(self._socket)
        for process in (consumer, self._pid):  # a sandbox may take each peer for the process that asks
            self._socket.setsockopt(zmq.IPC_FILTER_PID, process)
        self._path, self._way_back = os.path.join(folder, name), way_back(folder, name)
        self._socket.bind(endpoint(folder, name))
        self._answers = unix.socket(unix.AF_UNIX, unix.SOCK_SEQPACKET)
        self._answers.bind("")  # a name: a program that looks at its sockets finds this one like zmq's
        self._answers.setsockopt(unix.SOL_SOCKET, unix.SO_SNDBUF, _ROOM)
        room = self._answers.getsockopt(unix.SOL_SOCKET, unix.SO_SNDBUF)
        # Twice: the kernel rounds each message up, and counts what is its own.
        self._longest = min(_LONGEST, max(room // (2 * ahead), _LEAST))

    def say_hello(self) -> None:
        """Wait for the consumer to connect, and say that this worker is up. If the socket's file is removed
        meanwhile, it is made anew.

        Raises:
            ZMQError: the folder is gone, too.
            SystemExit: nobody listens for answers any more.
        """
        connected = False
        while not self._socket.poll(_LOOK_MS, zmq.POLLOUT):
            if not os.path.exists(self._path):
                self._socket.bind(f"ipc://{self._path}")
            # The consumer may lack the descriptor for zmq that its listener has.
            connected = connected or not self._answers.connect_ex(self._way_back)
        if not connected and self._answers.connect_ex(self._way_back):
            raise SystemExit(1)
        self.send(Hello(self._pid))

    def send(self, message: Message) -> None:
        """Send a message, and wait for room if there is none.

        Raises:
            Exception: it does not fit into a message, or no block is left for it.
        """
        if process_id.pid != self._pid:
            process_id.stay_in(self._pid)
        frame = encode(message)
        if len(frame) > self._longest:
            assert isinstance(message, Answer), "others are short"
            frame = encode(self._in_block(message, len(frame)))
        try:
            self._answers.send(frame, unix.MSG_NOSIGNAL)
        except ConnectionError:  # the consumer is gone, and in a moment this process, too
            return

    def receive(self, block: bool) -> Task | Epoch | Space | Stop | Ping | None:
        """The next message; None if there is none now, without `block`. A frame that is not a message is
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
        """Sleep until a message has come or a descriptor is readable, or only look without `block`. Returns
        the descriptors that are readable."""
        sources: list[Any] = [(source, zmq.POLLIN) for source in (self._socket, *descriptors)]
        ready = zmq.zmq_poll(sources, -1 if block and not self._frames else 0)
        return [source for source, _ in ready if source in descriptors]

    def told_to_stop(self) -> bool:
        """Whether a Stop has come and was not read; it stays there."""
        process_id.stay_in(self._pid)
        with contextlib.suppress(zmq.Again):
            while True:
                self._frames.append(self._socket.recv(_NOBLOCK))
        return _STOP in self._frames

    def close(self) -> None:
        if self._pid == process_id.current():
            self._answers.close()
            self._socket.close(linger=0)
            self._context.term()
        else:
            _inherited.append(self)
