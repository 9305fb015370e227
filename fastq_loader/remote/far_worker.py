"""A worker on another machine: `workers.main.Worker`, with a connection in place of its socket.

Runs in a process that a host has forked: the worker on its main thread, and a thread that sends batches, so
that the wire is busy while the next batch is loaded. Batches are written to blocks of an arena of its own.
When their bytes have been sent, the blocks serve the next tasks; a pool like the consumer's says which.

The proxy gives tasks out one by one, and the host ends this process when the connection is gone.

A `HostSpec` is made in the consumer. It is pickled by cloudpickle, which includes what was defined in a
notebook or a script, and excludes what cannot leave the machine.
"""

from __future__ import annotations

import gc
import os
import pickle
import platform
import queue
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fastq_loader.errors import UnpicklableError
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
from fastq_loader.remote.connection import LONGEST, MESSAGE, WELCOME, Connection, Lost, Request, Tls
from fastq_loader.system import process_id
from fastq_loader.workers import children
from fastq_loader.workers.config import Setup
from fastq_loader.workers.main import Worker, prepare_signals
from fastq_loader.workers.payload import Descriptors, PickledPayload

#: Answers that may wait to be sent. One is on its way then, and one is loaded.
_WAITING = 1
#: Batches that blocks are kept for: one on its way, one that waits, and the one that is loaded.
_BATCHES = 3

#: Payload and body of an answer, and the offsets of the blocks that the body lies in.
_Packed = tuple[bytes, Sequence[Any], Sequence[int]]


@dataclass(frozen=True)
class HostSpec:
    """Setup of a host.

    Attributes:
        setup: of any worker; the payload is pickled.
        tls: encrypts connections, or None.
        path: the consumer's `sys.path`. Entries that the host lacks come at the end of its own.
        versions: the consumer's, of all that has to be the same where workers run.
    """

    setup: Setup
    tls: Tls | None
    path: tuple[str, ...]
    versions: dict[str, str]

    @classmethod
    def of(cls, setup: Setup, tls: Tls | None) -> HostSpec:
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


def main(connection: Connection, spec: HostSpec, request: Request, stacks: int) -> None:
    """Entry point of a far worker.

    Args:
        connection: to its proxy.
        spec: of its pool.
        request: the proxy's.
        stacks: where it writes its Python stacks.
    """
    gc.freeze()  # see `workers.main`
    prepare_signals()
    children.write_stacks(stacks)
    arena = Arena(1)
    blocks = SentBlocks(arena, spec.setup.plan.for_device)
    allocator.install(blocks)
    collate.install()
    setup = replace(spec.setup, worker=request.worker)
    proxy = ProxySocket(connection, blocks)
    connection.send(WELCOME, b"%d" % os.getpid())
    # The claim table is its own, and of no importance.
    Worker(setup, blocks, proxy, ClaimTable(arena.fd, arena.mapping.claims)).run()
    proxy.finish()


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
            SystemExit: the connection has ended.
        """
        process_id.stay_in(self._pid)
        payload = self._frames.popleft() if self._frames else self._payload(block)
        if payload is None:
            return None
        message = decode_for_worker(payload)
        assert not isinstance(message, Bundle), "these are for workers of the consumer's machine"
        return message

    def _payload(self, block: bool) -> bytes | None:
        try:
            frame = self._connection.receive(block)
        except Lost as error:
            raise SystemExit(1) from error
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
            try:
                self._connection.send(MESSAGE, payload, body)
            except Lost:
                os._exit(1)  # whatever the main thread is doing, its batch cannot be delivered
            self._blocks.sent.extend(offsets)

    def finish(self) -> None:
        """All answers are sent when this returns."""
        self._sending.put(None)
        self._thread.join()
