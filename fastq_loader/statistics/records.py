"""The records of a loader's calls, from which statistics and traces are computed.

Pure. Each call leaves one record, a plain tuple that is created when the call ends:

    (kind, epoch, began, ended, thread, steps, …)

`steps` lists the events of the call in order, each as a tuple that also begins with its kind; a worker's
answer is a step of the call in which it arrived. Times are nanoseconds of the monotonic clock, which is the
same for all processes of a machine. `thread` is the id of the calling thread, 0 if no trace needs it. Records
are folded many at a time: between two batches the counting code is not in a CPU's cache, and would take more
than twice as long.

They are tuples, because creating an object of a class is a call, and `next()` creates several for each batch
(`tests/end_to_end/test_calls.py` has the budget). The folds give names to the parts by `match`, with the
layouts below.

    record    more                 created when
    ITER                           `iter()` returns
    NEXT      answer, seq, error   `next()` is about to return a batch, or to raise in the place of batch seq
    CUT                            a call begins after one that an interrupt ended, or that left a batch out
    END       cpu                  `next()` has found no further batch; CPU time of the process
    CLOSE                          the previous call has also shut down the workers
    PART                           answers arrived outside of calls, in `poll()`
    DROP                           the undelivered batches of an epoch are dropped
    COPY      nbytes               a copy to the device has run; belongs to no epoch

    step      more                 meaning
    DREW      since, until, seqs   indices were drawn, and the tasks of these batches sent; or sent again, in
                                   no time
    DEVICE    since, until         the call worked on copies to the device
    LOADED    since, until, seq, fetched
                                   the call loaded a batch itself; fetched: when its samples had been read
    WAITED    since, until, cause, seq, index
                                   the call waited for workers; cause: the apparent one; index: of a batch
                                   that held up others
    ANSWERED  counters, pid, answer
                                   an answer of this epoch arrived from this worker and process
    STALE     counters, pid, answer
                                   an answer of an older epoch arrived
    REPLACED  now, worker, pid, report
                                   a new process took over a worker; report: how the old one ended
"""

from __future__ import annotations

from typing import Any

Record = tuple[Any, ...]
Step = tuple[Any, ...]

ITER, NEXT, CUT, END = "iter", "next", "cut", "end"
CLOSE, PART, DROP, COPY = "close", "part", "drop", "copy"
DREW, DEVICE, LOADED, WAITED = "drew", "device", "loaded", "waited"
ANSWERED, STALE, REPLACED = "answered", "stale", "replaced"


def cause_of_wait(behind: int, blocked: bool, least: int) -> str:
    """The apparent cause of a wait, before it has ended.

    Args:
        behind: how many batches are ready behind the awaited one.
        blocked: some worker is idle, because the window is full.
        least: size of the window before it widens, in batches.
    """
    if behind and (blocked or behind >= least):
        return "head_of_line"
    return "memory" if blocked else "workers"
