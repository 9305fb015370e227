"""The samples that could not be read, and were left out or replaced: they are counted, told, and limited.

Runs in the consumer, on the thread that calls `next()`; others read. Batches are judged in the order in which
they are handed out, so the one with which there are too many is the same for any number of workers.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, Protocol

from fastq_loader.errors import BadSampleFound, shorten
from fastq_loader.reading.tolerance import Bad, Tolerance
from fastq_loader.statistics.snapshots import BadSample

#: Samples that are kept one by one, and of those that an error names.
_KEPT, _NAMED = 1000, 10


class Teller(Protocol):
    """Warns at a moment when nothing can be lost."""

    def warn_next(self, text: str, category: type[Warning]) -> None: ...


class BadSamples:
    """Those of one loader.

    Attributes:
        total, in_epoch: how many there were in all, and in this epoch.
        last: of these the last thousand.
        teller: of this epoch; None before the first.
    """

    def __init__(self) -> None:
        self.total = self.in_epoch = 0
        self.last: deque[BadSample] = deque(maxlen=_KEPT)
        self.teller: Teller | None = None
        self._epoch, self._errors = 0, Tolerance()

    def begin_epoch(self, epoch: int, errors: Tolerance, goes_on: bool, teller: Teller) -> None:
        """An epoch with this number begins, or goes on where a state has left it."""
        self._epoch, self._errors, self.teller = epoch, errors, teller
        self.in_epoch *= goes_on

    def state(self) -> dict[str, Any]:
        """What a state has of it. The last entries may be newer than the numbers, if another thread asks."""
        last = [
            [each if type(each) in (int, str, type(None)) else repr(each) for each in astuple(bad)]
            for bad in list(self.last)
        ]
        return {"in_epoch": self.in_epoch, "total": self.total, "last": last}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state()` returned."""
        self.in_epoch, self.total = state["in_epoch"], state["total"]
        self.last = deque((BadSample(*each) for each in state["last"]), _KEPT)

    def found(
        self, batch: int, samples: Sequence[Bad], read: int, error: BaseException
    ) -> BaseException | None:
        """Samples of a batch could not be read. Returns what is to be raised, if there are too many now.

        Args:
            batch: its number.
            samples: these.
            read: how many samples were asked for in this epoch.
            error: that of the last one.
        """
        self.in_epoch += len(samples)
        new = [BadSample(self._epoch, batch, bad.index, bad.instead, bad.error) for bad in samples]
        self.last.extend(new)
        first, self.total = self.total == 0, self.total + len(samples)
        if first and self.teller is not None:
            self.teller.warn_next(
                f"{_line(new[0])}. It is the first one; statistics() counts them", BadSampleFound
            )
        self._write(new)
        if self._errors.allows(self.in_epoch, read):
            return None
        if hasattr(error, "add_note"):  # Python 3.11
            named = list(self.last)[-_NAMED:]
            head = f"errors={self._errors}: {self.in_epoch} of {read} samples could not be read, the last:"
            error.add_note("\n  ".join([head, *map(_line, named)]))
        return error

    def _write(self, samples: list[BadSample]) -> None:
        if self._errors.path is None:
            return
        lines = [json.dumps(vars(sample), default=repr) + "\n" for sample in samples]
        try:
            with open(self._errors.path, "a") as file:
                file.write("".join(lines))
        except OSError as error:
            if self.teller is not None:
                self.teller.warn_next(f"errors: bad samples could not be noted: {error}", BadSampleFound)


def _line(sample: BadSample) -> str:
    instead = "left out" if sample.instead is None else f"{shorten(sample.instead)} is in its place"
    which = "a sample" if sample.index is None else f"sample {shorten(sample.index)}"
    where = f"{which} of batch {sample.batch}, epoch {sample.epoch}"
    return f"{where}, could not be read, and {instead}: {sample.error}"
