"""Small objects that a dataset holds, and of which every worker has a copy although it only reads them.

Runs in the consumer, before workers start, before they end, and when somebody asks. Who reads an
object of Python's writes its reference count. In a forked worker that copies the page; the kernel says which
pages a process has alone, so some objects tell it of all. Workers that were not forked have unpickled theirs.
Where there are no such objects, they are looked for once.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastq_loader.insight import machine
from fastq_loader.sharing.share import columns_nbytes, containers_of, some_of
from fastq_loader.system.pages import share_alone

#: Bytes of copies in all workers from which on they are worth a word, or this part of what memory there is.
_MUCH, _PART = 1e9, 0.1
#: Items of which each stands for others.
_SAMPLE = 500
_PLURALS = {"str": "strings", "int": "integers", "dict": "dicts"}


@dataclass(frozen=True)
class Copied:
    """An attribute of a dataset, and what its copies take.

    Attributes:
        name: of the attribute.
        what: the type, and how many items of which type.
        nbytes: that the objects take in the consumer, about.
        each: bytes that a worker has copied, on average.
        workers: how many there are.
        once: bytes that it would take in all once it is shared, about.
    """

    name: str
    what: str
    nbytes: int
    each: int
    workers: int
    once: int

    def __str__(self) -> str:
        each = "the worker" if self.workers == 1 else f"each of {self.workers} workers"
        return (
            f"`{self.name}`: {self.what}, about {_megabytes(self.nbytes)}; {each} has copied "
            f"{_megabytes(self.each)}: fastq_loader.share(dataset) takes {_megabytes(self.once)} once"
        )


class Growth:
    """What a loader's workers have copied.

    Attributes:
        found: the attributes with most copies first; empty where all copies together are not worth a word.
    """

    def __init__(self) -> None:
        self.found: tuple[Copied, ...] = ()
        self._containers: list[tuple[Copied, list[int]]] | None = None
        self._much = 0.0

    def begin(self, dataset: Any, context: Any, workers: int) -> bool:
        """Workers are about to start. Returns whether it is worth it to look at them later.

        Args:
            dataset: theirs. Some of its objects are touched, which copies pages of this process once these
                are shared: so it is done now.
            context: of multiprocessing; None: its own.
            workers: how many.
        """
        if self._containers == []:
            return False
        values = {id(value): (name, value, nbytes) for name, value, nbytes in containers_of(dataset)}
        self._containers = []
        if most := workers * sum(nbytes for _, _, nbytes in values.values()):
            self._much = min(_MUCH, _PART * machine.memory_bytes() / machine.ranks())
            if most > self._much:
                forked = (context or multiprocessing).get_start_method() == "fork"
                self._containers = [_container(*found, workers, forked) for found in values.values()]
        return self._containers != []

    def look(self, pids: Sequence[int]) -> None:
        """Find out what the workers with these process ids have copied now."""
        if not (self._containers and pids):
            return
        found = []
        for whole, addresses in self._containers:
            parts = [share_alone(pid, addresses) for pid in pids] if addresses else [1.0]
            each = int(whole.nbytes * sum(parts) / len(parts))
            if each > whole.nbytes // 20:
                found.append(replace(whole, each=each))
        found.sort(key=lambda copied: -copied.each)
        worth = sum(copied.each for copied in found) * len(pids) > self._much
        self.found = tuple(found) if worth else ()


def _container(name: str, value: Any, nbytes: int, workers: int, forked: bool) -> tuple[Copied, list[int]]:
    """An attribute that is copied as a whole, and where some of its objects lie; nowhere, where they are not
    inherited."""
    items = type(next(iter(value))).__name__
    items = "items" if type(value) is dict else _PLURALS.get(items, f"{items}s")
    what = f"{type(value).__name__} of {len(value):,} {items}"
    whole = Copied(name, what, nbytes, nbytes, workers, columns_nbytes(value))
    return whole, list(_addresses(value)) if forked else []


def _addresses(value: Any) -> Iterator[int]:
    for item in some_of(value, _SAMPLE):
        if type(value) is not dict:
            yield id(item)
        if type(item) in (tuple, list):
            yield from map(id, item[:4])


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
