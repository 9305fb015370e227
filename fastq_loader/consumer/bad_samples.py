"""The samples that could not be read, and were left out or replaced: they are counted, told, and limited.

Runs in the consumer, on the thread that calls `next()`; others read. Batches are judged in the order in which
they are handed out, so the one with which there are too many is the same for any number of workers.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from fastq_loader.errors import BadSampleFound, add_note, shorten, warn_user
from fastq_loader.ipc.messages import Indices
from fastq_loader.reading.tolerance import Tolerance
from fastq_loader.statistics.snapshots import BadSample

#: Samples that are kept one by one, and of those that an error names.
_KEPT, _NAMED = 1000, 10


class BadSamples:
    """Those of one loader.

    Args:
        state: what `state` returned, or {}.

    Attributes:
        total: how many there were.
        untold: warnings that wait for a moment when nothing can be lost.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.total: int = state.get("total", 0)
        self.untold: deque[str] = deque()
        self._last: deque[list[Any]] = deque(state.get("last", ()), _KEPT)  # the fields of each
        self._cannot_write = False

    @property
    def last(self) -> tuple[BadSample, ...]:
        """The last thousand."""
        return tuple(BadSample(*fields) for fields in list(self._last))

    def tell(self) -> None:
        """Warn, at a moment when nothing can be lost."""
        with contextlib.suppress(IndexError):  # there is none left; another thread may have taken it
            while True:
                warn_user(self.untold.popleft(), BadSampleFound)

    def state(self, of_epoch: BadSampleCounter | None) -> dict[str, Any]:
        """Counts for a saved state: of all, and of the epoch."""
        in_epoch, read = (0, 0) if of_epoch is None else (of_epoch.bad, of_epoch.read)
        return {"in_epoch": in_epoch, "read": read, "total": self.total, "last": list(self._last)}

    def add(self, samples: list[list[Any]], path: Any) -> None:
        """There are more of them, which get a line each in the file at `path`, if there is one."""
        if not self.total:
            first = _line(BadSample(*samples[0]))
            self.untold.append(f"{first}. It is the first one; statistics() counts them")
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
            self.untold.append(f"bad samples are not written to {path}: {error!r}")


class BadSampleCounter:
    """Counts those of one epoch, and says when there are too many.

    Args:
        among: the loader's.
        errors: what becomes of them.
        epoch: its number.
        in_batches: whether an index is that of a batch.
        state: of an epoch that goes on, what `BadSamples.state` returned; else {}.

    Attributes:
        bad, read: how many there were in this epoch, of how many that were asked for.
    """

    def __init__(
        self, among: BadSamples, errors: Tolerance, epoch: int, in_batches: bool, state: dict[str, Any]
    ) -> None:
        self.epoch = epoch
        self.bad: int = state.get("in_epoch", 0)
        self.read: int = state.get("read", 0)
        self._among, self._errors, self._in_batches = among, errors, in_batches

    def judge(
        self, batch: int, index: Any, found: Sequence[Any], error: BaseException | None
    ) -> BaseException | None:
        """A batch was read, or left out. Returns what to raise in its place, if there are too many now.

        Args:
            batch: its number.
            index: its own, as it was sent.
            found: its bad samples; see `TolerantFetcher.bad`.
            error: what the last of them raised.
        """
        if type(index) is Indices:
            self.read += len(index.data) // 8
        else:
            self.read += len(index) if self._in_batches and hasattr(index, "__len__") else 1
        if not found:
            return None
        self.bad += len(found)
        self._among.add([[self.epoch, batch, *each] for each in found], self._errors.path)
        if self._errors.allows(self.bad, self.read):
            return None
        named = map(_line, self._among.last[-_NAMED:])
        head = f"errors={self._errors}: {self.bad} of {self.read} samples could not be read, the last:"
        add_note(error, "\n  ".join([head, *named]))
        return error


def _line(sample: BadSample) -> str:
    instead = "left out" if sample.instead is None else f"{shorten(sample.instead)} is in its place"
    which = "a sample" if sample.index is None else f"sample {shorten(sample.index)}"
    where = f"{which} of batch {sample.batch}, epoch {sample.epoch}"
    return f"{where}, could not be read, and {instead}: {sample.error}"
