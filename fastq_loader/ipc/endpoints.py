"""System resources of sockets: a private folder for their files, and descriptors and threads for zmq.

Runs in the consumer and in the workers, before a zmq context is made: zmq ends the process if there are too
few descriptors or threads.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator

from fastq_loader.system.interrupts import without_signals
from fastq_loader.system.unpatched import time

#: Seconds to wait for the probing threads to end.
_PATIENCE = 10.0
#: sun_path of <sys/un.h> holds 108 bytes with the closing NUL.
_LONGEST_PATH = 107


def endpoint_folder() -> str:
    """Make a folder with mode 0700 whose socket paths are short enough, whatever TMPDIR is.

    Raises:
        OSError: no folder could be made anywhere.
    """
    failure: OSError | None = None
    parents = (_temp_folder(), os.environ.get("XDG_RUNTIME_DIR"), "/tmp", "/var/tmp", "/dev/shm")
    for parent in parents:
        # mkdtemp adds eight characters to the prefix; the socket's name is the longest there could be.
        try:
            # zmq takes endpoints as UTF-8.
            if not parent or len(parent.encode()) + len("/fastq-12345678/w12345.123456") > _LONGEST_PATH:
                continue
            return tempfile.mkdtemp(prefix="fastq-", dir=parent)
        except UnicodeEncodeError:
            continue
        except OSError as error:
            failure = error
    raise failure or OSError(f"no folder with a path short enough for a socket in any of {parents}")


def _temp_folder() -> str | None:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # no writable folder: others are tried
        return None


def endpoint(folder: str, name: str) -> str:
    return f"ipc://{folder}/{name}"


def socket_name(worker: int, generation: int) -> str:
    """Name of a worker's socket; `generation` counts its predecessors of the same number."""
    return f"w{worker}.{generation}"


def way_back(folder: str, name: str) -> str:
    """Path at which the consumer listens for the answers of the worker with this socket."""
    return os.path.join(folder, f"a{name}")


def remove_folder(folder: str) -> None:
    """Remove a folder of sockets; ignore errors."""
    # Not shutil.rmtree: if a signal handler interrupts it, it closes a descriptor twice.
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def expect_descriptors(count: int) -> None:
    """Check that `count` more descriptors can be opened.

    Raises:
        OSError: (EMFILE, ENFILE) there are not so many.
    """
    opened: list[int] = []
    try:
        with naming_the_limit(count):
            opened.extend(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(count))
    finally:
        for descriptor in opened:
            os.close(descriptor)


@contextlib.contextmanager
def naming_the_limit(count: int) -> Iterator[None]:
    """Name the limit, and the `count` descriptors that the loader needs, in an error about too few of them.

    Raises:
        OSError: (EMFILE, ENFILE) the block has run out of descriptors.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):  # a signal handler may have raised it
            raise
        raise OSError(
            error.errno,
            f"{error.strerror}: the loader needs {count} descriptors for its workers; raise the limit with "
            "`ulimit -n`, or use fewer workers",
        ) from error


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
