"""The worker processes of one pool: they are started, replaced and stopped here.

Runs in the consumer. What the workers do is none of its business. A worker counts as dead when its descriptor
says so, and only then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
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
from fastq_loader.workers.children import Child
from fastq_loader.workers.config import Plan, Setup
from fastq_loader.workers.main import main
from fastq_loader.workers.payload import Descriptors, Payload
from fastq_loader.workers.stack_dumps import Stacks
from fastq_loader.workers.stopping import Stopping
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


class WorkerPool:
    """The processes of one pool.

    Args:
        plan: what they do.

    Attributes:
        forks: whether a worker is at work as soon as it was started.
    """

    def __init__(self, plan: Plan) -> None:
        self.forks = False
        self._plan = plan
        self._payload: Payload = plan.payload
        self._setup: Setup | None = None  # of worker 0; the others differ in what is their own
        self._children: list[Child] = []
        self._generations: list[int] = []  # of the workers: how many had the number before
        self._make: Any = None  # a process object, with the arguments of multiprocessing.Process
        self._zygote: Zygote | None = None
        self._late: LateStart | None = None  # makes the processes of workers that start late
        self._stacks: Stacks | None = None
        self._stopping: Stopping | None = None
        _pools.add(self)

    def start(self, arena: Arena, folder: str, token: bytes, base_seed: int, shared_seed: int | None) -> None:
        """Start the first processes, and all of them where that is cheap. Whatever happens in here, `stop`
        takes it back.

        Under spawn and forkserver a worker spends seconds of a core on its imports. Eight of them on two
        cores would all be up at the end, and the first batch would wait for that; started one for each core,
        the first workers load while `start_next` brings up the others. What is pickled for each of them is
        pickled here, so that all see the dataset as it is now.

        Args:
            arena: the shared memory they write to.
            folder: where they bind their sockets.
            token: the pool's, see `messages`.
            base_seed, shared_seed: of their generators, and of datapipe graphs.

        Raises:
            TypeError, AttributeError, PicklingError: something of the plan cannot be pickled, and has to be
                under this start method; the text names it.
        """
        plan = self._plan
        context: Any = multiprocessing.get_context() if plan.context is None else plan.context
        method = context.get_start_method()
        self.forks = method == "fork"
        self._make = context.Process
        self._stacks = Stacks()
        self._setup = Setup(
            plan=replace(plan, context=None),  # it need not survive a journey
            worker=0,
            generation=0,
            folder=folder,
            space=None,
            consumer=os.getpid(),
            base_seed=base_seed,
            shared_seed=shared_seed,
            token=token,
            mapping=arena.mapping if self.forks else None,
            arena_length=arena.mapping.length,
            arena_whole=arena.mapping.whole,
            descriptors=Descriptors(arena=arena.fd, stacks=self._stacks.write_end),
        )
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
            self._zygote = Zygote(context, self._process)

    def _left(self) -> bool:
        return self._setup is not None and len(self._children) < self._plan.workers

    def start_next(self) -> bool:
        """Start one more worker; False: all were started.

        Raises:
            what `start` raises.
        """
        if not self._left():
            return False
        assert self._setup is not None
        with _uninterrupted():
            child = Child(self._process(len(self._children), 0, self._setup.folder, None))
            self._children.append(child)
            self._generations.append(0)
            self._start(child)
        return True

    def replace(self, worker: int, folder: str, space: Extents) -> int:
        """Start a new process in the place of one that has ended; its generation.

        Args:
            worker: its number.
            folder: where it binds its socket.
            space: ranges (offset, size) of its part of the arena that it can make blocks in.

        Raises:
            what `start` raises; OSError also when the process that forks workers has ended.
        """
        generation = self._generations[worker] + 1
        make = self._process if self._zygote is None else self._zygote.process
        with _uninterrupted():
            child = Child(make(worker, generation, folder, space))
            self._start(child)
            self._children[worker].release()
            self._children[worker], self._generations[worker] = child, generation
        return generation

    def _process(self, worker: int, generation: int, folder: str, space: Extents | None) -> BaseProcess:
        assert self._setup is not None, "the pool was started"
        setup = replace(self._setup, worker=worker, generation=generation, folder=folder, space=space)
        process: BaseProcess = self._make(target=main, args=(setup,), daemon=True)
        if self._plan.context is None:  # torch's name for it, which logs show
            process.name = f"Process-{process.name.rpartition('-')[2]}"
        return process

    def _start(self, child: Child) -> None:
        try:
            child.start()
        except (TypeError, AttributeError, PicklingError) as error:
            warn_user(_PICKLE_WARNING, UserWarning)
            raise _named(error, self._payload.parts) from error
        finally:
            if not self._left() and not self._plan.restarts:
                self._payload.unseal()

    # ---- the workers by their numbers -----------------------------------------------------------

    @property
    def processes(self) -> list[BaseProcess]:
        """The workers, so far as they were started."""
        return [child.process for child in self._children if child.pid]

    @property
    def descriptors(self) -> list[int]:
        """For each worker that was started a descriptor that becomes readable when it has ended."""
        return [child.descriptor for child in self._children if child.pid]

    def pid(self, worker: int) -> int:
        """The process id of a worker; 0 as long as it was not started."""
        return self._children[worker].pid if worker < len(self._children) else 0

    def stacks(self, worker: int) -> str:
        """The Python stacks of a worker as it writes them now, whatever it is doing."""
        pid = self.pid(worker)
        if self._stacks is None or not pid:  # a signal to process 0 would go to everybody
            return "  (it was not started, or is gone)"
        return self._stacks.of(pid)

    def kill(self, worker: int) -> None:
        """End a worker that does not answer; returns when it has ended."""
        self._children[worker].kill()

    def killed(self, worker: int) -> bool:
        """Whether an ended worker was ended by a signal, and not by itself."""
        return self._children[worker].killed

    def death(self, worker: int) -> tuple[str, str]:
        """How an ended worker died: in our words, and in torch's."""
        return self._children[worker].death()

    # ---- the end ----------------------------------------------------------------------------------

    def stop(
        self, patience: Callable[[int], float], owner: object, after: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Let the workers leave, and end those that do not; returns before that, see `stopping`.

        Whoever wants them to leave on their own has told them before. May be called again, also when an
        interrupt cut it short.

        Args:
            patience: seconds that a worker has to leave on its own, by its number.
            owner: for whoever waits until they have ended.
            after: what is done then, on any thread.
        """
        self._setup = None
        if self._stopping is None:
            self._payload.unseal()
            self._payload = Payload(None, None, None)  # the user's objects are free now
            self._plan = replace(self._plan, payload=self._payload)
            for child in self._children:
                if not child.pid:
                    child.release()
            leaving = {child: patience(at) for at, child in enumerate(self._children) if child.pid}
            self._stopping = Stopping(owner, leaving, [self._give_back, *after], self.forget)
        self._stopping.finish()

    def _give_back(self) -> None:
        """All have ended."""
        held = self._zygote, self._late, self._stacks
        self._zygote = self._late = self._stacks = None
        for one in held:
            if one is not None:
                one.close()

    @property
    def stopped(self) -> bool:
        return self._stopping is not None

    @property
    def ended(self) -> bool:
        """Whether it was stopped, and none of its processes is left."""
        return self._stopping is not None and self._stopping.over.is_set()

    def forget(self) -> None:
        """This process is a forked copy: the workers are its siblings."""
        for child in self._children:
            child.forget()
        if self._zygote is not None:
            self._zygote.forget()


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A child of the user's own os.fork() is no parent of our workers. multiprocessing does not know
    # that, and would end and join them when the child exits.
    for pool in list(_pools):
        pool.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def cores() -> int:
    """How many workers that begin with their imports are started at once."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A Ctrl-C in here comes after it: between the fork and the worker's own handler it would print a
    traceback there, and between the start of a process and the note of it here it would leave it behind."""
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)


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
