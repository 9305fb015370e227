"""Worker processes of this machine, under any of multiprocessing's start methods.

Runs in the consumer. What the workers do is none of its business.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import TYPE_CHECKING, Any

import torch

from fastq_loader.errors import warn_user
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.blocks import Extents
from fastq_loader.packing.pickling import explain, pickles
from fastq_loader.system import calls
from fastq_loader.workers.backend import WorkerBackend, cores
from fastq_loader.workers.children import Child
from fastq_loader.workers.config import Plan
from fastq_loader.workers.main import main
from fastq_loader.workers.stack_dumps import Stacks
from fastq_loader.workers.zygote import Zygote

if TYPE_CHECKING:
    from fastq_loader.workers.starting import LateStart

_PICKLE_WARNING = (  # torch/utils/data/dataloader.py
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)


class WorkerPool(WorkerBackend):
    """The processes of one pool, on this machine.

    Args:
        plan: what they do.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._make: Any = None  # a process object, with the arguments of multiprocessing.Process
        self._zygote: Zygote | None = None
        self._late: LateStart | None = None  # makes the processes of workers that start late
        self._stacks: Stacks | None = None

    def start(self, arena: Arena, folder: str, token: bytes, base_seed: int, shared_seed: int | None) -> None:
        """Start the first processes, and all of them where that is cheap.

        Under spawn and forkserver a worker spends seconds of a core on its imports. Eight of them on two
        cores would all be up at the end, and the first batch would wait for that; started one for each core,
        the first workers load while `start_next` brings up the others. What is pickled for each of them is
        pickled here, so that all see the dataset as it is now.
        """
        plan = self._plan
        context: Any = multiprocessing.get_context() if plan.context is None else plan.context
        method = context.get_start_method()
        self.forks = method == "fork"
        self._make = context.Process
        self._stacks = Stacks()
        stacks = self._stacks.write_end
        self._setup = self._make_setup(arena, folder, token, base_seed, shared_seed, stacks=stacks)
        self._prepare(context, method)
        at_once = plan.workers if self._late is None else cores()
        while self._left() and (len(self._children) < at_once or not self._payload.sealed):
            self.start_next()
        if self._late is not None:  # whoever starts from here on is late
            self._make = self._late.process

    def _prepare(self, context: Any, method: str) -> None:
        """Make what starts the first workers quickly, and what will start late ones and successors."""
        if method == "forkserver":
            _preload(context)
        if not self.forks:
            from fastq_loader.workers.starting import LateStart  # some systems lack what it is made of

            self._late = LateStart.of(context.Process)
        elif self._plan.restarts and calls.has_pidfd():
            self._zygote = Zygote.forked(context, self._process)

    def _process(self, worker: int, generation: int, folder: str, space: Extents | None) -> BaseProcess:
        assert self._setup is not None, "the pool was started"
        setup = replace(self._setup, worker=worker, generation=generation, folder=folder, space=space)
        process: BaseProcess = self._make(target=main, args=(setup,), daemon=True)
        if self._plan.context is None:  # torch's name for it, which logs show
            process.name = f"Process-{process.name.rpartition('-')[2]}"
        return process

    def _make_successor(self, worker: int, generation: int, folder: str, space: Extents) -> BaseProcess:
        make = self._process if self._zygote is None else self._zygote.process
        return make(worker, generation, folder, space)

    def _start(self, child: Child) -> None:
        try:
            child.start()
        except (TypeError, AttributeError, PicklingError) as error:
            warn_user(_PICKLE_WARNING, UserWarning)
            raise _named(error, self._payload.parts) from error
        finally:
            if not self._left() and not self._plan.restarts:
                self._payload.unseal()

    def stacks(self, worker: int) -> str:
        """The Python stacks of a worker as it writes them now, whatever it is doing."""
        pid = self.pid(worker)
        if self._stacks is None or not pid:  # a signal to process 0 would go to everybody
            return "  (it was not started, or is gone)"
        return self._stacks.of(pid)

    def _give_back(self) -> None:
        """All have ended."""
        held = self._zygote, self._late, self._stacks
        self._zygote = self._late = self._stacks = None
        for one in held:
            if one is not None:
                one.close()

    def forget(self) -> None:
        super().forget()
        if self._zygote is not None:
            self._zygote.forget()


def _preload(context: Any) -> None:
    """Let the fork server import torch, unless it runs already or somebody chose for it.

    Not numpy.random, which our own modules need: other children of the server would inherit one state of
    its global generator, where each seeds its own now.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None and server._preload_modules == ["__main__"]:
        context.set_forkserver_preload(["__main__", torch.__name__])


def _named(error: Exception, parts: dict[str, Any]) -> Exception:
    """The same error with the path to what cannot be pickled, if it is among the user's objects."""
    for name, part in parts.items():
        if not pickles(part):
            return type(error)(str(explain(part, error, name)))
    return error
