"""Work on a copy of the user's loader in a process of its own, such as one measurement of one setting.

`measure` and `in_child` run in the consumer, `_run` and everything below it in the child. The child has a
copy of everything: a loader like the user's with other settings, its dataset, sampler and generators. So the
user's objects stay as they are, also for settings without workers. The step is simulated by sleeping, as a
step on an accelerator uses no CPU of this process. Batches stay on the host and are not pinned, because the
context of an accelerator does not survive a fork.

The child starts as the loader's workers do, because users choose "spawn" for a reason. It ends with all its
workers: when its work is done, on SIGINT from the consumer or Ctrl-C, and when the consumer dies.
"""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from fastq_loader import options
from fastq_loader.epoch import resources
from fastq_loader.extras.insight import causes
from fastq_loader.extras.insight.facts import private_bytes
from fastq_loader.extras.insight.model import Costs, Setting, costs_of
from fastq_loader.loader import DataLoader
from fastq_loader.packing.pickling import dump_exception, load_exception
from fastq_loader.system import calls
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers.children import Child, leave_with
from fastq_loader.workers.payload import Payload

#: Seconds that a child has to end after SIGINT: its workers have 5 to finish their sample.
_PATIENCE = 8.0


@dataclass(frozen=True)
class Measured:
    """Result of one measurement.

    Attributes:
        batches: number of batches that count.
        seconds: wall time in which they arrived, including the steps.
        costs: costs of its batches, for the model; None if none were recorded.
        worker_bytes: the most private memory of a worker.
    """

    batches: float
    seconds: float
    costs: Costs | None = None
    worker_bytes: float = 0.0


def settings_of(setting: Setting) -> dict[str, Any]:
    """The arguments of `DataLoader` for a setting."""
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
    """A new loader with another setting and everything else unchanged.

    The constructor would accept its attributes: without workers, all arguments that need workers have their
    defaults.
    """
    new, changed = copy.copy(loader), settings_of(setting)
    if setting.dynamic == options.of(loader).is_dynamic:
        changed.pop("schedule", None)  # the user's own value, with its options
    if not setting.num_workers:
        changed |= {**options.WITHOUT_WORKERS, "multiprocessing_context": None}
    options.put(new, changed)
    return new


def check_loader(loader: Any, kind: type, needed: str) -> None:
    """Check that a loader can be tried on this system.

    Raises:
        TypeError: it is not an instance of `kind`; `needed` is part of the text.
        RuntimeError: this system has no worker processes.
    """
    if not isinstance(loader, kind):
        given = f"{type(loader).__module__}.{type(loader).__qualname__}"
        hint = ", not a class or a function" if callable(loader) else ""
        raise TypeError(f"loader is a {given}: {needed}{hint}")
    if lacking := calls.missing():
        raise RuntimeError(
            f"this system or sandbox lacks {lacking}, which workers of this package need, so torch's own run "
            "and there is nothing to try. On the shell `python -m fastq_loader doctor` says what to change"
        )


def report(line: str) -> None:
    """Write a line of progress to stderr."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr is missing or closed
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def start_method(loader: Any) -> str:
    """Start method of the loader's workers."""
    context = loader.multiprocessing_context or multiprocessing
    return str(context.get_start_method())


def accelerator(loader: DataLoader[Any]) -> torch.device | None:
    """The accelerator that batches go to, and that trials leave out: their processes may be forked."""
    device = options.of(loader).device
    return None if device is None else device.target


def measure(
    loader: DataLoader[Any], setting: Setting, step_seconds: float, seconds: float, patience: float
) -> Measured:
    """Measure a setting by iterating a copy of the user's loader for some seconds.

    Args:
        loader: the user's loader, which stays as it is.
        setting: the setting to measure.
        step_seconds: seconds of the step after each batch.
        seconds: seconds to measure, from the first batch on.
        patience: seconds after which the measurement is interrupted.

    Raises:
        TimeoutError: too few batches arrived in time.
        RuntimeError: the child died.
        Exception: any error of the loader, or of the user's code in it.
    """
    trial = like(loader, setting)
    resources.forget(trial)  # the copy begins its own epoch
    options.put(trial, {"pin_memory": False, **({"device": None} if accelerator(loader) else {})})
    measured: Measured | None = in_child(
        _Trial(trial, step_seconds, seconds), setting.start_method or start_method(loader), patience
    )
    if measured is None:
        raise TimeoutError(f"too few batches in {patience:.0f} s to measure a rate: give it more seconds")
    return measured


@dataclass
class ChildTask(ABC):
    """Work with a loader in a child. A spawned child receives it as a pickle.

    Attributes:
        loader: torch's or ours.
    """

    loader: Any

    @abstractmethod
    def run(self) -> None:
        """Do the work; may be interrupted."""

    @abstractmethod
    def result(self) -> Any:
        """Return the result so far; None if it is not enough."""

    def close(self) -> None:
        """End the workers that `run` started."""
        if isinstance(self.loader, DataLoader):
            self.loader.close()
        elif (iterator := vars(self.loader).pop("_iterator", None)) is not None:  # of persistent workers
            iterator._shutdown_workers()


def in_child(
    task: ChildTask, method: str, patience: float = math.inf, look: Callable[[int], float] | None = None
) -> Any:
    """Run a task in a process of its own, and return its result.

    Args:
        task: the work to do.
        method: start method of the process.
        patience: seconds after which the task is interrupted; its result so far is returned.
        look: called with the process id while the task runs; returns the seconds until the next call.

    Raises:
        RuntimeError: the child died.
        Exception: any error of the task.
    """
    # Not through Python's own fork server: its children may be interrupted while they import.
    context: Any = multiprocessing.get_context("fork" if method == "fork" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    payload = Payload(task.loader.dataset, None, None)  # what workers can be sent, a trial can
    payload.parts["task"] = task
    child, up = Child(context.Process(target=_run, args=(sender, payload, os.getpid()))), False
    with receiver, sender:
        try:
            # A Ctrl-C between the fork and the child's own handler would print a traceback there.
            with without_signals(signal.SIGINT):
                child.start()
            sender.close()
            sources = receiver.fileno(), child.descriptor
            receiver.recv()  # it is up: the time of imports does not count
            up = True
            while look is not None and not calls.readable(sources, look(child.pid)):
                pass
            if not calls.readable(sources, patience):
                _interrupt(child)  # it then sends its result so far
                calls.readable(sources, _PATIENCE)
            answer = receiver.recv() if receiver.poll() else None
        except EOFError:
            raise RuntimeError(f"the process of a trial {child.death()[0]} before it sent a result") from None
        finally:
            payload.unseal()
            _end(child, _PATIENCE if up else 0.0)  # until it is up it blocks SIGINT, and has no workers
    if isinstance(answer, bytes):
        raise load_exception(answer)
    return answer


def _interrupt(child: Child) -> None:
    """Make a child end, by SIGINT: the loader blocks it wherever an exception would be lost."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGINT)


def _end(child: Child, patience: float) -> None:
    """End a child and its workers. Another interrupt ends it at once; the workers notice that."""
    if not child.pid:
        child.release()
        return
    try:
        _interrupt(child)
        calls.readable([child.descriptor], patience)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it had no group yet
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.release()


# ---- in the child --------------------------------------------------------------------------------


class _TimeIsOver(BaseException):
    """Raised in the child when the consumer wants it to end."""


def _run(answers: Connection, payload: Payload, consumer: int) -> None:
    task: ChildTask = payload.open()["task"]
    torch.set_num_threads(1)  # threads of a pool are not forked, and torch would wait for them
    warnings.simplefilter("ignore")  # they are shown in the user's own epochs
    answer: Any = None
    with contextlib.suppress(_TimeIsOver):
        # First, while SIGINT is blocked: a thread that receives it would deliver it to a worker's start.
        os.setpgid(0, 0)  # in the middle of a sample, torch's workers do not notice that this process ends
        leave_with(consumer, with_group=True)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, _leave)
        answers.send(None)
        try:
            with contextlib.suppress(_TimeIsOver):
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                task.run()
            _let_finish()  # workers need at most 5 s more
            answer = task.result()
        except Exception as error:
            answer = dump_exception(error, None)
        task.close()
        answers.send(answer)


def _let_finish() -> None:
    # A handler rather than SIG_IGN, which programs started by user code would inherit.
    signal.signal(signal.SIGINT, lambda signum, frame: None)


def _leave(signum: int, frame: object) -> None:
    _let_finish()  # one interrupt is enough: the child is ending
    raise _TimeIsOver


class _Times(NamedTuple):
    """Times in seconds at which an epoch began, its batches arrived, and, if it is over, it ended."""

    began: float
    came: list[float]
    ended: list[float]


@dataclass
class _Trial(ChildTask):
    """Iterates a loader for some seconds.

    Args:
        step_seconds: seconds of the step after each batch.
        seconds: seconds to measure, from the first batch on.
    """

    step_seconds: float
    seconds: float
    _epochs: list[_Times] = field(default_factory=list)
    _worker_bytes: int = 0  # the most private memory of a worker

    def run(self) -> None:
        """Iterate epochs, and record when batches arrive."""
        until = 0.0
        while True:
            epoch = _Times(time.monotonic(), [], [])
            self._epochs.append(epoch)
            self._batches = iter(self.loader)  # an attribute, so that it outlives `run`
            for _ in self._batches:
                now = time.monotonic()
                epoch.came.append(now)
                until = until or now + self.seconds
                if len(epoch.came) == 2 and not self._worker_bytes:
                    workers = self.loader.statistics().workers
                    self._worker_bytes = max(map(private_bytes, workers), default=0)
                if now >= until and len(epoch.came) > 1:
                    return
                time.sleep(self.step_seconds)
            epoch.ended.append(time.monotonic())
            if not epoch.came:
                raise ValueError("the loader gives no batch: its dataset is empty, or its sampler is")
            if until and epoch.ended[0] >= until:
                return

    def result(self) -> Measured | None:
        """Evaluate the times; None if there are too few."""
        self.loader.statistics()  # adds the CPU time so far
        counters = resources.of(self.loader).counters
        epochs = causes.breakdowns(counters)
        begun = [load + pack for epoch in epochs for number, load, pack in epoch.costs if not number]
        first = begun[-1] / 1e9 if begun else 0.0
        found = _rate(self.loader, self._epochs, first)
        if found is None:
            return None
        filled = [epoch for epoch in epochs if epoch.epoch.batches]
        load_cpu = causes.cpu_share(counters) if counters.workers else None
        costs = costs_of(filled[-1], load_cpu, counters.batch_bytes) if filled else None
        return Measured(
            *found,
            costs=costs and replace(costs, step=self.step_seconds, step_cpu=0.0),
            worker_bytes=self._worker_bytes,
        )


def _rate(loader: DataLoader[Any], epochs: list[_Times], first: float = 0.0) -> tuple[float, float] | None:
    """Count batches, and the seconds that they took; None if there are too few.

    Whole epochs count, including the start and end of their workers, except the first epoch of persistent
    workers. Without one, the batches after the workers' first ones count, for which workers had more time;
    the start is divided among `len(loader)` batches. The rate is at most that of all batches since the
    first was begun, because batches behind a late one arrive all at once.

    Args:
        loader: the loader of the trial.
        epochs: times of the epochs in order; the last one may not be over.
        first: seconds that a worker took for the first batch.
    """
    persistent = loader.persistent_workers and loader.num_workers > 0
    whole = [epoch for epoch in epochs if epoch.ended and epoch.came][1 if persistent else 0 :]
    if whole:
        return float(sum(len(each.came) for each in whole)), sum(each.ended[0] - each.began for each in whole)
    epoch = max(epochs, key=lambda each: len(each.came), default=_Times(0.0, [], []))
    if len(epoch.came) < 2:
        return None
    count, seconds = _steady(loader, epoch.came, first)
    if not persistent:
        with contextlib.suppress(Exception):  # it has no length, or the dataset's `__len__` raises
            start = (epoch.came[0] - epoch.began - seconds / count) / len(loader)
            seconds += max(0.0, start) * count
    return float(count), seconds


def _steady(loader: DataLoader[Any], came: list[float], first: float) -> tuple[int, float]:
    """Batches after the workers' first ones, and the seconds that they took."""
    ahead = loader.num_workers * ((loader.prefetch_factor or 0) + 1)
    skipped = min(ahead, (len(came) - 1) // 2)
    count = len(came) - 1 - skipped
    # Workers that started together finish together: all others answer between two batches of one.
    count -= count % loader.num_workers if count > loader.num_workers > 0 else 0
    seconds = came[skipped + count] - came[skipped]
    return count, max(seconds, (came[-1] - came[0] + first) * count / len(came))
