"""The worker process: it reads tasks, loads their batches and answers.

Everything here runs in a worker: the loop on its main thread, and one thread that only waits for the
consumer's death. The worker reads tasks from its socket, looks for a new epoch before each one, and answers
each of its own tasks exactly once. When an epoch is broken off, its remaining tasks are skipped; torch's
workers load them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from functools import partial
from typing import Any

import torch

from fastq_loader.ipc.claim_table import ClaimTable
from fastq_loader.ipc.inbox import Inbox
from fastq_loader.ipc.messages import (
    BATCH,
    BROKEN,
    ERROR,
    LEFT_OUT,
    PART_ENDED,
    PASSED,
    SKIPPED,
    Answer,
    BatchHandle,
    BeginEpoch,
    Hello,
    InBlock,
    Space,
    Stop,
    Task,
    encode,
    load_index,
)
from fastq_loader.ipc.sockets import WorkerSocket
from fastq_loader.memory import allocator, nontemporal
from fastq_loader.memory.allocator import Allocator, Used
from fastq_loader.packing.pack import Packer
from fastq_loader.packing.pickling import dump_exception
from fastq_loader.reading import collate
from fastq_loader.reading.fetch import EndOfStream, LeftOut
from fastq_loader.reading.reader import DeliveredBefore
from fastq_loader.system import calls
from fastq_loader.system.unpatched import time
from fastq_loader.workers import children
from fastq_loader.workers.config import Setup
from fastq_loader.workers.reader import WorkerReader
from fastq_loader.workers.task_queue import TaskQueue

#: Nanoseconds for which a worker with tasks does not look for a new epoch: as much time is spent at most on
#: batches that nobody wants any more. To look takes as long as to load a small batch.
_LOOK_EVERY = 1_000_000
#: Bytes by which an answer may grow when its own block, and blocks returned meanwhile, are added.
_GROWTH = 16 * 1024
_NONE: Used = ()
#: Kinds of answers without a batch that are no errors, by the exception of the reader.
_WITHOUT_BATCH = {EndOfStream: PART_ENDED, DeliveredBefore: PASSED, LeftOut: LEFT_OUT}


def main(setup: Setup) -> None:
    """Entry point of a worker process."""
    # Inherited and imported objects are not garbage. If the collector of a forked worker scanned them, it
    # would copy all their pages (120 ms, 37 MB with nothing but torch imported).
    gc.freeze()
    calls.name_process(f"fastq_worker{setup.worker}")
    with contextlib.suppress(KeyboardInterrupt):  # as in torch, the consumer's own is the one to show
        prepare_signals(setup.plan.grace)
        _work_for(setup)


def _work_for(setup: Setup) -> None:
    children.write_stacks(setup.descriptors["stacks"])
    children.leave_with(setup.consumer)
    plan, mapping = setup.plan, setup.mapping
    assert mapping is not None, "it is on the consumer's machine"
    claims = ClaimTable(mapping.fd, mapping.claims)
    # In use are the batches of the window, and the one that was delivered last.
    nontemporal_from = nontemporal.CACHED / (plan.workers * plan.prefetch + 1)
    blocks = Allocator(mapping, setup.worker, setup.space, plan.for_device, nontemporal_from)
    allocator.install(blocks)
    collate.install()
    socket = open_socket(setup, blocks)
    try:
        socket.send(Hello(os.getpid()))
        WorkerLoop(setup, blocks, socket, claims).run()
    finally:
        socket.close()


def open_socket(setup: Setup, blocks: Allocator) -> WorkerSocket:
    """Open the socket of a worker that writes to `blocks`."""
    return WorkerSocket(setup.descriptors, setup.consumer, partial(_in_block, blocks), setup.plan.prefetch)


def _in_block(blocks: Allocator, answer: Answer, nbytes: int) -> InBlock:
    """Write a finished answer, whose frame has `nbytes` bytes, into a block.

    Raises:
        MemoryError: the arena is used up, or the answer does not fit into the block.
    """
    block = blocks.take(nbytes + _GROWTH)
    fresh, returned = blocks.finish([(block.offset, nbytes)])
    freed = (*answer.returned, *returned, block.offset)
    frame = encode(answer._replace(fresh=(*answer.fresh, *fresh), returned=freed))
    if len(frame) > block.size:
        raise MemoryError(f"an answer of {len(frame)} bytes in a block of {block.size}")
    blocks.mapping.write(block.offset, frame)
    return InBlock(block.offset, len(frame))


def prepare_signals(grace: float = 0.0) -> None:
    """Set the handlers of torch's worker: SIGTERM ends it, SIGSEGV and SIGBUS are named. SIGINT raises
    KeyboardInterrupt, unless a forked worker inherits another handler.

    Args:
        grace: seconds for which it outlives SIGTERM and SIGINT that its consumer did not send.
    """
    signal.set_wakeup_fd(-1)  # an inherited one belongs to an event loop of the consumer
    torch._C._set_worker_signal_handlers()
    if grace:
        for number in children.BLOCKED:
            signal.signal(number, partial(_outlive, grace))
            signal.siginterrupt(number, False)
        # A process that user code forks has no grace.
        os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, children.BLOCKED)


def _outlive(grace: float, *_: Any) -> None:
    """Handle a signal that all processes of a job get: end after `grace` seconds. The consumer may be saving
    a checkpoint meanwhile; it kills its workers."""
    for number in children.BLOCKED:
        signal.signal(number, lambda *_: None)
    ending = threading.Timer(grace, os._exit, (128 + signal.SIGTERM,))
    ending.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can be started: the worker ends with its consumer
        ending.start()


class WorkerLoop:
    """The loop of one worker.

    Args:
        setup: the worker's setup.
        blocks: allocator of the blocks that batches are written to.
        socket: connection to the consumer.
        claims: table of the claims on shared tasks.
    """

    def __init__(self, setup: Setup, blocks: Allocator, socket: Inbox, claims: ClaimTable) -> None:
        self._setup = setup
        self._token = setup.token
        self._tasks = tasks = TaskQueue(claims, setup.plan.shared_tasks, setup.worker)
        self._waiting = tasks.waiting
        self._is_shared = setup.plan.shared_tasks
        #: The task that this worker works on, which is to blame if it dies: its ticket plus 1; else 0.
        self._at_work = claims.word_of(setup.worker)
        self._allocator = blocks
        self._socket = socket
        self._packer = Packer(blocks, setup.token)
        self._finished = 0  # time of the last answer
        self._looked = -1 - _LOOK_EVERY  # the last answer before the last look; a new worker looks first
        self._reader = WorkerReader(setup)

    def run(self) -> None:
        waiting, take = self._waiting, self._tasks.take
        try:
            while True:
                if (not waiting or self._finished - self._looked > _LOOK_EVERY) and not self._look_ahead():
                    return
                task = take()
                if task is not None:
                    self._at_work[0] = task.ticket + 1
                    self._work(task)
        finally:
            self._reader.close()

    # ---- incoming messages --------------------------------------------------------------------

    def _look_ahead(self) -> bool:
        """Read the messages that have come, and wait for one if there is no task; False: stop."""
        waiting, tasks, is_due = self._waiting, self._tasks, self._finished - self._looked > _LOOK_EVERY
        if not waiting:
            self._at_work[0] = 0
        while True:
            message = self._socket.receive(not waiting)
            if message is None:
                self._looked = self._finished
                return True
            if type(message) is Task:
                if self._is_shared and (tasks.retired or (waiting and message.seq < waiting[-1].seq)):
                    tasks.add(message)
                else:
                    waiting.append(message)
                if not is_due:
                    return True
            elif isinstance(message, BeginEpoch):
                for task in tasks.drop():
                    self._refuse(task, SKIPPED)
                self._reader.begin_epoch(message)
            elif isinstance(message, Space):
                self._allocator.free_ranges(message.ranges)
            else:
                assert isinstance(message, Stop)
                return False

    # ---- one task -----------------------------------------------------------------------------

    def _work(self, task: Task) -> None:
        """Load the batch of a task, and answer it. Everything that a usual batch needs is here; what is
        unusual was determined when the epoch began, or raises."""
        reader, allocator, packer = self._reader, self._allocator, self._packer
        if reader.ended or reader.failure is not None:
            self._refuse(task, SKIPPED if reader.ended else BROKEN)
            return
        epoch, seq, attempt, index, grants, _ = task
        started = time.monotonic_ns()
        allocator.begin(grants)
        kind, used, collated = BATCH, _NONE, 0
        handle: BatchHandle | None = None
        batch = None
        try:
            if type(index) is not list:
                index = load_index(index, self._token)
            try:
                batch = reader.load(seq, index)
            finally:
                collated = time.monotonic_ns()
                if reader.reports:
                    reader.report()
            handle, used = packer.pack(batch)
            batch = None  # user code may reference what is left of it
            if used:
                handle, used = packer.copy_held(handle, used)
        except Exception as error:
            batch = None
            kind, handle, used = self._failed(error, handle)
        fresh, returned = allocator.finish(used)
        times = reader.fetcher.fetched, collated, allocator.new_memory
        self._finished = finished = time.monotonic_ns()
        head = epoch, seq, attempt, kind, started, finished, fresh, returned, handle
        self._send(Answer(*head, reader.state, *times, reader.remarks), used)

    def _refuse(self, task: Task, kind: int) -> None:
        """Answer a task without loading anything: SKIPPED, or BROKEN if this worker cannot work."""
        started = time.monotonic_ns()
        self._allocator.begin(task.grants)
        handle, used = None, _NONE
        if kind == BROKEN and self._reader.failure is not None:
            self._reader.ended = True
            self._tasks.retire()
            handle, used = self._pack_exception(self._reader.failure)
        returned = self._allocator.finish(used)
        self._send(Answer(*task[:3], kind, started, time.monotonic_ns(), *returned, handle), used)

    def _send(self, answer: Answer, used: Used) -> None:
        try:
            self._socket.send(answer)
        except Exception as error:  # the answer does not fit into a message
            if answer.handle is not None:
                self._packer.unsend(answer.handle)
            text = self._as_text(error, error)
            returned = *answer.returned, *[offset for offset, _ in used]
            self._socket.send(answer._replace(kind=ERROR, returned=returned, handle=text, remarks=b""))

    # ---- errors -------------------------------------------------------------------------------

    def _failed(self, error: Exception, packed: BatchHandle | None) -> tuple[int, BatchHandle | None, Used]:
        """The kind of the answer for an exception, its handle and its blocks. `packed` is the handle of a
        batch that is not sent after all."""
        for exception, kind in _WITHOUT_BATCH.items():
            if isinstance(error, exception):
                return kind, None, _NONE
        if packed is not None:
            self._packer.unsend(packed)
        return ERROR, *self._pack_exception(error)

    def _pack_exception(self, error: Exception) -> tuple[BatchHandle, Used]:
        try:
            return self._packer.pack_exception(dump_exception(error, self._setup.worker))
        except Exception as reason:  # no block is left for it, or the error cannot even be described
            return self._as_text(error, reason), _NONE

    def _as_text(self, error: Exception, reason: Exception) -> BatchHandle:
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:  # its `__str__` fails
            text = type(error).__name__
        text = f"{text} (in DataLoader worker process {self._setup.worker}; it could not be sent: {reason!r})"
        return self._packer.pack_text(text, isinstance(error, MemoryError))
