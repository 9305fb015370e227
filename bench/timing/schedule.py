"""Order without the stall: whole epochs of the same batches, by loaders that differ in who loads which one.

What a loader delivers is compared with what it was asked for: every batch once, and in order where order is
promised.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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


class ScheduleLane(Lane):
    """One contender's loader, whose workers live until `close`."""

    def __init__(self, case: ScheduleCase, dataset: Dataset[Any], name: str, start_method: str) -> None:
        self._contender = CONTENDERS[name]
        self._ours = self._contender.peer == "fastq_loader"
        super().__init__(name, self._contender.label)
        self._case = case
        self._dataset = dataset
        self._start_method = start_method
        self._order = Order()
        self._loader: Any = None
        self._timelines: list[tuple[float, Row]] = []

    def start(self) -> None:
        make: Any = fastq_loader.DataLoader if self._ours else TorchDataLoader
        self._loader = make(
            self._dataset,
            self._case.batch_size,
            sampler=self._order,
            num_workers=self._case.workers,
            persistent_workers=True,
            multiprocessing_context=self._start_method,
            **self._contender.arguments,
        )
        if self._ours:
            self.closing.callback(self._loader.close)
        few = min(WARM_BATCHES * self._case.workers, self._case.batches)  # start the workers
        self._order.samples = few * self._case.batch_size
        for _ in self._loader:
            pass

    def block(self, part: str) -> list[Row]:
        """
        Raises:
            RuntimeError: batches were lost, came twice or in another order than was promised.
        """
        case, traced = self._case, isinstance(self._dataset, TracedSamples)
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
            self._check([int(index) for batch in batches for index in batch[:, INDEX]])
            timeline = timeline_of(batches, deliveries, began)
            self._timelines.append((row["seconds"], timeline))
            row["worked"] = sum(timeline["end"]) - sum(timeline["start"])
        if before is not None:
            after = self._loader.statistics()
            row["head_of_line"] = after.head_of_line_seconds - before.head_of_line_seconds
            row["window"] = after.window
        return [row]

    def finish(self) -> Row:
        """The timeline of the median epoch, or of the next shorter one."""
        if not (self._case.picture and self._timelines):
            return {}
        ordered = sorted(self._timelines, key=lambda each: each[0])
        return {"timeline": ordered[(len(ordered) - 1) // 2][1]}

    def close(self) -> None:
        super().close()
        self._loader = None  # torch's workers end with the last reference

    def _check(self, indices: list[int]) -> None:
        expected = list(range(self._case.samples))
        if sorted(indices) != expected:
            raise RuntimeError("batches were lost, or came twice")
        if self._contender.in_order and indices != expected:
            raise RuntimeError("batches came in another order than the sampler's")


def timeline_of(batches: Sequence[Tensor], deliveries: list[float], began: float) -> Row:
    """Who loaded which batch from when to when, in seconds since `began`, and when the consumer had them."""
    found = ((int(each[0, INDEX]) // len(each), each) for each in batches)
    work = sorted(found, key=lambda each: each[0])
    return {
        "batch": [number for number, _ in work],
        "worker": [int(each[0, WORKER]) for _, each in work],
        "start": [float(each[0, START]) - began for _, each in work],
        "end": [float(each[-1, END]) - began for _, each in work],
        "delivered": deliveries,
    }


def case(each: ScheduleCase, peers: Sequence[str], start_method: str, blocks: int) -> Case:
    """The contenders of a case that are the loaders of these peers."""
    names = [name for name in each.contenders if CONTENDERS[name].peer in peers]
    rounds = min(blocks, each.most_rounds or blocks)

    def plan() -> Plan:
        dataset = each.build()
        seconds, bounded_by, listed = bound(each, dataset)
        facts: Row = {"description": each.description, "batches": each.batches, "goal": each.goal._asdict()}
        facts |= {"bound": seconds, "bounded_by": bounded_by, "list_schedule": listed}
        return Plan(facts, [ScheduleLane(each, dataset, name, start_method) for name in names])

    return Case("schedule", each.name, each.workers, start_method, rounds, plan)


def _hold_the_gil(seconds: float) -> None:
    """A training step in pure Python."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
