"""The record of one worker: its current process, its state, and its cause of death.

Pure, except for the process that it refers to. Runs in the consumer, on the thread that calls `next()`. The
pool starts and ends the process, and the group moves the record from state to state. The tasks of a worker
are in a separate table of the scheduler, which knows nothing of processes.
"""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from fastq_loader.errors import Transitions
from fastq_loader.packing.layout import BatchLayout
from fastq_loader.statistics.counters import WorkerCounters

if TYPE_CHECKING:
    from fastq_loader.ipc.sockets import Line
    from fastq_loader.workers.children import Child

NEW, STARTING, READY, DEAD = "new", "starting", "ready", "dead"

#: A worker is ready when its hello was received; its signal handlers are set by then.
TRANSITIONS = Transitions(
    "a worker",
    {
        NEW: {"start": STARTING},
        STARTING: {"hello": READY, "die": DEAD},
        READY: {"hello": READY, "die": DEAD},
        DEAD: {"start": STARTING},
    },
)


class Worker:
    """One worker of a pool: a number that several processes have, one after the other.

    Attributes:
        number: number of the worker, from 0.
        state: see `TRANSITIONS`.
        child: current process; None before the first one.
        line: connections to the process; None before the first one, and after a death.
        answered_at: number of shared tasks that had been sent when its last answer arrived.
        is_behind: it was not sent all of them, because it is busy, and has many to read.
        layouts: layouts of the batches that the process has sent.
        counters: the loader's counters of the worker, set when it was started.
        why: why this side ended the process; "" if it did not.
        cause, torch_text: how the last process died, as our text and as torch's.
        died_up: whether the last process was ready before it died.
        failed_starts: processes in a row that ended by themselves before they were up.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = NEW
        self.child: Child | None = None
        self.line: Line | None = None
        self.answered_at, self.is_behind = 0, False
        self.layouts: dict[int, BatchLayout] = {}
        self.counters: WorkerCounters
        self.why = self.cause = self.torch_text = ""
        self.died_up = False
        self.failed_starts = 0

    def move(self, event: str) -> None:
        """Change the state by an event.

        Raises:
            InvalidTransition: the event is not allowed in this state.
        """
        self.state = TRANSITIONS[self.state, event]

    def begin(self) -> None:
        """Record that a new process was started under the number."""
        self.move("start")
        self.why = ""
        self.layouts = {}  # a new process numbers them anew

    def die(self, cause: str, torch_text: str) -> None:
        """Record that the process has ended."""
        self.died_up = self.state == READY
        # A process that was killed says nothing about the next one, unless it was killed here (`why`) because
        # it did not start in time.
        killed = self.child is not None and self.child.killed and not self.why
        self.failed_starts = 0 if self.died_up else self.failed_starts + (not killed)
        self.cause, self.torch_text = cause, torch_text
        self.move("die")

    @property
    def process(self) -> BaseProcess | None:
        """The multiprocessing process object; None until it is started."""
        return self.child.process if self.child is not None and self.child.pid else None

    @property
    def pid(self) -> int:
        """Process id; 0 until the process is started."""
        return 0 if self.child is None else self.child.pid

    @property
    def descriptor(self) -> int:
        """Descriptor that becomes readable when the process has ended; -1 until it is started."""
        return self.child.descriptor if self.child is not None and self.child.pid else -1

    @property
    def is_up(self) -> bool:
        return self.state == READY

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended and was not replaced."""
        return self.state == DEAD
