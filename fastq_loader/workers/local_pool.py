"""Worker processes on this machine, under any of multiprocessing's start methods.

Runs in the consumer. Knows nothing of the workers' tasks.

Workers are forked from a `zygote`: under spawn and forkserver always, under fork only if dead workers are
replaced. All of them, replacements included, start in the surroundings in which the pool was started: the
script may have changed to another folder since, set variables for its own children, or extended `sys.path`.
Without a zygote, a worker's process is started by its own class. This is so under fork without restarts,
which needs no zygote, and with a multiprocessing context of the user's own class.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import context as contexts
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import Any

from fastq_loader.errors import warn_user
from fastq_loader.packing.pickling import explain, hint, pickles
from fastq_loader.system.interrupts import without_signals
from fastq_loader.system.multiprocessing_names import starter
from fastq_loader.workers import interpreters, zygote
from fastq_loader.workers.children import Child, Stacks
from fastq_loader.workers.config import Plan, Setup, own_fields
from fastq_loader.workers.main import main
from fastq_loader.workers.payload import Descriptors
from fastq_loader.workers.worker import Worker
from fastq_loader.workers.worker_pool import WorkerPool

_PICKLE_WARNING = (  # torch/utils/data/dataloader.py
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)
#: multiprocessing's start methods that need a new interpreter, by the functions that start their processes.
_INTERPRETERS = {starter(contexts.SpawnProcess): "spawn", starter(contexts.ForkServerProcess): "forkserver"}


class LocalPool(WorkerPool):
    """The processes of one pool, on this machine.

    Args:
        plan: the workers' plan.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._context: Any = None
        self._fork: Callable[..., zygote.Forked] | None = None  # by a zygote, if there is one
        self._stacks: Stacks | None = None
        self._held: list[Any] = []  # to be closed when all workers have ended

    def _prepare(self) -> None:
        """Start the zygote, and pickle the payload once: all workers get the dataset as it is now."""
        plan = self._plan
        self._context = multiprocessing.get_context() if plan.context is None else plan.context
        self.forks = self._context.get_start_method() == "fork"
        with without_signals():
            self._stacks = Stacks()
            self._held.append(self._stacks)
        assert self._setup is not None, "the pool is starting"
        self._setup = replace(self._setup, descriptors=Descriptors(stacks=self._stacks.write_end))
        method = _INTERPRETERS.get(starter(self._context.Process))
        self.spawns = not self.forks and method is None
        if method is not None:
            interpreter = plan.interpreters[method] = interpreters.interpreter(method)  # the loader keeps it
            moment = interpreters.LaunchEnvironment(method)
            self._held.append(moment)
            self._fork = partial(interpreters.fork_interpreter, interpreter, moment)
            self._explain(plan.payload.seal)  # while the interpreter imports torch
            interpreter.wait()
        elif self.forks and plan.restarts:
            self._held.append(zygote.copy_of_consumer(self._context, self._inherited))
            fork = partial(zygote.fork_copy, self._held[-1])
            self._fork = lambda setup, process: fork(process, *own_fields(setup))

    def _process(self, setup: Setup) -> BaseProcess:
        process: BaseProcess = self._context.Process(target=main, args=(setup,), daemon=True)
        if self._plan.context is None:  # the same name as in torch, which logs show
            process.name = f"Process-{process.name.rpartition('-')[2]}"
        return process

    def _inherited(self, own: dict[str, Any], *ends: int) -> BaseProcess:
        """In a copy of the consumer: make the process object of a worker."""
        return self._process(self._setup_for(own, *ends))

    def _child(self, setup: Setup) -> Child:
        ended_by = signal.SIGKILL if self._plan.grace else signal.SIGTERM
        launch = None if self._fork is None else partial(self._fork, setup)
        return Child(self._process(setup), ended_by, launch)

    def _start(self, child: Child) -> None:
        self._explain(child.start)

    def _explain(self, pickle: Callable[[], None]) -> None:
        """Call a function that pickles. If an object cannot be pickled, emit torch's warning, and name the
        object in the error."""
        try:
            pickle()
        except (TypeError, AttributeError, PicklingError) as error:
            warn_user(_PICKLE_WARNING, UserWarning)
            for name, part in self._plan.payload.parts.items():
                if not pickles(part):
                    raise type(error)(f"{explain(part, error, name)}{hint()}") from error
            raise

    def stacks(self, worker: Worker) -> str:
        if self._stacks is None or not worker.pid:  # a signal to pid 0 would go to our whole group
            return "  (it was not started, or is gone)"
        return self._stacks.of(worker.pid)

    def _give_back(self) -> None:
        self._fork = self._stacks = None
        while self._held:
            self._held.pop().close()
