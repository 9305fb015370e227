"""Records of calls, made by hand, and epochs that are played."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from fastq_loader.extras.insight.causes import Breakdown, breakdown, table
from fastq_loader.statistics.counters import Counters, EpochLog, WorkerCounters
from fastq_loader.statistics.records import CLOSE, CUT, ITER, NEXT, Record


def record(kind: int, asked: int, returned: int, **more: int) -> Record:
    """A call of epoch 0, with these further numbers."""
    return Record(*[0] * len(Record._fields))._replace(
        kind=kind, asked=asked, returned=returned, **{"seq": -1, "worker": -1} | more
    )


def gives(asked: int, returned: int, times: tuple[int, ...] = (), **more: int) -> Record:
    """A call that gives batch 0, which worker 0 loaded at these times: started, fetched, collated,
    finished."""
    named = zip(("started", "fetched", "collated", "finished"), times, strict=bool(times))
    loaded = {"worker": 0, "pid": 70, **dict(named)} if times else {}
    return record(NEXT, asked, returned, **{"seq": 0, **loaded} | more)


def counted(*records: Record, workers: int = 0) -> Counters:
    """Counters of a loader with these records, which are of its first epoch."""
    counters = Counters()
    log = counters.begin_epoch(records[0].asked if records else 0, 0)
    counters.workers = tuple(WorkerCounters(number, 70 + number) for number in range(workers))
    for each in records:
        log.asked = each.asked
        for name in Record._fields[4:13]:
            setattr(log, name, getattr(each, name))
        log.record(each.kind, each.returned, each[13:])
    return counters


def folded(*records: Record) -> Breakdown:
    """Where the time of an epoch with these records went."""
    counters = counted(*records)
    return breakdown(counters.logs[0], table(counters))


class Played:
    """Epochs of one loader, up to three at once, each with two workers, whose answers come in any order.

    Args:
        counters: the loader's.
        draw: what is random.

    Attributes:
        now: the time, in nanoseconds.
        ended: epoch → from the call of `iter()` to the end of its last call.
    """

    def __init__(self, counters: Counters, draw: random.Random) -> None:
        self.counters, self._draw = counters, draw
        self.now, self.ended = 100, dict[int, tuple[int, int]]()

    def tick(self) -> int:
        self.now += self._draw.choice((1, 2, 10, 100, 10**7))
        return self.now

    def epochs(self, count: int) -> Iterator[None]:
        """So many. Halts after each call."""
        draw, live = self._draw, list[_Epoch]()
        for _ in range(count):
            if len(live) < draw.randrange(1, 4):
                began = self.tick()
                log = self.counters.begin_epoch(began, 0)
                self._draws(log)
                log.record(ITER, self.tick())
                live.append(_Epoch(log))
                self.ended[log.epoch] = began, self.now
                yield
            if live:
                epoch = draw.choice(live)
                if not self._call(epoch):
                    live.remove(epoch)
                yield

    def _draws(self, log: EpochLog) -> None:
        began = self.tick()
        log.drew_until = self.tick()
        log.drew += log.drew_until - began

    def _call(self, epoch: _Epoch) -> bool:
        """A call of `next()`; False: there will be no other."""
        draw, log = self._draw, epoch.log
        now = self.tick()
        if log.asked:  # the call before was interrupted
            log.record(CUT, now)
        log.asked = now
        for _ in range(draw.randrange(3)):
            waited = self.tick()
            sent, started = waited - draw.choice((0, 5, 200)), waited + draw.choice((-50, -5, 0, 1, 20))
            started = max(started, epoch.free, sent)
            times = [started]
            for _ in range(3):
                times.append(times[-1] + draw.choice((0, 1, 50)))
            epoch.free = times[-1]
            self.now = max(self.now, times[-1])
            epoch.ready.append((epoch.seq, draw.randrange(2), 100, sent, *times, draw.choice((0, 1))))
            epoch.seq += 1
            log.waited_for(waited, self.tick(), draw.randrange(3), draw.random() < 0.5, 2)
        self._draws(log)
        began = self.tick()
        log.device_until = self.tick()
        log.device += log.device_until - began
        how = draw.choice(("give", "give", "give", "raise", "cut", "end"))
        if how == "cut":  # nothing more is known before the next call
            self.ended[log.epoch] = self.ended[log.epoch][0], log._ended
            return True
        if how == "end":
            log.end(self.tick(), 0)
            log.record(CLOSE, self.tick())
            log.drop(self.tick())
        elif how == "give" and epoch.ready:
            log.record(NEXT, self.tick(), epoch.ready.pop(draw.randrange(len(epoch.ready))))
        else:
            log.record(NEXT, self.tick(), error=KeyError("the sampler's"))
        self.ended[log.epoch] = self.ended[log.epoch][0], log._ended
        return how != "end"


class _Epoch:
    """An epoch that is played: its log, and what its workers do."""

    def __init__(self, log: EpochLog) -> None:
        self.log = log
        self.seq = self.free = 0
        self.ready = list[tuple[Any, ...]]()
