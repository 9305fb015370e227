"""The worker process: seeds, worker info, fetch, collate, answer.

Everything here runs in a worker: the loop on its main thread, and one thread that only waits for the
consumer's death. The worker reads tasks from its socket, looks ahead for a new epoch before each one, and
answers every task that is its own exactly once. Of an epoch that was broken off it loads what torch's workers
would, if the random numbers that come after can tell, and skips it otherwise.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker

from fastq_loader.ipc.claim_table import ClaimTable
from fastq_loader.ipc.messages import (
    BATCH,
    BROKEN,
    ENDED,
    ERROR,
    SKIPPED,
    Answer,
    Epoch,
    Handle,
    Hello,
    Ping,
    Space,
    Stop,
    Task,
    load_index,
)
from fastq_loader.ipc.sockets import WorkerSocket, remove_folder, socket_name
from fastq_loader.memory import allocator
from fastq_loader.memory.allocator import Allocator, Used
from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.ledger import PAGE, Extents, size_class
from fastq_loader.packing.exceptions import dump_exception
from fastq_loader.packing.pack import Packer
from fastq_loader.reading import collate, datapipes, seeding
from fastq_loader.reading.fetch import EndOfStream, Fetcher, make_fetcher
from fastq_loader.system import calls
from fastq_loader.workers.config import Rules as Rules
from fastq_loader.workers.config import Setup as Setup
from fastq_loader.workers.payload import Payload, PickledPayload
from fastq_loader.workers.task_queue import TaskQueue

#: Makes a worker write its Python stacks to the pool's pipe. A real-time signal, because user code has
#: uses of its own for the named ones.
STACK_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 7


#: Nanoseconds of a task below which the worker does not look for a new epoch before the next one.
_QUICK = 500_000


def main(setup: Setup, payload: Payload | PickledPayload, mapping: Mapping | None) -> None:
    """Entry point of a worker process. `mapping` is the consumer's where it was inherited."""
    # What was inherited or imported is not garbage. A forked worker whose collector looked at it would copy
    # every page of it (120 ms, 37 MB with nothing but torch imported).
    gc.freeze()
    _prepare_signals(setup)
    threading.Thread(target=_leave_with_consumer, args=(setup,), daemon=True).start()
    arena = setup.descriptors["arena"]
    inherited = mapping is not None
    if mapping is None:
        mapping = Mapping(arena, setup.arena_length, setup.workers, setup.arena_whole)
    claims = ClaimTable(arena, mapping.claims)
    if not inherited and mapping.whole:
        os.close(arena)
    blocks = Allocator(mapping, setup.worker, setup.space, setup.for_device, setup.nontemporal_from)
    allocator.install(blocks)
    collate.install()
    if not os.path.isdir(setup.folder):  # the loader was closed before this worker was up
        return
    socket = WorkerSocket(setup.folder, socket_name(setup.worker, setup.generation))
    socket.send(Hello(os.getpid()))
    try:
        _Worker(setup, payload, blocks, socket, claims).run()
    except KeyboardInterrupt:
        return  # user code raised it; as in torch the consumer's own interrupt is the one to show
    finally:
        socket.close()


def _prepare_signals(setup: Setup) -> None:
    # Ctrl-C reaches the whole group: the consumer decides what it means, workers are silent. A handler
    # rather than SIG_IGN, which programs started by user code would inherit.
    signal.signal(signal.SIGINT, lambda signum, frame: None)
    signal.set_wakeup_fd(-1)  # an inherited one belongs to an event loop of the consumer
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch._C._set_worker_signal_handlers()  # SIGTERM of the parent ends it, SIGSEGV and SIGBUS are named
    faulthandler.register(STACK_SIGNAL, setup.descriptors["stacks"], all_threads=True)


def _leave_with_consumer(setup: Setup) -> None:
    """Wait for the consumer's death, however it dies and whatever this worker is doing."""
    try:
        consumer = calls.pidfd_open(setup.consumer)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # no pidfd in this kernel or sandbox: the pipe that multiprocessing keeps
        parent = parent_process()
        if parent is None:
            return
        consumer = parent.sentinel
    calls.readable([consumer], None)
    remove_folder(setup.folder)
    os._exit(1)


class _Worker:
    """The loop of one worker."""

    def __init__(
        self,
        setup: Setup,
        payload: Payload | PickledPayload,
        blocks: Allocator,
        socket: WorkerSocket,
        claims: ClaimTable,
    ) -> None:
        self._setup = setup
        self._tasks = TaskQueue(claims, setup.shared_tasks, setup.worker)
        self._allocator = blocks
        self._socket = socket
        self._packer = Packer(blocks, setup.token)
        self._quick = False  # the last task took no time worth mentioning
        self._base_seed: int | None = None  # every batch is seeded from it; None: they share one stream
        self._ended = False  # the rest of this epoch is skipped
        self._failure: Exception | None = None  # what keeps this worker from working
        self._fetcher: Fetcher | None = None
        self._dataset: Any = None
        self._collate_fn: Callable[[Any], Any] = _identity
        try:
            self._start(payload)
        except Exception as error:
            self._failure = error
        self._epochs = 0
        self._fetched = False  # it has loaded something since it was started
        # Of every generator that user code may draw from, before it did.
        self._untouched = self._random_states() if setup.persistent else ()

    def _start(self, payload: Payload | PickledPayload) -> None:
        setup = self._setup
        torch.set_num_threads(1)
        seed = seeding.seed_worker(setup.base_seed, setup.worker)
        parts = payload.open()
        dataset = datapipes.apply_seed(parts["dataset"], setup.shared_seed)
        self._dataset, self._collate_fn = dataset, parts["collate_fn"]
        # User code asks torch for it: torch.utils.data.get_worker_info().
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=setup.worker, num_workers=setup.workers, seed=seed, dataset=dataset
        )
        if parts["worker_init_fn"] is not None:
            parts["worker_init_fn"](setup.worker)

    def run(self) -> None:
        while (task := self._next_task()) is not None:
            self._work(task)
            self._tasks.answered()

    def _next_task(self) -> Task | None:
        """Read what has come, and wait while there is no task; None: stop."""
        tasks = self._tasks
        while True:
            # After a task that took no time, looking takes as long as loading what may be stale.
            if not (self._quick and tasks) and not self._look_ahead():
                return None
            task = tasks.take()
            if task is not None:
                return task

    def _look_ahead(self) -> bool:
        """Read what has come, and wait for something if there is no task; False: stop."""
        while True:
            message = self._socket.receive(block=not self._tasks)
            if message is None:
                return True
            if isinstance(message, Task):
                if self._can_write(message):
                    self._tasks.add(message)
                    if self._quick:
                        return True
            elif isinstance(message, Epoch):
                if not self._break_off():
                    return False
                self._begin_epoch(message)
            elif isinstance(message, Space):
                if self._can_own(message.ranges):
                    self._allocator.give(message.ranges)
            elif isinstance(message, Ping):
                self._socket.send(message)
            else:
                assert isinstance(message, Stop)
                return False

    def _can_write(self, task: Task) -> bool:
        """Whether the blocks of a task are blocks of the arena. One that names others, or comes before any
        epoch, is as good as no message."""
        blocks = task.grants + task.promises
        if not blocks:
            return self._epochs > 0
        _, end = self._allocator.mapping.region(self._setup.workers - 1)
        return self._epochs > 0 and all(
            offset % PAGE == 0 and size == size_class(size) and offset + size <= end
            for offset, size in blocks
        )

    def _can_own(self, ranges: Extents) -> bool:
        """Whether these ranges lie in this worker's part of the arena."""
        start, end = self._allocator.mapping.region(self._setup.worker)
        return all(
            offset % PAGE == size % PAGE == 0 and start <= offset <= offset + size <= end
            for offset, size in ranges
        )

    def _begin_epoch(self, message: Epoch) -> None:
        self._ended = False
        self._epochs += 1
        self._tasks.begin_epoch()
        self._base_seed = message.base_seed
        if message.base_seed is not None:
            seeding.seed_worker(message.base_seed, self._setup.worker)  # for what iter(dataset) draws
        if self._failure is not None:
            return
        rules = self._setup.rules
        try:
            if self._epochs > 1:
                self._dataset = datapipes.apply_seed(self._dataset, message.shared_seed)
            self._fetcher = make_fetcher(
                self._dataset,
                iterable=rules.iterable,
                auto_collation=rules.auto_collation,
                collate=self._collate_fn,
                drop_last=rules.drop_last,
            )
        except Exception as error:
            self._failure = error

    # ---- what is left of an epoch that was broken off -----------------------------------------

    def _break_off(self) -> bool:
        """Answer the tasks of the epoch that are left; False: stop."""
        tasks = self._tasks.drop()
        missed = bool(tasks) and self._is_missed()
        for task in tasks:
            if missed and self._socket.told_to_stop():
                return False
            self._skip(task, load=missed)
            missed = missed and self._is_missed()
        return True

    def _is_missed(self) -> bool:
        """Whether a batch that nobody will get has to be loaded all the same. torch's workers load whatever
        was dispatched, which decides on what the next epoch draws. Where nothing was ever drawn from any
        generator, nobody can tell; the first batch of all has to show it."""
        if self._base_seed is not None or self._ended or self._failure is not None:
            return False
        if not self._fetched or getattr(self._fetcher, "dataset_iter", None) is self._dataset:
            return True  # a dataset that is its own iterator goes on where it stopped
        return self._random_states() != self._untouched

    def _random_states(self) -> tuple[Any, ...]:
        return seeding.states(self._dataset, self._collate_fn)

    # ---- one task -----------------------------------------------------------------------------

    def _skip(self, task: Task, load: bool = False) -> None:
        started = time.monotonic_ns()
        self._allocator.begin(task.grants, task.promises)
        if load:
            with contextlib.suppress(Exception):  # whatever user code raises is nobody's any more
                self._fetch(task)
        self._answer(task, SKIPPED, started, None, [])

    def _work(self, task: Task) -> None:
        if self._ended:
            self._skip(task)
            return
        started = time.monotonic_ns()
        self._allocator.begin(task.grants, task.promises)
        if self._failure is not None:
            self._ended = True
            self._tasks.retire()
            self._answer(task, BROKEN, started, *self._pack_exception(self._failure))
        else:
            outcome, handle, used = self._load(task)
            self._answer(task, outcome, started, handle, used)

    def _load(self, task: Task) -> tuple[int, Handle | None, Used]:
        handle: Handle | None = None
        try:
            if self._base_seed is not None:
                self._seed(seeding.seed_batch(self._base_seed, task.seq))
            batch = self._fetch(task)
            handle, used = self._packer.pack(batch)
            del batch
            return BATCH, *self._packer.copy_held(handle, used)
        except EndOfStream:
            return ENDED, None, []
        except Exception as error:
            if handle is not None:
                self._packer.unsend(handle)
            return ERROR, *self._pack_exception(error)

    def _fetch(self, task: Task) -> Any:
        assert self._fetcher is not None, "an epoch comes before its tasks"
        self._fetched = True
        try:
            return self._fetcher.fetch(load_index(task.index, self._setup.token))
        except EndOfStream:
            self._ended = True
            raise

    def _seed(self, seed: int) -> None:
        # torch's class lets nobody set its attributes; who asked for it before sees the new seed too.
        object.__setattr__(torch_worker._worker_info, "seed", seed)

    def _pack_exception(self, error: Exception) -> tuple[Handle, Used]:
        try:
            return self._packer.pack_exception(dump_exception(error, self._setup.worker))
        except Exception as reason:  # no block is left for it, or the error cannot even be described
            return self._in_words(error, reason), []

    def _in_words(self, error: Exception, reason: Exception) -> Handle:
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:  # it has no text
            text = type(error).__name__
        text = f"{text} (in DataLoader worker process {self._setup.worker}; it could not be sent: {reason!r})"
        return self._packer.pack_text(text, isinstance(error, MemoryError))

    def _answer(self, task: Task, outcome: int, started: int, handle: Handle | None, used: Used) -> None:
        fresh: list[tuple[int, int]] = []
        returned: list[int] = []
        if not self._allocator.untouched:
            fresh, returned = self._allocator.finish(used)
        finished = time.monotonic_ns()
        self._quick = finished - started < _QUICK
        head = (task.epoch, task.seq, task.attempt)
        try:
            self._socket.send(
                Answer(*head, outcome, started, finished, tuple(fresh), tuple(returned), handle)
            )
        except Exception as error:  # what does not fit into a message
            if handle is not None:
                self._packer.unsend(handle)
            returned += [offset for offset, _ in used]
            words = self._in_words(error, error)
            self._socket.send(Answer(*head, ERROR, started, finished, tuple(fresh), tuple(returned), words))


def _identity(data: Any) -> Any:
    return data
