"""The processes behind the numbers of a group of workers, wherever the work itself is done.

Runs in the consumer. Each kind of workers (see `kinds`) has a pool of its own: `local_pool` has processes of
this machine, `remote.proxy_pool` one here for each worker on another machine. Either way the group deals with
child processes, each under a worker's number. They are started, replaced and stopped here, and a worker
counts as dead when its descriptor says so, and only then. So this is a base class and not only a protocol.
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.ipc.endpoints import naming_the_limit
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.blocks import Extents
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.workers import WorkerCounters
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers.children import END, KEPT_OUT, Child, Launch
from fastq_loader.workers.config import Plan, Setup
from fastq_loader.workers.payload import Descriptors, Payload
from fastq_loader.workers.stopping import Stopping
from fastq_loader.workers.worker import Worker

#: Descriptors that the start of a process takes: two pipes, one for its end, and those that are passed on.
_DESCRIPTORS = 8


class WorkerPool(ABC):
    """The processes of one pool.

    Args:
        plan: what the workers do.

    Attributes:
        workers: their records, by number.
        forks: whether a worker is at work as soon as it was started.
    """

    forks = False

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._setup: Setup | None = None  # of worker 0, for all
        self.workers = [Worker(number) for number in range(plan.workers)]
        self._stopping: Stopping | None = None

    # ---- what each kind does in its own way -----------------------------------------------------

    @abstractmethod
    def _prepare(self) -> None:
        """Get ready to start workers; see `start`."""

    @abstractmethod
    def stacks(self, worker: Worker) -> str:
        """The Python stacks of a worker as it writes them now, whatever it is doing."""

    @abstractmethod
    def _process(self, setup: Setup) -> BaseProcess:
        """A process to be started."""

    def _launch(self, setup: Setup) -> Launch | None:
        """Starts such a process; None: in its own way."""
        return None

    def _start(self, child: Child) -> None:
        """Start it, and say what is wrong if it cannot be."""
        child.start()

    @abstractmethod
    def _give_back(self) -> None:
        """All have ended."""

    # ---- starting -------------------------------------------------------------------------------

    def start(self, arena: Arena, folder: str, token: bytes, base_seed: int, shared_seed: int | None) -> None:
        """Start the first processes. Whatever happens in here, `stop` takes it back.

        Args:
            arena: the shared memory they write to.
            folder: where they bind their sockets.
            token: the pool's, see `messages`.
            base_seed, shared_seed: of the workers' generators, and of datapipe graphs.

        Raises:
            TypeError, AttributeError, PicklingError: something of the plan cannot be pickled, and has to be;
                the text names it.
        """
        self._setup = Setup(
            plan=replace(self._plan, context=None, kept={}),  # they stay here
            worker=0,
            generation=0,
            folder=folder,
            space=None,
            consumer=os.getpid(),
            base_seed=base_seed,
            shared_seed=shared_seed,
            token=token,
            mapping=arena.mapping,
            descriptors=Descriptors(),
        )
        try:
            with naming_the_limit(_DESCRIPTORS):
                self._prepare()
            for worker in self.workers:
                self.launch(worker, folder)
        finally:
            if not self._plan.restarts:
                self._plan.payload.unseal()

    def count_in(self, counters: Counters) -> None:
        """Count what the workers do there from now on."""
        for worker in self.workers:
            worker.counters = WorkerCounters(worker.number, worker.pid)
        counters.workers = tuple(worker.counters for worker in self.workers)

    def _setup_for(self, **fields: Any) -> Setup:
        """The setup of all workers, with these fields of one."""
        assert self._setup is not None, "the pool was started"
        return replace(self._setup, **fields)

    def launch(self, worker: Worker, folder: str, space: Extents | None = None) -> None:
        """Start a process for a worker, its first one or the successor of one that has ended.

        Args:
            worker: its record.
            folder: where it binds its socket.
            space: ranges (offset, size) of its part of the arena that it can make blocks in; None is all.

        Raises:
            what `start` raises; OSError also when what forks the workers has ended.
        """
        generation, before = worker.generation + 1, worker.child
        # Signals: between fork and handler.
        with naming_the_limit(_DESCRIPTORS), without_signals(*KEPT_OUT):
            own = {"worker": worker.number, "generation": generation, "folder": folder, "space": space}
            worker.child = child = self._child(self._setup_for(**own))
            try:
                self._start(child)
            except BaseException:
                if not child.pid:  # else an interrupt came behind the start
                    worker.child = before
                raise
            worker.begin(folder)
            if before is not None:
                before.release()

    def _child(self, setup: Setup) -> Child:
        ended_by = END if self._plan.grace else signal.SIGTERM
        return Child(self._process(setup), ended_by, self._launch(setup))

    @property
    def processes(self) -> list[BaseProcess]:
        """The workers, so far as they were started."""
        return [worker.process for worker in self.workers if worker.process is not None]

    def death(self, worker: Worker) -> tuple[str, str]:
        """How an ended worker died: in our words, and in torch's."""
        assert worker.child is not None, "it was started"
        return worker.child.death()

    # ---- the end ----------------------------------------------------------------------------------

    def stop(
        self, patience: Callable[[Worker], float], owner: object, after: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Let the workers leave, and end those that do not; returns before that, see `stopping`.

        Workers that may leave on their own were told before. May be called again, also when an
        interrupt cut it short.

        Args:
            patience: seconds that a worker has to leave on its own.
            owner: see `stopping.wait`.
            after: called then, on any thread.
        """
        self._setup = None
        if self._stopping is None:
            self._plan.payload.unseal()
            # What is the user's, and what is the loader's, is free now.
            self._plan = replace(self._plan, payload=Payload(None, None, None), kept={})
            leaving = {}
            for worker in self.workers:
                if worker.child is not None and worker.pid:
                    leaving[worker.child] = patience(worker)
                elif worker.child is not None:
                    worker.child.release()
            self._stopping = Stopping(owner, leaving, [self._give_back, *after])
        self._stopping.finish()

    @property
    def stopped(self) -> bool:
        return self._stopping is not None

    @property
    def ended(self) -> bool:
        """Whether it was stopped, and none of its processes is left."""
        return self._stopping is not None and self._stopping.over.is_set()
