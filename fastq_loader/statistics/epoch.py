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

from collections import deque
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from fastq_loader.ipc.messages import EMPTY, decode_index
from fastq_loader.statistics import records
from fastq_loader.statistics.snapshots import CAUSES, EpochStatistics, Histogram, LateBatch

if TYPE_CHECKING:
    from fastq_loader.ipc.messages import Answer

#: Parts of an epoch for which ready batches are counted, and their initial width in nanoseconds.
_PARTS, _WIDTH = 64, 1 << 24
#: First batches of each worker that are compared with other workers'.
FIRST_BATCHES = 8
#: Last batches whose costs are available to the model.
_KEPT = 1024
#: Batches that `statistics()` names as late.
_LATE = 10


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
        late: (epoch, batch) → a batch that held up others; the worst ones.
    """

    def __init__(self, epoch: int, now: int, cpu: int = 0) -> None:
        self.epoch = epoch
        self._cpu_before = cpu
        self.cpu = 0
        self.over = False
        self.batches = self.waited = self.in_transit = 0
        self._costs: deque[tuple[int, int, int]] = deque(maxlen=_KEPT)
        self._loads = self._load = 0  # batches with known costs, and nanoseconds to load them
        self.by_cause = dict.fromkeys(CAUSES, 0)
        self.late: dict[tuple[int, int], LateBatch] = {}
        self._held_up: dict[int, Any] = {}  # batches that hold up others → their indices
        self._calls = Histogram()
        self._began = self._left = now
        self._sent: dict[int, int] = {}  # batch → when its task was sent
        self._previous: dict[int, int] = {}  # batch → when its worker had finished the previous one, or 0
        self._finished: dict[int, int] = {}  # worker → when it had finished its last one
        # For each part of the epoch: the change in the number of ready batches, and the nanoseconds from each
        # change to the end of the part, summed; negative for a delivery.
        self._changes, self._rests = [0], [0]
        self._width = _WIDTH

    def used_cpu(self, cpu: int, over: bool = False) -> None:
        """Set the CPU time that this process has used so far; ignored once the epoch is over."""
        if not self.over:
            self.cpu, self.over = cpu - self._cpu_before, over

    # ---- records ------------------------------------------------------------------------------

    def fold(self, record: records.Record) -> None:
        """Count a record of this epoch."""
        kind, _, began, ended, _, steps = record[:6]
        by_cause, waits, counted = self.by_cause, records.NONE, 0
        for step in steps:
            what = step[0]
            if what == records.ANSWERED:
                # By position, which is several times as fast as by name.
                _, worker, process, answer = step
                seq, started, finished, load = answer[1], answer[4], answer[5], answer[12] - answer[4]
                previous, self._finished[worker.id] = self._finished.get(worker.id, 0), finished
                sent = self._sent.pop(seq, started)
                worker.answered(answer, sent if previous else 0, process)
                if answer[3] not in EMPTY:
                    self._previous[seq] = previous
                    self._costs.append((seq, load, finished - started - load))
                    self._loads, self._load = self._loads + 1, self._load + load
            elif what in by_cause:
                by_cause[what] += step[2] - step[1]
                counted += step[2] - step[1]
                if what == records.LOADED:
                    self._count_load(*step[1:4])
                elif what == records.DREW:
                    for seq in step[3]:
                        self._sent[seq] = step[2]
            elif what == records.WAITED:
                waits += (step,)
            elif what == records.STALE:
                step[1].answered(step[3], process=step[2])
        if not began:  # outside of calls
            return
        by_cause["consumer"] += began - self._left
        answer, own = record[6] if kind == records.NEXT else None, "transport"
        if waits:
            counted += self._count_waits(waits, answer)
        if kind == records.NEXT:
            self.batches += 1
            self._calls.add(ended - began)
            if answer is not None:
                self._count_ready(answer, ended)
        elif kind == records.PART or kind == records.DROP:
            ended = began + counted  # the duration of the call is unknown
        elif kind != records.CUT:
            own = "start_up"
        by_cause[own] += ended - began - counted
        self._left = ended
        if kind == records.END:
            self.used_cpu(record[6], over=True)

    def _count_load(self, began: int, ended: int, seq: int) -> None:
        """Count a batch that the call loaded itself."""
        self.waited += ended - began
        self._costs.append((seq, ended - began, 0))
        self._loads += 1
        self._load += ended - began

    # ---- causes of waits ----------------------------------------------------------------------

    def _count_waits(self, waits: tuple[records.Step, ...], answer: Answer | None) -> int:
        """Count the causes of a call's waits, and return their nanoseconds; the rest is the transport's.
        `answer`: of the batch that ended them, if any."""
        counted = 0
        for _, began, ended, cause, seq, index in waits:
            self.waited += ended - began
            if cause == "head_of_line":
                late = self.late.get((self.epoch, seq), LateBatch(self.epoch, seq, 0.0))
                self._keep(replace(late, seconds=late.seconds + (ended - began) / 1e9))
                self._held_up[seq] = index
            lost = {cause: ended - began}
            if answer is not None:
                lost = _lost_to(cause, began, ended, answer, self._previous.get(answer.seq, 0))
            for each, nanoseconds in lost.items():
                self.by_cause[each] += nanoseconds
                counted += nanoseconds
            self.in_transit += ended - began - sum(lost.values())
        return counted

    def _keep(self, late: LateBatch) -> None:
        self.late[late.epoch, late.batch] = late
        if len(self.late) > 2 * _LATE:
            self.late = {(each.epoch, each.batch): each for each in self.worst()}

    def worst(self) -> list[LateBatch]:
        """The batches that held up others longest, the worst first."""
        return sorted(self.late.values(), key=lambda late: -late.seconds)[:_LATE]

    def _came_late(self, answer: Answer, index: Any) -> None:
        """Complete the entry of a batch that held up others, from its answer and its index."""
        late = self.late.get((self.epoch, answer.seq))
        if late is None:
            return
        sample = None
        if answer.slowest and type(index) is list and answer.slowest_at < len(index):
            sample = index[answer.slowest_at]
        self._keep(
            replace(
                late,
                load_seconds=(answer.finished - answer.started) / 1e9,
                sample=sample,
                sample_seconds=answer.slowest / 1e9,
            )
        )

    # ---- how far the workers are ahead --------------------------------------------------------

    def _count_ready(self, answer: Answer, now: int) -> None:
        """Count a batch that is delivered now, and has been ready since its answer."""
        seq = answer[1]
        self._previous.pop(seq, 0)
        if seq in self._held_up:
            self._came_late(answer, decode_index(self._held_up.pop(seq)))
        begin, end = answer[5] - self._began, now - self._began
        if begin < 0:
            begin = 0
        elif begin > end:  # all processes should have the same clock
            begin = end
        while end >= _PARTS * self._width:
            self._double_width()
        width, changes, rests = self._width, self._changes, self._rests
        last, part = end // width, begin // width
        while last >= len(changes):
            changes.append(0)
            rests.append(0)
        changes[part] += 1
        rests[part] += (part + 1) * width - begin
        changes[last] -= 1
        rests[last] -= (last + 1) * width - end

    def _double_width(self) -> None:
        width, changes, rests = self._width, [*self._changes, 0], [*self._rests, 0]
        firsts = range(0, len(self._changes), 2)
        self._rests = [rests[at] + changes[at] * width + rests[at + 1] for at in firsts]
        self._changes = [changes[at] + changes[at + 1] for at in firsts]
        self._width = 2 * width

    def _ready(self) -> list[int]:
        """Ready batches times nanoseconds, for each part of the epoch."""
        width, changes, rests = self._width, list(self._changes), list(self._rests)
        before = accumulate(changes, initial=0)
        return [count * width + rest for count, rest in zip(before, rests, strict=False)]

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
            self._keep(late)

    @property
    def costs(self) -> list[Cost]:
        """Costs of the last thousand batches, in the order of their answers."""
        return [Cost(*cost) for cost in list(self._costs)]

    @property
    def load(self) -> float:
        """Average nanoseconds to load a batch, over all; needs one. The last thousand alone may differ from
        earlier ones: data are cached, or begin with something slow."""
        return self._load / self._loads

    @property
    def nanoseconds(self) -> int:
        """From the call of `iter()` to the end of the last call; of one that was interrupted, the recorded
        part."""
        return sum(self.by_cause.values())

    def snapshot(self) -> EpochStatistics:
        """The counts so far. May be called on any thread, so it reads growing data only once."""
        ready = self._ready()
        widths = [self._width] * (len(ready) - 1)
        widths.append(max(1, self.nanoseconds - sum(widths)))
        parts = zip(ready, widths, strict=True)
        seconds = {f"{cause}_seconds": self.by_cause[cause] / 1e9 for cause in CAUSES}
        waits = {f"wait_p{percent}": self._calls.percentile(percent) for percent in (50, 95, 99)}
        return EpochStatistics(
            epoch=self.epoch,
            batches=self.batches,
            seconds=self.nanoseconds / 1e9,
            cpu_seconds=self.cpu / 1e9,
            ready=tuple(round(batches / width, 2) for batches, width in parts),
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
    started, finished, collated = answer[4], answer[5], answer[12]
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
    if answer[13]:
        share = min(1.0, answer[13] / total)
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
