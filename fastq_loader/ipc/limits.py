"""Checks that there are enough descriptors and threads.

Runs in the consumer and in the workers, before a zmq context is made: zmq ends the process if there are too
few.
"""

from __future__ import annotations

import _thread
import errno
import os
import sys

from fastq_loader.system import calls
from fastq_loader.system.interrupts import without_signals
from fastq_loader.system.unpatched import time

#: Seconds to wait for the probing threads to end.
_PATIENCE = 10.0


def expect_descriptors(count: int) -> None:
    """Check that `count` more descriptors can be opened.

    Raises:
        OSError: (EMFILE) the limit allows fewer.
    """
    limit = calls.limit_of("NOFILE") or sys.maxsize
    try:
        used = len(os.listdir("/proc/self/fd")) - 1
    except OSError:  # this takes one, too
        used = limit
    if used + count > limit:
        raise OSError(
            errno.EMFILE,
            f"{os.strerror(errno.EMFILE)}: the loader needs {count} descriptors for its workers; raise the "
            "limit with `ulimit -n`, or use fewer workers",
        )


def require_threads(count: int) -> None:
    """Check that `count` more threads can be started.

    Raises:
        BlockingIOError: (EAGAIN) there are not so many.
        RuntimeError: new threads are not real ones: they run on the calling thread.
    """
    held = _thread.allocate_lock()  # `threading` waits 0.2 ms for the start of each
    started, ids = 0, list[int]()

    def wait() -> None:
        ids.append(_thread.get_native_id())
        with held:
            return

    with without_signals():  # a signal handler may raise RuntimeError, too
        held.acquire()
        try:
            while started < count:
                _thread.start_new_thread(wait, ())
                started += 1
        except RuntimeError as error:
            if "interpreter shutdown" in str(error):  # Python 3.12, in a function of atexit
                raise
            raise BlockingIOError(
                errno.EAGAIN,
                f"{error}: the loader needs {count} threads for its sockets and its workers; raise the limit "
                "of processes (`ulimit -u`, or the pids limit of the container), or use fewer workers",
            ) from error
        finally:
            held.release()
            # A thread that has ended still counts until the kernel has removed it.
            own, until = _thread.get_native_id(), time.monotonic() + _PATIENCE
            while len(ids) < started or any(
                os.access(f"/proc/self/task/{number}", os.F_OK) for number in ids
            ):
                if own in ids or time.monotonic() > until:
                    break
                time.sleep(0)
    if own in ids or len(ids) < started:
        raise RuntimeError(
            "the workers need threads that run beside this one: something has replaced them (for example "
            "gevent's monkey.patch_all()); patch with thread=False, or use num_workers=0"
        )
