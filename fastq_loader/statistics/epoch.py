"""Where the wall time of one epoch goes.

Pure: every method is told the time, in nanoseconds of the monotonic clock, which is the same for all
processes of a machine. Calls come in the order in which things happened, see `notes`. The consumer is either
outside of the loader (its training step) or inside a call of `iter()` or `next()`. Of a call it is known when
it began and ended, and what of it was spent on waiting, on the sampler and on the device; the rest is the
loader's own work.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastq_loader.statistics.snapshots import CAUSES, EpochStatistics, Histogram

if TYPE_CHECKING:
    from fastq_loader.ipc.messages import Answer
    from fastq_loader.statistics.workers import WorkerCounters

#: Parts of an epoch for which it is known how many batches were ready, and the width that they begin with.
_PARTS, _WIDTH = 64, 1 << 24
#: Batches of each worker that are compared with other workers'.
FIRST_BATCHES = 8
#: Batches whose costs are kept for the model.
_KEPT = 1024


class Cost(NamedTuple):
    """What one batch cost its worker, in nanoseconds.

    Attributes:
        seq: its number.
        load: reading samples and making a batch of them.
        pack: writing it to shared memory.
    """

    seq: int
    load: int
    pack: int


class Observer(Protocol):
    """Is told of what happens in an epoch when it is counted; see `tracing`. Times are as `EpochCounters` has
    them. Most calls come on the thread of `next()`, but any may come on another one."""

    def thread(self) -> int: ...
    def began(self, epoch: int, now: int) -> None: ...
    def entered(self, epoch: int, now: int, thread: int) -> None: ...
    def drew(self, epoch: int, began: int, ended: int) -> None: ...
    def sent(self, epoch: int, seq: int, now: int) -> None: ...
    def waited(self, epoch: int, cause: str, began: int, ended: int) -> None: ...
    def used_device(self, epoch: int, began: int, ended: int) -> None: ...
    def answered(self, epoch: int, worker: int, pid: int, answer: Answer) -> None: ...
    def loaded(self, epoch: int, seq: int, began: int, fetched: int, ended: int) -> None: ...
    def replaced(self, epoch: int, worker: int, pid: int, report: str, now: int) -> None: ...
    def raised(self, epoch: int, seq: int | None, error: BaseException, now: int) -> None: ...
    def left(self, epoch: int, seq: int | None, now: int) -> None: ...
    def ended(self, epoch: int, now: int) -> None: ...
    def closed(self, began: int, now: int) -> None: ...
    def dropped(self, epoch: int, now: int) -> None: ...
    def copied(self, nbytes: int, began: int, ended: int) -> None: ...


#: An answer that has come: its worker, it, whether it will be handed out, and the worker's counters.
Arrival = tuple[int, "Answer", bool, "WorkerCounters"]


class EpochCounters:
    """Counts for one epoch.

    Args:
        epoch: its number, from 0 on.
        now: when `iter()` was called.
        cpu: CPU time that this process had used then, with all its threads, in nanoseconds.

    Attributes:
        batches: handed out.
        first_batches: worker → of its first 8 batches, a digest and the bytes that it was made of; only of an
            iterable dataset.
        over: there is no further batch.
        in_transit: nanoseconds of the transport's that were waits; the others are work of `next()`.
        cpu: CPU time that this process used in the epoch, in nanoseconds, when it was asked for last.
        observer: is told of everything, too; None: nobody is.
        pid_of: gives the process id of a worker.
    """

    def __init__(self, epoch: int, now: int, cpu: int = 0) -> None:
        self.epoch = epoch
        self._cpu_before = cpu
        self.cpu = 0
        self.over = False
        self.batches = self.in_transit = 0
        self._costs: deque[tuple[int, int, int]] = deque(maxlen=_KEPT)
        self._loads = self._load = 0  # batches of which the costs are known, and nanoseconds that they took
        self.first_batches: dict[int, list[tuple[bytes, int]]] = {}
        self.observer: Observer | None = None
        self.pid_of: Callable[[int], int] = int
        self.by_cause = dict.fromkeys(CAUSES, 0)
        self.waits = Histogram()
        self._began = self._left = self._entered = now
        self._inside = True
        self._counted = 0  # of the call under way
        self._waits: list[tuple[str, int, int]] = []  # in this call, for the answer to tell their causes
        self._sent: dict[int, int] = {}  # batch → when its task was given out
        self._previous: dict[int, int] = {}  # batch → when its worker had finished the one before, or 0
        self._finished: dict[int, int] = {}  # worker → when it had finished its last one
        # Of each part of the epoch: how many more batches were ready at its end than at its beginning, and
        # for how long each of these was, or was not any more, up to there.
        self._changes, self._rests = [0], [0]
        self._width = _WIDTH

    def used_cpu(self, cpu: int) -> None:
        """The CPU time that this process has used by now; does not count once the epoch is over."""
        if not self.over:
            self.cpu = cpu - self._cpu_before

    # ---- calls --------------------------------------------------------------------------------

    def called(
        self,
        inside: tuple[Any, ...],
        now: int,
        answer: Answer | None,
        seq: int | None,
        error: BaseException | None,
    ) -> None:
        """A call of `next()`: what happened `inside` of it, see there, and how it ended, see `left`."""
        entered, _, drew, answers, others = inside
        if self.observer is not None or self._inside or others or not entered:
            self.inside(*inside)
            self.left(now, answer, seq, error)
            return
        # The same for a usual call, without a step for each.
        by_cause, took = self.by_cause, 0
        by_cause["consumer"] += entered - self._left
        if drew is not None:
            began, ended, seqs = drew
            took = ended - began
            by_cause["sampler"] += took
            for each in seqs:
                self._sent[each] = ended
        for arrival in answers:
            self.answered(*arrival)
        if answer is not None:
            self._previous.pop(answer[1], None)
            self._note_ready(answer[5], now)
        self.batches += 1
        self.waits.add(now - entered)
        by_cause["transport"] += now - entered - took
        self._left = now

    def inside(
        self,
        entered: int,
        thread: int,
        drew: tuple[int, int, Sequence[int]] | None,
        answers: Iterable[Arrival],
        others: Iterable[tuple[Any, ...]],
    ) -> None:
        """What happened in a call of `next()`, or outside.

        Args:
            entered, thread: when and by whom it was called, see `entered`; 0: by nobody.
            drew: when indices were drawn, from and to, and of which batches, whose tasks were sent then.
            answers: that have come.
            others: what else happened: (method, *arguments).
        """
        if entered:
            self.entered(entered, thread)
        if drew is not None:
            began, ended, seqs = drew
            self.drew(began, ended)
            for seq in seqs:
                self.sent(seq, ended)
        for arrival in answers:
            self.answered(*arrival)
        for method, *arguments in others:
            method(*arguments)

    def entered(self, now: int, thread: int = 0) -> None:
        """`next()` was called. `thread`: by whom, if there is an observer."""
        if self._inside:  # an interrupt cut the call before short
            self._end_call(now, "transport")
        self.by_cause["consumer"] += now - self._left
        self._entered, self._inside = now, True
        if self.observer is not None:
            self.observer.entered(self.epoch, now, thread)

    def left(
        self,
        now: int,
        answer: Answer | None = None,
        seq: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        """`next()` is about to return a batch, or to raise an error.

        Args:
            now: when.
            answer: of the worker that loaded it, if there is one.
            seq: the number of the batch, if the error has the place of one.
            error: what is raised.
        """
        if error is not None and self.observer is not None:
            self.observer.raised(self.epoch, seq, error, now)
        if answer is not None:
            seq = answer[1]
            previous = self._previous.pop(seq, 0)
            if self._waits:
                self._count_waits(answer, previous)
            self._note_ready(answer[5], now)
        self.batches += 1
        self.waits.add(now - self._entered)
        self._end_call(now, "transport", seq)

    def started(self, now: int) -> None:
        """`iter()` is about to return."""
        self._end_call(now, "start_up")

    def ended(self, now: int, cpu: int) -> None:
        """A call found that there is no further batch. `cpu`: as for `used_cpu`."""
        self.used_cpu(cpu)
        self._end_call(now, "start_up")
        if self.observer is not None and not self.over:
            self.observer.ended(self.epoch, now)
        self.over = True

    def closed(self, now: int) -> None:
        """The call that found the end of the epoch, or the death of a worker, has ended the workers, too."""
        began, self._left = self._left, now
        self.by_cause["start_up"] += now - began
        if self.observer is not None:
            self.observer.closed(began, now)

    def dropped(self, now: int) -> None:
        """What was not handed out never will be, and there are no workers any more."""
        self.pid_of = int  # else it keeps the pool
        if self.observer is not None:
            self.observer.dropped(self.epoch, now)

    def replaced(self, worker: int, report: str, now: int) -> None:
        """Another process does the work of a worker. `report`: how that one ended."""
        if self.observer is not None:
            self.observer.replaced(self.epoch, worker, self.pid_of(worker), report, now)

    def _end_call(self, now: int, rest: str, seq: int | None = None) -> None:
        for cause, began, ended in self._waits:  # nothing has come
            self._count(cause, ended - began)
        self._waits.clear()
        self.by_cause[rest] += now - self._entered - self._counted
        self._counted = 0
        self._left, self._inside = now, False
        if self.observer is not None:
            self.observer.left(self.epoch, seq, now)

    def _count(self, cause: str, nanoseconds: int) -> None:
        self.by_cause[cause] += nanoseconds
        self._counted += nanoseconds

    # ---- what happens in a call ---------------------------------------------------------------

    def drew(self, began: int, ended: int) -> None:
        """The sampler was asked for indices."""
        self._count("sampler", ended - began)
        if self.observer is not None:
            self.observer.drew(self.epoch, began, ended)

    def sent(self, seq: int, now: int) -> None:
        """The task of a batch was given out, for the first time or again."""
        self._sent[seq] = now
        if self.observer is not None:
            self.observer.sent(self.epoch, seq, now)

    def used_device(self, began: int, ended: int) -> None:
        """Something was done for the way to the device."""
        self._count("device_copy", ended - began)
        if self.observer is not None:
            self.observer.used_device(self.epoch, began, ended)

    def waited(self, cause: str, began: int, ended: int) -> None:
        """`next()` waited for workers. `cause`: head_of_line, memory or workers, as it seemed; what it was
        lost to, the answer decides."""
        self._waits.append((cause, began, ended))
        if self.observer is not None:
            self.observer.waited(self.epoch, cause, began, ended)

    def loaded(self, seq: int, began: int, fetched: int, ended: int) -> None:
        """A batch was loaded on this thread."""
        self._count("workers", ended - began)
        self._costs.append((seq, ended - began, 0))
        self._loads += 1
        self._load += ended - began
        if self.observer is not None:
            self.observer.loaded(self.epoch, seq, began, fetched, ended)

    def answered(self, worker: int, answer: Answer, delivers: bool, counters: WorkerCounters) -> None:
        """An answer has come.

        Args:
            worker: whose.
            answer: it, of this epoch.
            delivers: it will be handed out.
            counters: the worker's.
        """
        # By their places, which is several times as fast as by their names.
        seq, started, finished, collated = answer[1], answer[4], answer[5], answer[12]
        previous = self._finished.get(worker, 0)
        self._finished[worker] = finished
        sent = self._sent.pop(seq, started)
        counters.answered(answer, sent if previous else 0)
        if delivers:
            self._previous[seq] = previous
            self._costs.append((seq, collated - started, finished - collated))
            self._loads += 1
            self._load += collated - started
        if self.observer is not None:
            self.observer.answered(self.epoch, worker, self.pid_of(worker), answer)

    # ---- what waits are lost to ---------------------------------------------------------------

    def _count_waits(self, answer: Answer, previous: int) -> None:
        """Count what the waits of this call were lost to; what is not counted here goes to the transport."""
        started, finished, collated = answer[4], answer[5], answer[12]
        total = finished - started or 1
        for cause, began, ended in self._waits:
            left = ended - began
            busy = 0  # with the batch before, which is as like this one as can be known
            if previous:
                busy = _overlap(began, ended, began, previous if previous < started else started)
            else:
                starting = _overlap(began, ended, began, started)
                self._count("start_up", starting)
                left -= starting
            if cause != "workers":
                self._count(cause, left)
                continue
            loading = _overlap(began, ended, started, collated) + busy * (collated - started) // total
            new_memory = 0
            if answer[13]:
                share = min(1.0, answer[13] / total)
                packing = _overlap(began, ended, collated, finished) + busy * (finished - collated) // total
                new_memory = round((loading + packing) * share)
                loading -= round(loading * share)
                self._count("memory", new_memory)
            self._count("workers", loading)
            self.in_transit += left - new_memory - loading
        self._waits.clear()

    # ---- how far the workers are ahead --------------------------------------------------------

    def _note_ready(self, since: int, now: int) -> None:
        """A batch was ready from `since` on."""
        begin, end = since - self._began, now - self._began
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
        self.waits.include(other.waits)
        self.cpu += other.cpu
        for cause, nanoseconds in other.by_cause.items():
            self.by_cause[cause] += nanoseconds

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
        """What was counted so far. May be called on any thread, so it looks once at what grows."""
        ready = self._ready()
        widths = [self._width] * (len(ready) - 1)
        widths.append(max(1, self.nanoseconds - sum(widths)))
        parts = zip(ready, widths, strict=True)
        seconds = {f"{cause}_seconds": self.by_cause[cause] / 1e9 for cause in CAUSES}
        waits = {f"wait_p{percent}": self.waits.percentile(percent) for percent in (50, 95, 99)}
        return EpochStatistics(
            epoch=self.epoch,
            batches=self.batches,
            seconds=self.nanoseconds / 1e9,
            cpu_seconds=self.cpu / 1e9,
            ready=tuple(round(batches / width, 2) for batches, width in parts),
            **seconds,
            **waits,
        )


def _overlap(began: int, ended: int, since: int, until: int) -> int:
    if since > began:
        began = since
    if until < ended:
        ended = until
    return ended - began if ended > began else 0


def summed(epochs: list[EpochCounters]) -> EpochStatistics:
    """What was counted in several epochs, as one."""
    total = EpochCounters(0, 0)
    for epoch in epochs:
        total.include(epoch)
    return replace(total.snapshot(), epoch=None, ready=())
