"""Work on a copy of the user's loader in a process of its own, such as one measurement of one setting.

`measure` and `in_child` run in the consumer, `_run` and what follows it in the child. It has a copy of all: a
loader like the user's with other settings, its dataset, sampler and generators. So the user's are as they
were, also where the setting is to load without workers. The step is simulated by sleeping, as a step on an
accelerator uses no CPU of this process. Batches stay on the host, and are not pinned: no context of an
accelerator outlives a fork.

The child starts as the loader's workers do: "spawn" is chosen for a reason. It ends with all of its
workers: in time by itself, on SIGINT when the consumer or Ctrl-C asks for it, and when the consumer dies.
"""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch

from fastq_loader import arguments
from fastq_loader.insight.model import Costs, Setting, costs_of
from fastq_loader.loader import DataLoader
from fastq_loader.packing.pickling import dump_exception, load_exception
from fastq_loader.system import calls
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers.children import Child, leave_with

#: Seconds that a child which was told to end has for it: workers have 5 to finish their sample.
_PATIENCE = 8.0


@dataclass(frozen=True)
class Measured:
    """Result of one measurement.

    Attributes:
        batches: that were counted.
        seconds: wall time in which they came, with the steps.
        costs: of its batches, for the model; None where no batch told.
        worker_bytes: memory that a worker has for itself.
    """

    batches: float
    seconds: float
    costs: Costs | None = None
    worker_bytes: float = 0.0


def settings_of(setting: Setting) -> dict[str, Any]:
    """The arguments of `DataLoader` that make a setting."""
    if not setting.num_workers:
        return {"num_workers": 0}
    settings: dict[str, Any] = {
        "num_workers": setting.num_workers,
        "prefetch_factor": setting.prefetch_factor,
        "schedule": "dynamic" if setting.dynamic else "round_robin",
    }
    if setting.start_method is not None:
        settings["multiprocessing_context"] = setting.start_method
    return settings


def like(loader: DataLoader[Any], setting: Setting) -> DataLoader[Any]:
    """A new loader with another setting, and everything else as it is.

    Its attributes are such that the constructor would take them: without workers, none of what goes with them
    is left.
    """
    new, changed = copy.copy(loader), settings_of(setting)
    if setting.dynamic == arguments.is_dynamic(loader):
        changed.pop("schedule", None)  # as it was said
    if not setting.num_workers:
        changed |= {**arguments.WITHOUT_WORKERS, "multiprocessing_context": None}
    for name, value in changed.items():
        object.__setattr__(new, name, value)  # torch refuses to change some of them after the constructor
    return new


def check_loader(loader: Any, kind: type, needed: str) -> None:
    """
    Raises:
        TypeError: it is not of this class, whose need is said.
        RuntimeError: this system has no worker processes.
    """
    if not isinstance(loader, kind):
        given = f"{type(loader).__module__}.{type(loader).__qualname__}"
        raise TypeError(f"loader is a {given}: {needed}, not a class or a function")
    if lacking := calls.missing():
        raise RuntimeError(
            f"this system or sandbox lacks {lacking}, so that there are no workers of ours to try; torch's "
            "own run. On the shell `python -m fastq_loader doctor` says what to change"
        )


def start_method(loader: Any) -> str:
    """How the loader's workers start."""
    context = loader.multiprocessing_context or multiprocessing
    return str(context.get_start_method())


def measure(
    loader: DataLoader[Any], setting: Setting, step_seconds: float, seconds: float, patience: float
) -> Measured:
    """Iterate a loader like the user's for a time.

    Args:
        loader: the user's, which stays as it is.
        setting: what is measured.
        step_seconds: between two batches.
        seconds: to measure, from the first batch on.
        patience: seconds after which it must be over.

    Raises:
        TimeoutError: no batch came in time.
        RuntimeError: the child died.
        Exception: what the loader, or the user's code in it, raised.
    """
    trial = like(loader, setting)
    vars(trial).pop("_resources", None)  # its epoch is a new one
    vars(trial).update(device=None, pin_memory=False)
    measured: Measured | None = in_child(
        _Trial(trial, step_seconds, seconds), setting.start_method or start_method(loader), patience
    )
    if measured is None:
        raise TimeoutError(f"too few batches in {patience:.0f} s to tell: give it more seconds")
    return measured


class Task(Protocol):
    """Work of a child. It reaches a child that is spawned by pickle."""

    def run(self) -> None:
        """All of it; may be interrupted."""

    def result(self) -> Any:
        """The result so far; None: too little."""

    def close(self) -> None:
        """End the workers that it started."""


def in_child(
    task: Task, method: str, patience: float = math.inf, look: Callable[[int], float] | None = None
) -> Any:
    """The result of a task, in a process of its own.

    Args:
        task: what it does.
        method: how the process starts.
        patience: seconds after which it must be over; it then has the result so far.
        look: is called with the process's id as long as it runs; returns the seconds until the next call.

    Raises:
        RuntimeError: the child died.
        Exception: what the task raised.
    """
    # Not by Python's own fork server: its children may be interrupted while they import.
    context: Any = multiprocessing.get_context("fork" if method == "fork" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = Child(context.Process(target=_run, args=(sender, task, os.getpid())))
    with receiver, sender:
        try:
            # A Ctrl-C between the fork and the child's own handler would print a traceback there.
            with without_signals(signal.SIGINT):
                child.start()
            sender.close()
            sources = receiver.fileno(), child.descriptor
            receiver.recv()  # it is up: imports are not part of its time
            while look is not None and not calls.readable(sources, look(child.pid)):
                pass
            if not calls.readable(sources, patience):
                _interrupt(child)  # it says what it has so far
                calls.readable(sources, _PATIENCE)
            answer = receiver.recv() if receiver.poll() else None
        except EOFError:
            raise RuntimeError(f"the process of a trial {child.death()[0]} before it said anything") from None
        finally:
            _end(child)
    if isinstance(answer, bytes):
        raise load_exception(answer)
    return answer


def _interrupt(child: Child) -> None:
    """Tell a child to end. By SIGINT, which the loader knows to keep out of where an exception is lost."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGINT)


def _end(child: Child) -> None:
    """End a child, with its workers. Another interrupt ends it at once; the workers see that."""
    if not child.pid:
        child.release()
        return
    try:
        _interrupt(child)
        calls.readable([child.descriptor], _PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it had not begun
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.release()


# ---- in the child --------------------------------------------------------------------------------


class _TimeIsOver(BaseException):
    """The consumer wants the child to end."""


def _run(answers: Connection, task: Task, consumer: int) -> None:
    torch.set_num_threads(1)  # a pool of threads that was forked has no threads, and is waited for
    warnings.simplefilter("ignore")  # they come again in the user's own epochs
    answer: Any = None
    with contextlib.suppress(_TimeIsOver):
        # First, while SIGINT is blocked: a thread that took it would bring it into the start of a worker.
        os.setpgid(0, 0)  # torch's workers do not see this process end in the middle of a sample
        leave_with(consumer, with_group=True)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, _leave)
        answers.send(None)
        try:
            with contextlib.suppress(_TimeIsOver):
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                task.run()
            _let_finish()  # what is left takes workers 5 s at most
            answer = task.result()
        except Exception as error:
            answer = dump_exception(error, 0)
        task.close()
        answers.send(answer)


def _let_finish() -> None:
    # A handler rather than SIG_IGN, which programs started by user code would inherit.
    signal.signal(signal.SIGINT, lambda signum, frame: None)


def _leave(signum: int, frame: object) -> None:
    _let_finish()  # once is enough: what follows is the way out
    raise _TimeIsOver


class _Times(NamedTuple):
    """When an epoch began, when each of its batches came, and, if it is over, when it ended; in seconds."""

    began: float
    came: list[float]
    ended: list[float]


class _Trial:
    """The iteration of a loader, for a time.

    Args:
        loader: whose.
        step_seconds: between two batches.
        seconds: to measure, from the first batch on.
    """

    def __init__(self, loader: DataLoader[Any], step_seconds: float, seconds: float) -> None:
        self._loader = loader
        self._step_seconds = step_seconds
        self._seconds = seconds
        self._batches: Any = None
        self._epochs: list[_Times] = []
        self._worker_bytes = 0

    def run(self) -> None:
        """Note when batches come, from the first one on."""
        until = 0.0
        while True:
            epoch = _Times(time.monotonic(), [], [])
            self._epochs.append(epoch)
            self._batches = iter(self._loader)  # kept, so that nothing ends before `run` has
            for _ in self._batches:
                now = time.monotonic()
                epoch.came.append(now)
                until = until or now + self._seconds
                if len(epoch.came) == 2 and not self._worker_bytes:
                    self._weigh()
                if now >= until and len(epoch.came) > 1:
                    return
                if self._step_seconds:
                    time.sleep(self._step_seconds)
            epoch.ended.append(time.monotonic())
            if not epoch.came:
                raise ValueError("the loader gives no batch: its dataset is empty, or its sampler is")
            if until and epoch.ended[0] >= until:
                return

    def _weigh(self) -> None:
        """Note how much memory a worker has that it does not share."""
        for worker in self._loader.statistics().workers:
            self._worker_bytes = max(self._worker_bytes, worker.private_bytes)

    def close(self) -> None:
        self._loader.close()

    def result(self) -> Measured | None:
        """Evaluate the times; None: there are too few."""
        self._loader.statistics()  # counts the CPU time so far
        counters = self._loader._resources.counters
        begun = [cost.load + cost.pack for epoch in counters.history for cost in epoch.costs if not cost.seq]
        first = begun[-1] / 1e9 if begun else 0.0
        found = _rate(self._loader, self._epochs, first)
        if found is None:
            return None
        filled = [epoch for epoch in counters.history if epoch.batches]
        costs = costs_of(filled[-1], counters.workers, counters.batch_bytes) if filled else None
        return Measured(
            *found,
            costs=costs and replace(costs, step=self._step_seconds, step_cpu=0.0),
            worker_bytes=self._worker_bytes,
        )


def _rate(loader: DataLoader[Any], epochs: list[_Times], first: float = 0.0) -> tuple[float, float] | None:
    """Batches, and the seconds that they took.

    Whole epochs count with the start and the end of their workers, as in a training; but for the first one of
    workers that stay. If there is none, the rate is that of batches after the workers' first ones, for which
    they had more time, and the start is one of `len(loader)` batches. It is no more than all batches in the
    time since they were begun: those behind a late one come all at once.

    Args:
        loader: the trial's.
        epochs: in the order of time; the last one may not be over.
        first: seconds that the first batch took its worker.
    """
    persistent = loader.persistent_workers and loader.num_workers > 0
    whole = [epoch for epoch in epochs if epoch.ended and epoch.came][1 if persistent else 0 :]
    if whole:
        return float(sum(len(each.came) for each in whole)), sum(each.ended[0] - each.began for each in whole)
    epoch = max(epochs, key=lambda each: len(each.came), default=_Times(0.0, [], []))
    came = epoch.came
    if len(came) < 2:
        return None
    ahead = loader.num_workers * ((loader.prefetch_factor or 0) + 1)
    skipped = min(ahead, (len(came) - 1) // 2)
    count = len(came) - 1 - skipped
    # Workers that started together finish together: between two batches of the same one lie all the others.
    count -= count % loader.num_workers if count > loader.num_workers > 0 else 0
    seconds = came[skipped + count] - came[skipped]
    seconds = max(seconds, (came[-1] - came[0] + first) * count / len(came))
    if not persistent:
        with contextlib.suppress(Exception):  # it has no length, or its dataset's raises
            start = (came[0] - epoch.began - seconds / count) / len(loader)
            seconds += max(0.0, start) * count
    return float(count), seconds
