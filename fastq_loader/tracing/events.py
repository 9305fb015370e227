"""What each occurrence in a loader becomes in a trace.

Pure: told the times, and who is who. The events are those of the Trace Event Format, JSON array format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), each one JSON object in a
text. A time is written as nanoseconds with the exponent of a microsecond, "12345e-3", which costs a third of
a decimal fraction.

Spans of one track never overlap in part: viewers drop what does. So a span is written when it has ended. A
thread's steps lie between its own calls of `next()`, whatever they were for. Batches under way and copies may
overlap, so they are asynchronous events, which viewers lay out themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from fastq_loader.errors import shorten
from fastq_loader.ipc.messages import BATCH, BROKEN, ENDED, ERROR, PASSED, SKIPPED, Answer

#: Workers on other machines may have the process ids of some here: their tracks have numbers above those of
#: all threads, which is Linux's PID_MAX_LIMIT.
_FAR = 1 << 22
#: Nanoseconds of a call of `next()` from which on it is marked as a stall.
_STALL = 1_000_000_000
#: See `statistics.counters.Source.far_worker`.
Far = Callable[[int], tuple[int, str] | None]
#: What an answer without a batch was.
_OTHERS = {ENDED: "end of the stream", SKIPPED: "skip", PASSED: "pass over"}
_WAITS = {
    "workers": "wait for workers",
    "head_of_line": "wait: head of the line",
    "memory": "wait: the window is full",
}


class _Batch:
    """A batch that is under way.

    Attributes:
        sent, again: when its task was given out, and when it was given out for the last time.
        attempt: that was answered.
        loaded: when its worker began and ended; None: nobody answered.
    """

    __slots__ = ("again", "attempt", "loaded", "sent")

    def __init__(self, now: int) -> None:
        self.sent = self.again = now
        self.attempt = 0
        self.loaded: tuple[int, int] | None = None


class _Epoch:
    """An epoch that is under way.

    Attributes:
        thread: that called last.
        entered: when it did; 0: no call is under way.
        call: which one.
        batches: that were given out and not handed out, the oldest first.
        changes: of what is ready, as (time, +1 or -1); a heap.
        ready: batches, up to the oldest of these changes.
    """

    __slots__ = ("batches", "call", "changes", "entered", "ready", "thread")

    def __init__(self, thread: int, now: int, call: str) -> None:
        self.thread = thread
        self.entered = now
        self.call = call
        self.batches: dict[int, _Batch] = {}
        self.changes: list[tuple[int, int]] = []
        self.ready = 0


class Events:
    """An `Observer` (see `statistics.epoch`) that makes events of what it is told.

    Args:
        origin: where times count from, in nanoseconds of the monotonic clock.
        pid: of the consumer.
        thread: gives the id of the calling thread.
        far: says for which worker on another machine a process stands.

    Attributes:
        lines: the events so far, each a JSON object; whoever writes them down takes them out.
    """

    def __init__(self, origin: int, pid: int, thread: Callable[[], int], far: Far = lambda pid: None) -> None:
        self.lines: list[str] = []
        self._origin = origin
        self._pid = pid
        self.thread = thread
        self._far = far
        self._far_tracks: dict[tuple[int, int, str], int] = {}  # by process here, process there, and machine
        self._epochs: dict[int, _Epoch] = {}
        self._outside: dict[int, tuple[int, str]] = {}  # thread → when a call gave it a batch, and which one
        self._names: set[int] = set()  # threads that have one
        self._finished: dict[int, tuple[int, int]] = {}  # track → epoch and end of its last answer
        self._asynchronous = 0  # how many of these spans there were
        self._span = '{"ph":"X","pid":%d,"tid":%d,"name":"%s","ts":%de-3,"dur":%de-3%s}'
        self._ready = f'{{"ph":"C","pid":{pid},"name":"ready","ts":%de-3,"args":{{"batches":%d}}}}'
        about = f'"name":"DataLoader (pid {pid})","origin_ns":{origin}'
        self.lines.append(f'{{"ph":"M","pid":{pid},"name":"process_name","args":{{{about}}}}}')

    # ---- names ----------------------------------------------------------------------------------

    def _name_thread(self, thread: int, name: str, order: int) -> None:
        about = f'"pid":{self._pid},"tid":{thread}'
        self._names.add(thread)
        self.lines += (
            f'{{"ph":"M",{about},"name":"thread_name","args":{{"name":{json.dumps(name)}}}}}',
            f'{{"ph":"M",{about},"name":"thread_sort_index","args":{{"sort_index":{order}}}}}',
        )

    def _consumer(self, thread: int = 0) -> int:
        thread = thread or self.thread()
        if thread not in self._names:
            other = "" if thread == self._pid else f" (thread {thread})"
            self._name_thread(thread, f"consumer{other}", 0)
        return thread

    def _track(self, worker: int, pid: int) -> int:
        """The track of the worker that a process is, or stands for. The first has the number of the process,
        which no other on this machine has."""
        if pid in self._names:
            return pid
        track, name, far = pid, f"pid {pid}", self._far(pid)
        if far is not None:
            there, node = far
            track = self._far_tracks.setdefault((pid, there, node), _FAR + len(self._far_tracks))
            name = f"pid {there} on {node}" if there else "not up yet"
        if track not in self._names:
            self._name_thread(track, f"worker {worker} ({name})", 1 + worker)
        return track

    # ---- marks and spans ------------------------------------------------------------------------

    def _add(self, thread: int, name: str, began: int, ended: int, more: str = "") -> None:
        origin = self._origin
        if origin <= began <= ended:  # else the trace began in the middle of it
            self.lines.append(self._span % (self._pid, thread, name, began - origin, ended - began, more))

    def _add_asynchronous(
        self, name: str, began: int, ended: int, more: str, parts: Iterable[tuple[str, int, int]] = ()
    ) -> None:
        """A span that may overlap others of its name; its parts do not overlap."""
        self._asynchronous += 1
        origin, which = self._origin, f'"pid":{self._pid},"cat":"{name}","id":{self._asynchronous}'
        self.lines.append(f'{{"ph":"b",{which},"name":"{name}","ts":{began - origin}e-3{more}}}')
        for part, start, end in parts:
            self.lines += (
                f'{{"ph":"b",{which},"name":"{part}","ts":{start - origin}e-3}}',
                f'{{"ph":"e",{which},"name":"{part}","ts":{end - origin}e-3}}',
            )
        self.lines.append(f'{{"ph":"e",{which},"name":"{name}","ts":{ended - origin}e-3}}')

    def _mark(self, thread: int, name: str, now: int, scope: str = "t", about: str = "") -> None:
        text, what = json.dumps(name), json.dumps({"about": about} if about else {})
        self.lines.append(
            f'{{"ph":"i","pid":{self._pid},"tid":{thread},"name":{text},"s":"{scope}",'
            f'"ts":{now - self._origin}e-3,"args":{what}}}'
        )

    # ---- calls ----------------------------------------------------------------------------------

    def _epoch(self, epoch: int) -> _Epoch:
        """It may have begun before the trace did."""
        found = self._epochs.get(epoch)
        if found is None:
            found = self._epochs[epoch] = _Epoch(self._consumer(), 0, "")
        return found

    def began(self, epoch: int, now: int) -> None:
        """`iter()` was called."""
        thread = self._consumer()
        self._end_step(thread, now)
        self._epochs[epoch] = _Epoch(thread, now, "iter")
        self._mark(thread, f"epoch {epoch} begins", now, "p")

    def entered(self, epoch: int, now: int, thread: int = 0) -> None:
        """`next()` was called, by this thread if not by the one that calls now."""
        at, thread = self._epoch(epoch), self._consumer(thread)
        at.thread, at.entered, at.call = thread, now, "next"
        self._end_step(thread, now)

    def _end_step(self, thread: int, now: int) -> None:
        step = self._outside.pop(thread, None)
        if step is not None:
            self._add(thread, "step", step[0], now, step[1])

    def left(self, epoch: int, seq: int | None, now: int) -> None:
        """The call is about to give a batch, or to raise."""
        at = self._epoch(epoch)
        which = f',"args":{{"epoch":{epoch}}}'
        if seq is not None:
            which = f',"args":{{"epoch":{epoch},"batch":{seq}}}'
            self._outside[at.thread] = now, which
            if (batch := at.batches.pop(seq, None)) is not None:
                self._draw_life(at, batch, now, which)
            self._tell_ready(at, now)
        if at.entered:
            self._add(at.thread, at.call, at.entered, now, which)
            if at.call == "next" and now - at.entered >= _STALL:
                self._mark(at.thread, f"stall of {(now - at.entered) / 1e9:.1f} s", now - 1)

    def raised(self, epoch: int, seq: int | None, error: BaseException, now: int) -> None:
        """The call is about to raise."""
        place = "" if seq is None else f" at batch {seq}"
        at = self._epoch(epoch)
        self._mark(at.thread, f"{type(error).__name__}{place}", now - 1, about=shorten(error, 400))

    def ended(self, epoch: int, now: int) -> None:
        """There is no further batch."""
        self._close(epoch, now, "ends")

    def closed(self, began: int, now: int) -> None:
        """The workers were ended."""
        self._add(self._consumer(), "end of the workers", began, now)

    def dropped(self, epoch: int, now: int) -> None:
        """What was not handed out never will be."""
        self._close(epoch, now, "is broken off")

    def _close(self, epoch: int, now: int, how: str) -> None:
        at = self._epochs.pop(epoch, None)
        if at is None:
            return
        self._mark(at.thread, f"epoch {epoch} {how}", now, "p")
        at.batches.clear()
        self._tell_ready(at, now)
        if at.ready:
            self.lines.append(self._ready % (now - self._origin, 0))

    def close(self, now: int) -> None:
        """The trace ends."""
        for at in self._epochs.values():
            at.batches.clear()
            self._tell_ready(at, now)

    # ---- what happens in a call -------------------------------------------------------------------

    def drew(self, epoch: int, began: int, ended: int) -> None:
        """The sampler was asked for an index."""
        self._add(self._epoch(epoch).thread, "sampler", began, ended)

    def waited(self, epoch: int, cause: str, began: int, ended: int) -> None:
        """`next()` waited for workers."""
        self._add(self._epoch(epoch).thread, _WAITS[cause], began, ended)

    def used_device(self, epoch: int, began: int, ended: int) -> None:
        """Something was done for the way to the device."""
        self._add(self._epoch(epoch).thread, "device", began, ended)

    def loaded(self, epoch: int, seq: int, began: int, fetched: int, ended: int) -> None:
        """A batch was loaded on the consumer's thread."""
        thread, which = self._epoch(epoch).thread, f',"args":{{"epoch":{epoch},"batch":{seq}}}'
        fetched = max(began, fetched)  # that of an earlier batch, if this one failed before
        self._add(thread, "fetch", began, fetched, which)
        self._add(thread, "collate", fetched, ended, which)

    def copied(self, nbytes: int, began: int, ended: int) -> None:
        """A copy to the device was seen to have run."""
        if began >= self._origin:
            self._add_asynchronous("copy to the device", began, ended, f',"args":{{"bytes":{nbytes}}}')

    # ---- batches --------------------------------------------------------------------------------

    def sent(self, epoch: int, seq: int, now: int) -> None:
        """The task of a batch was given out, for the first time or again."""
        at = self._epoch(epoch)
        if seq in at.batches:
            at.batches[seq].again = now
        else:
            at.batches[seq] = _Batch(now)

    def replaced(self, epoch: int, worker: int, pid: int, report: str, now: int) -> None:
        """Another process does the work of a worker from now on."""
        self._mark(self._track(worker, pid), f"worker {worker} was replaced", now, "p", report)

    def answered(self, epoch: int, worker: int, pid: int, answer: Answer) -> None:
        """An answer of a worker's process has come."""
        at, seq = self._epoch(epoch), answer.seq
        pid = self._track(worker, pid)
        before, end = self._finished.get(pid, (0, 0))
        started, fetched, collated, finished = _times(answer)
        if before == epoch:
            self._add(pid, "wait", end, started)
        self._finished[pid] = epoch, finished
        if answer.outcome in _OTHERS:
            self._add(pid, _OTHERS[answer.outcome], started, finished)
            at.batches.pop(seq, None)
            return
        which = f',"args":{{"epoch":{epoch},"batch":{seq}}}'
        self._add(pid, "fetch", started, fetched, which)
        self._add(pid, "collate", fetched, collated, which)
        self._add(pid, "pack", collated, finished, which)
        if (batch := at.batches.get(seq)) is not None:
            batch.attempt, batch.loaded = answer.attempt, (started, finished)
            heappush(at.changes, (finished, 1))

    def _draw_life(self, at: _Epoch, batch: _Batch, now: int, which: str) -> None:
        """A batch was handed out: draw its life from its task to here."""
        if batch.loaded is None:  # it is an error of this process
            return
        sent, (started, finished), parts = batch.sent, batch.loaded, []
        heappush(at.changes, (max(now, finished + 1), -1))  # not before it was ready
        # Clocks of other processes are the same, but who knows.
        started, finished = (min(max(time, sent), now) for time in (started, finished))
        if batch.attempt and sent < batch.again <= started:
            parts.append(("lost with a worker", sent, batch.again))
            sent = batch.again
        parts += ("queued", sent, started), ("load", started, finished), ("ready", finished, now)
        self._add_asynchronous("batch", batch.sent, now, which, parts)

    def _tell_ready(self, at: _Epoch, now: int) -> None:
        """Write down how many batches were ready, up to where it is known: a batch that was not handed out
        may turn out to have been ready since some time after its task was given out."""
        known = next(iter(at.batches.values())).sent if at.batches else now
        while at.changes and at.changes[0][0] <= known:
            time, change = heappop(at.changes)
            at.ready += change
            self.lines.append(self._ready % (time - self._origin, at.ready))


def _times(answer: Answer) -> tuple[int, int, int, int]:
    """When a task was begun, its samples were there, they were a batch, and it was packed. What is not known
    counts as fetching; what is of an earlier batch, because this one failed before, takes no time."""
    started, fetched, collated, finished = answer.started, answer.fetched, answer.collated, answer.finished
    if not collated:
        return started, finished, finished, finished
    if not started <= fetched <= collated <= finished:
        fetched = min(max(fetched, started), finished)
        collated = min(max(collated, fetched), finished)
    return started, fetched, collated, finished


assert {BATCH, ERROR, BROKEN, *_OTHERS} == set(range(6)), "an outcome is missing here"
