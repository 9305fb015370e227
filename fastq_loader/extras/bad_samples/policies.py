"""The policies for the argument `errors=`: samples that cannot be read are replaced or left out.

Only errors raised while a sample is read count: errors of collate functions, samplers and workers are raised
as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from fastq_loader.errors import is_int
from fastq_loader.extras.bad_samples.fetcher import TolerantFetcher
from fastq_loader.extras.bad_samples.records import BadSampleJudge, BadSamples
from fastq_loader.reading.computed import is_computed
from fastq_loader.reading.error_policy import ErrorPolicy
from fastq_loader.reading.fetch import Fetcher

#: A share counts at least this many samples as read: one bad sample among the first is not 100 %.
LEAST_READ = 1000


@dataclass(frozen=True)
class Tolerance(ErrorPolicy):
    """Base class of policies for samples that raise when they are read; see `Replace` for the arguments."""

    limit: int | float | None = 0.5
    only: type[Exception] | tuple[type[Exception], ...] = (Exception,)
    path: str | PathLike[str] | None = None
    replaces = False

    def __post_init__(self) -> None:
        self._check_limit()
        only, path = self.only if isinstance(self.only, tuple) else (self.only,), self.path
        if not only or not all(isinstance(each, type) and issubclass(each, Exception) for each in only):
            raise TypeError(f"{self}: only must be an exception class, or a tuple of exception classes")
        if not (path is None or isinstance(path, (str, PathLike))):
            raise TypeError(f"{self}: path must be a file's path")

    def _check_limit(self) -> None:
        limit = self.limit
        if limit is None:
            return
        if not (is_int(limit) or isinstance(limit, float)):
            raise TypeError(f"{self}: limit must be a number of samples, a share, or None")
        if limit < 0 or (isinstance(limit, float) and not limit <= 1.0):
            raise ValueError(f"{self}: limit must be at least 0, and a share at most 1.0")

    def fetchers(self, index_sampler: Any, iterable: bool) -> Callable[..., Fetcher]:
        """See `ErrorPolicy`. @private"""
        population = None if iterable else _population(index_sampler)
        return partial(TolerantFetcher, errors=self, population=population)

    def records(self, state: dict[str, Any]) -> BadSamples:
        """See `ErrorPolicy`. @private"""
        return BadSamples(state)

    def judge(
        self, records: BadSamples, epoch: int, in_batches: bool, state: dict[str, Any]
    ) -> BadSampleJudge:
        """See `ErrorPolicy`. @private"""
        return BadSampleJudge(records, self, epoch, in_batches, state)

    def allows(self, bad: int, read: int) -> bool:
        """Whether `bad` failures among `read` samples are within the limit. @private"""
        if isinstance(self.limit, float):
            return bad <= self.limit * max(read, LEAST_READ)
        return self.limit is None or bad <= self.limit


@dataclass(frozen=True)
class Replace(Tolerance):
    """Replaces a sample that raises in `__getitem__` or `__getitems__` by another sample: batches keep their
    sizes, and ranks stay in step.

    The replacement depends only on the epoch, the batch, the position and the index: it is the same for any
    number of workers, after worker deaths and after a resume. With torch's `RandomSampler`,
    `SequentialSampler` or `DistributedSampler`, or a `PermutationSampler`, it is any sample that the sampler
    may yield; with any other it comes from the same batch, so that no sample of a validation set is used.

    Args:
        limit: how many samples of an epoch may fail: an int, or a float from 0.0 to 1.0 for a share of the
            samples read, counted as at least 1,000; None: any number. Beyond it the last error is raised,
            with a list.
        only: exceptions to tolerate, a class or a tuple of classes; others are raised as usual.
        path: a file that gets a line of JSON for each such sample: epoch, batch, index, instead, error.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    >>> class Reciprocals(torch.utils.data.Dataset):
    ...     def __len__(self):
    ...         return 4
    ...     def __getitem__(self, index):
    ...         return 1 / index
    >>> warnings.simplefilter("ignore", BadSampleFound)
    >>> loader = DataLoader(Reciprocals(), 4, errors=Replace(limit=1, only=ZeroDivisionError))
    >>> [len(batch) for batch in loader], loader.statistics().bad_samples
    ([4], 1)
    """

    replaces = True

    def check(self, iterable: bool) -> None:
        """See `ErrorPolicy`. @private"""
        if iterable:
            raise ValueError(
                f"errors={self} cannot be used with an IterableDataset, which cannot be indexed: use Skip(), "
                "or let its __iter__ handle the error"
            )


@dataclass(frozen=True)
class Skip(Tolerance):
    """Leaves out a sample that raises in `__getitem__`, `__getitems__` or `__next__`: its batch gets shorter,
    and an empty batch is not delivered. The arguments and their errors are the same as for `Replace`.

    An iterable dataset must continue after it has raised, which generators do not: an error that has ended a
    generator is raised.

    >>> class Reciprocals(torch.utils.data.Dataset):
    ...     def __len__(self):
    ...         return 4
    ...     def __getitem__(self, index):
    ...         return 1 / index
    >>> warnings.simplefilter("ignore", BadSampleFound)
    >>> list(DataLoader(Reciprocals(), 4, errors=Skip()))
    [tensor([1.0000, 0.5000, 0.3333], dtype=torch.float64)]
    """


def _population(index_sampler: Any) -> int | None:
    """Number of indices that a sampler chooses from, if these are 0, 1, 2, ...; None if unknown."""
    sampler: Any = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    if is_computed(sampler):
        return sampler.population  # type: ignore[no-any-return]
    source = {RandomSampler: "data_source", SequentialSampler: "data_source", DistributedSampler: "dataset"}
    return len(getattr(sampler, source[type(sampler)])) if type(sampler) in source else None
