"""Samples that could not be read and were left out or replaced: counted, reported, and limited.

Runs in the consumer, on the thread that calls `next()`; other threads read the counts. Batches are judged in
the order of delivery, so the batch that exceeds the limit is the same for any number of workers.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from typing import Any

from fastq_loader.errors import BadSampleFound, add_note, shorten, warn_user
from fastq_loader.ipc.messages import Indices
from fastq_loader.packing.pickling import load_exception
from fastq_loader.statistics.snapshots import BadSample

#: Bad samples that are recorded individually, and how many of them an error lists.
_KEPT, _NAMED = 1000, 10


class BadSamples:
    """The bad samples of one loader.

    Args:
        state: a saved state, as returned by `BadSampleJudge.state`, or {}.

    Attributes:
        total: their number, over all epochs.
        pending_warnings: warnings that `issue_warnings` has not issued yet.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.total: int = state.get("total", 0)
        self.pending_warnings: deque[str] = deque()
        self._last: deque[list[Any]] = deque(state.get("last", ()), _KEPT)  # the fields of each
        self._cannot_write = False

    @property
    def last(self) -> tuple[BadSample, ...]:
        """The last thousand bad samples."""
        return tuple(BadSample(*fields) for fields in list(self._last))

    def issue_warnings(self) -> None:
        """Issue the pending warnings. Called when no batch is lost if warnings are errors."""
        while self.pending_warnings:
            with contextlib.suppress(IndexError):  # another thread may have taken the last one
                warn_user(self.pending_warnings.popleft(), BadSampleFound)

    def counts(self) -> dict[str, Any]:
        """Counts for a saved state."""
        return {"total": self.total, "last": list(self._last)}

    def add(self, samples: list[list[Any]], path: Any) -> None:
        """Record more bad samples, and append a line for each to the file at `path`, unless that is None."""
        if not self.total:
            first = _line(BadSample(*samples[0]))
            self.pending_warnings.append(f"{first}. It is the first bad sample; statistics() counts them")
        self._last.extend(samples)
        self.total += len(samples)
        if path is None or self._cannot_write:
            return
        lines = [json.dumps(vars(BadSample(*sample))) + "\n" for sample in samples]
        try:
            with open(path, "a") as file:
                file.write("".join(lines))
        except (OSError, ValueError) as error:
            self._cannot_write = True
            self.pending_warnings.append(f"bad samples are not written to {path}: {error!r}")


class BadSampleJudge:
    """Counts the bad samples of one epoch, and reports when there are too many.

    Args:
        among: the bad samples of the loader.
        errors: the policy for bad samples, a `Tolerance`.
        epoch: number of the epoch.
        in_batches: whether an index stands for a batch of samples.
        state: for an epoch that is resumed, a saved state as returned by `state`; else {}.

    Attributes:
        bad, read: number of bad samples in this epoch, and of samples that were requested.
    """

    def __init__(
        self, among: BadSamples, errors: Any, epoch: int, in_batches: bool, state: dict[str, Any]
    ) -> None:
        self.epoch = epoch
        self.bad: int = state.get("in_epoch", 0)
        self.read: int = state.get("read", 0)
        self._among, self._errors, self._in_batches = among, errors, in_batches

    def state(self) -> dict[str, Any]:
        """Counts for a saved state: of all bad samples, and of those in the epoch."""
        return {"in_epoch": self.bad, "read": self.read, **self._among.counts()}

    def judge(self, batch: int, index: Any, remark: Any) -> BaseException | None:
        """Count a batch that was read or left out. Return the error to raise in its place if the limit is
        exceeded.

        Args:
            batch: number of the batch.
            index: its index, as it was sent.
            remark: see `TolerantFetcher.remark`.
        """
        if type(index) is Indices:
            self.read += len(index.data) // 8
        else:
            self.read += len(index) if self._in_batches and hasattr(index, "__len__") else 1
        if remark is None:
            return None
        found, raised = remark
        error: BaseException = load_exception(raised) if isinstance(raised, bytes) else raised
        self.bad += len(found)
        self._among.add([[self.epoch, batch, *each] for each in found], self._errors.path)
        if self._errors.allows(self.bad, self.read):
            return None
        named = map(_line, self._among.last[-_NAMED:])
        among = "samples and their replacements" if self._errors.replaces else "samples"
        head = f"errors={self._errors}: {self.bad} of {self.read} {among} could not be read, the last:"
        add_note(error, "\n  ".join([head, *named]))
        return error


def _line(sample: BadSample) -> str:
    instead = "left out" if sample.instead is None else f"replaced by sample {shorten(sample.instead)}"
    which = "a sample" if sample.index is None else f"sample {shorten(sample.index)}"
    where = f"{which} of batch {sample.batch}, epoch {sample.epoch}"
    return f"{where}, could not be read and was {instead}: {sample.error}"
