"""Sockets: one ROUTER in the consumer, one DEALER in each worker, and the folder where they meet.

`ConsumerSocket` runs in the consumer, `WorkerSocket` in a worker; both on one thread each. Each worker
binds an ipc endpoint of its own and the consumer connects to it under the worker's number as routing id,
so tasks can be queued before the worker is up. The folder is private to the user (0700), and is gone as
soon as every worker is connected.

One `wait` serves everything (design, rule 7): the socket, the workers' process descriptors, a wake-up.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence

import zmq

from fastq_loader.messages import (
    Answer,
    Epoch,
    Hello,
    Message,
    Stop,
    Task,
    decode_for_consumer,
    decode_for_worker,
    encode,
)

#: sun_path of <sys/un.h> holds 108 bytes with the closing NUL.
_LONGEST_PATH = 107
#: Milliseconds between attempts to reach a worker that is not up yet, and their bound.
_RECONNECT_MS, _RECONNECT_MAX_MS = 2, 100
#: As numbers: the enum's own `|` takes a microsecond.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
#: Descriptors that zmq takes (its threads' epolls and mailboxes; a connection and an attempt at one for each
#: worker). Without them it ends the process, or tries to connect in silence for ever.
_OWN_DESCRIPTORS, _DESCRIPTORS_PER_WORKER = 12, 2


def endpoint_folder() -> str:
    """A fresh 0700 folder whose socket paths are short enough, whatever TMPDIR says.

    Raises:
        OSError: no folder could be made in any of the places tried.
    """
    failure: OSError | None = None
    places = (_temp_folder(), os.environ.get("XDG_RUNTIME_DIR"), "/tmp", "/var/tmp", "/dev/shm")
    for place in places:
        # mkdtemp adds eight characters to the prefix, a socket's name at most eight more.
        try:
            # zmq takes endpoints as UTF-8.
            if not place or len(place.encode()) + len("/fastq-12345678/w1234567") > _LONGEST_PATH:
                continue
            return tempfile.mkdtemp(prefix="fastq-", dir=place)
        except UnicodeEncodeError:
            continue
        except OSError as error:
            failure = error
    raise failure or OSError(f"no folder with a path short enough for a socket among {places}")


def _temp_folder() -> str | None:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # no folder that can be written to: there are others to try
        return None


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def _expect_descriptors(count: int) -> None:
    """Raise OSError (EMFILE) unless `count` more descriptors can be opened."""
    opened: list[int] = []
    try:
        opened.extend(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(count))
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}: the loader needs {count} descriptors for its sockets; raise the limit with "
            "`ulimit -n`, or use fewer workers",
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def endpoint(folder: str, worker: int) -> str:
    return f"ipc://{folder}/w{worker}"


def remove_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


class ConsumerSocket:
    """The consumer's end, for all workers of one pool.

    Args:
        folder: where the workers bind.
        workers: how many there are.
    """

    def __init__(self, folder: str, workers: int) -> None:
        _expect_descriptors(_OWN_DESCRIPTORS + _DESCRIPTORS_PER_WORKER * workers)
        self.woken = False
        self._waking = threading.RLock()  # no wake-up is written to a descriptor that was closed
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.SNDHWM, 0)  # the scheduler's window is the bound
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
            self._names = [b"w%d" % worker for worker in range(workers)]
            self._numbers = {name: worker for worker, name in enumerate(self._names)}
            for worker, name in enumerate(self._names):
                self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, name)
                self._socket.connect(endpoint(folder, worker))
        except BaseException:
            self.close()
            raise
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)

    def send(self, worker: int, message: Message) -> None:
        """Queue a message.

        Raises:
            Exception: whatever pickling raises for the index of a task.
        """
        frame = encode(message)
        self._socket.send(self._names[worker], _NOBLOCK_MORE)
        self._socket.send(frame, _NOBLOCK)

    def receive(self) -> tuple[int, Hello | Answer] | None:
        """The next message and the worker that sent it; None if there is none now.

        Raises:
            ProtocolError: a frame that is no message.
        """
        try:
            name = self._socket.recv(_NOBLOCK)
        except zmq.Again:
            return None
        frame = self._socket.recv()
        return self._numbers[name], decode_for_consumer(frame)

    def watch(self, descriptor: int) -> None:
        """Let `wait` return when `descriptor` becomes readable (a process descriptor: has ended)."""
        self._poller.register(descriptor, zmq.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._poller.unregister(descriptor)

    def wait(self, timeout: float | None) -> Sequence[object]:
        """Sleep until a message, a watched descriptor or `wake`, at most `timeout` seconds.

        Returns:
            What is readable: the watched descriptors among it as numbers. Empty after the timeout.
        """
        milliseconds = None if timeout is None else _milliseconds(timeout)
        return [ready for ready, _ in self._poller.poll(milliseconds)]

    def wait_for_message(self, timeout: float) -> bool:
        """Sleep until a message has come, at most `timeout` seconds."""
        return bool(self._socket.poll(_milliseconds(timeout)))

    def wake(self) -> None:
        """Let `wait` return now and from now on; may be called on any thread."""
        with self._waking:
            self.woken = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        # Not left to the context: it finds its sockets through weak references, which are dead already
        # when the garbage collector ends a loader, and would wait for the socket for ever.
        self._poller = zmq.Poller()
        self._socket.close(linger=0)
        self._context.term()
        with self._waking:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)


class WorkerSocket:
    """A worker's end. Made in the worker process, after it was started (design, rule 9)."""

    def __init__(self, folder: str, worker: int) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(endpoint(folder, worker))

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def receive(self, block: bool) -> Task | Epoch | Stop | None:
        """The next message; without `block` None if there is none now."""
        try:
            return decode_for_worker(self._socket.recv(0 if block else _NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
