"""Where the wall time of one epoch goes.

Pure: a fold over the records of the epoch's calls (see `records`), in the order in which the calls ended; how
many are folded at once makes no difference. The consumer is either outside of the loader (its training step)
or inside a call of `iter()` or `next()`. Of a call it is known when it began and ended, and what of it was
spent on waiting, on the sampler and on the device; the rest is the loader's own work.

What a wait was lost to is known when the batch that ends it is there, because its answer says when its worker
began, had the samples, had the batch and had packed it:

    wait           ├───────────────────────────────────────────────────────────────┤
    worker   busy with others ─┤ idle ├─ fetch ─┬─ collate ─┬─ pack ─┤
    lost to     workers         transport     workers         transport   transport

While a worker is not up yet, a wait for its first batch counts as start-up's, whatever the others do. Else a
wait counts as the head of the line's while later batches are ready and some worker has nothing to do, or
more batches are ready than the window is wide before it widens: then more workers would not help. It counts
as memory's while none is ready and some worker has nothing to do: the window is full. Memory's are new pages,
too, which a worker maps before it writes to them.
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

#: Parts of an epoch for which it is known how many batches were ready, and the width that they begin with.
_PARTS, _WIDTH = 64, 1 << 24
#: Batches of each worker that are compared with other workers'.
FIRST_BATCHES = 8
#: Batches whose costs are kept for the model.
_KEPT = 1024
#: Batches that `statistics()` names as late.
_LATE = 10


class Cost(NamedTuple):
    """Costs of one batch in its worker, in nanoseconds.

    Attributes:
        seq: its number.
        load: reading samples and making a batch of them.
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
        cpu: CPU time that this process had used then, with all its threads, in nanoseconds.

    Attributes:
        batches: handed out.
        by_cause: nanoseconds.
        waited: nanoseconds that `next()` waited for workers, or loaded.
        in_transit: nanoseconds of the transport's that were waits; the others are work of `next()`.
        cpu: CPU time that this process used in the epoch, in nanoseconds, when it was asked for last.
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
        self._loads = self._load = 0  # batches of which the costs are known, and nanoseconds that they took
        self.by_cause = dict.fromkeys(CAUSES, 0)
        self.late: dict[tuple[int, int], LateBatch] = {}
        self._held_up: dict[int, Any] = {}  # batches that hold up others → their indices
        self._calls = Histogram()
        self._began = self._left = now
        self._sent: dict[int, int] = {}  # batch → when its task was given out
        self._previous: dict[int, int] = {}  # batch → when its worker had finished the one before, or 0
        self._finished: dict[int, int] = {}  # worker → when it had finished its last one
        # Of each part of the epoch: how many more batches were ready at its end than at its beginning, and
        # for how long each of these was, or was not any more, up to there.
        self._changes, self._rests = [0], [0]
        self._width = _WIDTH

    def used_cpu(self, cpu: int, over: bool = False) -> None:
        """The CPU time that this process has used by now; does not count once the epoch is over."""
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
                # By its places, which is several times as fast as by its names.
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
            ended = began + counted  # how long the call lasted is not known
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

    # ---- what waits are lost to ---------------------------------------------------------------

    def _count_waits(self, waits: tuple[records.Step, ...], answer: Answer | None) -> int:
        """Count what the waits of a call were lost to, and return how many nanoseconds that are; the rest is
        the transport's. `answer`: what ended them, if anything did."""
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
        """The answer for a batch that held up others, and its index."""
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
        """Count a batch that is handed out now, and was ready since its answer."""
        seq = answer[1]
        self._previous.pop(seq, 0)
        if seq in self._held_up:
            self._came_late(answer, decode_index(self._held_up.pop(seq)))
        begin, end = answer[5] - self._began, now - self._began
        if begin < 0:
            begin = 0
        elif begin > end:  # clocks of other processes are the same, but who knows
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
        """Batches times nanoseconds in each part."""
        width, changes, rests = self._width, list(self._changes), list(self._rests)
        before = accumulate(changes, initial=0)
        return [count * width + rest for count, rest in zip(before, rests, strict=False)]

    # ---- reading ------------------------------------------------------------------------------

    def include(self, other: EpochCounters) -> None:
        """Count what was counted in another epoch, too."""
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
        """Of the last thousand batches, in the order of their answers."""
        return [Cost(*cost) for cost in list(self._costs)]

    @property
    def load(self) -> float:
        """Nanoseconds that a batch took to load, on average of all; needs one. The last thousand alone may
        be unlike those before: data are cached, or begin with something slow."""
        return self._load / self._loads

    @property
    def nanoseconds(self) -> int:
        """From the call of `iter()` to the end of the last call, or as far as is known of one that an
        interrupt cut short."""
        return sum(self.by_cause.values())

    def snapshot(self) -> EpochStatistics:
        """The counts so far. May be called on any thread, so it looks once at what grows."""
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
    """Causes of a wait, in nanoseconds of each; the rest of it is the transport's.

    Args:
        cause: what it seemed to be.
        began, ended: of the wait.
        answer: of the batch that ended it.
        previous: when the worker of that had finished the batch before, or 0.
    """
    started, finished, collated = answer[4], answer[5], answer[12]
    lost, left, total = dict[str, int](), ended - began, finished - started or 1
    busy = 0  # with the batch before, which is as like this one as can be known
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
    """The counts of several epochs, as one."""
    total = EpochCounters(0, 0)
    for epoch in epochs:
        total.include(epoch)
    return total
