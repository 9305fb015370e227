"""What the loader says of itself: whether its verdicts are right, and what counting and tracing cost.

Verdicts are about whole runs that one known cause limits, beside a stopwatch in the training loop. The costs
are those of `tokens`, whose batches are made in no time. `timing.tuning` has `tune` and `num_workers="auto"`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from bench.peers import PEERS, LoaderSettings, make_peer
from bench.peers.torch_loader import TorchLoader
from bench.peers.uncounted import nothing_counted
from bench.timing import tuning
from bench.timing.processes import Owners
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.timing.steady import PeerLane
from bench.workloads import find_workload, limited

AXIS = tuning.AXIS
VERDICTS, COST = "verdicts", "cost"
ROUNDS = {"fork": 2, "spawn": 1}
"""Start methods of the verdicts. A spawned worker imports torch, which takes longer than the run."""

OURS, UNCOUNTED, TRACED = "fastq_loader", "uncounted", "traced"
LABELS = {OURS: "as it is", UNCOUNTED: "nothing counted", TRACED: "with trace()"}
COST_WORKERS, COST_METHOD = 2, "fork"  # what is replaced before a fork is replaced in the workers, too
COST_ROUNDS, COST_SHARE = 6, 0.5
"""Blocks of the cost for each one of other cases, and their length. It is a question of one percent, of which
many short blocks tell more than a few long ones."""


@dataclass(eq=False, kw_only=True)
class VerdictLane(Lane):
    """Plays a run in every block, with a new loader."""

    workers: int
    start_method: str

    def block(self, part: str) -> list[Row]:
        run = limited.CASES[self.peer]
        loader, watch = limited.play(run, self.workers, self.start_method)
        with loader:
            found = loader.diagnose()
        expected = run.lost(watch) / watch.total
        shares = {"share": 100 * found.share, "expected": 100 * expected}
        return [{"seconds": watch.total, "limit": found.limit, "right": found.limit == run.limit, **shares}]

    def finish(self) -> Row:
        return {"limit": limited.CASES[self.peer].limit}


@dataclass(eq=False, kw_only=True)
class CostLane(PeerLane):
    """Makes a loader for every block: which pool of workers is quicker than another one is luck.

    Attributes:
        trace: the file to write to.
    """

    trace: Path

    def start(self) -> None:
        """There is nothing to do before the first block."""

    def block(self, part: str) -> list[Row]:
        with ExitStack() as around:
            if self.peer == UNCOUNTED:
                around.enter_context(nothing_counted())
            around.callback(self.close)
            super().start()
            if self.peer == TRACED:
                around.enter_context(cast(TorchLoader, self._peer).loader.trace(self.trace))
            return super().block(part)


def cases(options: Namespace, folder: Path) -> Iterator[Case]:
    """All of the axis: verdicts with these numbers of workers, the searches, the costs."""
    for workers in filter(None, options.workers[AXIS]):
        for method, rounds in ROUNDS.items():
            yield _verdicts(workers, method, min(rounds, options.blocks))
    yield from tuning.cases(options, folder)
    yield _cost(options, folder)


def _verdicts(workers: int, method: str, rounds: int) -> Case:
    lanes = [VerdictLane(name, name, workers=workers, start_method=method) for name in limited.CASES]
    plan = Plan({"description": "runs that one known cause limits"}, lanes)
    return Case(AXIS, VERDICTS, workers, method, rounds, lambda: plan)


def _cost(options: Namespace, folder: Path) -> Case:
    workload, settings = find_workload("tokens"), LoaderSettings(COST_WORKERS, COST_METHOD)

    def plan() -> Plan:
        load, owners = workload.load(folder), Owners()
        lanes = [
            CostLane(
                name,
                label,
                COST_SHARE * options.seconds,
                make=partial(make_peer, OURS, load, settings),
                workload=workload,
                load=load,
                burst=COST_WORKERS,
                owners=owners,
                trace=folder / "trace.json",
            )
            for name, label in LABELS.items()
        ]
        return Plan({"description": f"{PEERS[OURS].label}, tokens: {workload.description}"}, lanes)

    return Case(AXIS, COST, COST_WORKERS, COST_METHOD, COST_ROUNDS * options.blocks, plan)
