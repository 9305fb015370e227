"""Order without the stall: whole epochs of the same batches, by loaders that differ in who loads which one.

All contenders of a case are alive in this process with their workers up, and take turns epoch by epoch. What
one delivers is compared with what it was asked for: every batch once, and in order where order is promised.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import fastq_loader
from bench.cases import VARIANTS, Case, bound
from bench.costs import END, INDEX, START, WORKER, TracedSamples
from bench.measure import Tick, reason, time_limit
from bench.proc import wait_until_quiet
from bench.results import Contender, Epoch, ScheduleResult, Timeline, Work

STARTING_S = 120.0  # many spawned workers that each import torch on few cores
LIMIT_S = 60.0  # an epoch takes a few seconds
WARM_BATCHES = 4  # for each worker, before the first epoch


class Order(Iterable[int]):
    """A sampler of the first samples in turn, of which there are more or fewer in every epoch."""

    def __init__(self) -> None:
        self.samples = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))

    def __len__(self) -> int:
        return self.samples


class Lane:
    """One contender's loader, whose workers live until `close`."""

    def __init__(self, case: Case, dataset: Dataset[Any], name: str, start_method: str) -> None:
        self._case = case
        self._variant = VARIANTS[name]
        self._traced = isinstance(dataset, TracedSamples)
        self._order = Order()
        make: Any = TorchDataLoader if self._variant.peer == "torch" else fastq_loader.DataLoader
        self._loader: Any = make(
            dataset,
            case.batch_size,
            sampler=self._order,
            num_workers=case.workers,
            persistent_workers=True,
            multiprocessing_context=start_method,
            **self._variant.arguments,
        )

    def warm_up(self) -> None:
        """Start the workers, with an epoch of a few batches."""
        few = min(WARM_BATCHES * self._case.workers, self._case.batches)
        self._order.samples = few * self._case.batch_size
        for _ in self._loader:
            pass

    def epoch(self) -> tuple[Epoch, Timeline | None]:
        """
        Raises:
            RuntimeError: batches were lost, came twice or in another order than was promised.
        """
        step = self._case.step
        self._order.samples = self._case.samples
        late_before = self._statistics("head_of_line_seconds")
        waited, deliveries, batches = 0.0, [], []
        began = time.monotonic()
        iterator = iter(self._loader)
        asked = time.monotonic()
        for batch in iterator:
            came = time.monotonic()
            waited += came - asked
            deliveries.append(came - began)
            if self._traced:
                batches.append(batch)
            if step.seconds and len(deliveries) % step.every == 0:
                _hold_the_gil(step.seconds)
            asked = time.monotonic()
        del iterator
        if len(deliveries) != self._case.batches:
            raise RuntimeError(f"gave {len(deliveries)} of {self._case.batches} batches")
        late = self._statistics("head_of_line_seconds")
        timeline = None
        if self._traced:
            self._check([int(index) for batch in batches for index in batch[:, INDEX]])
            timeline = timeline_of(batches, deliveries, began)
        epoch = Epoch(
            asked - began,
            waited,
            None if timeline is None else sum(work.end - work.start for work in timeline.work),
            None if late is None or late_before is None else late - late_before,
            self._statistics("window"),
        )
        return epoch, timeline

    def close(self) -> None:
        if isinstance(self._loader, fastq_loader.DataLoader):
            self._loader.close()
        self._loader = None  # torch's workers end with the last reference

    def _statistics(self, name: str) -> Any:
        if not isinstance(self._loader, fastq_loader.DataLoader):
            return None
        return getattr(self._loader.statistics(), name)

    def _check(self, indices: list[int]) -> None:
        expected = list(range(self._case.samples))
        if sorted(indices) != expected:
            raise RuntimeError("batches were lost, or came twice")
        if self._variant.in_order and indices != expected:
            raise RuntimeError("batches came in another order than the sampler's")


def timeline_of(batches: Sequence[Tensor], deliveries: list[float], began: float) -> Timeline:
    """What took place, from traced batches; `began` is when the epoch's clock started."""
    work = [
        Work(
            int(batch[0, INDEX]) // len(batch),
            int(batch[0, WORKER]),
            float(batch[0, START]) - began,
            float(batch[-1, END]) - began,
        )
        for batch in batches
    ]
    return Timeline(sorted(work, key=lambda each: each.batch), deliveries)


def measure_schedule(
    case: Case, names: Sequence[str], start_method: str, rounds: int, tick: Tick
) -> ScheduleResult:
    """The contenders of a case take turns; `tick` is called with a contender's label after its epochs."""
    dataset = case.build()
    seconds, bounded_by, listed = bound(case, dataset)
    epochs: dict[str, list[tuple[Epoch, Timeline | None]]] = {name: [] for name in names}
    failures: dict[str, str] = {}
    lanes: dict[str, Lane] = {}
    with ExitStack() as stack:
        for name in names:
            try:
                with time_limit(STARTING_S):
                    lanes[name] = Lane(case, dataset, name, start_method)
                    stack.callback(lanes[name].close)
                    lanes[name].warm_up()
            except Exception as error:
                failures[name] = reason(error)
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                try:
                    if name not in failures:
                        wait_until_quiet()
                        with time_limit(LIMIT_S):
                            epochs[name].append(lanes[name].epoch())
                except Exception as error:
                    failures[name] = reason(error)
                tick(VARIANTS[name].label)
    contenders = {}
    for name in names:
        label = VARIANTS[name].label
        if name in failures:
            contenders[name] = Contender(label, failure=failures[name])
        else:
            shown = _median(epochs[name])[1] if case.picture else None
            contenders[name] = Contender(label, [epoch for epoch, _ in epochs[name]], shown)
    return ScheduleResult(
        case.name,
        case.description,
        case.batches,
        case.workers,
        start_method,
        seconds,
        bounded_by,
        listed,
        case.goal,
        contenders,
    )


def _median(epochs: Sequence[tuple[Epoch, Timeline | None]]) -> tuple[Epoch, Timeline | None]:
    """The one that took the median time, or the next shorter one."""
    return sorted(epochs, key=lambda each: each[0].seconds)[(len(epochs) - 1) // 2]


def _hold_the_gil(seconds: float) -> None:
    """A training step in pure Python."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
