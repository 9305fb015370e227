"""The fetcher that applies `errors=`: it leaves out or replaces samples that raise when they are read.

Runs in workers, and in the consumer with num_workers=0. The replacement of a failed sample depends only on
the epoch, the batch, the position and the index, not on the worker or earlier attempts.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Callable
from functools import partial
from inspect import CO_GENERATOR
from traceback import walk_tb
from types import TracebackType
from typing import Any

from torch.utils.data import get_worker_info

from fastq_loader.errors import add_note, shorten
from fastq_loader.packing.pickling import dump_exception
from fastq_loader.reading.fetch import EndOfStream, Fetcher, LeftOut

#: Replacements tried for one sample, and characters of an error that are recorded.
_TRIES, _ERROR = 100, 200


class TolerantFetcher(Fetcher):
    """A fetcher that tolerates samples which cannot be read.

    Args:
        errors: the policy for such samples, a `Tolerance`.
        population: replacements are chosen from the indices below it; None: from the same batch.

    Attributes:
        bad: samples of the last batch that could not be read: index, the index read instead, error.
        remark: these, and the exception of the last one, pickled in a worker; None without any.
    """

    bad: list[list[Any]]

    def __init__(self, dataset: Any, *, errors: Any, population: int | None, **rules: Any) -> None:
        super().__init__(dataset, **rules)
        self._errors, self._population = errors, population
        self._error: Exception | None = None  # of the last bad sample
        self._failed: Exception | None = None  # error of the last `next()` of the stream

    def fetch(self, index: Any) -> Any:
        self.bad, self._error = [], None
        try:
            return super().fetch(index)
        finally:
            error, self._error = self._error, None
            if error is not None:
                worker = get_worker_info()
                self.remark = self.bad, error if worker is None else dump_exception(error, worker.id)
            del error  # its traceback refers to this frame

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
            except self._errors.only:
                data = self.dataset.__getitems__(self._read_each(indices, self._readable))
        else:
            data = self._read_each(indices, None)
        return data if self.auto_collation else data[0]

    def _readable(self, index: Any) -> Any:
        """Return the index if the dataset can read its sample."""
        self.dataset.__getitems__([index])
        return index

    def _read_each(self, indices: list[Any], read: Callable[[Any], Any] | None) -> list[Any]:
        dataset, data = self.dataset, list[Any]()
        self.indices, self.left, left_out = indices, iter(indices), 0
        while True:  # samples read before an error are not read again
            try:
                if read is None:
                    for index in self.left:  # faster than `map`
                        data.append(dataset[index])
                else:
                    data.extend(map(read, self.left))
                if len(data) + left_out == len(indices):
                    break
                raise StopIteration  # as user code did, which ended the `map`
            except self._errors.only as error:
                position = len(data) + left_out
                self._note(indices[position], error)
            if not self._errors.replaces:
                left_out += 1
            else:
                data.append(self._instead(indices, position, read or partial(operator.getitem, dataset)))
        self.indices = ()
        if self.bad and not data:
            raise LeftOut
        return data

    def _note(self, index: Any, error: Exception) -> None:
        if isinstance(error, StopIteration):  # it would end the epoch if it were raised
            error = RuntimeError("the dataset raised StopIteration")
        self.bad.append([to_builtin(index), None, shorten(error, _ERROR)])
        self._error = error

    def _instead(self, indices: list[Any], position: int, read: Callable[[Any], Any]) -> Any:
        """Read a replacement for the sample that was recorded last."""
        first = len(self.bad) - 1
        index = indices[position]
        bulk = isinstance(index, (dict, list, tuple, slice, range)) or getattr(index, "ndim", 0) > 0
        for attempt in range(0 if bulk and self._population else _TRIES):
            index = self._other(indices, position, attempt)
            failed = self.bad[first:]
            if to_builtin(index) in (tried for tried, _, _ in failed):
                continue
            try:
                sample = read(index)
            except self._errors.only as raised:
                self._note(index, raised)
                continue
            for each in failed:
                each[1] = to_builtin(index)
            return sample
        error, self._error = self._error, None
        assert error is not None, "it was noted"
        try:
            if bulk:
                add_note(error, f"errors={self._errors} cannot replace samples that are read by one index")
            elif not self._population and len(indices) == 1:
                why = (
                    "the batch has no other sample, and indices of samplers other than torch's are not known"
                )
                add_note(error, f"errors={self._errors} finds no replacement: {why}")
            raise error
        finally:
            del error  # its traceback refers to this frame

    def _other(self, indices: list[Any], position: int, attempt: int) -> Any:
        index = indices[position]
        known = to_builtin(index) if hasattr(index, "__index__") or type(index) is str else 0
        which = repr((*self.batch_numbers, position, attempt, known))
        digest = hashlib.blake2b(which.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        return number % self._population if self._population else indices[number % len(indices)]

    def _read_stream_on(self, size: int) -> list[Any]:
        """Like `_read_stream`, but continues after samples that raise."""
        if self.ended:
            raise EndOfStream
        data: list[Any] = []
        self.indices, self.left = range(size), iter(range(size))
        for _ in self.left:
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
                self._note(None, error)
                self._failed = error
        if self.bad and not data:
            raise LeftOut
        return data

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
    """Whether an error came through a generator from which the stream is read: it has ended. A generator
    expression in a function ends with its sample: `sum(x for x in parts)`."""
    within = False
    for frame, _ in walk_tb(entries):
        code = frame.f_code
        if not code.co_flags & CO_GENERATOR:
            within |= frame.f_globals.get("__name__") != __name__
        elif not within or code.co_name != "<genexpr>":
            return True
    return False


def to_builtin(index: Any) -> int | str | None:
    """Convert an index to a number or a text, as statistics and states show it."""
    if index is None or type(index) is str:
        return index
    with contextlib.suppress(Exception):  # a user's type may do anything
        return operator.index(index)
    return shorten(index, _ERROR)
