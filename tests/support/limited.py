"""Runs that are limited by one known cause each, and a stopwatch beside them.

What takes time sleeps, so that a busy machine changes little; the time of the epoch shows how much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset, Sampler

from fastq_loader import DataLoader, RoundRobin, ToDevice


@dataclass
class Stopwatch:
    """Seconds of one epoch, as the training loop sees them.

    Attributes:
        total: from before `iter()` to after the last `next()`.
        started: in `iter()`.
        waits: in each call of `next()`.
        steps: between them.
        inside: of whatever part measures itself.
        workers: how many there are, each with a first batch.
    """

    total: float = 0.0
    started: float = 0.0
    waits: list[float] = field(default_factory=list)
    steps: float = 0.0
    inside: float = 0.0
    workers: int = 0

    def sleep(self, seconds: float) -> None:
        """Sleep, and count it as `inside`."""
        began = time.monotonic()
        time.sleep(seconds)
        self.inside += time.monotonic() - began

    def transform(self, batch: Any) -> Any:
        self.sleep(0.02)
        return batch

    def run(self, loader: DataLoader[Any], step: float) -> None:
        """An epoch with steps of so many seconds."""
        self.inside = 0.0  # the workers' start may have come before
        before = entered = time.monotonic()
        iterator = iter(loader)
        self.started = time.monotonic() - before
        while True:
            entered = time.monotonic()
            batch = next(iterator, None)
            left = time.monotonic()
            self.waits.append(left - entered)
            if batch is None:
                break
            time.sleep(step)
            self.steps += time.monotonic() - left
        self.total = left - before


class Naps(Dataset[int]):
    """Sample i takes `seconds`, and `nap` if it is `slow`."""

    def __init__(
        self, seconds: float = 0.0, slow: Callable[[int], bool] | None = None, nap: float = 0.0
    ) -> None:
        self.seconds, self.slow, self.nap = seconds, slow, nap

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> int:
        time.sleep(self.nap if self.slow is not None and self.slow(index) else self.seconds)
        return index


class Order(Sampler[int]):
    """The first samples in turn: so many in an epoch, which may change."""

    samples = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))

    def __len__(self) -> int:
        return self.samples


class SlowOrder(Order):
    """Each index takes long to draw."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self.watch = watch

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self.watch.sleep(0.02)
            yield index


class SlowToPickle:
    """A batch that takes long on one side of its way."""

    def __init__(self, packing: float = 0.0, unpacking: float = 0.0) -> None:
        self.packing, self.unpacking = packing, unpacking

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(self.packing)
        return _unpacked, (self.unpacking,)


def _unpacked(seconds: float) -> str:
    time.sleep(seconds)
    return "unpacked"


def every_tenth(index: int) -> bool:
    return index % 10 == 5


def sleepy_start(worker: int) -> None:
    time.sleep(0.3)


@dataclass(frozen=True)
class Case:
    """A run of so many batches and steps of so many seconds that one cause limits.

    Attributes:
        lost: the seconds that were lost to it, by the stopwatch.
        seconds: of the epoch, if nothing disturbs it.
        arguments: of the loader, for so many workers, with the stopwatch.
        warm: the workers are there before the epoch.
    """

    limit: str
    batches: int
    lost: Callable[[Stopwatch], float]
    seconds: float
    arguments: Callable[[int, Stopwatch], dict[str, Any]]
    step: float = 0.0
    warm: bool = True

    def disturbed(self, watch: Stopwatch) -> float:
        """The share of an epoch's time that the rest of the machine took."""
        return max(0.0, 1 - self.seconds / watch.total)


def waited(watch: Stopwatch) -> float:
    return sum(watch.waits)


def loading(seconds: float) -> Callable[[int, Stopwatch], dict[str, Any]]:
    """A batch comes every so many seconds, for any number of workers."""
    return lambda workers, _: {"dataset": Naps(seconds * max(1, workers))}


def batches_of(batch: Any) -> dict[str, Any]:
    """Every batch is this one."""
    return {"dataset": Naps(), "collate_fn": lambda samples: batch}


CASES = {
    "workers": Case("workers", 12, waited, 0.5, loading(0.04), 0.002),
    "head_of_line": Case(
        "head_of_line",
        34,
        lambda watch: sum(wait for at, wait in enumerate(watch.waits) if every_tenth(at)),
        0.5,
        lambda workers, _: {"dataset": Naps(0.001, every_tenth, 0.15)},
        0.002,
    ),
    "consumer": Case(
        "consumer", 20, lambda watch: watch.steps, 0.6, lambda *_: {"dataset": Naps(0.002)}, 0.03
    ),
    "packing": Case("transport", 12, waited, 0.4, lambda *_: batches_of(SlowToPickle(packing=0.06)), 0.003),
    "unpacking": Case(
        "transport", 12, waited, 0.78, lambda *_: batches_of(SlowToPickle(unpacking=0.06)), 0.005
    ),
    "window": Case(
        "memory",
        10,
        waited,
        0.65,
        lambda *_: {"dataset": Naps(0.06), "schedule": RoundRobin(window=1)},
        0.005,
    ),
    "sampler": Case(
        "sampler",
        20,
        lambda watch: watch.inside,
        0.5,
        lambda workers, watch: {"dataset": Naps(), "sampler": SlowOrder(watch)},
        0.005,
    ),
    "device_copy": Case(
        "device_copy",
        20,
        lambda watch: watch.inside,
        0.5,
        lambda workers, watch: {"dataset": Naps(), "device": ToDevice("cpu", transform=watch.transform)},
        0.005,
    ),
    "start_up": Case(
        "start_up",
        12,
        lambda watch: watch.started + sum(watch.waits[: watch.workers]) + watch.waits[-1],  # and their end
        0.6,
        lambda *_: {"dataset": Naps(), "worker_init_fn": sleepy_start},
        0.02,
        warm=False,
    ),
    "balanced": Case("balanced", 40, lambda watch: watch.total - watch.steps, 0.88, loading(0.02), 0.022),
}


def play(
    cases: list[Case], workers: int, context: str | None
) -> Iterator[tuple[Case, DataLoader[Any], Stopwatch]]:
    """Run cases at once, each on a thread of its own: all that takes time sleeps. The newest epoch of each
    loader is the one that was measured."""
    prepared = [(case, *_prepared(case, workers, context)) for case in cases]
    with ThreadPoolExecutor(len(cases)) as threads:
        list(threads.map(lambda each: each[2].run(each[1], each[0].step), prepared))
    for case, loader, watch in prepared:
        with loader:
            yield case, loader, watch


def _prepared(case: Case, workers: int, context: str | None) -> tuple[DataLoader[Any], Stopwatch]:
    """The loader of a case before the epoch that is measured."""
    watch = Stopwatch(workers=workers)
    arguments: dict[str, Any] = {"sampler": Order(), "persistent_workers": case.warm and workers > 0}
    arguments |= case.arguments(workers, watch)
    loader: DataLoader[Any] = DataLoader(
        num_workers=workers, multiprocessing_context=context if workers else None, **arguments
    )
    if case.warm:
        arguments["sampler"].samples = 2 * workers
        for _ in loader:
            pass
    arguments["sampler"].samples = case.batches
    return loader, watch
