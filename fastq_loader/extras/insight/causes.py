"""Where the time of epochs went: the records of a loader's calls, divided among causes.

Runs in the consumer, on the thread that asks. Changes nothing.

The consumer is either outside of the loader (its training step) or inside a call of `iter()` or `next()`. A
record has the begin and the end of a call, and the time spent on waiting, on the sampler and on the device;
the rest of it is the loader's own work. The causes of a wait follow from the times of the batch that ended
it:

              since                                                           until
    wait        ├───────────────────────────────────────────────────────────────┤
    worker ─ previous ─┤ idle ├─ started … fetched ─┬─ … collated ─┬─ … finished ─┤
    lost to   workers  transport   workers             workers        transport      transport

The previous batch of a worker is assumed to be like this one. While a worker starts up, a wait for its first
batch counts as start-up, whatever the other workers do. A wait counts as head-of-line blocking while later
batches are ready and some worker is idle, or while at least as many batches are ready as the window has
before it widens: then more workers would not help. It counts as memory while no batch is ready and some
worker is idle, because the window is full. New pages, which a worker maps before it writes to them, also
count as memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, TypeAlias

import numpy as np

from fastq_loader.extras.insight.snapshots import (
    CAUSES,
    EpochStatistics,
    LateBatch,
    LoaderStatistics,
    WorkerStatistics,
)
from fastq_loader.statistics.counters import Counters, EpochLog, Totals
from fastq_loader.statistics.records import CLOSE, END, ITER, NEXT, Record

#: Batches that `statistics()` names as late; last batches whose costs are available to the model.
_LATE, _KEPT = 10, 1024

Column: TypeAlias = Any  # an array of one number of each record
Records: TypeAlias = Any  # a `Record` of columns


@dataclass(frozen=True)
class Breakdown:
    """One epoch, or several together.

    Attributes:
        epoch: its times by cause.
        over: there is no further batch.
        costs: number, nanoseconds to load and nanoseconds to pack of the last thousand batches, in the order
            of batches; nanoseconds to load one on average, over all that are recorded.
        in_transit: the part of the transport's seconds that was waiting; the rest is work of `next()`.
        late: the batches that held up others longest, the worst first.
        calls: nanoseconds of each call of `next()` that gave a batch.
    """

    epoch: EpochStatistics
    over: bool = False
    costs: Sequence[tuple[int, int, int]] = ()
    load: float = 0.0
    in_transit: float = 0.0
    late: tuple[LateBatch, ...] = ()
    calls: Column = ()

    @property
    def seconds(self) -> float:
        """Seconds of the causes: of the epoch, or of its last batches."""
        return sum(map(self.epoch.spent_on, CAUSES))


def table(counters: Counters) -> Records:
    """The records of a loader as columns, epoch by epoch, and of each epoch in the order of calls."""
    rows = np.frombuffer(b"".join(list(counters.records)), np.int64).reshape(-1, len(Record._fields))
    order = np.argsort(rows[:, Record._fields.index("epoch")], kind="stable")
    return Record._make(np.ascontiguousarray(rows[order].T))


def _since(records: Records, epoch: int, until: int | None = None) -> Records:
    """The records from this epoch on, up to another one."""
    first, last = np.searchsorted(records.epoch, (epoch, np.inf if until is None else until))
    return _where(records, slice(first, last))


def _where(records: Records, chosen: Column) -> Records:
    return Record._make(column[chosen] for column in records)


def previous(records: Records) -> Column:
    """When the worker of each batch had finished the one before, or 0."""
    order = np.lexsort((records.finished, records.worker))
    worker, finished = records.worker[order], records.finished[order]
    found = np.zeros_like(finished)
    same = worker[1:] == worker[:-1]
    found[order[1:]] = np.where(same, finished[:-1], 0)
    return found


def _overlap(since: Column, until: Column, began: Column, ended: Column) -> Column:
    return np.maximum(0, np.minimum(until, ended) - np.maximum(since, began))


def lost(records: Records, before: Column) -> dict[str, Column]:
    """Nanoseconds of the waits by cause, which add up to the waits.

    Args:
        records: of batches, and of calls without one.
        before: when the worker of each batch had finished the previous one; 0 for its first.
    """
    waited = records.workers + records.head + records.memory
    is_first = (records.worker >= 0) & (before == 0)
    start_up = np.where(is_first, np.clip(records.started - records.wait_from, 0, waited), 0)
    # Start-up is the first part of a wait. It is taken from the wait for workers, then from that at the head
    # of the line, then from that for memory.
    workers = np.maximum(0, records.workers - start_up)
    memory = np.minimum(records.memory, waited - start_up - workers)
    head = waited - start_up - workers - memory
    loading, pages = _at_work(records, before, records.wait_from + start_up, workers)
    return {
        "start_up": start_up,
        "workers": loading,
        "head_of_line": head,
        "memory": memory + pages,
        "transport": workers - loading - pages,
    }


def _at_work(records: Records, before: Column, since: Column, waited: Column) -> tuple[Column, Column]:
    """Nanoseconds of waits in which the worker of the batch loaded, and in which it mapped new pages. In the
    rest it packed, or the batch was on its way. The waits began at `since` and took `waited`."""
    started, finished, until = records.started, records.finished, since + waited
    collated, took = np.clip(records.collated, started, finished), np.maximum(1, finished - started)
    # Until then the worker was at its previous batch, of which it loaded as large a part as of this one.
    previous_until = np.where(before > 0, np.minimum(before, started), 0)
    at_previous = _overlap(since, until, since, previous_until)
    loading = _overlap(since, until, started, collated) + at_previous * ((collated - started) / took)
    packing = _overlap(since, until, collated, finished) + at_previous * ((finished - collated) / took)
    mapping = np.minimum(1.0, records.new_memory / took)  # the part of its work in which it mapped pages
    pages = np.minimum(waited, (loading + packing) * mapping).astype(np.int64)
    loading = np.minimum(waited - pages, loading * (1 - mapping)).astype(np.int64)
    return np.where(finished == 0, waited, loading), pages  # 0: no batch ended the wait


def by_cause(records: Records) -> tuple[dict[str, int], int]:
    """Nanoseconds of an epoch by cause, from its records in the order of calls, and the part of the
    transport's that was waiting. They add up to the time from the begin of the first call to the end of the
    last one."""
    before = previous(records)
    if len(records.kind) and records.kind[0] != ITER:  # the first records of the epoch were overwritten
        before = np.where(before == 0, records.started, before)
    waits = {cause: int(each.sum()) for cause, each in lost(records, before).items()}
    calls = records.returned - records.asked
    # What a call did besides drawing, copying and waiting is the loader's own work.
    own = calls - records.drew - records.device - records.workers - records.head - records.memory
    is_start = np.isin(records.kind, (ITER, END, CLOSE))
    whole = int(records.returned[-1] - records.asked[0]) if len(calls) else 0
    found = dict.fromkeys(CAUSES, 0) | waits
    found["sampler"], found["device_copy"] = int(records.drew.sum()), int(records.device.sum())
    found["start_up"] += int(own[is_start].sum())
    found["transport"] += int(own[~is_start].sum())
    found["consumer"] = whole - int(calls.sum())
    return found, waits["transport"]


def breakdown(log: EpochLog, records: Records) -> Breakdown:
    """Break down one epoch of a loader, with the records of all."""
    in_epoch = _since(records, log.epoch, log.epoch + 1)
    calls = _where(in_epoch, in_epoch.kind == NEXT)
    loaded = _where(calls, (calls.started <= calls.collated) & (calls.collated > 0))
    causes, transit = by_cause(in_epoch)
    costs = loaded.seq, loaded.collated - loaded.started, loaded.finished - loaded.collated
    took = calls.finished - calls.started
    worst = [at for at in np.argsort(-calls.head, kind="stable")[:_LATE] if calls.head[at]]
    return Breakdown(
        _statistics(log.epoch, log.totals(), len(calls.kind), causes, calls.returned - calls.asked),
        log.over,
        sorted(zip(*(each[-_KEPT:].tolist() for each in costs), strict=True)),
        float(costs[1].mean()) if len(costs[1]) else 0.0,
        transit / 1e9,
        tuple(
            LateBatch(log.epoch, int(calls.seq[at]), float(calls.head[at]) / 1e9, float(took[at]) / 1e9)
            for at in worst
        ),
        calls.returned - calls.asked,
    )


def _statistics(
    epoch: int | None, totals: Totals, recorded: int, causes: dict[str, int], calls: Column
) -> EpochStatistics:
    seconds: dict[str, Any] = {f"{cause}_seconds": ns / 1e9 for cause, ns in causes.items()}
    waits = np.percentile(calls, (50, 95, 99)) / 1e9 if len(calls) else (0.0, 0.0, 0.0)
    for percent, wait in zip((50, 95, 99), waits, strict=True):
        seconds[f"wait_p{percent}"] = float(wait)
    return EpochStatistics(epoch, *totals, recorded, **seconds)


def breakdowns(counters: Counters) -> list[Breakdown]:
    """The last hundred epochs, the newest last."""
    records = table(counters)
    return [breakdown(log, records) for log in list(counters.logs.values())]


def newest(counters: Counters) -> Breakdown | None:
    """The newest epoch."""
    logs = list(counters.logs.values())
    return breakdown(logs[-1], table(counters)) if logs else None


def _together(counters: Counters, epochs: Sequence[Breakdown]) -> Breakdown:
    totals = counters.older
    for log in list(counters.logs.values()):
        totals = Totals(*map(add, totals, log.totals()))
    causes = {cause: round(sum(each.epoch.spent_on(cause) for each in epochs) * 1e9) for cause in CAUSES}
    recorded = sum(each.epoch.recorded_batches for each in epochs)
    calls = np.concatenate([(), *(each.calls for each in epochs)])
    late = sorted((late for each in epochs for late in each.late), key=lambda late: -late.seconds)
    return Breakdown(_statistics(None, totals, recorded, causes, calls), late=tuple(late[:_LATE]))


# ---- workers ----------------------------------------------------------------------------------------


def workers_of(counters: Counters, records: Records) -> Iterator[WorkerStatistics]:
    """Counts of each worker of the live pool, or of the last one."""
    loaded = _since(records, counters.first_epoch)
    for worker in counters.workers:
        own = _where(loaded, (loaded.worker == worker.id) & (loaded.finished > 0))
        own = _where(own, np.argsort(own.finished))
        fetched = np.clip(own.fetched, own.started, own.finished)
        collated = np.clip(own.collated, fetched, own.finished)
        times = {
            "work": own.finished - own.started,
            "fetch": fetched - own.started,
            "collate": collated - fetched,
            "packing": own.finished - collated,
            "new_memory": own.new_memory,
            **_between(own),
        }
        seconds: dict[str, Any] = {f"{name}_seconds": float(each.sum()) / 1e9 for name, each in times.items()}
        pid, node = worker.far or (worker.pid, None)
        fixed = worker.id, pid, worker.restarts, len(own.seq)
        yield WorkerStatistics(*fixed, **seconds, node=node, wire_bytes=worker.wire_bytes)


def _between(own: Records) -> dict[str, Column]:
    """Nanoseconds between the batches of a worker in which it had no task, and in which it had one."""
    before, after = _where(own, slice(None, -1)), _where(own, slice(1, None))
    gap = np.where(before.pid == after.pid, np.maximum(0, after.started - before.finished), 0)
    blocked = np.clip(after.sent - before.finished, 0, gap)
    blocked = np.where(before.epoch == after.epoch, blocked, 0)
    return {"idle": gap - blocked, "blocked": blocked}


def cpu_share(counters: Counters) -> float:
    """Share of their work in which workers used a CPU, or waited for one; 1 if unknown."""
    for worker in counters.workers:
        worker.look_at_cpu()
    cpu = sum(worker.cpu for worker in counters.workers)
    work = sum(worker.cpu_busy for worker in counters.workers)
    return min(1.0, cpu / work) if work else 1.0


def snapshot(counters: Counters, **now: Any) -> LoaderStatistics:
    """The counts so far, with the fields in `now`, which the caller provides."""
    records = table(counters)
    epochs = [breakdown(log, records) for log in list(counters.logs.values())]
    total = _together(counters, epochs)
    wire_bytes = sum((source.count() for source in list(counters.sources)), counters.wire_bytes)
    names = "epochs", "batches", "bytes", "window", "worker_restarts", "rejected_frames", "blocks_grown"
    return LoaderStatistics(
        **{name: getattr(counters, name) for name in (*names, "stale_answers")},
        **now,
        wait_seconds=total.epoch.wait_seconds,
        total=total.epoch,
        per_epoch=tuple(each.epoch for each in epochs),
        late_batches=total.late,
        workers=tuple(workers_of(counters, records)),
        wire_bytes=wire_bytes,
        staging=None if counters.staging is None else counters.staging.snapshot(),
    )
