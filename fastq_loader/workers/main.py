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
    ENDED,
    ERROR,
    LEFT_OUT,
    PASSED,
    SKIPPED,
    Answer,
    BatchHandle,
    Epoch,
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
from fastq_loader.reading.reader import HandedOutBefore
from fastq_loader.system import calls
from fastq_loader.system.unpatched import time
from fastq_loader.workers import children
from fastq_loader.workers.config import Setup
from fastq_loader.workers.reader import WorkerReader
from fastq_loader.workers.task_queue import TaskQueue

#: Nanoseconds: after a shorter task, the worker does not look for a new epoch before the next task.
_QUICK = 500_000
#: Bytes by which an answer may grow when its own block, and blocks returned meanwhile, are added.
_GROWTH = 16 * 1024


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
    mine = (*answer.returned, *returned, block.offset)
    frame = encode(answer._replace(fresh=(*answer.fresh, *fresh), returned=mine))
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
        for number in children.KEPT_OUT:
            signal.signal(number, partial(_outlive, grace))
            signal.siginterrupt(number, False)
        # A process that user code forks has no grace.
        os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, children.KEPT_OUT)


def _outlive(grace: float, *_: Any) -> None:
    """Handle a signal that all processes of a job get: end after `grace` seconds. The consumer may be saving
    a checkpoint meanwhile; it kills its workers."""
    for number in children.KEPT_OUT:
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
        self._tasks = TaskQueue(claims, setup.plan.shared_tasks, setup.worker)
        self._allocator = blocks
        self._socket = socket
        self._packer = Packer(blocks, setup.token)
        self._quick = False  # whether the last task took less than _QUICK
        self._reader = WorkerReader(setup)

    def run(self) -> None:
        try:
            while (task := self._next_task()) is not None:
                self._work(task)
                self._tasks.begin(None)
        finally:
            self._reader.close()

    # ---- incoming messages --------------------------------------------------------------------

    def _next_task(self) -> Task | None:
        """Read messages until there is a task to work on, and return it; None: stop."""
        while True:
            # After a quick task, looking for a new epoch takes as long as loading a batch that may be stale.
            if not (self._quick and self._tasks) and not self._look_ahead():
                return None
            task = self._tasks.take()
            if task is not None:
                return task

    def _look_ahead(self) -> bool:
        """Read the messages that have come, and wait for one if there is no task; False: stop."""
        while True:
            message = self._socket.receive(block=not self._tasks)
            if message is None:
                return True
            if type(message) is Task:
                self._tasks.add(message)
                if self._quick:
                    return True
            elif isinstance(message, Epoch):
                for task in self._tasks.drop():
                    self._skip(task)
                self._reader.begin_epoch(message)
            elif isinstance(message, Space):
                self._allocator.free_ranges(message.ranges)
            else:
                assert isinstance(message, Stop)
                return False

    # ---- one task -----------------------------------------------------------------------------

    def _skip(self, task: Task) -> None:
        self._answer(task, SKIPPED, self._begin(task))

    def _work(self, task: Task) -> None:
        if self._reader.ended:
            self._skip(task)
            return
        started = self._begin(task)
        if self._reader.failure is not None:
            self._reader.ended = True
            self._tasks.retire()
            self._answer(task, BROKEN, started, *self._pack_exception(self._reader.failure))
        else:
            kind, handle, used = self._load(task)
            self._answer(task, kind, started, handle, used, loaded=True)

    def _begin(self, task: Task) -> int:
        """Let the task's blocks be written to; return the time in nanoseconds."""
        started = time.monotonic_ns()
        self._allocator.begin(task.grants)
        return started

    def _load(self, task: Task) -> tuple[int, BatchHandle | None, Used]:
        handle: BatchHandle | None = None
        try:
            batch = self._reader.load(task.seq, load_index(task.index, self._setup.token))
            handle, used = self._packer.pack(batch)
            del batch
            return BATCH, *self._packer.copy_held(handle, used)
        except EndOfStream:
            return ENDED, None, []
        except HandedOutBefore:
            return PASSED, None, []
        except LeftOut:
            return LEFT_OUT, None, []
        except Exception as error:
            if handle is not None:
                self._packer.unsend(handle)
            return ERROR, *self._pack_exception(error)

    def _pack_exception(self, error: Exception) -> tuple[BatchHandle, Used]:
        try:
            return self._packer.pack_exception(dump_exception(error, self._setup.worker))
        except Exception as reason:  # no block is left for it, or the error cannot even be described
            return self._as_text(error, reason), []

    def _as_text(self, error: Exception, reason: Exception) -> BatchHandle:
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:  # its `__str__` fails
            text = type(error).__name__
        text = f"{text} (in DataLoader worker process {self._setup.worker}; it could not be sent: {reason!r})"
        return self._packer.pack_text(text, isinstance(error, MemoryError))

    def _answer(
        self,
        task: Task,
        kind: int,
        started: int,
        handle: BatchHandle | None = None,
        used: Used = (),
        loaded: bool = False,
    ) -> None:
        fresh: list[tuple[int, int]] = []
        returned: list[int] = []
        if not self._allocator.untouched:
            fresh, returned = self._allocator.finish(used)
        state = self._reader.state if loaded else b""
        costs: tuple[Any, ...] = ()  # the fields of an answer from `fetched` on
        if loaded:
            costs = *self._reader.timing, self._allocator.new_memory, self._reader.remarks
        finished = time.monotonic_ns()
        self._quick = finished - started < _QUICK
        head = *task[:3], kind, started, finished, tuple(fresh), tuple(returned), handle
        answer = Answer(*head, (), state, *costs)
        try:
            self._socket.send(answer)
        except Exception as error:  # the answer does not fit into a message
            if handle is not None:
                self._packer.unsend(handle)
            text = self._as_text(error, error)
            returned += [offset for offset, _ in used]
            self._socket.send(answer._replace(kind=ERROR, returned=tuple(returned), handle=text, remarks=b""))
