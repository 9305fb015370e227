"""Errors and warnings about workers that die or hang. Also handles timeouts.

Runs in the consumer, on the thread that calls `next()`.
"""

from __future__ import annotations

from typing import Any

from fastq_loader.consumer.answers import Answers
from fastq_loader.consumer.outcomes import Raised
from fastq_loader.errors import LoaderTimeout, WorkerDied, WorkerReplaced, describe_index, warn_user
from fastq_loader.ipc.messages import decode_index
from fastq_loader.scheduling.events import IterationFailed, Wait
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.workers.config import Plan
from fastq_loader.workers.group import WorkerGroup
from fastq_loader.workers.worker import Worker


class Deaths:
    """Reports the deaths and timeouts in one pool of workers.

    Args:
        plan: configuration of the workers.
        group: the workers.
        scheduler: the scheduler of their batches.
        answers: have the progress of the epoch, which no death changes.

    Attributes:
        timeout: the loader's `timeout`.
    """

    def __init__(self, plan: Plan, group: WorkerGroup, scheduler: Scheduler, answers: Answers) -> None:
        self._plan = plan
        self._group = group
        self._scheduler = scheduler
        self._answers = answers
        self.timeout = Timeout(plan.timeout, of_head=plan.options.is_dynamic and plan.in_order)

    def sentence(self, worker: Worker, seq: int | None, index: Any = None) -> str:
        """Describe how a worker died, and at which batch, if any."""
        doing = "between batches" if worker.died_up else "before it was up"
        if seq is not None:
            index = self._scheduler.index_of(seq) if index is None else index
            doing = f"before it answered batch {seq} (indices {describe_index(decode_index(index))})"
        return (
            f"DataLoader worker (pid(s) {worker.pid}) exited unexpectedly: worker {worker.number} "
            f"{worker.cause} {doing}"
        )

    def of(self, lost: IterationFailed) -> Raised:
        """The error for a worker that died, with torch's own text as its cause."""
        worker = self._group.workers[lost.worker]
        return self.end(self.sentence(worker, lost.seq, lost.index), RuntimeError(worker.torch_text))

    def end(self, report: str, cause: Exception) -> Raised:
        """The error that ends an iteration because of a death."""
        died = WorkerDied(report)
        died.__cause__ = cause
        return Raised(died, self._answers.progress or 0, fatal=report)

    def who_is_late(self, wait: Wait) -> tuple[int | None, int | None]:
        """Return the worker that has the awaited batch, None if unknown, and the worker that hangs."""
        if wait.worker is not None:
            return wait.worker, wait.worker
        ticket = self._scheduler.pending_tasks[self._scheduler.epoch, wait.seq].ticket
        return self._group.claims.holder(ticket), self._group.late_for(ticket)

    def timed_out(self, worker: int | None, seq: int) -> Raised:
        """The error for a batch that has not arrived within the timeout. `worker` is loading it; None if no
        worker has started it."""
        indices = describe_index(decode_index(self._scheduler.index_of(seq)))
        if worker is None:
            text = f"no worker has started batch {seq} (indices {indices}) yet"
        else:
            who = f"worker {worker} (pid {self._group.workers[worker].pid})"
            stacks = f"Its Python stacks:\n{self._group.stacks(worker)}"
            text = f"{who} has not answered batch {seq} (indices {indices}). {stacks}"
        error = LoaderTimeout(f"DataLoader timed out after {self._plan.timeout:g} seconds: {text}")
        return Raised(error, self._answers.progress or 0)

    def warn_of_replacement(self, report: str, stacks: str) -> Raised | None:
        """Warn that a worker was replaced. Return the warning, to be raised, if warnings are errors."""
        after = f". Its Python stacks:\n{stacks}" if stacks else ""
        try:
            warn_user(f"{report}; another one was started in its place{after}", WorkerReplaced)
        except WorkerReplaced as warning:  # the loop can go on afterwards
            return Raised(warning, self._answers.progress or 0)
        return None


class Timeout:
    """The `timeout` of a loader. torch's limits the wait for one message. Where workers may run far past a
    batch that hangs, it limits the time that the next batch has taken.

    Args:
        timeout: in seconds; 0 waits for ever.
        of_head: whether it limits the time of the next batch.

    Attributes:
        was_over: whether the last call of `next()` has waited in vain.
    """

    was_over = False

    def __init__(self, timeout: float, of_head: bool) -> None:
        self._timeout = timeout
        self._of_head = of_head
        self._awaited: tuple[int, int, float] | None = None  # batch, its attempt, start of the wait
        self._graced: tuple[int, int, float] | None = None  # the same, of the attempt that had its grace

    def seconds(self, seq: int, attempt: int, now: float) -> float | None:
        """Seconds to wait now for an attempt at batch `seq`, the next one; None waits for ever."""
        if not self._timeout:
            return None
        if not self._of_head:
            return self._timeout
        if self._awaited is None or self._awaited[:2] != (seq, attempt):
            self._awaited = (seq, attempt, now)
        return max(self._awaited[2] + self._timeout - now, 0)

    def is_over(self, message: bool) -> bool:
        """Whether the timeout is really over. If this process itself was stopped for that long, a `message`
        is there as soon as it continues. An attempt at a batch gets that grace once."""
        if not message:
            return True
        again, self._graced = self._graced, self._awaited
        return self._awaited is not None and again == self._awaited

    def forget(self) -> None:
        """Reset the timeout after a wait was given up."""
        self._awaited, self.was_over = None, True
