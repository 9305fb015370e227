"""The seed of a sample: the same for any number of workers, any schedule, a restart and a resume.

Runs where samples are read: in workers, and in the consumer with num_workers=0. A seed is mixed from the base
seed of the epoch, the number of the batch and the position in it. So it depends on nothing that was drawn
before, and draws from no generator.
"""

from __future__ import annotations

import hashlib
import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fastq_loader.reading.fetch import loading


class _Reading(threading.local):
    """What this thread reads.

    Attributes:
        used: number of times that a sample's seed decided something: the result is another one each time.
        renews: whether a sample that is unpickled takes a new seed, because it comes from a cache.
        owed: number of seeds for which torch's generator has to be advanced yet; None outside of `watched`.
    """

    used = 0
    renews = False
    owed: int | None = None


reading = _Reading()


def place() -> tuple[int, ...] | None:
    """The numbers of the batch that this thread reads, and the position of the sample in it, from 1 on; None
    outside of a loader. The position is 0 in the collate function, and where it is not known (`__getitems__`,
    indices of other types than list and tuple)."""
    if (reader := loading.reader) is None:
        return None
    size, left = map(operator.length_hint, (reader.fetcher.indices, reader.fetcher.left))
    return *reader.numbers, size - left if size else 0


class watched:
    """Context in which seeds advance torch's generator at its end only. A cache compares the generator before
    and after a call, and stores a sample without its seed."""

    def __enter__(self) -> None:
        self._around, reading.owed = reading.owed, reading.owed or 0

    def __exit__(self, *error: object) -> None:
        owed, reading.owed = reading.owed or 0, self._around
        for _ in range(owed if self._around is None else 0):
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
    reader, used, result = loading.reader, reading.used, Again()
    newest = None if reader is None else reader.newest
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
            if reader is not None:
                reader.newest = newest


def take() -> int:
    """A seed for the current sample, of 63 bits: the first, the second, ... that it takes.

    Outside of a loader of this package it is drawn from torch's global generator. Where the position of the
    sample is not known, all seeds of the batch are counted.
    """
    reader, of_sample = loading.reader, place()
    if of_sample is None and reading.owed is not None:
        reading.owed += 1
        return sample_seed(torch.random.get_rng_state().numpy().tobytes(), reading.owed)
    if of_sample is None:
        return int(torch.randint(1 << 62, (), device="cpu")) * 2 + int(torch.randint(2, (), device="cpu"))
    before, taken = reader.newest or ((), 0)
    reader.newest = of_sample, taken + 1 if of_sample == before else 1
    return sample_seed(*of_sample, reader.newest[1])


def sample_seed(*parts: int | bytes) -> int:
    """A hash of 63 bits of all parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
