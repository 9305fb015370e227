"""What a batch costs, in calls of Python and C functions and in frames: the same on every machine.

A steady batch has a budget; who raises it has to say what the calls are for. Each batch is asked for after a
moment in which the workers get ahead. Calls are means over groups of batches, because a message may bring
several of them. Of the groups the lower quartile counts: a batch that has to be waited for costs more, and on
a machine that is busy many are.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from fastq_loader import DataLoader
from fastq_loader.extras.tracing import trace
from fastq_loader.memory.arena import AVAILABLE
from tests.conftest import wait_until
from tests.support.loaders import MANY_WORKERS, collector_off
from tests.support.pair import LARGE, Pair, paired
from tests.support.thorough import is_thorough, thorough

WARM, COUNTED, GROUP, EPOCH = 100, 160 if is_thorough else 80, 16, 1400  # batches
AHEAD_S = 0.002  # some ten times what a worker takes for a batch
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
        return {"tokens": self.text[start : start + 4096], "labels": self.text[start + 1 : start + 4097]}


class Budget(NamedTuple):
    """The most that a batch may cost: calls of Python and of C functions, and frames one above the other."""

    python: float
    c: float
    frames: int


TWO = {"num_workers": 2, "persistent_workers": True}
DEEP = {"schedule": "dynamic", "prefetch_factor": 16}

#: One of the C calls is that of the end of counting.
BUDGETS: dict[str, tuple[type[Rows], dict[str, Any], Budget]] = {
    "rows": (Rows, TWO, Budget(44, 40, 8)),
    "tokens": (Tokens, TWO, Budget(74, 66, 10)),
    "rows, deep": (Rows, TWO | DEEP, Budget(46, 42, 10)),
    "rows, 0 workers": (Rows, {"num_workers": 0}, Budget(79, 15, 8)),
}
#: With a trace that is written.
TRACED = {"rows": Budget(62, 62, 8), "rows, 0 workers": Budget(90, 30, 8)}


class Count:
    """What an action calls, directly and indirectly.

    Attributes:
        python, c: calls of functions. `of`: those of each function.
        deepest: the functions from the outermost to the deepest frame.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        self.python = self.c = self._depth = 0
        self.deepest: list[str] = []
        self.of: Counter[str] = Counter()
        before = sys.getprofile()
        with collector_off():  # what it calls is not the action's
            sys.setprofile(self._look)
            try:
                action()
            finally:
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


def cost(dataset: Rows, arguments: dict[str, Any], traced: Path | None = None) -> tuple[Budget, str]:
    """What a batch costs, and where: the functions that are called most, and the deepest frames."""
    counts, workers = [], list[int]()
    with DataLoader(dataset, batch_size=dataset.size, **arguments) as loader, ExitStack() as stack:
        if traced is not None:
            stack.enter_context(loader.trace(traced))
        batches = iter(loader)
        for _ in itertools.islice(batches, WARM):
            continue
        workers += [worker.pid for worker in loader.statistics().workers] if loader.num_workers else []
        for _ in range(COUNTED):
            if workers:
                time.sleep(AHEAD_S)
                wait_until(lambda: all(map(_sleeps, workers)), 1)
            counts.append(Count(batches.__next__))
    groups = [counts[first : first + GROUP] for first in range(0, COUNTED, GROUP)]
    python = _lower_quartile(mean(count.python for count in group) for group in groups)
    c = _lower_quartile(mean(count.c for count in group) for group in groups)
    deepest = sorted((count.deepest for count in counts), key=len)[COUNTED // 2]
    called = sum((count.of for count in counts), Counter[str]()).most_common(SHOWN)
    most = (f"{calls / COUNTED:6.1f} {name}" for name, calls in called)
    where = "\n".join(("called most, calls a batch:", *most, "deepest frames:", *deepest))
    return Budget(python, c, len(deepest)), where


def _sleeps(pid: int) -> bool:
    """Whether a process waits; on a busy machine one that has work may wait for its turn."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def _lower_quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 4]


@pytest.mark.processes
@MANY_WORKERS
@thorough(but={"name": ["rows", "rows, 0 workers"]})
@pytest.mark.parametrize(
    ("name", "traced"), [*((name, False) for name in BUDGETS), *((name, True) for name in TRACED)]
)
def test_a_steady_batch_stays_within_its_calls(
    name: str, traced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, arguments, budget = BUDGETS[name]
    path = tmp_path / "trace.json" if traced else None
    monkeypatch.setattr(trace, "_EVERY", 1 << 62)  # it writes by the clock
    budget = TRACED[name] if traced else budget
    found, where = cost(dataset(), arguments, path)
    assert path is None or path.stat().st_size > WARM
    over = [field for field in budget._fields if getattr(found, field) > getattr(budget, field)]
    assert not over, f"a batch of {name} costs {found}, and may cost {budget}; {where}"


@pytest.mark.parametrize(("shuffle", "budget"), [(False, 270), (True, 305)])
def test_an_epoch_of_one_batch_without_workers_stays_within_its_calls(shuffle: bool, budget: int) -> None:
    loader = DataLoader(Subset(Rows(), range(64)), 64, shuffle=shuffle)
    for _ in range(3):
        list(loader)
    assert calls(lambda: list(loader)) <= budget


MEMFD = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # The invariants look at every block, which is what is not to be counted here.
    monkeypatch.setattr("tests.support.pair.check_pool", lambda pool: None)
    with paired() as both:
        yield both


def calls(action: Callable[[], object]) -> int:
    count = Count(action)
    return count.python + count.c


def batch_of(leaves: int, elements: int) -> dict[str, torch.Tensor]:
    return {str(leaf): torch.ones(elements) for leaf in range(leaves)}


@MEMFD
@pytest.mark.parametrize("elements", [8, LARGE])
def test_a_batch_costs_the_same_however_many_are_kept(pair: Pair, elements: int) -> None:
    batch = batch_of(2, elements)
    kept = [pair.trip(batch) for _ in range(10)]
    few = calls(lambda: kept.append(pair.trip(batch)))
    kept += [pair.trip(batch) for _ in range(300)]
    many = calls(lambda: kept.append(pair.trip(batch)))
    assert many <= few


@MEMFD
@pytest.mark.parametrize("elements", [8, LARGE])
def test_a_batch_costs_what_its_leaves_cost(pair: Pair, elements: int) -> None:
    costs = []
    for leaves in (1, 11, 21, 201):
        for _ in range(3):  # the layout is known, and the blocks are there
            pair.trip(batch_of(leaves, elements))
        batch = batch_of(leaves, elements)
        costs.append(calls(lambda batch=batch: pair.trip(batch)))
    ten = costs[1] - costs[0]
    assert costs[2] - costs[1] <= ten * 1.1
    assert costs[3] - costs[2] <= 18 * ten * 1.1
