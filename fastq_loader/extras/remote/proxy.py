"""The proxy of a worker on another machine, which acts as the worker towards the consumer.

Runs in a process of its own, on one thread. It has the worker's number, socket, claims and blocks, and
forwards its tasks to the far worker. When the head of an answer has arrived, it claims and forwards the next
task, so that the far worker never waits for bytes. Then it receives the bytes straight into blocks, and sends
the usual answer, with their new location.

A proxy without a far worker waits for a place. One that loses its far worker waits for another place if no
batch is lost and the change has no effect on results. Otherwise it dies, as a worker would. It receives
places over a pipe, and sends its `Status` back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple, NoReturn

from fastq_loader.errors import ProtocolError
from fastq_loader.extras.remote.connection import (
    MESSAGE,
    WELCOME,
    Address,
    Connection,
    Lost,
    Request,
    connect,
)
from fastq_loader.ipc.claim_table import ClaimTable
from fastq_loader.ipc.messages import (
    Answer,
    BatchHandle,
    BeginEpoch,
    Hello,
    Space,
    Stop,
    Task,
    decode_for_consumer,
    encode,
    reencode,
)
from fastq_loader.ipc.sockets import WorkerSocket
from fastq_loader.memory.allocator import Allocator
from fastq_loader.system import calls
from fastq_loader.workers import children
from fastq_loader.workers.config import Setup
from fastq_loader.workers.main import open_socket, prepare_signals
from fastq_loader.workers.task_queue import TaskQueue

#: Consecutive places without a reachable far worker after which the proxy gives up.
_ATTEMPTS = 3
#: Tasks that a proxy without a far worker queues before it drops the claimed ones among them.
_UNREAD = 256


class Place(NamedTuple):
    """A place to run a worker. Sent to a waiting proxy.

    Attributes:
        address: of the far worker there.
        pid: its process id.
        node: name of that machine.
    """

    address: Address
    pid: int
    node: str


class NoPlace(NamedTuple):
    """Sent to a waiting proxy when no machine will be available; `why` is the reason."""

    why: str


class Status(NamedTuple):
    """Sent by a proxy.

    Attributes:
        waits: whether it waits for a place.
        pid: process id of its far worker, once connected; else 0.
        why: why it is about to exit: its far worker is lost, or could not be had; else "".
    """

    waits: bool = False
    pid: int = 0
    why: str = ""


def main(setup: Setup, pipe: Pipe[Any, Any], traffic: memoryview) -> None:
    """Entry point of a proxy; for the arguments see `Proxy`."""
    calls.name_process(f"fastq_proxy{setup.worker}")
    prepare_signals(setup.plan.grace)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the consumer, too
    children.leave_with(setup.consumer)
    assert setup.mapping is not None, "it is inherited"
    claims = ClaimTable(setup.mapping.fd, setup.mapping.claims)
    blocks = Allocator(setup.mapping, setup.worker, setup.space, setup.plan.for_device)
    socket = open_socket(setup, blocks)
    try:
        Proxy(setup, pipe, traffic, socket, claims, blocks).run()
    finally:
        socket.close()


class Proxy:
    """The loop of a proxy.

    Args:
        setup: the worker's.
        pipe: to the consumer's `ProxyPool`.
        traffic: bytes received, by worker number.
        socket: to the consumer.
        claims: the claims of shared tasks by workers.
        blocks: where answers are received.
    """

    def __init__(
        self,
        setup: Setup,
        pipe: Pipe[Any, Any],
        traffic: memoryview,
        socket: WorkerSocket,
        claims: ClaimTable,
        blocks: Allocator,
    ) -> None:
        self._setup = setup
        self._pipe = pipe
        self._socket = socket
        self._blocks = blocks
        self._traffic = traffic
        self._tasks = TaskQueue(claims, setup.plan.shared_tasks, setup.worker)
        self._far: Connection | None = None
        self._greeted = False
        self._epoch: BeginEpoch | None = None
        self._stopping = False
        self._failures = 0
        self._unsent: list[Task | BeginEpoch] = []  # to be sent to the far worker before the next task
        self._due: deque[Task] = deque()  # forwarded and not answered

    def run(self) -> None:
        self._report(Status(waits=True))
        while True:
            self._read_messages()
            if self._stopping:
                self._see_off()
                return
            ready: list[object] = []
            try:
                self._forward()
                ready = self._wait()
                if self._far is not None and self._far.fileno() in ready:
                    self._receive(self._far)
            except (Lost, ProtocolError) as error:
                self._lose(str(error))
            except MemoryError as error:
                self._die(str(error))
            if self._pipe.fileno() in ready:
                self._take_place()

    def _wait(self) -> list[object]:
        """Sleep until something arrives. Returns at once if the far worker is idle and a queued task is being
        claimed by another worker."""
        descriptors = [self._pipe.fileno()]
        if self._far is not None:
            descriptors.append(self._far.fileno())
        is_claiming = self._tasks and not self._due
        return self._socket.wait(descriptors, block=self._far is None or not is_claiming)

    @property
    def _shared_tasks(self) -> bool:
        return self._setup.plan.shared_tasks

    # ---- from the consumer --------------------------------------------------------------------

    def _read_messages(self) -> None:
        while not self._stopping and (message := self._socket.receive(block=False)) is not None:
            if isinstance(message, Task):
                self._add(message)
            elif isinstance(message, BeginEpoch):
                self._tasks.drop()
                if self._shared_tasks:
                    self._unsent.clear()
                self._epoch = message
                self._unsent.append(message)
            elif isinstance(message, Space):
                self._blocks.free_ranges(message.ranges)
            else:
                assert isinstance(message, Stop)
                self._stopping = True

    def _add(self, task: Task) -> None:
        if not self._shared_tasks:  # all are this worker's, and the far worker observes their order
            self._unsent.append(task)
            return
        self._tasks.add(task)
        if self._far is None and len(self._tasks) % _UNREAD == 0:
            self._tasks.prune()

    # ---- to the far worker --------------------------------------------------------------------

    def _forward(self, arriving: int = 0) -> None:
        """Send unsent messages to the far worker, and a task if it has none to load.

        Args:
            arriving: how many of the forwarded tasks have been loaded, and their answers are arriving.

        Raises:
            Lost: it is gone.
        """
        if self._far is None:
            return
        for message in self._unsent:
            self._send(self._far, message, arriving)
        self._unsent.clear()
        while len(self._due) == arriving and self._tasks.waiting and (task := self._tasks.take()) is not None:
            self._send(self._far, task, arriving)

    def _send(self, connection: Connection, message: Task | BeginEpoch, arriving: int) -> None:
        if isinstance(message, Task):
            self._due.append(message)
            # If this worker dies, the task that is being loaded is to blame, rather than one already loaded.
            self._tasks.begin(self._due[min(arriving, len(self._due) - 1)])
            message = message._replace(grants=(), ticket=0)
        connection.send(MESSAGE, reencode(message))

    def _see_off(self) -> None:
        """Let the far worker finish, and wait for its end. The consumer limits this time."""
        if self._far is None:
            return
        with contextlib.suppress(Lost, ProtocolError):
            self._far.send(MESSAGE, encode(Stop()))
            while True:
                self._far.receive_exactly(self._far.receive().body)

    # ---- from the far worker ------------------------------------------------------------------

    def _receive(self, connection: Connection) -> None:
        """Receive an answer: its head, and then its bytes.

        Raises:
            Lost, ProtocolError: the connection to the far worker has failed.
        """
        frame = connection.receive()
        arrived = time.monotonic_ns()
        answer = decode_for_consumer(frame.payload)
        if not isinstance(answer, Answer) or not self._due or answer[:3] != self._due[0][:3]:
            raise ProtocolError("it did not send an answer to its task")
        self._read_messages()
        self._forward(arriving=1)
        task = self._due[0]
        self._blocks.begin(task.grants)
        handle, used = self._receive_body(connection, answer.handle, frame.body)
        fresh, returned = self._blocks.finish(used)
        self._traffic[self._setup.worker] += frame.nbytes
        answer = _at_this_clock(answer, arrived)
        self._socket.send(answer._replace(fresh=fresh, returned=returned, handle=handle))
        self._due.popleft()
        self._tasks.begin(self._due[0] if self._due else None)

    def _receive_body(
        self, connection: Connection, handle: BatchHandle | None, body: int
    ) -> tuple[BatchHandle | None, list[tuple[int, int]]]:
        """Return the handle with the blocks that contain the bytes, and these blocks as (offset, bytes)."""
        announced = () if handle is None else handle.segments
        if sum(nbytes for _, nbytes, _ in announced) != body:
            raise ProtocolError(f"a body of {body} bytes differs from the size in its answer")
        segments, used = [], []
        for _, nbytes, third in announced:
            block = self._blocks.take(nbytes)
            connection.receive_body(calls.view(block.address, nbytes))
            segments.append((block.offset, block.size, third))
            used.append((block.offset, nbytes))
        return handle and handle._replace(segments=tuple(segments)), used

    # ---- places -------------------------------------------------------------------------------

    def _take_place(self) -> None:
        """Take a place from the consumer, and connect to the far worker there."""
        try:
            place: Place | NoPlace = self._pipe.recv()
        except EOFError:  # the consumer is gone, or about to end this process
            self._stopping = True
            return
        if isinstance(place, NoPlace):
            self._die(place.why)
        setup = self._setup
        request = Request(False, setup.worker)
        try:
            far, _ = connect(place.address, setup.token, request, WELCOME, MESSAGE)
        except (Lost, ProtocolError) as error:
            self._failures += 1
            self._lose(str(error), final=self._failures == _ATTEMPTS)
            return
        self._failures = 0
        self._far = far
        self._report(Status(pid=place.pid))
        if not self._greeted:
            self._greeted = True
            self._socket.send(Hello(os.getpid()))

    def _report(self, status: Status) -> None:
        with contextlib.suppress(OSError):  # the consumer is gone, and this process will soon be, too
            self._pipe.send(status)

    def _lose(self, why: str, final: bool = False) -> None:
        """The far worker is gone: wait for another one if that has no effect on results, otherwise exit."""
        had_one, self._far = self._far is not None, None
        if final or self._due or (had_one and not self._shared_tasks):
            self._die(why)
        if had_one:
            self._unsent = [] if self._epoch is None else [self._epoch]
        self._report(Status(waits=True))

    def _die(self, why: str) -> NoReturn:
        self._report(Status(why=why))
        sys.exit(1)


def _at_this_clock(answer: Answer, now: int) -> Answer:
    """Shift the times of an answer so that it finished `now`: machines' clocks start at different times."""
    shift = now - answer.finished
    return answer._replace(
        started=answer.started + shift,
        finished=now,
        fetched=answer.fetched and answer.fetched + shift,
        collated=answer.collated and answer.collated + shift,
    )
