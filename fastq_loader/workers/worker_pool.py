"""Base class of worker pools: the child processes behind the numbers of a group of workers.

Runs in the consumer. Each kind of workers (see `kinds`) has its own pool: in `local_pool` the child processes
are the workers; in `extras.remote.proxy_pool` each is the proxy of a worker on another machine. In both cases
the group deals with child processes, one per worker number, which this class starts, replaces and stops. A
worker counts as dead if and only if its process descriptor is readable.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastq_loader.ipc.limits import expect_descriptors
from fastq_loader.ipc.sockets import Line
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.blocks import Extents
from fastq_loader.statistics.counters import Counters, WorkerCounters
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers.children import BLOCKED, Child
from fastq_loader.workers.config import Plan, Setup
from fastq_loader.workers.payload import Descriptors, Payload
from fastq_loader.workers.stopping import Stopping
from fastq_loader.workers.worker import Worker

#: Descriptors needed to start a process: two pipes, one that shows its end, and the ones passed to it.
_DESCRIPTORS = 8


class WorkerPool(ABC):
    """Base class of worker pools.

    Args:
        plan: the workers' plan.

    Attributes:
        workers: the workers' records, by number.
        forks: whether a worker begins to work as soon as it is started, without importing anything.
        spawns: whether a start runs a fresh interpreter, which would begin with all signals blocked.
    """

    forks = False
    spawns = False

    def __init__(self, plan: Plan) -> None:
        sent = replace(plan.options, device=None, errors=None)  # objects of the user's, of no use here
        self._plan = replace(plan, options=sent)
        self._setup: Setup | None = None  # of worker 0, for all
        self.workers = [Worker(number) for number in range(plan.workers)]
        self._stopping: Stopping | None = None

    # ---- implemented by each kind of pool -------------------------------------------------------

    @abstractmethod
    def _prepare(self) -> None:
        """Get ready to start workers; see `start`."""

    @abstractmethod
    def stacks(self, worker: Worker) -> str:
        """Return the current Python stacks of a worker, whatever it is doing."""

    @abstractmethod
    def _child(self, setup: Setup) -> Child:
        """Make a child process, not yet started."""

    def _start(self, child: Child) -> None:
        """Start a child process; a subclass may add the cause to an error."""
        child.start()

    @abstractmethod
    def _give_back(self) -> None:
        """Release the pool's own resources. All processes have ended."""

    # ---- starting -------------------------------------------------------------------------------

    def start(self, arena: Arena, token: bytes, base_seed: int, shared_seed: int | None) -> None:
        """Start the first processes. `stop` undoes it, also after an error or an interrupt half-way.

        Args:
            arena: the shared memory that the workers write to.
            token: the pool's token, see `messages`.
            base_seed, shared_seed: seeds of the workers' generators, and of datapipe graphs.

        Raises:
            TypeError, AttributeError, PicklingError: an object of the plan has to be pickled and cannot be;
                the text names it.
        """
        self._setup = Setup(
            plan=replace(self._plan, context=None, interpreters={}),  # they stay here
            worker=0,
            space=None,
            consumer=os.getpid(),
            base_seed=base_seed,
            shared_seed=shared_seed,
            token=token,
            mapping=arena.mapping,
            descriptors=Descriptors(),
        )
        try:
            self._prepare()
            for worker in self.workers:
                self.launch(worker)
        finally:
            if not self._plan.restarts:
                self._plan.payload.unseal()

    def count_in(self, counters: Counters) -> None:
        """Make new counters for the workers, as part of the loader's counters."""
        for worker in self.workers:
            worker.counters = WorkerCounters(worker.number, worker.pid)
        counters.workers = tuple(worker.counters for worker in self.workers)
        counters.first_epoch = counters.epochs - 1

    def _setup_for(self, own: dict[str, Any], answers: int, tasks: int) -> Setup:
        """Return the setup of a worker with its `own_fields`."""
        assert self._setup is not None, "the pool was started"
        descriptors = Descriptors({**self._setup.descriptors, "answers": answers, "tasks": tasks})
        return replace(self._setup, **own, descriptors=descriptors)

    def launch(self, worker: Worker, space: Extents | None = None) -> None:
        """Start a process for a worker: its first one, or the successor of one that has ended.

        Args:
            worker: the worker's record.
            space: ranges (offset, size) of its part of the arena in which it can make blocks; None is all.

        Raises:
            TypeError, AttributeError, PicklingError: see `start`.
            OSError: processes or descriptors are used up, or the zygote has ended.
        """
        before = worker.child
        with without_signals():
            worker.line = line = Line(worker.number)
        # Signals are blocked between the fork and the setting of handlers; and all, where Python's own hooks
        # run after the fork, which lose an exception. A fresh interpreter would start with this mask.
        expect_descriptors(_DESCRIPTORS)
        with without_signals(*BLOCKED), without_signals(*(BLOCKED if self.spawns else ())):
            own = {"worker": worker.number, "space": space}
            worker.child = child = self._child(self._setup_for(own, **line.ends))
            try:
                self._start(child)
            except BaseException:
                if not child.pid:  # else an interrupt came after the start
                    worker.child = before
                raise
            line.close_ends("answers")
            worker.begin()
            if before is not None:
                before.release()

    def death(self, worker: Worker) -> tuple[str, str]:
        """How an ended worker died: our text, and torch's."""
        assert worker.child is not None, "it was started"
        return worker.child.death()

    # ---- the end ----------------------------------------------------------------------------------

    def stop(
        self, patience: Callable[[Worker], float], owner: object, after: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Let the workers end by themselves, and end the others. Does not wait for that, see `stopping`.

        Workers that may end by themselves were sent a `Stop` before. May be called again, also when an
        interrupt cut it short.

        Args:
            patience: seconds that a worker gets to end by itself.
            owner: see `stopping.wait`.
            after: functions to call when all have ended, on any thread.
        """
        self._setup = None
        if self._stopping is None:
            self._plan.payload.unseal()
            self._drop_objects()
            leaving = {}
            for worker in self.workers:
                if worker.child is not None and worker.pid:
                    leaving[worker.child] = patience(worker)
                elif worker.child is not None:
                    worker.child.release()
            self._stopping = Stopping(owner, leaving, [self._give_back, *after])
        self._stopping.finish()

    def _drop_objects(self) -> None:
        """Drop the references to the user's objects, and to the loader's."""
        self._plan = replace(self._plan, payload=Payload(None, None, None), interpreters={})
        if self._setup is not None:
            self._setup = replace(self._setup, plan=replace(self._plan, context=None))

    @property
    def stopped(self) -> bool:
        return self._stopping is not None

    @property
    def ended(self) -> bool:
        """Whether the pool was stopped and all its processes have ended."""
        return self._stopping is not None and self._stopping.over.is_set()
