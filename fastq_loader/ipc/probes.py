"""Whether this process may still open and start what the loader needs.

Runs in the consumer and in the workers, before a context of zmq is made: it ends the process that has too few
descriptors or threads for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time

from fastq_loader.system.interrupts import without_signals


def expect_descriptors(count: int) -> None:
    """
    Raises:
        OSError: (EMFILE, ENFILE) fewer than `count` more descriptors can be opened.
    """
    opened: list[int] = []
    try:
        opened.extend(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(count))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):  # a handler of a signal has raised, perhaps
            raise
        raise OSError(
            error.errno,
            f"{error.strerror}: the loader needs {count} descriptors for its sockets; raise the limit with "
            "`ulimit -n`, or use fewer workers",
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def expect_threads(count: int) -> None:
    """
    Raises:
        BlockingIOError: (EAGAIN) fewer than `count` more threads can be started.
    """
    # What the handler of a signal raises in the middle of `threading` comes out as a RuntimeError, too.
    with without_signals():
        _expect_threads(count)


def _expect_threads(count: int) -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        raise BlockingIOError(
            errno.EAGAIN,
            f"{error}: the loader needs {count} threads for its sockets and its workers; raise the limit of "
            "processes (`ulimit -u`, or the pids limit of the container), or use fewer workers",
        ) from error
    finally:
        over.set()
        for thread in threads:
            with contextlib.suppress(RuntimeError):  # it was not started
                thread.join()
        # A thread that was joined counts until the kernel has taken it down.
        while any(os.path.exists(f"/proc/self/task/{thread.native_id}") for thread in threads):
            time.sleep(0)
