"""Breakdown of the wall time of one epoch by cause.

Pure: a fold over the records of the epoch's calls (see `records`), in the order in which the calls ended; how
many are folded at once makes no difference. The consumer is either outside of the loader (its training step)
or inside a call of `iter()` or `next()`. For each call the record has the begin and the end, and the time
spent on waiting, on the sampler and on the device; the rest is the loader's own work.

The causes of a wait are determined when the batch that ends it arrives, because its answer has the times at
which its worker began, had read the samples, had collated and had packed them:

    wait           ├───────────────────────────────────────────────────────────────┤
    worker   busy with others ─┤ idle ├─ fetch ─┬─ collate ─┬─ pack ─┤
    lost to     workers         transport     workers         transport   transport

While a worker starts up, a wait for its first batch counts as start-up, whatever the other workers do.
Otherwise a wait counts as head-of-line blocking while later batches are ready and some worker is idle, or
while at least as many batches are ready as the window has before it widens: then more workers would not help.
It counts as memory while no batch is ready and some worker is idle, because the window is full. New pages,
which a worker maps before it writes to them, also count as memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from math import log2
from typing import TYPE_CHECKING, Any, NamedTuple

from fastq_loader.ipc.messages import EMPTY
from fastq_loader.statistics import records
from fastq_loader.statistics.deliveries import LateBatches, ReadyCounts
from fastq_loader.statistics.snapshots import CAUSES, PER_OCTAVE, EpochStatistics, Histogram, LateBatch

if TYPE_CHECKING:
    from fastq_loader.ipc.messages import Answer

#: First batches of each worker that are compared with other workers'.
FIRST_BATCHES = 8
#: Last batches whose costs are available to the model.
_KEPT = 1024
#: Kinds of calls whose own work is the transport's; that of the others is start-up.
_WHILE_BATCHES_COME = records.NEXT, records.CUT, records.PART, records.DROP


class Cost(NamedTuple):
    """Costs of one batch in its worker, in nanoseconds.

    Attributes:
        seq: its number.
        load: reading samples and collating them.
        pack: writing it to shared memory.
    """

    seq: int
    load: int
    pack: int


class BatchCosts:
    """Costs of the batches of an epoch."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, int, int]] = deque(maxlen=_KEPT)
        self._batches = self._load = 0

    def add(self, seq: int, load: int, pack: int) -> None:
        """Count a batch; see `Cost`."""
        self._last.append((seq, load, pack))
        self._batches += 1
        self._load += load

    @property
    def last(self) -> list[Cost]:
        """Costs of the last thousand batches, in the order of their answers."""
        return [Cost(*cost) for cost in list(self._last)]

    @property
    def load(self) -> float:
        """Average nanoseconds to load a batch, over all; needs one. The last thousand alone may differ from
        earlier ones: data are cached, or begin with something slow."""
        return self._load / self._batches


class _Times:
    """Times of the batches in flight, and of their workers.

    Attributes:
        sent: batch → when its task was sent.
        previous: batch → when its worker had finished the previous one, or 0.
        finished: worker → when it had finished its last one.
    """

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        self.previous: dict[int, int] = {}
        self.finished = defaultdict[int, int](int)


class EpochCounters:
    """Counts of one epoch, folded from its records.

    Args:
        epoch: its number, from 0 on.
        now: when `iter()` was called.
        cpu: CPU time that this process had used by then, in all its threads, in nanoseconds.

    Attributes:
        batches: number of delivered batches.
        by_cause: cause → nanoseconds.
        waited: nanoseconds in which `next()` waited for workers, or loaded a batch itself.
        in_transit: the part of the transport's nanoseconds that was waiting; the rest is work of `next()`.
        cpu: CPU time that this process used in the epoch, in nanoseconds, at the last measurement.
        over: there is no further batch.
        costs: of its batches.
    """

    def __init__(self, epoch: int, now: int, cpu: int = 0) -> None:
        self.epoch = epoch
        self._cpu_before = cpu
        self.cpu = 0
        self.over = False
        self.batches = self.waited = self.in_transit = 0
        self.costs = BatchCosts()
        self.by_cause = dict.fromkeys(CAUSES, 0)
        self._calls = Histogram()
        self._ready = ReadyCounts(now)
        self._late = LateBatches(epoch)
        self._left = now
        self._times = _Times()

    def used_cpu(self, cpu: int, over: bool = False) -> None:
        """Set the CPU time that this process has used so far; ignored once the epoch is over."""
        if not self.over:
            self.cpu, self.over = cpu - self._cpu_before, over

    # ---- records ------------------------------------------------------------------------------

    def fold(self, record: records.Record) -> None:
        """Count a record of this epoch."""
        kind, _, began, ended, _, steps, *more = record
        waits: list[Any] = []
        by_cause, times, counted = self.by_cause, self._times, 0
        for step in steps:
            match step:
                case records.ANSWERED, worker, process, answer:
                    previous, times.finished[worker.id] = times.finished[worker.id], answer.finished
                    sent = times.sent.pop(answer.seq, answer.started)
                    worker.answered(answer, sent if previous else 0, process)
                    if answer.kind not in EMPTY:
                        times.previous[answer.seq] = previous
                        load, pack = answer.collated - answer.started, answer.finished - answer.collated
                        self.costs.add(answer.seq, load, pack)
                case records.DREW, since, until, seqs:
                    by_cause["sampler"] += until - since
                    counted += until - since
                    for seq in seqs:
                        times.sent[seq] = until
                case records.DEVICE, since, until:
                    by_cause["device_copy"] += until - since
                    counted += until - since
                case records.LOADED, since, until, seq, _:
                    by_cause["workers"] += until - since
                    counted += until - since
                    self.waited += until - since
                    self.costs.add(seq, until - since, 0)
                case records.WAITED, *wait:
                    waits += (wait,)
                case records.STALE, worker, process, answer:
                    worker.answered(answer, process=process)
        if began:  # else outside of calls
            self._count_call(kind, began, ended, waits, counted, more)

    def _count_call(
        self, kind: str, began: int, ended: int, waits: list[Any], counted: int, more: list[Any]
    ) -> None:
        """Count the time of a call, of which so many nanoseconds are counted already."""
        self.by_cause["consumer"] += began - self._left
        answer = None
        if kind == records.NEXT:
            answer, _, _ = more
        for wait in waits:
            counted += self._count_wait(answer, *wait)
        if kind == records.NEXT:
            self.batches += 1
            self._calls[int(PER_OCTAVE * log2(ended - began or 1))] += 1
            if answer is not None:
                self._times.previous.pop(answer.seq, 0)
                if answer.seq in self._late.waiting:
                    self._late.delivered(answer)
                self._ready.add(answer.finished, ended)
        elif kind == records.PART or kind == records.DROP:
            ended = began + counted  # the duration of the call is unknown
        elif kind == records.END:
            (cpu,) = more
            self.used_cpu(cpu, over=True)
        own = "transport" if kind in _WHILE_BATCHES_COME else "start_up"
        self.by_cause[own] += ended - began - counted
        self._left = ended

    def _count_wait(
        self, answer: Answer | None, began: int, ended: int, cause: str, seq: int, index: Any
    ) -> int:
        """Count the causes of a wait, and return their nanoseconds; the rest is the transport's. `answer`: of
        the batch that ended it, if any."""
        self.waited += ended - began
        if cause == "head_of_line":
            self._late.held_up(seq, index, ended - began)
        lost = {cause: ended - began}
        if answer is not None:
            lost = _lost_to(cause, began, ended, answer, self._times.previous.get(answer.seq, 0))
        for each, nanoseconds in lost.items():
            self.by_cause[each] += nanoseconds
        counted = sum(lost.values())
        self.in_transit += ended - began - counted
        return counted

    # ---- reading ------------------------------------------------------------------------------

    def include(self, other: EpochCounters) -> None:
        """Add the counts of another epoch."""
        self.batches += other.batches
        self._calls.include(other._calls)
        self.cpu += other.cpu
        for cause, nanoseconds in other.by_cause.items():
            self.by_cause[cause] += nanoseconds
        self.waited += other.waited
        for late in other.worst():
            self._late.keep(late)

    def worst(self) -> list[LateBatch]:
        """The batches that held up others longest, the worst first."""
        return self._late.worst()

    @property
    def nanoseconds(self) -> int:
        """From the call of `iter()` to the end of the last call; of one that was interrupted, the recorded
        part."""
        return sum(self.by_cause.values())

    def snapshot(self) -> EpochStatistics:
        """The counts so far. May be called on any thread."""
        ready = self._ready.averages(lambda: self.nanoseconds)
        seconds = {f"{cause}_seconds": self.by_cause[cause] / 1e9 for cause in CAUSES}
        waits = {f"wait_p{percent}": self._calls.percentile(percent) for percent in (50, 95, 99)}
        return EpochStatistics(
            epoch=self.epoch,
            batches=self.batches,
            seconds=self.nanoseconds / 1e9,
            cpu_seconds=self.cpu / 1e9,
            ready=ready,
            **seconds,
            **waits,
        )


def _lost_to(cause: str, began: int, ended: int, answer: Answer, previous: int) -> dict[str, int]:
    """Nanoseconds of a wait by cause; the rest of it is the transport's.

    Args:
        cause: the apparent one.
        began, ended: of the wait.
        answer: of the batch that ended it.
        previous: when the worker of that batch had finished its previous one, or 0.
    """
    started, finished, collated = answer.started, answer.finished, answer.collated
    lost, left, total = dict[str, int](), ended - began, finished - started or 1
    busy = 0  # with the previous batch, which is assumed to be like this one
    if previous:
        busy = _overlap(began, ended, began, min(previous, started))
    else:
        lost["start_up"] = _overlap(began, ended, began, started)
        left -= lost["start_up"]
    if cause != "workers":
        return lost | {cause: left}
    loading = _overlap(began, ended, started, collated) + busy * (collated - started) // total
    if answer.new_memory:
        share = min(1.0, answer.new_memory / total)
        packing = _overlap(began, ended, collated, finished) + busy * (finished - collated) // total
        lost["memory"] = round((loading + packing) * share)
        loading -= round(loading * share)
    return lost | {"workers": loading}


def _overlap(began: int, ended: int, since: int, until: int) -> int:
    return max(0, min(ended, until) - max(began, since))


def summed(epochs: list[EpochCounters]) -> EpochCounters:
    """The sum of the counts of several epochs."""
    total = EpochCounters(0, 0)
    for epoch in epochs:
        total.include(epoch)
    return total
