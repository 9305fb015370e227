"""The record of one worker: the process that has its number now, and what is known of it.

Pure, but for the process that it refers to. Runs in the consumer, on the thread that calls `next()`. The
pool starts and ends the process, the group moves the record from state to state. What the scheduler has
given to a worker is in a table of its own, which knows nothing of processes.
"""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from fastq_loader.errors import InvalidTransition
from fastq_loader.packing.spec import SpecCache
from fastq_loader.statistics.workers import WorkerCounters

if TYPE_CHECKING:
    from fastq_loader.workers.children import Child

NEW, STARTING, READY, DEAD = "new", "starting", "ready", "dead"

#: state → event → next state. A worker is ready when it has said so, and has handlers for signals from then
#: on.
TRANSITIONS: dict[str, dict[str, str]] = {
    NEW: {"start": STARTING},
    STARTING: {"hello": READY, "die": DEAD},
    READY: {"hello": READY, "die": DEAD},
    DEAD: {"start": STARTING},
}


class Worker:
    """One worker of a pool, whatever processes have its number one after the other.

    Attributes:
        number: its own, from 0.
        generation: how many processes had the number before.
        state: see `TRANSITIONS`.
        child: its process, once there is one.
        folder: where it is to bind its socket.
        specs: those of batches that this process has sent.
        counters: what the loader counts of it, once it was started.
        why: why it was ended here; "" if it was not.
        cause, torch_text: how its last process died, in our words and in torch's.
        died_up: whether that one was ready before.
        failed_starts: processes in a row that ended by themselves before they were up.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.generation = -1
        self.state = NEW
        self.child: Child | None = None
        self.folder = ""
        self.specs = SpecCache()
        self.counters: WorkerCounters
        self.why = self.cause = self.torch_text = ""
        self.died_up = False
        self.failed_starts = 0

    def move(self, event: str) -> None:
        """
        Raises:
            InvalidTransition: no worker that is in this state can do that.
        """
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise InvalidTransition(f"worker {self.number} is {self.state}: {event!r} is not allowed")
        self.state = following

    def begin(self, folder: str) -> None:
        """A process is about to be started under the number."""
        self.move("start")
        self.generation += 1
        self.folder, self.why = folder, ""
        self.specs = SpecCache()  # it numbers them anew

    def die(self, cause: str, torch_text: str) -> None:
        """Its process has ended."""
        self.died_up = self.state == READY
        # One that was killed, but for not getting up in time, says nothing about the next one.
        killed = self.child is not None and self.child.killed and not self.why
        self.failed_starts = 0 if self.died_up else self.failed_starts + (not killed)
        self.cause, self.torch_text = cause, torch_text
        self.move("die")

    @property
    def process(self) -> BaseProcess | None:
        """Its process object of multiprocessing's; None until it is started."""
        return self.child.process if self.child is not None and self.child.pid else None

    @property
    def pid(self) -> int:
        """0 until it is started."""
        return 0 if self.child is None else self.child.pid

    @property
    def descriptor(self) -> int:
        """Readable when it has ended; -1 until it is started."""
        return self.child.descriptor if self.child is not None and self.child.pid else -1

    @property
    def is_up(self) -> bool:
        return self.state == READY

    @property
    def is_dead(self) -> bool:
        """It was not replaced."""
        return self.state == DEAD
