"""A worker on another machine: `workers.main.WorkerLoop`, with a connection in place of its socket.

Runs in a process with no other purpose: an actor of Ray, or a process started by a test. It opens the user's
objects and works on the main thread. One thread sends batches, so that the wire is busy while the next batch
is loaded. Another one listens, and each connection, from the proxy or from a client that requests stacks, has
a thread of its own. Batches are written to blocks of the process's own arena. Once their bytes are sent, the
blocks are reused for the next tasks; a pool like the consumer's manages them.

The proxy sends tasks one by one. When it is gone there is nothing left to do: the main thread returns after
its batch, and the starter of the process ends it. If neither happens in time, the process ends itself.

A `FarSetup` is made in the consumer. It is pickled by cloudpickle, which includes objects defined in a
notebook or a script, and leaves out what exists only on this machine (memory, descriptors).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import platform
import queue
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fastq_loader.errors import ProtocolError, UnpicklableError
from fastq_loader.extras.remote import connection
from fastq_loader.extras.remote.connection import LONGEST, MESSAGE, REPORT, WELCOME, Connection, Lost
from fastq_loader.ipc.claim_table import ClaimTable
from fastq_loader.ipc.inbox import Inbox
from fastq_loader.ipc.messages import VERSION, Answer, BatchHandle, Message, encode
from fastq_loader.memory import allocator
from fastq_loader.memory.allocator import Allocator, Used
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.blocks import BlockOwner, Extents
from fastq_loader.memory.pool import BlockPool
from fastq_loader.reading import collate
from fastq_loader.system import calls, process_id
from fastq_loader.workers.config import Setup
from fastq_loader.workers.main import WorkerLoop, prepare_signals
from fastq_loader.workers.payload import Descriptors, Payload, PickledPayload

#: Answers that may wait to be sent, besides one that is being sent and one that is being loaded.
_WAITING = 1
#: Number of batches whose blocks are retained: one being sent, one waiting, and one being loaded.
_BATCHES = 3
#: Connections that have not proven to have the token yet. Each takes two round trips; only a scan of ports
#: makes more.
_STRANGERS = 64
#: Seconds by which this process outlives its proxy in the middle of a batch. Ray ends it sooner, and would
#: print a warning if it ended by itself.
_OUTLIVES = 3.0
#: Seconds between two attempts when descriptors or threads are exhausted.
_PAUSE = 0.1

#: Payload and body of an answer, and the offsets of the blocks that contain the body.
_Packed = tuple[bytes, Sequence[Any], Sequence[int]]


@dataclass(frozen=True)
class FarSetup:
    """Setup of all far workers of a pool.

    Attributes:
        setup: of any worker; the payload is pickled.
        path: the consumer's `sys.path`. Entries missing on the other machine are appended to its own.
        versions: the consumer's versions, which its workers must have, too.
    """

    setup: Setup
    path: tuple[str, ...]
    versions: dict[str, str]

    @classmethod
    def of(cls, setup: Setup) -> FarSetup:
        """Pickle the payload of a setup for other machines.

        Raises:
            UnpicklableError: the dataset, or one of its functions, cannot be pickled.
        """
        payload = PickledPayload(_pickled(setup.plan.payload.open()), Descriptors())
        # A far worker receives the tasks that its proxy has claimed; it claims none.
        options = replace(setup.plan.options, workers=None)
        plan = replace(setup.plan, payload=payload, options=options, shared_tasks=False)
        sent = replace(setup, plan=plan, mapping=None, descriptors={})
        return cls(sent, tuple(sys.path), versions())


def versions() -> dict[str, str]:
    """Versions that must be the same in the consumer and its workers."""
    return {
        "fastq_loader's protocol": str(VERSION),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def _pickled(parts: dict[str, Any]) -> bytes:
    try:
        from cloudpickle import dumps
    except ImportError:  # then the user's objects must be importable from modules
        dumps = pickle.dumps
    try:
        pickled: bytes = dumps(parts)
        return pickled
    except Exception:
        for name, part in parts.items():
            try:
                dumps(part)
            except Exception as error:
                text = f"{name} cannot be sent to another machine: {type(error).__name__}: {error}"
                raise UnpicklableError(text) from error
        raise


class FarWorker:
    """The far worker of this process. The main thread creates it, opening the user's objects, and runs it.

    Args:
        pickled: a `FarSetup`.
        address: of this machine, at which it listens.
        ports: ports that it may listen at; 0 is any.

    Attributes:
        port: at which it listens.

    Raises:
        ProtocolError: a version differs from the consumer's.
        OSError: no port is free.
    """

    def __init__(self, pickled: bytes, address: str, ports: Sequence[int]) -> None:
        sent: FarSetup = pickle.loads(pickled)
        if sent.versions != (here := versions()):
            raise ProtocolError(f"this machine has {here}, and the consumer {sent.versions}")
        prepare_signals()
        multiprocessing.current_process().daemon = True  # like torch's workers
        sys.path += [folder for folder in sent.path if folder not in sys.path]
        self._setup = sent.setup
        with contextlib.suppress(Exception):  # the worker fails in the same way, and reports it
            plan = self._setup.plan
            opened = replace(plan, payload=Payload(*plan.payload.open().values()))
            self._setup = replace(self._setup, plan=opened)
        self._listener = connection.listen(address, ports)
        self.port: int = self._listener.getsockname()[1]
        self._strangers: deque[socket.socket] = deque()
        self._has_proxy = threading.Lock()
        self._proxies: queue.Queue[tuple[socket.socket, Connection, int]] = queue.Queue()
        self._over = False
        threading.Thread(target=self._accept, name="fastq_loader: listening", daemon=True).start()

    def run(self) -> None:
        """Wait for the proxy, and work until it stops this worker, or is gone."""
        with contextlib.suppress(Lost, KeyboardInterrupt):  # the consumer's own is the one to show
            self._work_for(*self._proxies.get())

    def _work_for(self, sock: socket.socket, client: Connection, number: int) -> None:
        for held in (sock, self._listener):  # a child of user code would keep the connection open
            os.register_at_fork(after_in_child=held.close)
        gc.freeze()  # see `workers.main`
        arena = Arena(1)
        blocks = SentBlocks(arena, self._setup.plan.for_device)
        allocator.install(blocks)
        collate.install()
        setup = replace(self._setup, worker=number)
        proxy = ProxySocket(client, blocks)
        try:
            # The claim table is its own, and has no effect.
            WorkerLoop(setup, blocks, proxy, ClaimTable(arena.fd, arena.mapping.claims)).run()
            proxy.finish()
        finally:
            self._over = True
            with contextlib.suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)

    # ---- connections, in threads --------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
                sock.settimeout(connection.PATIENCE)
                connection.configure(sock, connection.NOTICED_THERE)
                if len(self._strangers) == _STRANGERS:
                    self._strangers.popleft().shutdown(socket.SHUT_RDWR)
                self._strangers.append(sock)
                threading.Thread(
                    target=self._serve, args=(sock,), name="fastq_loader: serving", daemon=True
                ).start()
            except (OSError, RuntimeError, IndexError):  # the client has left, or a resource is exhausted
                time.sleep(_PAUSE)

    def _serve(self, sock: socket.socket) -> None:
        client = Connection(sock, MESSAGE)
        with sock, contextlib.suppress(Lost, ProtocolError):
            try:
                request = connection.admit(client, self._setup.token, os.urandom(connection.NONCE_BYTES))
            finally:
                with contextlib.suppress(ValueError):  # it was the oldest, and `_accept` ended it
                    self._strangers.remove(sock)
            if request.asks:
                client.send(REPORT, _stacks())
            elif self._has_proxy.acquire(blocking=False):
                client.settimeout(None)
                client.send(WELCOME, b"")
                self._proxies.put((sock, client, request.worker))
                self._end_with(sock)

    def _end_with(self, sock: socket.socket) -> None:
        """End this process if it outlives its proxy, even if the main thread is busy."""
        poller = select.poll()
        poller.register(sock, select.POLLRDHUP)
        poller.poll()
        time.sleep(_OUTLIVES)
        if not self._over:
            os._exit(1)


def _stacks() -> bytes:
    """Dump the Python stacks of the threads of this process."""
    with open(calls.memfd_create("fastq_loader stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()[: LONGEST[REPORT]]


class SentBlocks(Allocator):
    """The blocks of a far worker, which are granted to the next task once their bytes are sent.

    Args:
        arena: its own.
        for_device: see `Allocator`.

    Attributes:
        sent: offsets of blocks whose bytes were sent; the sending thread appends to it.
        shipped: the blocks of the last answer's batch.
    """

    def __init__(self, arena: Arena, for_device: bool) -> None:
        super().__init__(arena.mapping, 0, for_device=for_device)
        self.sent: deque[int] = deque()
        self.shipped: Used = ()
        self._kept = BlockPool(arena)

    def begin(self, grants: Extents) -> None:
        self.shipped = ()
        while self.sent:
            self._kept.drop([self.sent.popleft()])
        if self._kept.trim(_BATCHES):
            self.free_ranges(self._kept.space(0))
        super().begin(self._kept.grant(BlockOwner(0)))

    def finish(self, used: Used) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        fresh, returned = super().finish(used)
        self._kept.accept(0, tuple(used), fresh, returned)
        self.shipped = used
        return (), ()


class ProxySocket(Inbox):
    """Socket of a far worker.

    Args:
        connection: to the proxy.
        blocks: the blocks of the batches.
    """

    def __init__(self, connection: Connection, blocks: SentBlocks) -> None:
        super().__init__()
        self._connection = connection
        self._blocks = blocks
        self._sending: queue.Queue[_Packed | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="fastq_loader: sending", daemon=True)
        self._thread.start()

    def _frame(self, block: bool) -> bytes | None:
        """As in the base class. Raises Lost if the connection has ended."""
        if not block and not calls.readable([self._connection.fileno()], 0):
            return None
        return self._connection.receive().payload

    def send(self, message: Message) -> None:
        """Send an answer after those already queued.

        Raises:
            Exception: it does not fit into a message.
        """
        process_id.stay_in(self._pid)
        assert type(message) is Answer, "the proxy says all else by itself"
        used = self._blocks.shipped
        handle, body = self._taken_apart(message.handle, used)
        payload = encode(message._replace(handle=handle))
        if len(payload) > LONGEST[MESSAGE]:
            raise ValueError(f"{len(payload)} bytes of plain values do not fit into a message")
        self._blocks.shipped = ()
        if not body:  # an error that replaces a batch too large for a message
            self._blocks.sent.extend(offset for offset, _ in used)
            used = ()
        self._sending.put((payload, body, [offset for offset, _ in used]))

    def _taken_apart(self, handle: BatchHandle | None, used: Used) -> tuple[BatchHandle | None, list[Any]]:
        """Return a handle whose segments have sizes in place of locations, and the bytes of the segments.

        Only the bytes that the batch needs are sent. So each part starts with the first byte of its segment;
        the third number of a packet is its size.
        """
        if handle is None or not handle.segments:
            return handle, []
        mapping, segments, body = self._blocks.mapping, [], []
        for (offset, _, third), (_, need) in zip(handle.segments, used, strict=True):
            start = 0 if third == need else third
            body.append(mapping.read(offset + start, need - start))
            segments.append((0, need - start, third - start))
        return handle._replace(segments=tuple(segments)), body

    def _send_all(self) -> None:
        while (answer := self._sending.get()) is not None:
            payload, body, offsets = answer
            with contextlib.suppress(Lost):  # the main thread detects that, too
                self._connection.send(MESSAGE, payload, body)
            self._blocks.sent.extend(offsets)

    def finish(self) -> None:
        """Wait until all answers are sent."""
        self._sending.put(None)
        self._thread.join()
