"""Sockets: tasks are sent over ZeroMQ, answers over a Unix socket.

`ConsumerSocket` runs in the consumer, `WorkerSocket` in a worker, each on one thread. Each worker binds its
own ipc endpoint. The consumer's ROUTER connects to it with the socket's name as routing id, so tasks can be
queued before the worker is up. A worker that replaces a dead one has a new endpoint and routing id, so it
receives nothing that was sent to the dead one. The folder is private to the user (0700), and is removed as
soon as every worker is connected.

For the answers, the consumer listens in the same folder, once for each worker, which connects when it is up.
A ZeroMQ message passes through two more threads, one at each end, which cost a small batch as much as loading
half of its samples. A worker's answer goes to the consumer directly (`SOCK_SEQPACKET`: in order, each message
whole). A finished answer is sent at once, and the consumer can read it even after the worker has ended; then
the connection breaks. The frame of a long answer lies in a block, and the message refers to it. So there is
room for as many answers as a worker may be ahead. Only a worker that is hundreds of answers ahead of a
consumer that does not read has to wait, which costs no more than any other limit on reading ahead.

The consumer opens its descriptors when it starts to expect a worker: the listener, and a spare one, which it
closes just before it accepts the connection. If zmq lacks a descriptor by then, it gets the listener's.

A worker accepts connections only from the consumer's process. Each connection is made once. The consumer
notices when that of the answers breaks: the worker is killed then, if it has not ended.

One `wait` serves everything: answers, broken connections, the workers' process descriptors, a wake-up.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket as unix
import threading
from collections.abc import Callable, Container, Sequence
from typing import Any

import zmq

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.decoding import Read, decode_for_consumer
from fastq_loader.ipc.endpoints import (
    endpoint,
    expect_descriptors,
    naming_the_limit,
    require_threads,
    socket_name,
    way_back,
)
from fastq_loader.ipc.inbox import Inbox
from fastq_loader.ipc.messages import (
    Answer,
    Bundle,
    Hello,
    InBlock,
    Message,
    encode,
)
from fastq_loader.system import calls, process_id
from fastq_loader.system.interrupts import without_signals

#: Milliseconds between attempts to connect to a worker that is not up yet: the first, and the longest.
_RECONNECT_MS, _RECONNECT_MAX_MS = 2, 100
#: Plain ints, because `|` of the enum takes a microsecond.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
#: Descriptors for zmq (epolls and mailboxes of its threads; for each worker a connection and an attempt at
#: one) and for the answers. Without them zmq ends the process, or tries to connect for ever without an error.
_OWN_DESCRIPTORS, _DESCRIPTORS_PER_WORKER = 14, 3
#: Bytes of the longest frame that is sent over the socket; longer ones go into a block.
_LONGEST = 1 << 15
#: Bytes below which a frame is never put into a block.
_LEAST = 512
#: Requested size of the send buffer for answers, in bytes. Most systems allow 416 KiB, overhead included.
_ROOM = 1 << 20
#: Threads of a zmq context.
THREADS = 2
#: Milliseconds between a worker's checks for its socket's file, until the consumer has connected.
_LOOK_MS = 500


def _configure(socket: zmq.Socket[bytes]) -> None:
    for option in (
        zmq.LINGER,
        zmq.SNDHWM,  # the scheduler's window is the bound
        zmq.RCVHWM,
        zmq.HANDSHAKE_IVL,  # a stopped process must not lose its connection
    ):
        socket.setsockopt(option, 0)


def _together(frames: Sequence[bytes]) -> bytes:
    return frames[0] if len(frames) == 1 else encode(Bundle(tuple(frames)))


class _Line:
    """The consumer's connections to one worker, in both directions.

    Attributes:
        worker: the worker's number.
        endpoint, name: address at which zmq connects to the worker, and its routing id.
        descriptor: the listener, later the accepted connection; -1 once nothing more is read.
        spare: descriptor that is closed to make room for the accepted connection; -1 after that.
    """

    def __init__(self, worker: int, endpoint: str, name: bytes, descriptor: int, spare: int) -> None:
        self.worker, self.endpoint, self.name = worker, endpoint, name
        self.descriptor, self.spare = descriptor, spare

    def close(self) -> None:
        descriptors = {self.descriptor, self.spare} - {-1}
        self.descriptor = self.spare = -1
        for descriptor in descriptors:
            os.close(descriptor)


class ConsumerSocket:
    """The consumer's end, for all workers of one pool. The caller checks that THREADS more threads can start.

    Args:
        folder: folder in which the workers bind.
        workers: number of workers.
        token: the pool's token, see `messages`.
        read: see `decode_for_consumer`.

    Attributes:
        woken: whether `wake` was called.
    """

    def __init__(self, folder: str, workers: int, token: bytes, read: Read | None = None) -> None:
        expect_descriptors(_OWN_DESCRIPTORS + _DESCRIPTORS_PER_WORKER * workers)
        self.woken = False
        self._token, self._read = token, read
        self._waking = threading.RLock()  # keeps `wake` from writing to a closed descriptor
        self._wake = calls.wake_up()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        # pyzmq's C class directly: its subclass only forwards each call.
        self._send = super(zmq.Socket, self._socket).send
        self._lines: dict[int, _Line] = {}  # by worker; without dead ones
        self._at: dict[int, _Line] = {}  # by descriptor; only lines that are read from
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._ready: list[_Line] = []  # lines with something to read
        self._broken: list[int] = []  # workers whose connection has broken, until reported
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
        """Expect a worker. Messages sent before it is up are queued.

        Raises:
            OSError: there are no free descriptors, or the folder is gone.
        """
        if generation:
            expect_descriptors(_DESCRIPTORS_PER_WORKER)
        name = socket_name(worker, generation)
        # Descriptors, not socket objects: those would warn when a forked child drops its copies.
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
        """Accept a worker's connection.

        Raises:
            OSError: there are no free descriptors: another thread has taken the spare one.
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
        """Stop reading from a worker, and close the descriptors."""
        if line.descriptor >= 0:
            del self._at[line.descriptor]
            self._epoll.unregister(line.descriptor)  # closing is not enough: a forked child may have a copy
            line.close()

    def disconnect(self, worker: int) -> None:
        """Disconnect a dead worker: send it nothing more, and ignore anything that it sent."""
        line = self._lines.pop(worker)
        with contextlib.suppress(zmq.ZMQError):  # zmq has already noticed that it ended
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
        """Queue encoded messages, as one."""
        if frames:
            self.send_frame(worker, _together(frames))

    def send_all(self, *frames: bytes, but: Container[int] = ()) -> None:
        """Queue the same encoded messages, as one, for every worker except those in `but`."""
        frame = _together(frames)
        for worker, line in self._lines.items():
            if worker not in but:
                self._send(line.name, _NOBLOCK_MORE)
                self._send(frame, _NOBLOCK)

    def receive(self) -> tuple[int, Hello | Answer | None] | None:
        """The next message, as (worker, message); None if nothing is waiting. The message is None if the
        worker has sent an invalid frame; nothing more will be read from this worker then."""
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
                self._broken.append(line.worker)
                continue
            try:
                return line.worker, decode_for_consumer(self._buffer[:size], self._read)
            except ProtocolError:
                self._drop(line)
                return line.worker, None

    def _find(self, timeout: float | None) -> tuple[list[int], bool]:
        """Wait until something is readable. Returns watched descriptors, and whether anything happened."""
        others, at = list[int](), self._at
        self._ready = ready = []
        events = self._epoll.poll(timeout)
        for descriptor, _ in events:
            if descriptor in at:
                line = at[descriptor]
                ready.append(line) if line.spare < 0 else self._accept(line)
            else:
                others.append(descriptor)
        return others, bool(events)

    def broken(self) -> list[int]:
        """The workers whose connection has broken; each is reported once."""
        broken, self._broken = self._broken, []
        return broken

    def watch(self, descriptor: int) -> None:
        """Make `wait` return when `descriptor` becomes readable (for a pidfd: when its process has ended)."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # it is not watched
            self._epoll.unregister(descriptor)

    def wait(self, timeout: float | None) -> tuple[list[int], bool]:
        """Sleep until a message, a watched descriptor or `wake`, for at most `timeout` seconds.

        Returns:
            The watched descriptors that are readable, and whether anything has happened at all.
        """
        nothing_known = not (self._ready or self._broken)
        others, happened = self._find(timeout if nothing_known else 0)
        return others, happened or not nothing_known

    def wait_for_message(self, timeout: float) -> bool:
        """Sleep until there is a message, for at most `timeout` seconds. Returns whether there is one."""
        return bool(calls.readable([at for at, line in self._at.items() if line.spare < 0], timeout))

    def wake(self) -> None:
        """Make the current `wait` and all later ones return at once. May be called on any thread."""
        with self._waking:
            self.woken = True
            if self._wake >= 0:
                calls.wake(self._wake)

    def close(self) -> None:
        # Not left to the context, which finds its sockets through weak references. These are dead when the
        # garbage collector frees a loader, and the context would wait for the socket for ever.
        while self._at:
            self._at.popitem()[1].close()
        self._epoll.close()
        self._socket.close(linger=0)
        with without_signals():  # an interrupted call leaves the context's thread and descriptors
            self._context.term()
        with self._waking:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)


#: Sockets that a forked child of a worker must not close, not even through garbage collection.
_inherited: list[WorkerSocket] = []


class WorkerSocket(Inbox):
    """A worker's end. Made in the worker process, because a zmq context does not survive a fork. A frame that
    is not a message is dropped.

    Args:
        folder: folder in which the socket binds.
        name: name of the socket.
        consumer: process id of the consumer.
        in_block: puts an answer into a block; takes the answer and the length of its frame in bytes.
        ahead: number of answers that may wait to be read.

    Raises:
        OSError: there are too few free descriptors or threads.
    """

    dropped = (ProtocolError,)

    def __init__(
        self,
        folder: str,
        name: str,
        consumer: int,
        in_block: Callable[[Answer, int], InBlock],
        ahead: int,
    ) -> None:
        expect_descriptors(_OWN_DESCRIPTORS)
        require_threads(THREADS)
        super().__init__()
        self._context = zmq.Context(io_threads=1)
        self._in_block = in_block
        self._socket = self._context.socket(zmq.DEALER)
        self._recv = super(zmq.Socket, self._socket).recv
        _configure(self._socket)
        for process in (consumer, self._pid):  # a sandbox may report our own id for each peer
            self._socket.setsockopt(zmq.IPC_FILTER_PID, process)
        self._path, self._way_back = os.path.join(folder, name), way_back(folder, name)
        self._socket.bind(endpoint(folder, name))
        self._answers = unix.socket(unix.AF_UNIX, unix.SOCK_SEQPACKET)
        self._answers.bind("")  # named, as zmq's sockets are, for programs that inspect theirs
        self._answers.setsockopt(unix.SOL_SOCKET, unix.SO_SNDBUF, _ROOM)
        room = self._answers.getsockopt(unix.SOL_SOCKET, unix.SO_SNDBUF)
        # Times 2: the kernel rounds each message up, and counts its own overhead.
        self._longest = min(_LONGEST, max(room // (2 * ahead), _LEAST))

    def say_hello(self) -> None:
        """Wait for the consumer to connect, and report that this worker is up. If the socket's file is
        removed meanwhile, make it again.

        Raises:
            ZMQError: the folder is gone, too.
            SystemExit: the consumer does not listen for answers any more.
        """
        connected = False
        while not self._socket.poll(_LOOK_MS, zmq.POLLOUT):
            if not os.access(self._path, os.F_OK):
                self._socket.bind(f"ipc://{self._path}")
            # Connect early: zmq in the consumer may need the descriptor that the listener occupies.
            connected = connected or not self._answers.connect_ex(self._way_back)
        if not connected and self._answers.connect_ex(self._way_back):
            raise SystemExit(1)
        self.send(Hello(self._pid))

    def send(self, message: Message) -> None:
        """Send a message; wait until there is room for it.

        Raises:
            Exception: the message is too long, or there is no block for it.
        """
        if process_id.pid != self._pid:
            process_id.stay_in(self._pid)
        frame = encode(message)
        if len(frame) > self._longest:
            assert isinstance(message, Answer), "others are short"
            frame = encode(self._in_block(message, len(frame)))
        try:
            self._answers.send(frame, unix.MSG_NOSIGNAL)
        except ConnectionError:  # the consumer is gone, and this process ends soon
            return

    def _frame(self, block: bool) -> bytes | None:
        try:
            frame: bytes = self._recv(0 if block else _NOBLOCK)
        except zmq.Again:
            return None
        return frame

    def wait(self, descriptors: Sequence[int], block: bool) -> list[object]:
        """Sleep until there is a message or a descriptor is readable; without `block`, only check. Returns
        the readable descriptors."""
        sources: list[Any] = [(source, zmq.POLLIN) for source in (self._socket, *descriptors)]
        ready = zmq.zmq_poll(sources, -1 if block and not self._frames else 0)
        return [source for source, _ in ready if source in descriptors]

    def close(self) -> None:
        if self._pid == process_id.current():
            self._answers.close()
            self._socket.close(linger=0)
            self._context.term()
        else:
            _inherited.append(self)
