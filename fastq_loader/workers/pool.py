"""Worker processes: start, watch, stop, and say how one died.

Runs in the consumer. Owns the process objects and their descriptors; what the workers do is none of its
business. A worker counts as dead when its process descriptor says so, and only then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import TYPE_CHECKING, Any

import torch

from fastq_loader.errors import warn_user
from fastq_loader.memory import nontemporal
from fastq_loader.memory.arena import Arena, Mapping
from fastq_loader.memory.ledger import Extents
from fastq_loader.packing.pickling import explain, pickles
from fastq_loader.scheduling.window import WindowLimits
from fastq_loader.system import calls
from fastq_loader.system.calls import readable
from fastq_loader.workers import stopping
from fastq_loader.workers.children import release
from fastq_loader.workers.main import STACK_SIGNAL, Rules, Setup, main
from fastq_loader.workers.payload import Descriptors, Payload
from fastq_loader.workers.zygote import Zygote

if TYPE_CHECKING:
    from fastq_loader.workers.starting import LateStart

#: Seconds that a hung worker has to begin with its stacks, and between two lines of them.
_STACKS, _NEXT_LINE = 0.3, 0.02
_PICKLE_WARNING = (  # torch/utils/data/dataloader.py
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)


@dataclass(frozen=True)
class Plan:
    """What a pool of workers is to do; fixed for its life.

    Attributes:
        payload: the user's objects.
        rules: how the dataset is read.
        workers: how many.
        prefetch: batches that each works ahead.
        in_order: whether batches are delivered in the order of the sampler.
        dynamic: whether any worker may load any batch, each seeded for itself.
        window: how wide the pool's window may be.
        restarts: how many workers that died are replaced in an epoch.
        timeout: seconds to wait for a message; 0 waits for ever.
        persistent: whether the pool serves one epoch after the other, and not one.
        context: multiprocessing's context; None is the default when the pool starts.
        to_device: whether batches go on to a device, and are laid out for it.
    """

    payload: Payload
    rules: Rules
    workers: int
    prefetch: int
    in_order: bool
    dynamic: bool
    window: WindowLimits
    restarts: int
    timeout: float
    persistent: bool
    context: BaseContext | None
    to_device: bool = False

    @property
    def shared_tasks(self) -> bool:
        """Whether any worker may claim a task. Not of an iterable dataset: each worker has a part of it to
        itself."""
        return self.dynamic and not self.rules.iterable


class WorkerPool:
    """The processes of one pool.

    Args:
        plan: what they do.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._context: Any = None
        self._zygote: Zygote | None = None
        self._late: LateStart | None = None  # makes the processes of workers that start late
        self._setup: Setup | None = None  # of worker 0; the others differ in their numbers
        self._mapping: Mapping | None = None
        self._processes: list[BaseProcess] = []
        self._descriptors: list[int] = []  # of the processes, as far as they are known to have started
        self._generations: list[int] = []  # of the workers: how many had the number before
        self._own: set[int] = set()  # descriptors that are ours to close
        self._started = False  # whoever starts from here on is late
        self._stacks: tuple[int, ...] = ()  # ends of the pipe for stacks: read, write
        self._stopping: stopping.Stopping | None = None
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
        self._stacks = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._context = multiprocessing.get_context() if plan.context is None else plan.context
        method = self._context.get_start_method()
        # Under fork the worker uses the consumer's mapping; under the others it makes its own.
        self._mapping = arena.mapping if method == "fork" else None
        self._setup = Setup(
            worker=0,
            generation=0,
            workers=plan.workers,
            consumer=os.getpid(),
            base_seed=base_seed,
            shared_seed=shared_seed,
            rules=plan.rules,
            shared_tasks=plan.shared_tasks,
            for_device=plan.to_device,
            persistent=plan.persistent,
            # The batches of the window are in use, and the one that was handed out.
            nontemporal_from=nontemporal.CACHED / (plan.workers * plan.prefetch + 1),
            folder=folder,
            token=token,
            arena_length=arena.mapping.length,
            arena_whole=arena.mapping.whole,
            space=None,
            descriptors=Descriptors(arena=arena.fd, stacks=self._stacks[1]),
        )
        if method == "forkserver":
            _preload(self._context)
        if method != "fork":
            from fastq_loader.workers.starting import LateStart  # some systems lack what it is made of

            self._late = LateStart.of(self._context.Process)
        elif plan.restarts and _knows_pidfd():
            self._zygote = Zygote(self._context, self._process)
        together = plan.workers if self._late is None else len(os.sched_getaffinity(0))
        while self._left() and (len(self._processes) < together or not plan.payload.sealed):
            self.start_next()
        self._started = True

    def _left(self) -> bool:
        return self._setup is not None and len(self._processes) < self._plan.workers

    def start_next(self) -> int | None:
        """Start one more worker; its descriptor, or None if all were started.

        Raises:
            what `start` raises.
        """
        if not self._left():
            return None
        assert self._setup is not None
        with _uninterrupted():
            process = self._process(len(self._processes), 0, self._setup.folder, None)
            self._processes.append(process)
            self._generations.append(0)
            self._start(process)
            self._descriptors.append(self._descriptor(process))
        return self._descriptors[-1]

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
            process = make(worker, generation, folder, space)
            self._start(process)
            self._let_go(worker)
            self._processes[worker], self._descriptors[worker] = process, self._descriptor(process)
            self._generations[worker] = generation
        return generation

    def _process(self, worker: int, generation: int, folder: str, space: Extents | None) -> BaseProcess:
        assert self._setup is not None, "the pool was started"
        setup = replace(self._setup, worker=worker, generation=generation, folder=folder, space=space)
        make = self._context.Process if self._late is None or not self._started else self._late.process
        process = make(target=main, args=(setup, self._plan.payload, self._mapping), daemon=True)
        if self._plan.context is None:  # torch's name for it, which logs show
            process.name = f"Process-{process.name.rpartition('-')[2]}"
        return process

    def _start(self, process: BaseProcess) -> None:
        try:
            process.start()
        except (TypeError, AttributeError, PicklingError) as error:
            warn_user(_PICKLE_WARNING, UserWarning)
            raise _named(error, self._plan.payload.parts) from error
        finally:
            if not self._left() and not self._plan.restarts:
                self._plan.payload.unseal()

    def _let_go(self, worker: int) -> None:
        """Give back what is left of a process that has ended."""
        process, descriptor = self._processes[worker], self._descriptors[worker]
        process.join()
        if descriptor in self._own:
            self._own.discard(descriptor)
            os.close(descriptor)
        release(process)

    def _descriptor(self, process: BaseProcess) -> int:
        assert process.pid is not None, "the process was started"
        try:
            descriptor = calls.pidfd_open(process.pid)
        except OSError:  # no pidfd in this kernel or sandbox: the pipe that multiprocessing keeps
            return process.sentinel
        self._own.add(descriptor)
        return descriptor

    @property
    def processes(self) -> list[BaseProcess]:
        """The workers, so far as they were started."""
        return [process for process in self._processes if process.pid is not None]

    @property
    def descriptors(self) -> list[int]:
        """For each worker a descriptor that becomes readable when it has ended."""
        return self._descriptors

    def started(self, worker: int) -> bool:
        return worker < len(self._descriptors)

    def pid(self, worker: int) -> int:
        """The process id of a worker; 0 as long as it was not started."""
        return (self._processes[worker].pid or 0) if self.started(worker) else 0

    def stacks(self, worker: int) -> str:
        """The Python stacks of a worker as it writes them now, whatever it is doing."""
        if not self.started(worker):  # its number would be 0, which is everybody
            return "  (it was not started, or is gone)"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(worker), STACK_SIGNAL)
        text, patience = b"", _STACKS
        while readable([self._stacks[0]], patience):
            text += os.read(self._stacks[0], 1 << 16)
            patience = _NEXT_LINE
        return text.decode(errors="replace") or "  (it did not write them)"

    def kill(self, worker: int) -> None:
        """End a worker that does not answer; returns when it has ended."""
        self._processes[worker].kill()
        readable([self._descriptors[worker]], None)

    def killed(self, worker: int) -> bool:
        """Whether an ended worker was ended by a signal, and not by itself."""
        code = self._processes[worker].exitcode
        return code is not None and code < 0

    def death(self, worker: int) -> tuple[str, str]:
        """How an ended worker died: in our words, and in torch's (its SIGCHLD handler's texts)."""
        process = self._processes[worker]
        process.join(timeout=1)
        code, pid = process.exitcode, process.pid
        if code is None:  # somebody else reaped it: SIGCHLD is ignored
            return "ended, its exit code is unknown", f"DataLoader worker (pid {pid}) exited unexpectedly"
        if code >= 0:
            return f"exited with code {code}", (
                f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}. "
                "Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better "
                "error trace."
            )
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        words = f"was killed by {name}"
        if -code == signal.SIGKILL:
            words += " (by the kernel's out-of-memory killer?)"
        torch_text = f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}. "
        return words, torch_text

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
            self._plan.payload.unseal()
            self._plan = replace(
                self._plan, payload=Payload(None, None, None)
            )  # the user's objects are free now
            members = []
            for worker, process in enumerate(self._processes):
                if process.pid is None:  # it was never started
                    release(process)
                    continue
                # An interrupt may have come between the start of a process and the note of its descriptor.
                noted = self.started(worker)
                descriptor = self._descriptors[worker] if noted else process.sentinel
                members.append(
                    stopping.Member(process, descriptor, descriptor in self._own, patience(worker))
                )
            after = [self._give_back, *after]
            self._stopping = stopping.Stopping(owner, members, after, self.forget)
        stopping.finish(self._stopping)

    def _give_back(self) -> None:
        """All have ended."""
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()
        if self._late is not None:
            self._late.close()
        stacks, self._stacks = self._stacks, ()
        for end in stacks:
            os.close(end)

    @property
    def stopped(self) -> bool:
        return self._stopping is not None

    @property
    def ended(self) -> bool:
        """Whether it was stopped, and none of its processes is left."""
        return self._stopping is not None and self._stopping.over.is_set()

    @property
    def forks(self) -> bool:
        """Whether a worker is at work as soon as it was started."""
        return self._mapping is not None

    def forget(self) -> None:
        """This process is a forked copy: the workers are its siblings."""
        multiprocessing.process._children.difference_update(self._processes)  # type: ignore[attr-defined]
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


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A Ctrl-C in here comes after it: between the fork and the worker's own handler it would print a
    traceback there, and between the start of a process and the note of it here it would leave it behind."""
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)


def _knows_pidfd() -> bool:
    try:
        os.close(calls.pidfd_open(os.getpid()))
    except OSError:  # not in this kernel or sandbox
        return False
    return True


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
