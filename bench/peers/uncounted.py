"""A loader that counts nothing, to see what counting costs.

What stays are the calls, which do nothing, and the numbers of batches and bytes, which are plain additions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from fastq_loader.consumer.accounting import Accounting
from fastq_loader.statistics.counters import Counters, WorkerCounters
from fastq_loader.statistics.epoch import EpochCounters
from fastq_loader.statistics.notes import Notes


def _nothing(*arguments: Any) -> None:
    """In place of what counts."""


def _silent(kind: type[Any], *kept: str, **instead: Any) -> Any:
    """The same class with public methods that do nothing, but for some."""
    methods = [name for name, of in vars(kind).items() if isinstance(of, FunctionType) and name[0] != "_"]
    return type(kind.__name__, (kind,), dict.fromkeys({*methods} - {*kept}, _nothing) | instead)


class _Sink(list[Any]):
    """Keeps nothing that is added."""

    def __iadd__(self, added: Any) -> _Sink:  # type: ignore[misc]
        return self

    append = _nothing


class _Notes(_silent(Notes)):  # type: ignore[misc]
    _counters: EpochCounters

    def __init__(self, counters: EpochCounters) -> None:
        super().__init__(counters)
        self.answers, self.others = _Sink(), _Sink()

    def counted(self) -> EpochCounters:
        return self._counters


class _Counters(Counters):
    def begin_epoch(self, now: int, cpu: int) -> Notes:
        self._notes.append(notes := _Notes(EpochCounters(0, 0)))
        return notes


_IN_PLACE: dict[str, Any] = {
    "consumer.resources.Counters": _Counters,
    "consumer.accounting.Notes": _Notes,
    "consumer.event_loop.Accounting": _silent(Accounting),
    "consumer.event_loop.time": SimpleNamespace(monotonic=time.monotonic, monotonic_ns=int),
    "workers.worker_pool.WorkerCounters": _silent(WorkerCounters, "replaced", "snapshot"),
    "workers.main.Worker._costs": lambda worker: (),
    "reading.fetch.monotonic_ns": int,
}


@contextmanager
def nothing_counted() -> Iterator[None]:
    """Loaders whose first epoch begins in here count nothing, for as long as it lasts; with workers that are
    forked."""
    with ExitStack() as around:
        for name, instead in _IN_PLACE.items():
            around.enter_context(patch(f"fastq_loader.{name}", instead))
        yield
