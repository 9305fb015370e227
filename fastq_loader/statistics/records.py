"""The record of a call: 64-bit numbers only, from which statistics and traces are computed.

Pure. Times are nanoseconds of the monotonic clock, which is the same for all processes of a machine.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

#: Kinds of records. ITER: `iter()` returned. NEXT: `next()` returned a batch or raised an error. CUT: a call
#: began after one that an interrupt ended, or that left a batch out. END: `next()` found no further batch.
#: CLOSE: it has also shut down the workers.
ITER, NEXT, CUT, END, CLOSE = range(5)


class Record(NamedTuple):
    """The numbers of a record; 0 where something did not happen.

    Attributes:
        kind, epoch: see above; the loader's number of the epoch.
        asked, returned: begin and end of the call.
        drew, drew_until: nanoseconds in which the sampler drew; when it had drawn last.
        device, device_until: the same of work for a device, and of pinning.
        wait_from, wait_until: from the begin of the first wait to the end of the last; without workers, from
            the begin to the end of loading.
        workers, head, memory: nanoseconds of waiting by what seemed to be the cause: workers are loading; the
            batch holds up others; the window is full.
        seq: number of the batch; -1 without a batch.
        worker, pid: who loaded it; -1, 0: the consumer, or nobody.
        sent: when its task was sent first.
        started, fetched, collated, finished: when the worker began, had read the samples, had collated them
            and had packed the batch.
        new_memory: nanoseconds in which the worker mapped new pages.
    """

    kind: int
    epoch: int
    asked: int
    returned: int
    drew: int
    drew_until: int
    device: int
    device_until: int
    wait_from: int
    wait_until: int
    workers: int
    head: int
    memory: int
    seq: int
    worker: int
    pid: int
    sent: int
    started: int
    fetched: int
    collated: int
    finished: int
    new_memory: int


PACKED = Struct(f"={len(Record._fields)}q")
#: The same for a batch that was loaded here, while nothing else happened: only the numbers that are not 0.
LOADED_HERE = Struct("=4q32x3q16x2q8x5q8x")

#: The numbers of a record from `seq` on.
Loaded = tuple[int, ...]
NOTHING: Loaded = (-1, -1, 0, 0, 0, 0, 0, 0, 0)
