"""What a steady batch costs the consumer, in calls of Python and C functions and in frames: no clock.

A change that makes `next()` a few per cent slower is within the noise of any timing. Here it is a number, and
the same on every machine. Each batch is asked for after a moment in which the workers get ahead. Calls are
means over groups of batches, because a message may bring several of them, and some work is done every so many
batches. Of the groups the median counts: a batch that has to be waited for nevertheless costs more.

One that raises a budget has to say what the calls are for.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from statistics import mean, median
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader
from fastq_loader.reading import fetch

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

WARM, COUNTED, GROUP, EPOCH = 100, 160, 16, 1400  # batches
AHEAD_S = 0.002  # some ten times what a worker takes for a batch
ATTEMPTS = 3  # on a machine so busy that most batches had to be waited for
SHOWN = 10


class Rows(Dataset[Any]):
    """64 rows of 8 floats and a number make a batch of 2.5 kB, all of which is copied."""

    size = 64

    def __init__(self) -> None:
        self.rows = torch.arange(8192.0).reshape(1024, 8)

    def __len__(self) -> int:
        return self.size * EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index % 1024], index


class Tokens(Rows):
    """8 dicts of two arrays make a batch of 0.5 MB: two leaves, which are looked at where they lie."""

    size = 8

    def __init__(self) -> None:
        self.text = np.arange(4096 * 64)

    def __getitem__(self, index: int) -> Any:
        start = index % 60 * 4096
        return {
            "tokens": self.text[start : start + 4096],
            "labels": self.text[start + 1 : start + 4097],
        }


class Budget(NamedTuple):
    """The most that a batch may cost: calls of Python and of C functions, and frames one above the other."""

    python: float
    c: float
    frames: int


TWO = {"num_workers": 2, "persistent_workers": True}
DEEP = {"schedule": "dynamic", "prefetch_factor": 16}

#: Two of the C calls are those of `next` and of the end of counting.
BUDGETS: dict[str, tuple[type[Rows], dict[str, Any], Budget]] = {
    "rows": (Rows, TWO, Budget(54, 42, 8)),
    "tokens": (Tokens, TWO, Budget(80, 71, 11)),
    "rows, deep": (Rows, TWO | DEEP, Budget(56, 46, 10)),
    "rows, 0 workers": (Rows, {"num_workers": 0}, Budget(110, 40, 13)),
}


class Count:
    """What asking for a batch calls.

    Attributes:
        python, c: calls of functions. `of`: those of each function.
        deepest: the functions from the outermost to the deepest frame.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self.python = self.c = self._depth = 0
        self.deepest: list[str] = []
        self.of: Counter[str] = Counter()
        before = sys.getprofile()
        sys.setprofile(self._look)
        next(batches)
        sys.setprofile(before)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.python += 1
            self._depth += 1
            self.of[_name(frame)] += 1
            if self._depth > len(self.deepest):
                self.deepest = _names(frame, self._depth)
        elif event == "return":
            self._depth -= 1
        elif event == "c_call":
            self.c += 1
            self.of[getattr(argument, "__qualname__", str(argument))] += 1


def _name(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}"


def _names(frame: FrameType | None, depth: int) -> list[str]:
    names: list[str] = []
    while frame is not None and len(names) < depth:
        names.insert(0, _name(frame))
        frame = frame.f_back
    return names


def cost(dataset: Rows, arguments: dict[str, Any]) -> tuple[Budget, str]:
    """What a batch costs, and where: the functions that are called most, and the deepest frames."""
    counts = []
    with DataLoader(dataset, batch_size=dataset.size, **arguments) as loader:
        batches = iter(loader)
        for _ in itertools.islice(batches, WARM):
            continue
        for _ in range(COUNTED):
            time.sleep(AHEAD_S)
            counts.append(Count(batches))
    groups = [counts[first : first + GROUP] for first in range(0, COUNTED, GROUP)]
    python = median(mean(count.python for count in group) for group in groups)
    c = median(mean(count.c for count in group) for group in groups)
    deepest = sorted((count.deepest for count in counts), key=len)[COUNTED // 2]
    called = sum((count.of for count in counts), Counter[str]()).most_common(SHOWN)
    most = (f"{calls / COUNTED:6.1f} {name}" for name, calls in called)
    where = "\n".join(("called most, calls a batch:", *most, "deepest frames:", *deepest))
    return Budget(python, c, len(deepest)), where


@pytest.mark.parametrize("name", BUDGETS)
def test_a_steady_batch_stays_within_its_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Counting makes samples slow, and slow ones are timed one by one.
    monkeypatch.setattr(fetch, "_WORTH_TIMING", float("inf"))
    dataset, arguments, budget = BUDGETS[name]
    for _ in range(ATTEMPTS):
        found, where = cost(dataset(), arguments)
        if over := [field for field in budget._fields if getattr(found, field) > getattr(budget, field)]:
            continue
        break
    assert not over, f"a batch of {name} costs {found}, and may cost {budget}; {where}"
