"""A worker on another machine: `workers.main.Worker`, with a connection in place of its socket.

Runs in a process that is nothing else: an actor of Ray, or one that a test starts. It opens the user's
objects and works on the main thread. A thread sends batches, so that the wire is busy while the next batch is
loaded. Another one listens, and each connection has one of its own: it belongs to the proxy, or to whoever
asks for stacks. Batches are written to blocks of an arena of its own. When their bytes have been sent, the
blocks serve the next tasks; a pool like the consumer's says which.

The proxy gives tasks out one by one. When it is gone there is nothing left to do: the main thread returns
after its batch, and whoever has started the process ends it. If neither happens in time, it ends itself.

A `FarSetup` is made in the consumer. It is pickled by cloudpickle, which includes what was defined in a
notebook or a script, and excludes what cannot leave the machine.
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
from fastq_loader.ipc.claim_table import ClaimTable
from fastq_loader.ipc.decoding import decode_for_worker
from fastq_loader.ipc.messages import (
    VERSION,
    Answer,
    Bundle,
    Epoch,
    Handle,
    Message,
    Ping,
    Space,
    Stop,
    Task,
    encode,
)
from fastq_loader.memory import allocator
from fastq_loader.memory.allocator import Allocator, Used
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.blocks import Extents, Holder
from fastq_loader.memory.pool import BlockPool
from fastq_loader.reading import collate
from fastq_loader.remote import connection
from fastq_loader.remote.connection import LONGEST, MESSAGE, REPORT, WELCOME, Connection, Lost, Tls
from fastq_loader.system import calls, process_id
from fastq_loader.workers.config import Setup
from fastq_loader.workers.main import Worker, prepare_signals
from fastq_loader.workers.payload import Descriptors, Payload, PickledPayload

#: Answers that may wait to be sent. One is on its way then, and one is loaded.
_WAITING = 1
#: Batches that blocks are kept for: one on its way, one that waits, and the one that is loaded.
_BATCHES = 3
#: Connections that have not shown the token yet. Each takes two round trips; more come from a scan of ports.
_STRANGERS = 64
#: Seconds for which this process outlives its proxy in the middle of a batch. Ray ends it sooner, and would
#: print a warning if it ended by itself.
_OUTLIVES = 3.0
#: Seconds between two tries where descriptors or threads are used up.
_PAUSE = 0.1

#: Payload and body of an answer, and the offsets of the blocks that the body lies in.
_Packed = tuple[bytes, Sequence[Any], Sequence[int]]


@dataclass(frozen=True)
class FarSetup:
    """Setup of all far workers of a pool.

    Attributes:
        setup: of any worker; the payload is pickled.
        tls: encrypts connections, or None.
        path: the consumer's `sys.path`. Entries that the other machine lacks come at the end of its own.
        versions: the consumer's, of all that has to be the same where workers run.
    """

    setup: Setup
    tls: Tls | None
    path: tuple[str, ...]
    versions: dict[str, str]

    @classmethod
    def of(cls, setup: Setup, tls: Tls | None) -> FarSetup:
        """
        Raises:
            UnpicklableError: the dataset, or one of its functions, cannot be pickled.
        """
        payload = PickledPayload(_pickled(setup.plan.payload.open()), Descriptors())
        # A far worker is sent the tasks that its proxy has claimed; it claims none.
        plan = replace(setup.plan, payload=payload, dynamic=False, make_pool=None)
        sent = replace(setup, plan=plan, folder="", mapping=None, descriptors={})
        return cls(sent, tls, tuple(sys.path), versions())


def versions() -> dict[str, str]:
    """Versions that have to be the same in the consumer and where its workers run."""
    return {
        "fastq_loader's protocol": str(VERSION),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def _pickled(parts: dict[str, Any]) -> bytes:
    try:
        from cloudpickle import dumps
    except ImportError:  # then the user's objects come from modules
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
    """The far worker of this process. Made, which opens the user's objects, and run on the main thread.

    Args:
        pickled: a `FarSetup`.
        address: of this machine, where it listens.
        ports: those that it may listen at; 0 is any.

    Attributes:
        port: where it listens.

    Raises:
        ProtocolError: a version is another one here.
        OSError: no port is free, or a certificate is not there.
    """

    def __init__(self, pickled: bytes, address: str, ports: Sequence[int]) -> None:
        sent: FarSetup = pickle.loads(pickled)
        if sent.versions != (here := versions()):
            raise ProtocolError(f"this machine has {here}, and the consumer {sent.versions}")
        prepare_signals()
        multiprocessing.current_process().daemon = True  # as workers are in torch
        sys.path += [folder for folder in sent.path if folder not in sys.path]
        self._setup = sent.setup
        self._tls = None if sent.tls is None else sent.tls.context(server=True)
        with contextlib.suppress(Exception):  # the worker finds the same failure, and reports it
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
        sock, client, number = self._proxies.get()
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
            # The claim table is its own, and of no importance.
            Worker(setup, blocks, proxy, ClaimTable(arena.fd, arena.mapping.claims)).run()
            proxy.finish()
        except Lost:
            pass
        finally:
            self._over = True
            with contextlib.suppress(OSError):  # it is gone
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    # ---- connections, in threads --------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
                sock.settimeout(connection.PATIENCE)
                connection.configure(sock, connection.NOTICED_THERE)
                if self._tls is not None:  # its handshake is a part of the first read
                    sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                if len(self._strangers) == _STRANGERS:
                    socket.socket.shutdown(self._strangers.popleft(), socket.SHUT_RDWR)
                self._strangers.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
            except (OSError, RuntimeError, IndexError):  # the other side has left, or something is used up
                time.sleep(_PAUSE)

    def _serve(self, sock: socket.socket) -> None:
        client = Connection(sock, MESSAGE)
        with sock, contextlib.suppress(Lost, ProtocolError):
            try:
                request = connection.admit(client, self._setup.token, os.urandom(connection.NONCE_BYTES))
            finally:
                with contextlib.suppress(ValueError):  # it has waited for longest, and was ended
                    self._strangers.remove(sock)
            if request.asks:
                client.send(REPORT, _stacks())
            elif self._has_proxy.acquire(blocking=False):
                client.settimeout(None)
                client.send(WELCOME, b"")
                self._proxies.put((sock, client, request.worker))
                self._end_with(sock)

    def _end_with(self, sock: socket.socket) -> None:
        """End this process if it outlives its proxy, whatever the main thread is doing."""
        poller = select.poll()
        poller.register(sock, select.POLLRDHUP)
        poller.poll()
        time.sleep(_OUTLIVES)
        if not self._over:
            os._exit(1)


def _stacks() -> bytes:
    """The Python stacks of all threads of this process."""
    with open(calls.memfd_create("fastq_loader stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(LONGEST[REPORT])


class SentBlocks(Allocator):
    """The blocks of a far worker: those whose bytes were sent are granted to the next task.

    Args:
        arena: its own.
        for_device: see `Allocator`.

    Attributes:
        sent: offsets of blocks whose bytes were sent; the thread that sends appends to it.
        shipped: the blocks of the batch that was answered last.
    """

    def __init__(self, arena: Arena, for_device: bool) -> None:
        super().__init__(arena.mapping, 0, for_device=for_device)
        self.sent: deque[int] = deque()
        self.shipped: Used = ()
        self._kept = BlockPool(arena, 1)
        self._given: Extents = ()

    def begin(self, grants: Extents, promises: Extents = ()) -> None:
        self.shipped = ()
        while self.sent:
            self._kept.drop([self.sent.popleft()])
        if self._kept.trim(_BATCHES):
            self.give(self._kept.space(0))
        granted, promised = self._kept.grant(Holder(0))
        self._given = granted + promised
        super().begin(granted, promised)

    def finish(self, used: Used) -> tuple[list[tuple[int, int]], list[int]]:
        fresh, returned = super().finish(used)
        self._kept.accept(0, tuple(used), tuple(fresh), tuple(returned), self._given)
        self.shipped = used
        return [], []


class ProxySocket:
    """Socket of a far worker. A child that user code forked there ends when it uses it.

    Args:
        connection: to the proxy.
        blocks: where batches lie.
    """

    def __init__(self, connection: Connection, blocks: SentBlocks) -> None:
        self._connection = connection
        self._blocks = blocks
        self._pid = process_id.current()
        self._frames: deque[bytes] = deque()  # received by `told_to_stop`
        self._sending: queue.Queue[_Packed | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="fastq_loader: sending", daemon=True)
        self._thread.start()

    # ---- in -----------------------------------------------------------------------------------

    def receive(self, block: bool) -> Task | Epoch | Space | Stop | Ping | None:
        """The next message; without `block` None if there is none now.

        Raises:
            Lost: the connection has ended.
        """
        process_id.stay_in(self._pid)
        payload = self._frames.popleft() if self._frames else self._payload(block)
        if payload is None:
            return None
        message = decode_for_worker(payload)
        assert not isinstance(message, Bundle), "these are for workers of the consumer's machine"
        return message

    def _payload(self, block: bool) -> bytes | None:
        frame = self._connection.receive(block)
        return None if frame is None else frame.payload

    def told_to_stop(self) -> bool:
        """Whether a Stop has come and was not read; it stays there."""
        process_id.stay_in(self._pid)
        while (payload := self._payload(block=False)) is not None:
            self._frames.append(payload)
        return encode(Stop()) in self._frames

    # ---- out ----------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send an answer, behind those that are on their way.

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
        if not body:  # an error in place of a batch that does not fit
            self._blocks.sent.extend(offset for offset, _ in used)
            used = ()
        self._sending.put((payload, body, [offset for offset, _ in used]))

    def _taken_apart(self, handle: Handle | None, used: Used) -> tuple[Handle | None, list[Any]]:
        """A handle whose segments say how many bytes each has, instead of where it lies, and these bytes.

        Only those are sent that the batch needs. So each begins with the first byte of its segment, but for
        a packet: its third number is how many bytes it has.
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
            with contextlib.suppress(Lost):  # the main thread finds that, too
                self._connection.send(MESSAGE, payload, body)
            self._blocks.sent.extend(offsets)

    def finish(self) -> None:
        """All answers are sent when this returns."""
        self._sending.put(None)
        self._thread.join()
