"""The proxy of a worker on another machine: for the consumer it is the worker.

Runs in a process of its own, on one thread. It has the worker's number,
socket, claims and blocks. A task that it has is forwarded to the far worker. When the head of the answer has
come, the next task is claimed and forwarded, so that the far worker never waits for bytes. Then the bytes are
received straight into blocks, and the usual answer is sent, which says where they lie now.

A proxy without a far worker waits for a place. One that loses its far worker waits for another one if no
batch is lost with it, and if that makes no difference. Else it dies of it, as a worker would. Of places it
hears over a pipe, where it says in return how it fares: a `Status`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple, NoReturn

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.claim_table import ClaimTable
from fastq_loader.ipc.decoding import decode_for_consumer
from fastq_loader.ipc.messages import Answer, Epoch, Handle, Ping, Space, Stop, Task, encode, pass_on
from fastq_loader.ipc.sockets import WorkerSocket
from fastq_loader.memory.allocator import Allocator
from fastq_loader.remote.connection import MESSAGE, WELCOME, Address, Connection, Lost, Request, Tls, connect
from fastq_loader.system import calls
from fastq_loader.workers import children
from fastq_loader.workers.config import Setup
from fastq_loader.workers.main import open_socket, prepare_signals
from fastq_loader.workers.task_queue import TaskQueue

#: Places, one after the other, where no far worker was to be had, until the proxy gives up.
_ATTEMPTS = 3
#: Tasks that a proxy without a far worker keeps before it looks which of them others have claimed.
_UNREAD = 256


class Place(NamedTuple):
    """Where a worker may run: to a proxy that waits for one.

    Attributes:
        address: of the far worker there.
        pid: its process id.
        node: what that machine is called.
    """

    address: Address
    pid: int
    node: str


class NoPlace(NamedTuple):
    """There is no place, and none will come: to a proxy that waits for one. `why`: in words."""

    why: str


class Status(NamedTuple):
    """From a proxy.

    Attributes:
        waits: it waits for a place.
        pid: of its far worker, which is up; or 0.
        why: it is about to exit, because its far worker is lost or was not to be had; or "".
    """

    waits: bool = False
    pid: int = 0
    why: str = ""


def main(setup: Setup, tls: Tls | None, pipe: Pipe[Any, Any], traffic: memoryview) -> None:
    """Entry point of a proxy; for the arguments see `Proxy`."""
    prepare_signals()
    children.leave_with(setup.consumer, setup.folder)
    assert setup.mapping is not None, "it is inherited"
    claims = ClaimTable(setup.mapping.fd, setup.mapping.claims)
    if not os.path.isdir(setup.folder):  # the loader was closed before this was up
        return
    blocks = Allocator(setup.mapping, setup.worker, setup.space, setup.plan.for_device)
    socket = open_socket(setup, blocks)
    try:
        Proxy(setup, tls, pipe, traffic, socket, claims, blocks).run()
    finally:
        socket.close()


class Proxy:
    """The loop of a proxy.

    Args:
        setup: what the worker is told.
        tls: encrypts the connection, or None.
        pipe: to the consumer's `ProxyPool`.
        traffic: bytes that have come, by the number of the worker.
        socket: to the consumer.
        claims: who loads which shared task.
        blocks: where answers are received.
    """

    def __init__(
        self,
        setup: Setup,
        tls: Tls | None,
        pipe: Pipe[Any, Any],
        traffic: memoryview,
        socket: WorkerSocket,
        claims: ClaimTable,
        blocks: Allocator,
    ) -> None:
        self._setup = setup
        self._tls = tls
        self._shared_tasks = setup.plan.shared_tasks
        self._pipe = pipe
        self._socket = socket
        self._claims = claims
        self._blocks = blocks
        self._traffic = traffic
        self._tasks = TaskQueue(claims, self._shared_tasks, setup.worker)
        self._far: Connection | None = None
        self._greeted = False
        self._pings: list[Ping] = []  # not sent back
        self._epoch: Epoch | None = None
        self._stopping = False
        self._failures = 0
        self._unsent: list[Task | Epoch] = []  # what the far worker has to hear before it can be sent a task
        self._due: deque[Task] = deque()  # forwarded, and not answered
        self._heads = 0  # of those, from the left, whose answers have begun to come

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
        """Sleep until something has come, unless a task that might be claimed is being claimed by another."""
        descriptors = [self._pipe.fileno()]
        if self._far is not None:
            descriptors.append(self._far.fileno())
        return self._socket.wait(descriptors, block=self._far is None or not (self._idle and self._tasks))

    @property
    def _idle(self) -> bool:
        """Whether the far worker has nothing to load."""
        return self._heads == len(self._due)

    # ---- from the consumer --------------------------------------------------------------------

    def _read_messages(self) -> None:
        while not self._stopping and (message := self._socket.receive(block=False)) is not None:
            if isinstance(message, Task):
                self._add(message)
            elif isinstance(message, Epoch):
                self._tasks.drop()
                if self._shared_tasks:
                    self._unsent.clear()
                self._epoch = message
                self._unsent.append(message)
            elif isinstance(message, Space):
                self._blocks.give(message.ranges)
            elif isinstance(message, Ping):
                self._pings.append(message)
                self._answer_pings()
            else:
                assert isinstance(message, Stop)
                self._stopping = True

    def _answer_pings(self) -> None:
        """Send them back; not before the greeting: until then there is no way back to the consumer."""
        while self._greeted and self._pings:
            self._socket.send(self._pings.pop())

    def _add(self, task: Task) -> None:
        if not self._shared_tasks:  # all are this worker's: the far one sees to their order
            self._unsent.append(task)
            return
        self._tasks.add(task)
        if self._far is None and len(self._tasks) % _UNREAD == 0:
            self._tasks.prune()

    # ---- to the far worker --------------------------------------------------------------------

    def _forward(self) -> None:
        """Tell the far worker what it has to know, and give it a task if it has none.

        Raises:
            Lost: it is gone.
        """
        if self._far is None:
            return
        for message in self._unsent:
            self._send(self._far, message)
        self._unsent.clear()
        while self._idle and (task := self._tasks.take()) is not None:
            self._send(self._far, task)

    def _send(self, connection: Connection, message: Task | Epoch) -> None:
        if isinstance(message, Task):
            self._due.append(message)
            self._mark()
            message = message._replace(grants=(), promises=(), ticket=0)
        connection.send(MESSAGE, pass_on(message))

    def _mark(self) -> None:
        """Note at which task this worker would die now: one that is loaded, rather than one that was."""
        at = min(self._heads, len(self._due) - 1)
        self._claims.begin(self._setup.worker, self._due[at].ticket if self._due else None)

    def _see_off(self) -> None:
        """Let the far worker finish, and wait until it has ended. The consumer does not wait for ever."""
        if self._far is None:
            return
        with contextlib.suppress(Lost, ProtocolError):
            self._far.send(MESSAGE, encode(Stop()))
            while (frame := self._far.receive()) is not None:
                self._far.receive_exactly(frame.body)

    # ---- from the far worker ------------------------------------------------------------------

    def _receive(self, connection: Connection) -> None:
        """An answer: its head, and then its bytes.

        Raises:
            Lost, ProtocolError: the far worker is of no use any more.
        """
        frame = connection.receive()
        assert frame is not None, "it was waited for"
        arrived = time.monotonic_ns()
        answer = decode_for_consumer(frame.payload)
        if not isinstance(answer, Answer) or not self._due or answer[:3] != self._due[0][:3]:
            raise ProtocolError("it did not send an answer to its task")
        self._heads = 1
        self._read_messages()
        self._forward()
        task = self._due[0]
        self._blocks.begin(task.grants, task.promises)
        handle, used = self._receive_body(connection, answer.handle, frame.body)
        fresh, returned = self._blocks.finish(used)
        self._traffic[self._setup.worker] += frame.nbytes
        self._socket.send(
            _at_this_clock(answer, arrived)._replace(
                fresh=tuple(fresh), returned=tuple(returned), handle=handle
            )
        )
        self._due.popleft()
        self._heads = 0
        self._mark()

    def _receive_body(
        self, connection: Connection, handle: Handle | None, body: int
    ) -> tuple[Handle | None, list[tuple[int, int]]]:
        """The handle with the blocks that the bytes lie in now, and these as (offset, bytes used)."""
        announced = () if handle is None else handle.segments
        if sum(nbytes for _, nbytes, _ in announced) != body:
            raise ProtocolError(f"a body of {body} bytes that is not what the answer says")
        segments, used = [], []
        for _, nbytes, third in announced:
            block = self._blocks.take(nbytes)
            connection.receive_body(calls.view(block.address, nbytes))
            segments.append((block.offset, block.size, third))
            used.append((block.offset, nbytes))
        return handle and handle._replace(segments=tuple(segments)), used

    # ---- places -------------------------------------------------------------------------------

    def _take_place(self) -> None:
        """The consumer has found a place: connect to the far worker there."""
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
            far, _ = connect(place.address, setup.token, request, WELCOME, MESSAGE, tls=self._tls)
        except (Lost, ProtocolError) as error:
            self._failures += 1
            self._lose(str(error), final=self._failures == _ATTEMPTS)
            return
        self._failures = 0
        self._far = far
        self._report(Status(pid=place.pid))
        if not self._greeted:
            self._greeted = True
            self._socket.say_hello()
            self._answer_pings()

    def _report(self, status: Status) -> None:
        with contextlib.suppress(OSError):  # the consumer is gone, and in a moment this process, too
            self._pipe.send(status)

    def _lose(self, why: str, final: bool = False) -> None:
        """There is no far worker any more: wait for another one, if that makes no difference."""
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
    """An answer in whose times it was finished `now`: the clocks of two machines begin anywhere."""
    shift = now - answer.finished
    return answer._replace(
        started=answer.started + shift,
        finished=now,
        fetched=answer.fetched and answer.fetched + shift,
        collated=answer.collated and answer.collated + shift,
    )
