"""The zygote, a process that forks workers on request, and the consumer's handle of it.

`Zygote` and `Forked` run in the consumer, on any thread; `serve` and the functions that it calls run in the
zygote, on its only thread, and in the children that it has just forked. There are two kinds of zygotes:

- `copy_of_consumer`, under fork: the consumer as it is when the pool starts. A worker that was forked from
  the consumer itself in the middle of a training run would see the dataset as it is then, copy the page
  tables of a process that has grown meanwhile, and inherit its sockets, threads' locks and devices.
- `interpreters`, under spawn and forkserver: a fresh interpreter that has imported torch and this package,
  which takes seconds and 90 MB, and no module of the user. Under forkserver it has also imported the modules
  chosen for Python's own server (`multiprocessing.set_forkserver_preload`), as torch's workers have. A worker
  forks from it in milliseconds, and goes on as multiprocessing's own child would: it imports the user's
  `__main__` and unpickles its process object.

A zygote ends when its connection is shut down, and with its consumer, however the consumer ends. It outlives
SIGTERM, which all processes of a job may get.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import popen_fork, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from fastq_loader.system import calls, multiprocessing_names, process_id
from fastq_loader.system.calls import readable
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers import payload
from fastq_loader.workers.children import BLOCKED, Child

#: Function to run in a child of the zygote. Takes a request, the descriptors that came with it, and one that
#: becomes readable when the consumer dies; returns the exit code.
Run = Callable[[Any, list[int], int], int]

#: Seconds for the zygote to end; and for each of two waits for its answer. If both processes were stopped
#: meanwhile (SIGSTOP), the first wait is over at once.
_PATIENCE, _ANSWER = 1.0, 20.0


class Zygote:
    """The consumer's end of a process that forks others.

    Args:
        start: starts the process, which serves the connection.
    """

    def __init__(self, start: Callable[[Connection], Child]) -> None:
        self._owner = process_id.current()
        self._lock = threading.RLock()  # active_children() on another thread calls `ask`, too
        self._requests = 0
        self._ready = False
        self._connection, other = multiprocessing.Pipe()
        with other:
            self._child = start(other)
        self._child.disown()

    @property
    def has_ended(self) -> bool:
        return self._connection.closed or bool(readable([self._child.descriptor], 0))

    def wait(self) -> None:
        """Wait until an interpreter is up, or has ended (`ask` raises then). Signals may cut it short."""
        if not self._ready:
            readable([self._connection.fileno(), self._child.descriptor], None)
            self._ready = True

    def ask(self, request: Any, passed: Sequence[int] = ()) -> int:
        """Send a request to the zygote, and return its answer.

        Args:
            request: a child to reap, by its process id, which returns its exit code; or to fork a child,
                which returns its process id: an argument of `Run`, in a tuple.
            passed: descriptors for the child.

        Raises:
            OSError: the zygote could not fork, has ended, or does not answer.
        """
        try:
            with self._lock, without_signals():
                answer = self._ask(request, passed)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            how = self._child.death()[0] if readable([self._child.descriptor], _PATIENCE) else "is gone"
            raise OSError(f"the process that starts new workers {how}") from error
        if isinstance(answer, OSError):
            raise answer
        return int(answer)

    def _ask(self, request: Any, passed: Sequence[int]) -> Any:
        self._requests += 1
        message = bytes(ForkingPickler.dumps((self._requests, request)))
        calls.send_message(self._connection.fileno(), message, passed)
        sources = self._connection.fileno(), self._child.descriptor  # no EOF: its children hold its end
        number = 0
        # The answer 0, which ends `wait`, is still there before the first request.
        while number < self._requests:
            ready = readable(sources, _ANSWER) or readable(sources, _ANSWER)
            if self._connection.fileno() not in ready:
                self._child.kill()  # it may be stopped (SIGSTOP)
                raise EOFError
            number, answer = self._connection.recv()
        return answer

    def close(self) -> None:
        """End the zygote, whose workers have ended."""
        if self._connection.closed or self._owner != process_id.current():
            return
        with contextlib.suppress(OSError), self._lock:
            # Forks by user code, and the zygote itself, may hold this end.
            with socket.fromfd(self._connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
                end.shutdown(socket.SHUT_RDWR)
            self._connection.close()
        if not readable([self._child.descriptor], _PATIENCE):  # it may be stopped (SIGSTOP)
            with contextlib.suppress(PermissionError):  # it has the ids that this process had then
                self._child.process.kill()
        self._child.release()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Nobody closes an interpreter: it ends when its last user is collected, or with the program.
        if hasattr(self, "_child") and not is_finalizing():
            self.close()

    def forget(self) -> None:
        """In a forked child of the process that started the zygote: close the inherited connection."""
        self._connection.close()


class Forked(popen_fork.Popen):
    """multiprocessing's handle of a child process, for one that is the zygote's child.

    Args:
        zygote: the zygote, which forks the process at once.
        request: argument of the zygote's `Run`.
        passed: descriptors for the process.
    """

    def __init__(self, zygote: Zygote, request: Any, passed: Sequence[int] = ()) -> None:
        self._zygote = zygote
        self._reaping = threading.RLock()  # a signal handler may come in between
        super().__init__((request, passed))  # type: ignore[arg-type]

    def _launch(self, launched: Any) -> None:
        request, passed = launched
        self.pid = self._zygote.ask((request,), passed)
        self.sentinel = calls.pidfd_open(self.pid)  # not reaped yet, so the pid was not reused
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and readable([self.sentinel], 0 if flag == os.WNOHANG else None):
            with self._reaping:  # any thread that starts a process polls all children
                if self.returncode is None:
                    with contextlib.suppress(OSError):  # the zygote has ended: the exit code is lost
                        code = self._zygote.ask(self.pid)
                        self.returncode = code if self.returncode is None else self.returncode
        return self.returncode

    def close(self) -> None:
        super().close()
        vars(self).pop("_zygote", None)  # an interpreter ends, though somebody keeps the process object


# ---- a copy of the consumer ---------------------------------------------------------------------------


def copy_of_consumer(context: Any, make: Callable[..., BaseProcess]) -> Zygote:
    """Start a zygote that is a copy of this process as it is now.

    Args:
        context: multiprocessing's context of start method fork.
        make: makes the process object in a child, from the `own` of `fork_copy` and the descriptors that came
            with it.

    Raises:
        OSError: processes or descriptors are used up.
    """

    def run(request: Any, passed: list[int], sentinel: int) -> int:
        own, identity = request
        return multiprocessing_names.become(make(own, *passed), identity, sentinel)

    def start(its: Connection) -> Child:
        arguments = its, os.getpid(), run
        make = partial(context.Process, target=serve, args=arguments, daemon=False)
        child = Child(multiprocessing_names.unnumbered(make), signal.SIGKILL)
        child.start()
        return child

    with without_signals(*BLOCKED), without_signals():  # it has the first ones blocked until `serve`
        return Zygote(start)


def fork_copy(zygote: Zygote, process: BaseProcess, own: Any, passed: Sequence[int] = ()) -> Forked:
    """Have a copy of the consumer fork a child that becomes `process`.

    Args:
        zygote: the copy.
        process: the consumer's process object.
        own: argument of the copy's `make`.
        passed: descriptors for the process.

    Raises:
        OSError: it could not be forked.
    """
    return Forked(zygote, (own, multiprocessing_names.identity_of(process)), passed)


# ---- in the zygote -------------------------------------------------------------------------------


def serve(connection: Connection, consumer: int, run: Run) -> None:
    """Fork workers until the consumer shuts the connection down, or dies."""
    # A garbage collector that scanned inherited and imported objects would copy all their pages.
    gc.freeze()
    calls.name_process("fastq_zygote")
    # The consumer's handlers must not run here; and if SIGCHLD is ignored, exit codes are lost.
    here = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN, signal.SIGCHLD: signal.SIG_DFL}
    handlers = {number: signal.signal(number, action) for number, action in here.items()}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    children = set[int]()
    with contextlib.suppress(EOFError, ConnectionError, ProcessLookupError):  # the consumer is gone
        death = calls.pidfd_open(consumer)
        while death not in readable([connection.fileno(), death], None):
            message, descriptors = calls.receive_message(connection.fileno())
            number, request = pickle.loads(message)
            answer: int | OSError
            try:
                if isinstance(request, int):
                    # ChildProcessError if it was reaped before, and an interrupt lost the answer.
                    answer = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
                    children.discard(request)
                else:
                    (wanted,) = request
                    answer = _fork(partial(run, wanted, descriptors, death), handlers)
                    children.add(answer)
            except OSError as error:
                answer = error
            payload.close_all(descriptors)
            connection.send((number, answer))
    # A worker that is still importing would not notice the consumer's death for some time.
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _fork(run: Callable[[], int], handlers: dict[signal.Signals, Any]) -> int:
    """Fork a child that runs `run` with the consumer's signal handlers; return its process id."""
    with without_signals(*BLOCKED):  # until it has a worker's handlers
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for number, handler in handlers.items():
                    if handler is not None:  # None: it was not set from Python
                        signal.signal(number, handler)
                code = run()
            except KeyboardInterrupt:
                pass  # the consumer shows its own
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(Exception):  # it is closed or absent
                        stream.flush()
                os._exit(code)
    return pid
