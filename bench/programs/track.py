"""What a run of a program costs: `Track` wraps its passes over loaders. Runs in the program's process.

Seconds are those between the call of `iter()` and the end of the pass; those waited for data are spent within
`iter()` and `next()`. Memory is the proportional set size (PSS) of the process and all below it, where a page
that several map counts once. A thread looks at it twice a second, because a look takes milliseconds, and
once more at the end of each pass, off the clock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.timing.processes import Owners, cpu_seconds
from fastq_loader import DataLoader, cached
from fastq_loader.extras.insight.processes import proportional

LOOK_S = 0.5
SHOW_S = 0.1
END = object()


@dataclass
class Pass:
    """One pass over a loader.

    Attributes:
        seconds, waited: of wall clock; all of them, and those waited for data.
        memory: its peak, in bytes.
        idle_cpu: seconds of CPU that the workers of the program's other loaders used meanwhile.
    """

    description: str
    batches: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    memory: int = 0
    idle_cpu: float = 0.0


class Track:
    """Call it with a loader and a description: it yields the loader's batches.

    Args:
        shown: with a progress bar.
    """

    def __init__(self, shown: bool = False) -> None:
        self.passes: list[Pass] = []
        self._owners = Owners()
        self._pids: dict[str, list[int]] = {}  # of the workers of each loader
        self._caches: dict[str, tuple[int, ...]] = {}
        self._ended = threading.Event()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[state]}"), disable=not shown)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The program runs: memory is looked at, and the bar shown."""
        looking = threading.Thread(target=self._look_often, daemon=True)
        looking.start()
        try:
            with self._progress:
                yield
        finally:
            self._ended.set()
            looking.join()

    def __call__(self, batches: Any, description: str) -> Iterator[Any]:
        this = Pass(description)
        self.passes.append(this)
        name = str(id(batches))
        others = [pid for other, pids in self._pids.items() if other != name for pid in pids]
        idle = sum(map(cpu_seconds, others))
        total = len(batches) if hasattr(batches, "__len__") else None
        task = self._progress.add_task(description, total=total, state="")
        began = asked = perf_counter()
        shown = 0.0
        iterator = iter(batches)
        while (batch := next(iterator, END)) is not END:
            came = perf_counter()
            this.waited += came - asked
            this.batches += 1
            if not self._progress.disable and came - shown > SHOW_S:
                state = f"waited {this.waited:.1f} s"
                self._progress.update(task, completed=this.batches, state=state)
                shown = came
            yield batch
            asked = perf_counter()
        ended = perf_counter()
        this.waited += ended - asked
        this.seconds = ended - began
        this.idle_cpu = sum(map(cpu_seconds, others)) - idle
        self._pids[name] = self._owners.of(name)
        if isinstance(batches, DataLoader):
            attributes = vars(batches.dataset).values()
            for cache in (each.statistics() for each in attributes if isinstance(each, cached)):
                samples = len(batches.dataset)  # type: ignore[arg-type]  # a program's dataset has a length
                self._caches[name] = (cache.values, samples, cache.bytes, cache.limit)
        self._look()
        self._progress.update(task, completed=this.batches, state=f"waited {this.waited:.1f} s")

    @property
    def cached(self) -> tuple[int, ...]:
        """Of the caches of all loaders: values in them, samples in all, bytes, and the most bytes allowed."""
        return tuple(map(sum, zip(*self._caches.values(), strict=True)))

    def _look(self) -> None:
        if self.passes:
            memory = proportional(os.getpid())
            self.passes[-1].memory = max(self.passes[-1].memory, memory)

    def _look_often(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._look()
