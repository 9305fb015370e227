"""How every case is measured: its lanes are alive side by side and take turns, block by block.

The speed of a machine drifts over minutes by more than loaders differ, so the lanes run to and fro within
seconds of each other. While one is timed the others rest: their workers stop once their prefetch is full, and
a block waits for that.

A lane that is missing, cannot do a case, raises, hangs or gives wrong batches has a reason in place of
figures, and the run goes on without it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from bench.output.figures import BASELINE
from bench.peers import Unsupported
from bench.timing.processes import wait_until_quiet

STARTING_S = 120.0  # many spawned workers import torch on few cores, or the first batch is a heavy one
HANGING_S = 60.0  # beyond what a block is expected to take: longer than any batch
CLOSING_S = 30.0
LONGEST_REASON = 200  # characters

Row = dict[str, Any]
"""A line of the results; `bench.output.rows` says what is in it."""


@dataclass(eq=False)
class Lane:
    """One contender of a case. `start` comes first, `close` last, all in the main thread of the consumer.

    Attributes:
        peer: the name in the rows. `label`: the name to show.
        seconds: about how long a block takes.
        parts: of a round, that it takes; none is all of them.
        notes: what a reader has to know beside the figures. `failure`: why it has none.
        rows: of its blocks.
        closing: how to stop what `start` has started.
    """

    peer: str
    label: str
    seconds: float = 0.0
    parts: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)
    failure: str | None = None
    rows: list[Row] = field(default_factory=list)
    closing: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Make the loader, look at its first batch, use all its memory once."""

    def block(self, part: str) -> list[Row]:
        """Time one block; of each subclass. The figures for its rows, which may name parts of their own."""
        raise NotImplementedError

    def finish(self) -> Row:
        """What is known after the last block only."""
        return {}

    def close(self) -> None:
        """Stop the workers; nothing is left to do the second time."""
        self.closing.close()


class Plan(NamedTuple):
    """A case that is about to be measured: what is known of it, and its lanes in the order of the report.

    All lanes take a part of a round before the next one begins.
    """

    facts: Row
    lanes: Sequence[Lane]
    parts: Sequence[str] = ("",)


class Case(NamedTuple):
    """What identifies the rows, how many rounds to measure, and what makes the plan.

    The plan is made when the case's turn comes, because it may build a large dataset. `ties`: how many rounds
    those lanes get that are level with torch's loader; 0: no more than the others.
    """

    kind: str
    name: str
    workers: int
    start_method: str
    blocks: int
    plan: Callable[[], Plan]
    ties: int = 0

    @property
    def key(self) -> Row:
        return dict(zip(("kind", "case", "workers", "start_method"), self, strict=False))


def measure(case: Case) -> list[Row]:
    """The rows of a case: one for the case, one for each peer, one for each block and part."""
    plan = case.plan()
    lanes = plan.lanes
    try:
        for lane in lanes:
            with _watched(lane, STARTING_S):
                wait_until_quiet()
                lane.start()
        for number in range(max(case.blocks, case.ties)):
            if number == case.blocks:
                lanes = level(lanes)
            for part in plan.parts:
                # To and fro, so that no lane always runs after the same other one.
                for lane in lanes[:: 1 if number % 2 == 0 else -1]:
                    if lane.failure is not None or part not in (lane.parts or plan.parts):
                        continue
                    with _watched(lane, lane.seconds + HANGING_S):
                        wait_until_quiet()
                        found = {"peer": lane.peer, "part": part, "block": number}
                        lane.rows += [found | row for row in lane.block(part)]
        peers = [_finish(lane) for lane in plan.lanes]
    finally:
        for lane in plan.lanes:
            _close(lane)
    kinds = {"case": [plan.facts], "peer": peers, "block": [row for lane in plan.lanes for row in lane.rows]}
    return [{"row": kind} | case.key | row for kind, found in kinds.items() for row in found]


def level(lanes: Sequence[Lane]) -> list[Lane]:
    """torch's loader, and those whose rounds disagree on which of the two is faster; none where all agree."""
    rates = {lane.peer: [row["batches"] / row["seconds"] for row in lane.rows] for lane in lanes}
    base = rates.get(BASELINE, [])
    tied = []
    for lane in lanes:
        ratios = [own / torchs for own, torchs in zip(rates[lane.peer], base, strict=False)]
        if ratios and min(ratios) <= 1 <= max(ratios):
            tied.append(lane)
    return tied if len(tied) > 1 else []  # torch's own ratio is 1


@contextmanager
def _watched(lane: Lane, seconds: float) -> Iterator[None]:
    """A lane that breaks here has no figures, also where it had some."""
    try:
        with time_limit(seconds):
            yield
    except Exception as error:
        lane.failure, lane.rows = reason(error), []
        _close(lane)


def _finish(lane: Lane) -> Row:
    """All that is known of a lane beside its blocks."""
    found: Row = {}
    if lane.failure is None:
        try:
            with time_limit(HANGING_S):
                found = lane.finish()
        except Exception as error:  # its blocks hold all the same
            lane.notes.append(reason(error))
        _close(lane)
    return {"peer": lane.peer, "label": lane.label, "failure": lane.failure, "notes": lane.notes} | found


def _close(lane: Lane) -> None:
    try:
        with time_limit(CLOSING_S):
            lane.close()
    except Exception as error:
        lane.notes.append(f"closing: {reason(error)}")


def reason(error: Exception) -> str:
    """Why a lane has no figures, in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error}"
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, Unsupported) else f"{type(error).__name__}: {lines[0]}"
    return text[:LONGEST_REASON]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread when this takes longer."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
