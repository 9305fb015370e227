"""Alarms whose handler raises at random moments inside `iter()`, `next()` and `close()`, epoch after epoch.

Whatever a call was doing, the next one goes on exactly where it was, or raises an error that says why, every
time: no batch is lost or given twice, and no epoch ends that has batches left. More than the tests run:

    python -c "from tests.support.alarms import main; main(2000)"
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter as TorchIterator

from fastq_loader import DataLoader, IteratorInvalid
from fastq_loader.consumer.event_loop import EventLoop
from fastq_loader.consumer.gate import WAITING
from tests.support.crimes import Slow
from tests.support.gates import Gates

#: Alarms in an epoch: a sample that takes longer than the time between two would never be loaded.
MOST = 60


class Alarm(BaseException):
    """Raised by the handler; not a type that anything else raises, and no Exception, as KeyboardInterrupt."""


def ring(signum: int, frame: FrameType | None) -> None:
    raise Alarm


@contextmanager
def alarm_after(seconds: float, handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """SIGALRM goes to `handler` in here, and comes once after some time."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def next_waits(frame: FrameType | None) -> bool:
    """Whether a loader's `next()` sleeps, or torch's is anywhere."""
    while frame is not None:
        if isinstance(loop := frame.f_locals.get("self"), EventLoop):
            return loop._gate.phase == WAITING
        if frame.f_code in (TorchIterator.__next__.__code__, Gates.wait_at.__code__):
            return True
        frame = frame.f_back
    return False


@contextmanager
def alarm_while_next_waits(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """The handler is called once, as soon as `next()` waits for a batch."""

    def look(signum: int, frame: FrameType | None) -> None:
        if not over.is_set() and next_waits(frame):
            over.set()
            handler(signum, frame)

    def knock() -> None:
        while not over.wait(0.01):
            signal.pthread_kill(main, signal.SIGALRM)

    main, over, before = threading.get_ident(), threading.Event(), signal.signal(signal.SIGALRM, look)
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGALRM, before)


def inside_the_loader(frame: FrameType | None) -> bool:
    """Whether the loader is running; else it would be the test's own loop that loses a batch."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("fastq_loader"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def alarms(rng: random.Random, kind: type[BaseException], within: float) -> Iterator[list[int]]:
    """One alarm after the other, each at a random moment; how many raised."""
    raised = [0]
    ringing = True

    def handler(signum: int, frame: FrameType | None) -> None:
        if ringing and raised[0] < MOST:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, within))
            if inside_the_loader(frame):
                raised[0] += 1
                raise kind("the alarm")

    with alarm_after(rng.uniform(1e-5, within), handler):
        try:
            yield raised
        finally:
            ringing = False


def run_epoch(loader: Any, kind: type[BaseException], within: float, rng: random.Random) -> Counter[str]:
    """One epoch under alarms; how it ended, and how many there were.

    Raises:
        AssertionError: anything was lost, or given twice, without an error that says so.
    """
    numbers: list[int] = []
    iterator: Any = None
    outcome = ""
    with alarms(rng, kind, within) as raised:
        while not outcome:
            try:
                if iterator is None:
                    iterator = iter(loader)
                while True:
                    numbers.append(int(next(iterator)))
            except kind:
                continue
            except StopIteration:
                outcome = "whole"
            except IteratorInvalid:
                outcome = "refused"
    assert numbers == list(range(len(numbers))), f"lost, twice or out of order: {numbers}"
    if outcome == "whole":
        assert len(numbers) == len(loader), f"the epoch ended after {len(numbers)} of {len(loader)}"
    for _ in range(3 if outcome == "refused" else 0):
        try:
            next(iterator)
        except IteratorInvalid:
            continue
        raise AssertionError("an iterator that cannot go on went on, or ended")
    went_on = outcome == "whole" and raised[0] > 0
    return Counter({outcome: 1, "alarms": raised[0], "went on": went_on})


def check(seed: int, epochs: int = 3) -> Counter[str]:
    """Some epochs of one loader, the seed in the message of what fails."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    workers, schedule = rng.choice([0, 1, 2, 3]), rng.choice(["round_robin", "dynamic"])
    options: dict[str, Any] = {"num_workers": workers, "schedule": schedule}
    options["persistent_workers"] = workers > 0 and rng.random() < 0.5
    if workers:  # multiprocessing's fork server and resource tracker are lost where a handler raises in them
        options["multiprocessing_context"] = "fork"
    # The rarer the alarms, the more often they meet a call that waits.
    within = rng.choice([0.002, 0.01, 0.05])
    kind = rng.choice([Alarm, KeyboardInterrupt])
    dataset = Slow(rng.choice([8, 30]), rng.choice([0, 0.001, 0.004]))
    loader: Any = DataLoader(dataset, None, **options)
    try:
        for _ in range(epochs):
            seen += run_epoch(loader, kind, within, rng)
        with alarms(rng, kind, within):
            for _ in range(100):
                try:
                    loader.close()
                    break
                except kind:
                    continue
        loader.close()
        # Nobody was left behind, and the loader works.
        assert list(map(int, loader)) == list(range(len(dataset)))
    except Exception as error:
        raise AssertionError(f"seed {seed}, {dataset}, {options}, {kind} in {within} s: {error!r}") from error
    finally:
        loader.close()
    return seen


def main(epochs: int, seed: int = 0) -> None:
    seen: Counter[str] = Counter()
    warnings.simplefilter("ignore")  # more workers than cores
    # An alarm inside a finalizer or a hook of a fork is nobody's to raise: Python reports it here.
    sys.unraisablehook = lambda unraisable: seen.update(unraisable=1)
    for number in range(-(-epochs // 3)):
        seen += check(seed * 1_000_003 + number)
    print(json.dumps(seen))
