"""Samples that cannot be read: the policies for the argument `errors=`, and the fetcher that applies them.

Runs in workers, and in the consumer with num_workers=0. Only errors raised while a sample is read count:
errors of collate functions, samplers and workers are raised as usual. The replacement of a failed sample
depends only on the epoch, the batch, the position and the index, not on the worker or earlier attempts.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import CO_GENERATOR
from os import PathLike
from traceback import clear_frames, walk_tb
from types import GeneratorType, TracebackType
from typing import Any

import numpy as np
import torch

from fastq_loader.errors import add_note, is_int, shorten
from fastq_loader.reading import sample_seeds
from fastq_loader.reading.fetch import EndOfStream, Fetcher
from fastq_loader.system.interrupts import alarm_is_set, refuse_interrupt
from fastq_loader.system.unpatched import time

#: Replacements tried for one sample, and characters of an error that are recorded.
_TRIES, _ERROR = 100, 200
#: A share counts at least this many samples as read: one bad sample among the first is not 100 %.
LEAST_READ = 1000


class LeftOut(Exception):
    """All samples of a batch were left out."""


@dataclass(frozen=True)
class Tolerance:
    """Base class of policies for samples that raise when they are read; see `Replace` for the arguments."""

    limit: int | float | None = 0.5
    only: type[Exception] | tuple[type[Exception], ...] = (Exception,)
    path: str | PathLike[str] | None = None

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


def read_errors(errors: Any, iterable: bool = False) -> Tolerance | None:
    """Validate the argument `errors=`; None: every error is raised.

    Raises:
        ValueError: `errors` is an unknown string, or cannot be used with an iterable dataset.
        TypeError: `errors` has another type.
    """
    if isinstance(errors, Replace) and iterable:
        raise ValueError(
            f"errors={errors} cannot be used with an IterableDataset, which cannot be indexed: use "
            "Skip(), or let its __iter__ handle the error"
        )
    if isinstance(errors, (Replace, Skip)):
        return errors
    if errors == "raise":
        return None
    raise (ValueError if isinstance(errors, str) else TypeError)(
        f"errors={errors!r} is unknown: use 'raise', Replace(...) or Skip(...)"
    )


def make_fetcher(
    dataset: Any, *, errors: Tolerance | None = None, population: int | None = None, **rules: Any
) -> Fetcher:
    """Create the fetcher for a dataset; see `Fetcher` and `TolerantFetcher` for the arguments."""
    if errors is None:
        return Fetcher(dataset, **rules)
    return TolerantFetcher(dataset, errors=errors, population=population, **rules)


class TolerantFetcher(Fetcher):
    """A fetcher that tolerates samples which cannot be read.

    Args:
        errors: the policy for such samples.
        population: replacements are chosen from the indices below it; None: from the same batch.

    Attributes:
        place: numbers of the epoch and of the batch; to be set before each batch.
    """

    def __init__(self, dataset: Any, *, errors: Tolerance, population: int | None, **rules: Any) -> None:
        super().__init__(dataset, **rules)
        self._errors, self._population = errors, population
        self._ends: list[int] = []
        self._own_alarm = False  # see `refuse_interrupt`
        self._failed: Exception | None = None  # error of the last `next()` of the stream
        self.place = (0, 0)

    def fetch(self, index: Any) -> Any:
        self.bad, self.error, self._own_alarm = [], None, not alarm_is_set()
        return super().fetch(index)

    def _read(self, index: Any) -> Any:
        """Read the samples to be collated."""
        indices = [index]
        if self.auto_collation:
            indices = index if type(index) is list else list(index)
        if self.dataset_iter is not None:
            data = self._read_stream_on(len(indices))
        elif self._getitems:
            try:
                return self.dataset.__getitems__(indices if iter(index) is index else index)
            except self._errors.only as error:
                refuse_interrupt(error, self._own_alarm)
            data = self.dataset.__getitems__(self._read_each(indices, self._readable))
        else:
            self._ends = [self.fetched]
            data = self._read_each(indices, self._timed if self._times_samples else None)
            if self._times_samples and not self.bad:
                self._compare(self._ends)
        return data if self.auto_collation else data[0]

    def _timed(self, index: Any) -> Any:
        sample = self.dataset[index]
        self._ends.append(time.monotonic_ns())
        return sample

    def _readable(self, index: Any) -> Any:
        """Return the index if the dataset can read its sample."""
        self.dataset.__getitems__([index])
        return index

    def _read_each(self, indices: list[Any], read: Callable[[Any], Any] | None) -> list[Any]:
        dataset, data = self.dataset, list[Any]()
        places, left_out = sample_seeds.followed(indices), 0
        while True:  # samples read before an error are not read again
            try:
                if read is None:
                    for index in places:  # faster than `map`
                        data.append(dataset[index])
                else:
                    data.extend(map(read, places))
                if len(data) + left_out == len(indices):
                    break
                raise StopIteration  # as user code did, which ended the `map`
            except self._errors.only as error:
                refuse_interrupt(error, self._own_alarm)
                position = len(data) + left_out
                self._note(indices[position], error)
            if isinstance(self._errors, Skip):
                left_out += 1
            else:
                data.append(self._instead(indices, position, read or partial(operator.getitem, dataset)))
        return self._some(data)

    def _some(self, data: list[Any]) -> list[Any]:
        if self.bad and not data:
            raise LeftOut
        return data

    def _note(self, index: Any, error: Exception) -> None:
        if isinstance(error, StopIteration):  # it would end the epoch if it were raised
            error = RuntimeError("the dataset raised StopIteration")
        self.bad.append([to_builtin(index), None, shorten(error, _ERROR)])
        self.error = error

    def _instead(self, indices: list[Any], position: int, read: Callable[[Any], Any]) -> Any:
        """Read a replacement for the sample that was recorded last."""
        first = len(self.bad) - 1
        for attempt in range(_TRIES):
            index = self._other(indices, position, attempt)
            failed = self.bad[first:]
            if to_builtin(index) in (tried for tried, _, _ in failed):
                continue
            try:
                sample = read(index)
            except self._errors.only as error:
                refuse_interrupt(error, self._own_alarm)
                self._note(index, error)
                continue
            for each in failed:
                each[1] = to_builtin(index)
            return sample
        try:
            assert self.error is not None, "it was noted"
            if not self._population and len(indices) == 1:
                why = (
                    "the batch has no other sample, and indices of samplers other than torch's are not known"
                )
                add_note(self.error, f"errors={self._errors} finds no replacement: {why}")
            raise self.error
        finally:
            self.error = None  # its traceback refers to this frame

    def _other(self, indices: list[Any], position: int, attempt: int) -> Any:
        index = indices[position]
        known = to_builtin(index) if hasattr(index, "__index__") or type(index) is str else 0
        which = repr((*self.place, position, attempt, known))
        digest = hashlib.blake2b(which.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        if not self._population:
            return indices[number % len(indices)]
        drawn = random.Random(number)
        try:
            made = _alike(index, self._population, drawn)
        except TypeError as error:
            raise TypeError(
                f"errors={self._errors} cannot read another sample in place of {shorten(index)}: {error}"
            ) from self.error
        return number % self._population if made is None else made

    def _read_stream_on(self, size: int) -> list[Any]:
        """Like `_read_stream`, but continues after samples that raise."""
        if self.ended:
            raise EndOfStream
        data: list[Any] = []
        for _ in sample_seeds.followed(range(size)):
            try:
                data.append(next(self.dataset_iter))
                self._failed = None
            except StopIteration:
                self._refuse_to_end()
                self.ended = self.auto_collation
                if self.drop_last or not (data or self.bad):
                    raise EndOfStream from None
                break
            except self._errors.only as error:
                refuse_interrupt(error, self._own_alarm)
                self._note(None, error)
                self._failed = error
        return self._some(data)

    def _refuse_to_end(self) -> None:
        """Raise the error with which a generator has ended: the samples after it are lost."""
        error, self._failed = self._failed, None
        if error is None or not _has_ended_a_generator(error.__traceback__):
            return
        name = type(self.dataset_iter).__name__
        add_note(error, f"errors={self._errors} cannot leave it out: the {name} did not go on after it")
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame


def _has_ended_a_generator(entries: TracebackType | None) -> bool:
    """Whether an error came through a generator from which the stream is read. A generator expression in a
    function counts only if it is still referenced afterwards: `sum(x for x in parts)` ends with its sample.
    """
    within, expressions = False, set()
    for frame, _ in walk_tb(entries):
        code = frame.f_code
        if not code.co_flags & CO_GENERATOR:
            within |= frame.f_globals.get("__name__") != __name__
        elif within and code.co_name == "<genexpr>":
            expressions.add(code)
        else:
            return True
    if not expressions:
        return False
    clear_frames(entries)  # their variables may be the only references to one
    found = (each for each in gc.get_objects() if type(each) is GeneratorType)
    return any(each.gi_frame is None and each.gi_code in expressions for each in found)


def _alike(index: Any, population: int, drawn: random.Random) -> Any:
    """Draw other indices in the same form and number as in `index`; None: it is a single one.

    Raises:
        TypeError: it has parts that are neither indices nor names.
    """
    if isinstance(index, dict):
        return {key: _part(value, population, drawn) for key, value in index.items()}
    if isinstance(index, (list, tuple)):
        made = [_part(each, population, drawn) for each in index]
        return index._make(made) if hasattr(index, "_make") else type(index)(made)
    if isinstance(index, slice):
        rows = _other_rows(range(*index.indices(population)), population, drawn)
        return slice(rows.start, None if rows.stop < 0 else rows.stop, rows.step) if rows else index
    if isinstance(index, range):
        return _other_rows(index, population, drawn)
    if isinstance(index, (torch.Tensor, np.ndarray)) and index.ndim:
        return _other_numbers(index, population, drawn)
    return None


def _other_rows(rows: range, population: int, drawn: random.Random) -> range:
    span = abs(rows[-1] - rows[0]) if rows else 0
    low = drawn.randrange(max(1, population - span))
    if not rows:
        return rows
    first, last = (low, low + span + 1) if rows.step > 0 else (low + span, low - 1)
    return range(first, last, rows.step)


def _other_numbers(index: torch.Tensor | np.ndarray, population: int, drawn: random.Random) -> Any:
    kind = str(index.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        raise TypeError(f"its values are {kind}, not whole numbers")
    shape = tuple(index.shape)
    values = np.array([drawn.randrange(population) for _ in range(math.prod(shape))], np.int64).reshape(shape)
    if isinstance(index, np.ndarray):
        return values.astype(index.dtype)
    return torch.from_numpy(values).to(index)


def _part(value: Any, population: int, drawn: random.Random) -> Any:
    if value is None or value is ... or isinstance(value, (str, bool)):  # such as a column's name
        return value
    made = _alike(value, population, drawn)
    if made is None and not hasattr(value, "__index__"):
        raise TypeError(f"{shorten(value)} is not an index")
    return drawn.randrange(population) if made is None else made


def to_builtin(index: Any) -> int | str | None:
    """Convert an index to a number or a text, as statistics and states show it."""
    if index is None or type(index) is str:
        return index
    with contextlib.suppress(Exception):  # a user's type may do anything
        return operator.index(index)
    return shorten(index, _ERROR)
