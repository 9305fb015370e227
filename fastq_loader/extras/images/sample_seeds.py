"""The seed of a sample: the same for any number of workers, any schedule, a restart and a resume.

Runs where samples are read: in workers, and in the consumer with num_workers=0. Owns the place of the
sample that the current thread reads. A seed is mixed from the base seed of the epoch, the number of the
batch and the position in it. So it depends on nothing that was drawn before, and draws from no
generator.

The place is kept only in processes in which something has asked for seeds (`want`): other datasets are read
without it.
"""

from __future__ import annotations

import hashlib
import operator
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastq_loader.reading import fetch


class Batch:
    """The batch that a thread reads.

    Args:
        numbers: base seed of the epoch and number of the batch; of an iterable dataset the number of readers,
            of the reader, and of its batch.

    Attributes:
        indices: iterator over the indices of the batch; its progress is the position of the sample.
        size: number of indices.
        newest: the position whose sample took the last seed, and how many seeds it took.
    """

    __slots__ = ("indices", "newest", "numbers", "size")

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers, self.indices, self.size, self.newest = numbers, iter(()), 0, (-1, 0)


class _Reading(threading.local):
    """What this thread reads.

    Attributes:
        batch: the batch, or None. A dataset may read from another loader meanwhile, so a reader puts back
            the one before.
        used: number of times that a sample's seed decided something: the result is another one each time.
        renews: whether a sample that is unpickled takes a new seed, because it comes from a cache.
        owed: number of seeds for which torch's generator has to be advanced yet; None outside of `watched`.
    """

    batch: Batch | None = None
    used = 0
    renews = False
    owed: int | None = None


reading = _Reading()


def want() -> None:
    """From now on, readers in this process keep the place of each sample."""
    fetch.sample_hook = sys.modules[__name__]


@contextmanager
def batch_of(numbers: tuple[int, ...]) -> Iterator[None]:
    """Context in which this thread reads a batch, see `Batch`."""
    outer, reading.batch = reading.batch, Batch(numbers)
    try:
        yield
    finally:
        reading.batch = outer


def followed(indices: Iterable[Any]) -> Iterator[Any]:
    """An iterator over the indices of the batch, whose progress says which sample is read: this costs no call
    for each of them."""
    iterator, batch = iter(indices), reading.batch
    if batch is not None:
        batch.indices, batch.size = iterator, operator.length_hint(indices, 0)
    return iterator


def current() -> tuple[int, ...] | None:
    """The numbers of the batch that this thread reads; None outside of a loader."""
    return None if reading.batch is None else reading.batch.numbers


@contextmanager
def watched() -> Iterator[None]:
    """Context in which seeds advance torch's generator at its end only. A cache compares the generator before
    and after a call, and stores a sample without its seed."""
    around, reading.owed = reading.owed, reading.owed or 0
    try:
        yield
    finally:
        owed, reading.owed = reading.owed, around
        for _ in range(owed if around is None else 0):
            torch.randint(2, (), device="cpu")


class Again:
    """Whether the seeds that were taken in a context of `again` stay taken."""

    stays = False

    def keep(self) -> None:
        self.stays = True


@contextmanager
def again() -> Iterator[Again]:
    """Context in which the value of a sample is computed once more. Its seeds are put back at the end, unless
    it raises or `keep` is called."""
    batch, used, result = reading.batch, reading.used, Again()
    newest = None if batch is None else batch.newest
    try:
        with watched():
            yield result
            if not result.stays:
                reading.owed = 0
    except BaseException:
        result.keep()
        raise
    finally:
        if not result.stays:
            reading.used = used
            if batch is not None and newest is not None:
                batch.newest = newest


def take() -> int:
    """A seed for the current sample, of 63 bits: the first, the second, ... that it takes.

    Outside of a loader of this package it is drawn from torch's global generator. Where the position of the
    sample is not known (`__getitems__`, indices of other types than list and tuple), all seeds of the batch
    are counted.
    """
    batch = reading.batch
    if batch is None and reading.owed is not None:
        reading.owed += 1
        return mixed(torch.random.get_rng_state().numpy().tobytes(), reading.owed)
    if batch is None:
        return int(torch.randint(1 << 62, (), device="cpu")) * 2 + int(torch.randint(2, (), device="cpu"))
    position = batch.size - operator.length_hint(batch.indices, 0)
    taken = batch.newest[1] if position == batch.newest[0] else 0
    batch.newest = position, taken + 1
    return mixed(*batch.numbers, position, taken)


def mixed(*parts: int | bytes) -> int:
    """A hash of 63 bits of all parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
