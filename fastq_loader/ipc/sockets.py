"""Sockets: tasks are sent over ZeroMQ, answers over a Unix socket.

`Line` and `ConsumerSocket` run in the consumer, `WorkerSocket` in a worker, each on one thread. The consumer
makes a `Line` just before it starts a worker: a pair of sockets for the answers, and a socket that listens at
an abstract address for tasks. The worker inherits its ends, or is sent them. The consumer's ROUTER connects
to the address, whose random name is the routing id, even before the worker is up: tasks are queued. When the
worker is up, its zmq socket takes over the socket that listens. A worker that replaces a dead one has another
address, and receives nothing that was sent to the dead one.

An abstract address is a name without a file, which lasts as long as the socket does. The consumer holds the
socket until zmq has connected, and zmq connects once: nobody else can listen at the address in the place of a
worker that has died. A worker accepts connections only from the consumer's process.

A ZeroMQ message passes through two more threads, one at each end, which cost a small batch as much as loading
half of its samples. A worker's answer goes to the consumer directly (`SOCK_SEQPACKET`: in order, each message
whole). It can be read even after the worker has ended: the broken connection is seen after the last answer.
The frame of a long answer lies in a block, and the message refers to it. So there is
room for as many answers as a worker may be ahead. Only a worker that is hundreds of answers ahead of a
consumer that does not read has to wait, which costs no more than any other limit on reading ahead.

A process that is forked at any moment may inherit any of the descriptors, so to close one need not end the
connection: the consumer shuts a line down to end it. A worker is dead if its process descriptor is readable;
the end of its line is only the second sign.

One `wait` serves everything: answers, broken connections, the workers' process descriptors, a wake-up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket as unix
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.inbox import Inbox
from fastq_loader.ipc.limits import expect_descriptors, require_threads
from fastq_loader.ipc.messages import (
    Answer,
    Bundle,
    Hello,
    InBlock,
    Message,
    Read,
    Task,
    ToWorker,
    decode_for_consumer,
    decode_for_worker,
    encode,
    encode_task,
)
from fastq_loader.system import calls, process_id
from fastq_loader.system.interrupts import without_signals

#: Seconds for zmq's thread to connect to an address, which takes 0.1 ms.
_PATIENCE = 10.0
#: Plain ints, because `|` of the enum takes a microsecond.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
#: Descriptors of a zmq context and its socket: epolls and mailboxes of threads.
_OWN_DESCRIPTORS = 14
#: Bytes of the longest frame that is sent over the socket; longer ones go into a block.
_LONGEST = 1 << 15
#: Bytes below which a frame is never put into a block.
_LEAST = 512
#: Requested size of the send buffer for answers, in bytes. Most systems allow 416 KiB, overhead included.
_ROOM = 1 << 20
#: Sent to a worker once it can accept its connection.
_BEGIN = b"!"
#: Threads of a zmq context.
THREADS = 2


def _configure(socket: zmq.Socket[bytes]) -> None:
    for option in (
        zmq.LINGER,
        zmq.SNDHWM,  # the scheduler's window is the bound
        zmq.RCVHWM,
        zmq.HANDSHAKE_IVL,  # a stopped process must not lose its connection
    ):
        socket.setsockopt(option, 0)


#: Lines that a forked child of the consumer inherits.
_lines: set[Line] = set()


def _leave_lines() -> None:
    """In a forked child, close the inherited sockets, except the ends of the worker that it is itself."""
    for line in _lines:
        os.close(line.descriptor)
        line.descriptor = -1
        if "answers" not in line.ends:  # this child is another worker, or none
            line.close_ends()
    _lines.clear()


process_id.in_forked_children(_leave_lines)


class Line:
    """The consumer's connections to one worker process, in both directions.

    Args:
        worker: the worker's number.

    Attributes:
        name: the address's random name, and zmq's routing id.
        descriptor: the consumer's end of the answers; -1 once nothing more is read.
        ends: the worker's ends: of the "answers", and the listening socket for "tasks". They are closed here
            when the worker was started, and when zmq has connected.

    Raises:
        OSError: there are no free descriptors, or a sandbox forbids abstract addresses.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.name = b"fastq-%s" % secrets.token_hex(16).encode()
        # Descriptors, not socket objects: those would warn when a forked child drops its copies.
        with without_signals(), unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as tasks:
            tasks.bind(b"\0" + self.name)
            tasks.listen()
            own_end, its = unix.socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET)
            own_end.setblocking(False)
            self.descriptor = own_end.detach()
            self.ends = {"answers": its.detach(), "tasks": tasks.detach()}
            _lines.add(self)

    @property
    def endpoint(self) -> str:
        """The address, as zmq takes it."""
        return f"ipc://@{self.name.decode()}"

    def close_ends(self, *names: str) -> None:
        """Close the worker's ends with these names, or all."""
        for name in names or list(self.ends):
            os.close(self.ends.pop(name))

    def close(self) -> None:
        """End the line, whoever has inherited it. Has no effect the second time."""
        _lines.discard(self)  # before: a forked child would close another's descriptor
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            # The worker's end may be closed already.
            with unix.socket(fileno=descriptor) as end, contextlib.suppress(OSError):
                end.shutdown(unix.SHUT_RDWR)
        self.close_ends()


class ConsumerSocket:
    """The consumer's end, for all workers of a pool. The caller checks that there are enough descriptors and
    threads.

    Args:
        token: the pool's token, see `messages`.
        read: see `decode_for_consumer`.

    Attributes:
        woken: whether `wake` was called.
    """

    def __init__(self, token: bytes, read: Read | None = None) -> None:
        self.woken = False
        self._token, self._read = token, read
        self._waking = threading.RLock()  # keeps `wake` from writing to a closed descriptor
        self._wake = calls.wake_up()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        # pyzmq's C class directly: its subclass only forwards each call.
        self._send = super(zmq.Socket, self._socket).send
        _configure(self._socket)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)  # never: the address may be a stranger's by then
        self._at: dict[int, Line] = {}  # by descriptor; only lines that are read from
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._ready: list[Line] = []  # lines with something to read
        self._broken: list[int] = []  # workers whose connection has broken, until reported
        self._buffer = memoryview(bytearray(_LONGEST))

    def connect(self, *lines: Line) -> None:
        """Connect to workers, which need not be up yet, and let them begin.

        Raises:
            OSError: there are no free descriptors.
        """
        for line in lines:
            self._at[line.descriptor] = line
            self._epoll.register(line.descriptor, select.EPOLLIN)
            self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, line.name)
            self._socket.connect(line.endpoint)
        for line in lines:
            if not calls.readable([line.ends["tasks"]], _PATIENCE):
                raise OSError(errno.ECONNREFUSED, "no connection to a worker could be made")
            line.close_ends("tasks")
            with contextlib.suppress(ConnectionError):  # it has ended
                os.write(line.descriptor, _BEGIN)

    def _drop(self, line: Line) -> None:
        """Stop reading from a worker."""
        if self._at.pop(line.descriptor, None) is not None:
            self._epoll.unregister(line.descriptor)  # closing is not enough: a forked child may have a copy
            line.close()

    def disconnect(self, line: Line) -> None:
        """Disconnect a dead worker, and ignore anything that it sent."""
        with contextlib.suppress(zmq.ZMQError):  # zmq has noticed that it ended
            self._socket.disconnect(line.endpoint)
        self._drop(line)
        line.close()  # also one that an interrupt kept from being read
        self._ready, self._broken = [], [other for other in self._broken if other != line.worker]

    def send(self, line: Line, message: Message) -> None:
        """Queue a message for a worker."""
        self.send_all([line], encode(message))

    def send_task(self, line: Line, task: Task) -> None:
        """Queue a task for a worker.

        Raises:
            Exception: whatever pickling raises for the index of a task.
        """
        frame = encode_task(task, self._token)  # first: no message is begun if this fails
        self._send(line.name, _NOBLOCK_MORE)
        self._send(frame, _NOBLOCK)

    def send_all(self, lines: Iterable[Line], *frames: bytes) -> None:
        """Queue the same encoded messages, as one, for several workers."""
        frame = frames[0] if len(frames) == 1 else encode(Bundle(frames))
        for line in lines:
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
                ready.append(at[descriptor])
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
        return bool(calls.readable(self._at, timeout))

    def wake(self) -> None:
        """Make the current `wait` and all later ones return at once. May be called on any thread."""
        with self._waking:
            self.woken = True
            if self._wake >= 0:
                calls.wake(self._wake)

    def close(self) -> None:
        # Not left to the context, which finds its sockets through weak references. These are dead when the
        # garbage collector frees a loader, and the context would wait for the socket for ever.
        for line in list(self._at.values()):
            self._drop(line)
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
        ends: this worker's ends of its `Line`.
        consumer: process id of the consumer.
        in_block: puts an answer into a block; takes the answer and the length of its frame in bytes.
        ahead: number of answers that may wait to be read.

    Raises:
        OSError: there are too few free descriptors or threads.
        SystemExit: the consumer has closed the line.
    """

    dropped = (ProtocolError,)

    def __init__(
        self, ends: dict[str, int], consumer: int, in_block: Callable[[Answer, int], InBlock], ahead: int
    ) -> None:
        expect_descriptors(_OWN_DESCRIPTORS)
        require_threads(THREADS)
        super().__init__()
        self._in_block = in_block
        self._answers = unix.socket(fileno=ends["answers"])
        if not self._answers.recv(len(_BEGIN)):
            self._answers.close()
            raise SystemExit(0)
        self._answers.setsockopt(unix.SOL_SOCKET, unix.SO_SNDBUF, _ROOM)
        room = self._answers.getsockopt(unix.SOL_SOCKET, unix.SO_SNDBUF)
        # Times 2: the kernel rounds each message up, and counts its own overhead.
        self._longest = min(_LONGEST, max(room // (2 * ahead), _LEAST))
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._recv = super(zmq.Socket, self._socket).recv
        _configure(self._socket)
        for process in (consumer, self._pid):  # a sandbox may report our own id for each peer
            self._socket.setsockopt(zmq.IPC_FILTER_PID, process)
        tasks = unix.socket(fileno=ends["tasks"])
        self._socket.setsockopt(zmq.USE_FD, tasks.fileno())
        self._socket.bind(f"ipc://@{tasks.getsockname()[1:].decode()}")
        tasks.detach()  # zmq closes it

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

    def receive(self, block: bool) -> ToWorker | None:
        if self._frames or process_id.pid != self._pid:
            return super().receive(block)
        try:
            message = decode_for_worker(self._recv(0 if block else _NOBLOCK))
        except zmq.Again:
            return None
        except ProtocolError:
            return super().receive(block)
        if type(message) is Bundle:
            self._frames.extend(message.frames)
            return super().receive(block)
        return message  # type: ignore[return-value]  # the usual case: one message, in one function

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
