"""Order without the stall: whole epochs of the same batches, by loaders that differ in who loads which one.

What a loader delivers is compared with what it was asked for: every batch once, and in order where order is
promised.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import fastq_loader
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.timing.schedule_cases import CONTENDERS, ScheduleCase, bound
from bench.workloads.slow import END, INDEX, START, WORKER, TracedSamples

WARM_BATCHES = 4  # for each worker, before the first epoch


class Order(Iterable[int]):
    """A sampler of the first samples in turn, of which there are more or fewer in every epoch."""

    def __init__(self) -> None:
        self.samples = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))

    def __len__(self) -> int:
        return self.samples


@dataclass(eq=False, kw_only=True)
class ScheduleLane(Lane):
    """One contender's loader, whose workers live until `close`."""

    case: ScheduleCase
    dataset: Dataset[Any]
    start_method: str

    def start(self) -> None:
        contender = CONTENDERS[self.peer]
        self._order, self._timelines = Order(), list[tuple[float, Row]]()
        self._ours = contender.peer == "fastq_loader"
        make: Any = fastq_loader.DataLoader if self._ours else TorchDataLoader
        self._loader: Any = make(
            self.dataset,
            self.case.batch_size,
            sampler=self._order,
            num_workers=self.case.workers,
            persistent_workers=True,
            multiprocessing_context=self.start_method,
            **contender.arguments,
        )
        if self._ours:
            self.closing.callback(self._loader.close)
        few = min(WARM_BATCHES * self.case.workers, self.case.batches)  # start the workers
        self._order.samples = few * self.case.batch_size
        for _ in self._loader:
            pass

    def block(self, part: str) -> list[Row]:
        case, traced = self.case, isinstance(self.dataset, TracedSamples)
        self._order.samples = case.samples
        before = self._loader.statistics() if self._ours else None
        batches, deliveries, waited = [], [], 0.0
        began = time.monotonic()
        iterator = iter(self._loader)
        asked = time.monotonic()
        for batch in iterator:
            came = time.monotonic()
            waited += came - asked
            deliveries.append(came - began)
            if traced:
                batches.append(batch)
            if case.step.seconds and len(deliveries) % case.step.every == 0:
                _hold_the_gil(case.step.seconds)
            asked = time.monotonic()
        if len(deliveries) != case.batches:
            raise RuntimeError(f"gave {len(deliveries)} of {case.batches} batches")
        row: Row = {"batches": len(deliveries), "seconds": asked - began, "waited": waited}
        if traced:
            work = torch.stack(batches)
            self._check(work[..., INDEX].flatten().tolist())
            timeline = timeline_of(work, deliveries, began)
            self._timelines.append((row["seconds"], timeline))
            row["worked"] = sum(timeline["end"]) - sum(timeline["start"])
        if before is not None:
            after = self._loader.statistics()
            row["head_of_line"] = after.head_of_line_seconds - before.head_of_line_seconds
            row["window"] = after.window
        return [row]

    def finish(self) -> Row:
        """The timeline of the median epoch, or of the next shorter one."""
        if not (self.case.picture and self._timelines):
            return {}
        ordered = sorted(self._timelines, key=lambda each: each[0])
        return {"timeline": ordered[(len(ordered) - 1) // 2][1]}

    def close(self) -> None:
        super().close()
        self._loader = None  # torch's workers end with the last reference

    def _check(self, indices: list[float]) -> None:
        expected = list(range(self.case.samples))
        if sorted(indices) != expected:
            raise RuntimeError("batches were lost, or came twice")
        if CONTENDERS[self.peer].arguments.get("in_order", True) and indices != expected:
            raise RuntimeError("batches came in another order than the sampler's")


def timeline_of(work: Tensor, deliveries: list[float], began: float) -> Row:
    """Who loaded which batch from when to when, in seconds since `began`, and when the consumer had them.

    `work` is batches x samples x columns of a traced sample.
    """
    work = work[work[:, 0, INDEX].argsort()]
    return {
        "batch": (work[:, 0, INDEX] // work.shape[1]).int().tolist(),
        "worker": work[:, 0, WORKER].int().tolist(),
        "start": (work[:, 0, START] - began).tolist(),
        "end": (work[:, -1, END] - began).tolist(),
        "delivered": deliveries,
    }


def case(each: ScheduleCase, peers: Sequence[str], start_method: str, blocks: int) -> Case:
    """The contenders of a case that are the loaders of these peers."""
    names = [name for name in each.contenders if CONTENDERS[name].peer in peers]

    def plan() -> Plan:
        dataset = each.build()
        seconds, bounded_by, listed = bound(each, dataset)
        facts: Row = {"description": each.description, "batches": each.batches, "goal": each.goal._asdict()}
        facts |= {"bound": seconds, "bounded_by": bounded_by, "list_schedule": listed}
        common: dict[str, Any] = {"case": each, "dataset": dataset, "start_method": start_method}
        return Plan(facts, [ScheduleLane(name, CONTENDERS[name].label, **common) for name in names])

    return Case("schedule", each.name, each.workers, start_method, min(blocks, each.most_rounds), plan)


def _hold_the_gil(seconds: float) -> None:
    """A training step in pure Python."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
