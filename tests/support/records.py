"""Records of calls, made by hand."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

from fastq_loader.ipc.messages import BATCH, ENDED, ERROR, Answer
from fastq_loader.statistics import records
from fastq_loader.statistics.counters import Counters, EpochLog
from fastq_loader.statistics.epoch import EpochCounters
from fastq_loader.statistics.records import Record, Step
from fastq_loader.statistics.workers import WorkerCounters


def answer(seq: int = 0, started: int = 0, collated: int = 0, finished: int = 0, **more: Any) -> Answer:
    """For a batch, with these times."""
    return Answer(1, seq, 0, BATCH, started, finished, (), (), None, collated=collated)._replace(**more)


def came(answer: Answer, worker: WorkerCounters | int = 0, pid: int = 1) -> Step:
    """The answer of a worker, or of one with this number, has come."""
    counters = WorkerCounters(worker, pid) if isinstance(worker, int) else worker
    return records.ANSWERED, counters, pid, answer


def call(kind: str, began: int, ended: int, *steps: Step, more: Any = (), epoch: int = 1) -> Record:
    """A record of this kind; `more`: its further fields."""
    return kind, epoch, began, ended, 0, list(steps), *more


def gives(
    answer: Answer | int | None, began: int, ended: int, *steps: Step, error: Any = None, epoch: int = 1
) -> Record:
    """A call of `next()` that gives the batch of an answer, or of this number without one; None: no batch."""
    seq = answer.seq if isinstance(answer, Answer) else answer
    more = (answer if isinstance(answer, Answer) else None), seq, error
    return call(records.NEXT, began, ended, *steps, more=more, epoch=epoch)


def folded(*found: Record, began: int = 1) -> EpochCounters:
    """What these records of an epoch come to, whose `iter()` was called then."""
    epoch = EpochCounters(1, began)
    for record in found:
        epoch.fold(record)
    return epoch


class Played:
    """Epochs of one loader on two threads at once, each with two workers, whose answers come in any order.

    Args:
        counters: the loader's.
        draw: what is random.

    Attributes:
        now: the time, in nanoseconds.
        workers: their counters.
        ended: epoch → from the call of `iter()` to the end of its last call.
    """

    def __init__(self, counters: Counters, draw: random.Random) -> None:
        self.counters, self._draw = counters, draw
        self.now, self.ended = 100, dict[int, tuple[int, int]]()
        self.workers, self._free = (WorkerCounters(0, 100), WorkerCounters(1, 101)), [0, 0]

    def thread(self) -> int:
        """Any of two."""
        return self._draw.choice((os.getpid(), os.getpid(), 51))

    def tick(self) -> int:
        self.now += self._draw.choice((1, 2, 10, 100, 10**7))
        return self.now

    def epochs(self, count: int) -> Iterator[None]:
        """So many, up to three at once. Halts after each call, so that records may be folded there."""
        draw, live = self._draw, list[_Epoch]()
        for _ in range(count):
            if len(live) < draw.randrange(1, 4):
                began = self.tick()
                log = self.counters.begin_epoch(began, 0)
                log.steps += (self._drew(),)
                log.leave(records.ITER, self.tick())
                live.append(_Epoch(log))
                self.ended[log.epoch] = began, self.now
                yield
            if live:
                epoch = draw.choice(live)
                if not self._call(epoch):
                    live.remove(epoch)
                yield

    def _drew(self) -> Step:
        began, ended = self.tick(), self.tick()
        return records.DREW, began, ended, (ended,)

    def _call(self, epoch: _Epoch) -> bool:
        """A call of `next()`; False: there will be no other."""
        draw, log = self._draw, epoch.log
        if epoch.loading and not epoch.cut and draw.random() < 0.2:
            self._answer(epoch)  # in `poll()`, or never to be handed out
            log.leave(kind := draw.choice((records.PART, records.DROP)), self.tick())
            if kind == records.DROP:
                return False
        log.enter(self.tick())
        if epoch.cut:  # the call before has ended somewhere
            self.ended[log.epoch] = self.ended[log.epoch][0], self.now
        for _ in range(draw.randrange(3)):
            step = self._drew()
            log.steps += (step,)
            epoch.loading.append(step[2])
            cause, waited = draw.choice(("workers", "memory", "head_of_line")), self.tick()
            if draw.random() < 0.7:
                self._answer(epoch)
            log.steps += ((records.WAITED, waited, self.tick(), cause, step[2], [7, 8]),)
            log.steps += ((records.DEVICE, self.tick(), self.tick()),)
        how = draw.choice(("give", "give", "give", "raise", "cut", "end", "drop"))
        epoch.cut = how == "cut"
        if epoch.cut:  # nothing more is known before the next call
            return True
        if how == "drop":
            log.leave(records.DROP, self.tick())
            del self.ended[log.epoch]
            return False
        if how == "end":
            log.leave(records.END, self.tick(), 0)
            log.leave(records.CLOSE, self.tick())
        elif how == "give" and epoch.ready:
            given = epoch.ready.pop(draw.randrange(len(epoch.ready)))
            log.give(self.tick(), given, given.seq, None)
        else:
            log.give(self.tick(), None, None, KeyError("the sampler's"))
        self.ended[log.epoch] = self.ended[log.epoch][0], self.now
        return how != "end"

    def _answer(self, epoch: _Epoch) -> None:
        draw, free = self._draw, self._free
        seq, worker = epoch.loading.pop(draw.randrange(len(epoch.loading))), draw.randrange(2)
        times = [max(seq, free[worker]) + draw.choice((0, 1, 50))]
        for _ in range(3):
            times.append(times[-1] + draw.choice((0, 1, 50)))
        free[worker] = times[-1]
        self.now = max(self.now, times[-1])
        started, fetched, collated, finished = times
        found = answer(seq, started, collated, finished, fetched=fetched, cpu=finished)
        found = found._replace(kind=draw.choice((BATCH, BATCH, ERROR, ENDED)), new_memory=draw.choice((0, 1)))
        counters = self.workers[worker]
        if draw.random() < 0.1:
            counters.replaced(counters.pid + 2)
            replaced = records.REPLACED, self.now, worker, counters.pid, "it died"
            epoch.log.steps += (replaced,)
        epoch.log.steps += (came(found, counters, counters.pid),)
        if found.kind != ENDED:
            epoch.ready.append(found)


class _Epoch:
    """Of a life that is played: its log, and what its workers do."""

    def __init__(self, log: EpochLog) -> None:
        self.log, self.cut = log, False
        self.loading, self.ready = list[int](), list[Answer]()
