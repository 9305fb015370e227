"""The records of a loader's calls: what statistics and traces are made of.

Pure. A call leaves one record, a plain tuple that is made when the call ends:

    (kind, epoch, began, ended, thread, steps, …)

`steps` holds what happened in the call, in that order, each as a tuple that begins with its kind, too; an
answer of a worker is a step of the call in which it came. Times are nanoseconds of the monotonic clock, which
is the same for all processes of a machine. `thread` is the id of the thread that called, 0 where no trace
wants it. Records are folded many at a time: between two batches none of the code that counts is in a CPU's
cache, and it would take more than twice as long.

    record    more                 made when
    ITER                           `iter()` returns
    NEXT      answer, seq, error   `next()` is about to return a batch, or to raise; the place of the error
    CUT                            a call begins after one that an interrupt ended, or that left a batch out
    END       cpu                  `next()` has found no further batch; CPU time of the process
    CLOSE                          the call before has ended the workers, too
    PART                           answers came outside of calls, in `poll()`
    DROP                           what was not handed out never will be
    COPY      nbytes               a copy to the device is known to have run; of no epoch

    step      more                 what
    DREW      since, until, seqs   indices were drawn, and the tasks of these batches sent; or sent again, in
                                   no time
    DEVICE    since, until         something was done for the way to the device
    LOADED    since, until, seq, fetched
                                   the call has loaded a batch itself; when its samples were there
    WAITED    since, until, cause, seq, index
                                   it waited for workers, as it seemed for that cause; the index of a batch
                                   that held up others
    ANSWERED  counters, pid, answer
                                   an answer of this epoch came: of which worker, and its process
    STALE     counters, pid, answer
                                   one of an older epoch
    REPLACED  now, worker, pid, report
                                   another process does the work of a worker; how that one ended
"""

from __future__ import annotations

from typing import Any

Record = tuple[Any, ...]
Step = tuple[Any, ...]
NONE: tuple[Step, ...] = ()

ITER, NEXT, CUT, END = "iter", "next", "cut", "end"
CLOSE, PART, DROP, COPY = "close", "part", "drop", "copy"
#: The first three are named after the cause that their time counts for.
DREW, DEVICE, LOADED = "sampler", "device_copy", "workers"
WAITED, ANSWERED, STALE, REPLACED = "waited", "answered", "stale", "replaced"
#: Steps that take time.
SPANS = (DREW, DEVICE, LOADED, WAITED)


def cause_of_wait(behind: int, blocked: bool, least: int) -> str:
    """The cause of a wait, as it seems before its end.

    Args:
        behind: batches that are ready and wait for the one that is waited for.
        blocked: some worker has nothing to do, because the window is full.
        least: batches of the window before it widens.
    """
    if behind and (blocked or behind >= least):
        return "head_of_line"
    return "memory" if blocked else "workers"
