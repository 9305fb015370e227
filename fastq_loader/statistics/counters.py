"""The counters of a loader, which outlive its pools of workers, and a record of each call.

They are counted on the threads that call `next()`, and read on any thread. What has to be exact is counted as
it happens. Where the time went is found out when somebody asks (`extras.insight.causes`), from the records of
the last 16,384 calls. Workers on other machines are counted by a `StatisticsSource`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from operator import add, length_hint
from typing import Any, NamedTuple, Protocol

from fastq_loader.ipc.messages import Indices
from fastq_loader.statistics.records import END, ITER, LOADED_HERE, NEXT, NOTHING, PACKED, Loaded
from fastq_loader.statistics.snapshots import StagingStatistics
from fastq_loader.system import pages

#: First batches of each worker that are compared with other workers'.
FIRST_BATCHES = 8

#: Epochs that are stored one by one, of older ones the sums; calls of which there is a record.
_EPOCHS, _RECORDS = 100, 1 << 14

_pack, _pack_loaded_here = PACKED.pack, LOADED_HERE.pack


class Totals(NamedTuple):
    """Exact counts of an epoch or of several.

    Attributes:
        batches: number of batches delivered, errors in their place included.
        seconds: from `iter()` to the end of the last call.
        cpu_seconds: CPU time of this process meanwhile, as of the last look.
        samples: the samples of the batches, as the sampler asked for them.
        bad_samples: number of unreadable samples.
        next_seconds: the part of `seconds` inside of `next()`.
        wait_seconds: the part of that in which it waited for workers, or loaded here.
        late_batches: number of batches that held up others which were ready.
        bytes: bytes of the batches in shared memory.
    """

    batches: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    samples: int = 0
    bad_samples: int = 0
    next_seconds: float = 0.0
    wait_seconds: float = 0.0
    late_batches: int = 0
    bytes: int = 0


class EpochLog:
    """Counts an epoch, and records its calls.

    Args:
        counters: the loader's.
        epoch: its number, from 0 on.
        now: when `iter()` was called, which is the call under way.
        cpu: CPU time that this process had used by then, in all its threads, in nanoseconds.
        in_batches: whether an index stands for a batch of samples.

    Attributes:
        batches: delivered, with errors in their place.
        nbytes: bytes of its batches in shared memory.
        bad_samples: counts bad samples (`bad`); None: none are tolerated.
        over: there is no further batch.
        asked: when the call under way began, or 0; the next ones are those of its `Record`.
        drew, drew_until, device, device_until, wait_from, wait_until, workers, head, memory: see `Record`.
        first_batches: worker → digest and bytes digested of each of its first 8 batches; only of an iterable
            dataset.
        private_generators: names of the generators that the dataset has for itself, if it matters which
            worker loads a batch.
    """

    nbytes = batches = _samples = _late = _in_next = _waited = _cpu = 0
    drew = drew_until = device = device_until = wait_from = wait_until = workers = head = memory = 0
    bad_samples: Any = None
    over = False

    def __init__(
        self, counters: Counters, epoch: int, now: int = 0, cpu: int = 0, in_batches: bool = True
    ) -> None:
        self.epoch, self._began, self._ended = epoch, now, now
        self.first_batches: dict[int, list[tuple[bytes, int]]] = {}
        self.private_generators: set[str] = set()
        self._counters, self._in_batches = counters, in_batches
        self._cpu_before, self.asked = cpu, now

    @property
    def profiled(self) -> bool:
        """Whether this epoch, which begins now, is to be profiled."""
        return self._counters.profile is not None

    def record(
        self,
        kind: int,
        now: int,
        loaded: Loaded = NOTHING,
        index: Any = None,
        error: BaseException | type | None = None,
    ) -> None:
        """Record that the call under way ends now, or that it took longer than recorded already.

        Args:
            kind: of the record; see `records`.
            now: the end of the call.
            loaded: who loaded the batch, and when: the last numbers of the record.
            index: of the batch.
            error: raised in place of the batch.
        """
        asked = self.asked or self._ended
        if kind == NEXT:
            self.batches += 1
            self._late += self.head > 0
            if error is None and index is not None:
                if type(index) is Indices:
                    self._samples += len(index.data) // 8
                else:
                    self._samples += length_hint(index, 1) if self._in_batches else 1
        self._waited += self.workers + self.head + self.memory
        if kind != ITER:
            self._in_next += now - asked
        record = _pack(
            *(kind, self.epoch, asked, now, self.drew, self.drew_until, self.device, self.device_until),
            *(self.wait_from, self.wait_until, self.workers, self.head, self.memory, *loaded),
        )
        self.asked = 0  # first: an interrupt must not record the call twice
        self.drew = self.drew_until = self.device = self.device_until = 0
        self.wait_from = self.wait_until = self.workers = self.head = self.memory = 0
        counters = self._counters
        counters.records.append(record)
        self._ended = now
        if counters.trace is not None:
            counters.trace.add(record, error)

    def loaded_here(self, asked: int, fetched: int, now: int, number: int, samples: int) -> None:
        """Record a call that gives a batch and has done nothing but load it, on its own thread.

        Args:
            asked, now: begin and end of the call.
            fetched: when the samples had been read.
            number, samples: of the batch, and how many it has.
        """
        took, counters = now - asked, self._counters
        self.batches += 1
        self._samples += samples
        self._in_next += took
        self._waited += took
        self._ended = now
        counters.batches += 1
        record = _pack_loaded_here(
            *(NEXT, self.epoch, asked, now, asked, now, took, number, -1, asked, asked, fetched, now, now)
        )
        counters.records.append(record)
        if counters.trace is not None:
            counters.trace.add(record, None)

    def waited_for(self, began: int, ended: int, behind: int, blocked: bool, least: int) -> None:
        """Count a wait for the next batch.

        Args:
            began, ended: of the wait.
            behind: how many batches are ready behind the awaited one.
            blocked: some worker is idle, because the window is full.
            least: size of the window before it widens, in batches.
        """
        self.wait_from, self.wait_until = self.wait_from or began, ended
        if behind and (blocked or behind >= least):  # more workers would not help
            self.head += ended - began
        elif blocked:
            self.memory += ended - began
        else:
            self.workers += ended - began

    def used_cpu(self, cpu: int) -> None:
        """Set the CPU time that this process has used so far; ignored once the epoch is over."""
        if not self.over:
            self._cpu = cpu - self._cpu_before

    def end(self, now: int, cpu: int) -> None:
        """Record that `next()` has found no further batch."""
        self.used_cpu(cpu)
        self.over = True
        self.record(END, now)

    def drop(self, now: int) -> None:
        """Note that the rest of the epoch is dropped."""
        if self._counters.trace is not None:
            self._counters.trace.add_drop(self.epoch, now)

    def totals(self) -> Totals:
        """The counts so far."""
        return Totals(
            self.batches,
            (self._ended - self._began) / 1e9,
            self._cpu / 1e9,
            self._samples,
            0 if self.bad_samples is None else self.bad_samples.bad,
            self._in_next / 1e9,
            self._waited / 1e9,
            self._late,
            self.nbytes,
        )


class StatisticsSource(Protocol):
    """A pool of workers on other machines, which counts for itself."""

    def count(self) -> int:
        """Update the counters of its workers, on any thread; returns the bytes that they sent."""

    def far_worker(self, pid: int) -> tuple[int, str] | None:
        """Process id and machine of the remote worker for which the local process `pid` stands, 0 and ""
        before it has started; None if `pid` is not of this pool."""


class WorkerCounters:
    """Counts of one worker, besides the records of its batches.

    Attributes:
        id, pid: its number and process.
        restarts: how often its process died and was replaced.
        busy: nanoseconds in which this process worked on tasks.
        cpu, cpu_busy: nanoseconds in which it had a CPU or waited for one, and in which it worked, as of the
            last look; 0 if unknown.
        far: process id and machine of the remote worker for which this one stands, if any.
        wire_bytes: bytes that it sent over the network.
    """

    def __init__(self, id: int, pid: int) -> None:
        self.id, self.pid, self.restarts, self.wire_bytes = id, pid, 0, 0
        self.busy = self.cpu = self.cpu_busy = 0
        self.far: tuple[int, str | None] | None = None

    def replaced(self, pid: int) -> None:
        """Count that another process takes over."""
        self.pid, self.busy, self.cpu, self.cpu_busy = pid, 0, 0, 0
        self.restarts += 1

    def look_at_cpu(self) -> None:
        """Ask the kernel for its CPU time, if it runs on this machine."""
        if self.far is None and (used := pages.cpu(self.pid)):
            self.cpu, self.cpu_busy = used, self.busy


class StagingCounters(StagingStatistics):
    """Counts copies to a device.

    Attributes:
        loader: counters of the loader that uses it; None without a loader.
    """

    __setattr__, __delattr__ = object.__setattr__, object.__delattr__  # a snapshot is frozen
    loader: Counters | None = None

    def copied(self, nbytes: int, began: float, ended: float) -> None:
        """Record a copy that has run, with its begin and end in seconds."""
        if self.loader is not None and self.loader.trace is not None:
            self.loader.trace.add_copy(nbytes, int(began * 1e9), int(ended * 1e9))

    def snapshot(self) -> StagingStatistics:
        """The counts so far."""
        return StagingStatistics(**{field.name: getattr(self, field.name) for field in fields(self)})


class Counters:
    """Counters of a loader; see `LoaderStatistics` for attributes without a description here.

    Attributes:
        records: of the last calls, packed, the newest last; see `records`.
        epochs: number of epochs so far.
        logs: number → log of each of the last hundred epochs.
        older: sums of the earlier ones.
        workers: of the live pool, or of the last one. first_epoch: its first epoch.
        sources: live pools of workers on other machines.
        trace: the recorder of the trace that is being written, or None.
        profile: gets the samples of the workers' stacks (`extras.profile`), or None.
    """

    def __init__(self) -> None:
        self.records: deque[bytes] = deque(maxlen=_RECORDS)
        self.epochs = self.batches = self.bytes = self.window = self.worker_restarts = 0
        self.rejected_frames = self.blocks_grown = self.stale_answers = self.wire_bytes = 0
        self.logs: dict[int, EpochLog] = {}
        self.older = Totals()
        self.workers: tuple[WorkerCounters, ...] = ()
        self.first_epoch = 0
        self.staging: StagingCounters | None = None
        self.sources: set[StatisticsSource] = set()
        self.trace: Any = None
        self.profile: Any = None

    @property
    def batch_bytes(self) -> float:
        """Average bytes of shared memory per batch."""
        return self.bytes / max(1, self.batches)

    def begin_epoch(self, now: int, cpu: int, in_batches: bool = True) -> EpochLog:
        """Create the log of a new epoch when `iter()` is called; see `EpochLog`."""
        log = self.logs[self.epochs] = EpochLog(self, self.epochs, now, cpu, in_batches)
        self.epochs += 1
        while len(self.logs) > _EPOCHS:
            old = self.logs.pop(next(iter(self.logs))).totals()
            self.older = Totals(*map(add, self.older, old))
        return log

    def stage(self, staging: StagingCounters | None) -> None:
        """Set the counters of copies to a device; None if batches stay on the host."""
        self.staging = staging
        if staging is not None:
            staging.loader = self

    def ended(self, source: StatisticsSource) -> None:
        """Include the final counts of a pool that has ended."""
        if source in self.sources:
            self.wire_bytes += source.count()
            self.sources.discard(source)

    def far_worker(self, pid: int) -> tuple[int, str] | None:
        """See `StatisticsSource`."""
        return next(filter(None, (source.far_worker(pid) for source in list(self.sources))), None)
