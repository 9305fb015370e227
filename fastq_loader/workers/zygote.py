"""The zygote, a process that forks workers on request, and the consumer's handle of it.

`Zygote` and `Forked` run in the consumer, on any thread; `_serve` and the functions that it calls run in the
zygote, on its only thread, and in the children that it has just forked. There are two kinds of zygotes:

- `copy_of_consumer`, under fork: the consumer as it is when the pool starts. A worker that was forked from
  the consumer itself in the middle of a training run would see the dataset as it is then, copy the page
  tables of a process that has grown meanwhile, and inherit its sockets, threads' locks and devices.
- `interpreter`, under spawn and forkserver: a fresh interpreter that has imported torch and this package,
  which takes seconds and 90 MB, and no module of the user. Under forkserver it has also imported the modules
  chosen for Python's own server (`multiprocessing.set_forkserver_preload`), as torch's workers have. A worker
  forks from it in milliseconds, and goes on as multiprocessing's own child would: it imports the user's
  `__main__` and unpickles its process object.

A zygote ends with its consumer, however the consumer ends, and when its connection is shut down; an
interpreter that is still importing then is killed by the kernel, and writes nothing. It outlives SIGTERM,
which all processes of a job may get. An interpreter serves all loaders of a process whose workers would
inherit the same from it (`inherited`), and lives as long as one of them or of their pools uses it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from multiprocessing import context as contexts
from multiprocessing import popen_fork, resource_tracker, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.ipc.endpoints import remove_folder
from fastq_loader.system import calls, exits, inherited, multiprocessing_names, process_id
from fastq_loader.system.calls import readable
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers import payload
from fastq_loader.workers.children import END, KEPT_OUT, UNKNOWN_EXIT, Child
from fastq_loader.workers.config import Setup

#: Function to run in a child of the zygote. Takes a request, the descriptors that came with it, and one that
#: becomes readable when the consumer dies; returns the exit code.
Run = Callable[[Any, list[int], int], int]

_FORK, _REAP = "fork", "reap"

#: Seconds for the zygote to end; and for each of two waits for its answer. If both processes were stopped
#: meanwhile (SIGSTOP), the first wait is over at once.
_PATIENCE, _ANSWER = 1.0, 5.0


class Zygote:
    """The consumer's end of a process that forks others.

    Args:
        start: starts the process; its arguments are the connection to serve, and the consumer's end of it.

    Attributes:
        users: number of users of an interpreter, see `Interpreters`.
    """

    def __init__(self, start: Callable[[Connection, Connection], Child]) -> None:
        self._owner = process_id.current()
        self._lock = threading.RLock()  # active_children() on another thread calls `ask`, too
        self._requests = 0
        self._ready = self._closed = self._over = False
        self.users = 0
        self._connection, other = multiprocessing.Pipe()
        with other:
            self._child = start(other, self._connection)
        self._child.disown()

    def join(self) -> bool:
        """Count one more user, unless the zygote has ended. The count comes first: from then on, a collector
        or a handler that comes in between does not end it."""
        self.users += 1
        if self._closed or readable([self._child.descriptor], 0):
            self.users -= 1
            return False
        return True

    def wait(self) -> None:
        """Wait until an interpreter is up, or has ended (`ask` raises then). Signals may cut it short."""
        if not self._ready:
            readable([self._connection.fileno(), self._child.descriptor], None)
            self._ready = True

    def ask(self, *request: Any, passed: Sequence[int] = ()) -> Any:
        """Send a request to the zygote, and return its answer.

        Args:
            request: the kind of request, and its arguments.
            passed: descriptors to send after the request.

        Raises:
            OSError: the zygote could not fork, has ended, or does not answer.
        """
        try:
            with self._lock, without_signals():
                answer = self._ask(request, passed)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise OSError("the process that starts new workers has ended") from error
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _ask(self, request: tuple[Any, ...], passed: Sequence[int]) -> Any:
        self._requests += 1
        self._connection.send((self._requests, *request))
        for descriptor in passed:
            calls.send_descriptor(self._connection.fileno(), descriptor)
        sources = self._connection.fileno(), self._child.descriptor  # no EOF: its children hold its end
        number = 0
        # With other threads, a signal handler may have raised in the middle of an earlier request.
        while number < self._requests:
            ready = readable(sources, _ANSWER) or readable(sources, _ANSWER)
            if self._connection.fileno() not in ready:
                self._child.kill()  # it may be stopped (SIGSTOP)
                raise EOFError
            number, answer = self._connection.recv()
        return answer

    def close(self) -> None:
        """End the zygote, whose workers have ended. May be called again after an interrupt."""
        if self._over or self._owner != process_id.current():
            return
        self._closed = True
        with contextlib.suppress(OSError), self._lock:
            # Shut down, because forks by user code may hold this end.
            with socket.fromfd(self._connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
                end.shutdown(socket.SHUT_RDWR)
            self._connection.close()
        if not readable([self._child.descriptor], _PATIENCE):
            with contextlib.suppress(PermissionError):  # it has the ids that this process had then
                self._child.process.kill()
        self._child.release()
        self._over = True

    def forget(self) -> None:
        """In a forked child of the process that started the zygote: close the inherited connection."""
        self._connection.close()


class Forked(popen_fork.Popen):
    """multiprocessing's handle of a child process, for one that is the zygote's child.

    Args:
        zygote: the zygote, which forks the process at once.
        request: argument of the zygote's `Run`.
        folder: folder of the process's socket, to be removed when the consumer dies.
        passed: descriptors for the process.

    Attributes:
        is_unknown: whether the exit code is unknown.
        sentinel_is_pidfd: see `Child`.
    """

    is_unknown = False
    sentinel_is_pidfd = True

    def __init__(self, zygote: Zygote, request: Any, folder: str, passed: Sequence[int] = ()) -> None:
        self._zygote = zygote
        self._folder = folder
        self._reaping = threading.RLock()  # a signal handler may come in between
        super().__init__((request, passed))  # type: ignore[arg-type]

    def _launch(self, launched: Any) -> None:
        request, passed = launched
        self.pid = self._zygote.ask(_FORK, request, len(passed), self._folder, passed=passed)
        self.sentinel = calls.pidfd_open(self.pid)  # not reaped yet, so the pid was not reused
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and readable([self.sentinel], 0 if flag == os.WNOHANG else None):
            with self._reaping:  # any thread that starts a process polls all children
                if self.returncode is None:
                    self._reap()
        return self.returncode

    def _reap(self) -> None:
        try:
            code = self._zygote.ask(_REAP, self.pid)
        except OSError:
            code = None
        if self.returncode is None:
            self.is_unknown = code is None  # the zygote has ended, so the exit code is lost
            self.returncode = UNKNOWN_EXIT if code is None else code


# ---- a copy of the consumer ---------------------------------------------------------------------------


def copy_of_consumer(context: Any, make: Callable[..., BaseProcess], folder: str) -> Zygote:
    """Start a zygote that is a copy of this process as it is now.

    Args:
        context: multiprocessing's context of start method fork.
        make: makes the process object in a child, from the `own` of `fork_copy` and the descriptors that came
            with it.
        folder: folder of sockets to remove when the consumer dies: there may be no worker yet to do it.

    Raises:
        OSError: processes or descriptors are used up.
    """

    def run(request: Any, passed: list[int], sentinel: int) -> int:
        own, identity = request
        return multiprocessing_names.become(make(own, *passed), identity, sentinel)

    def start(its: Connection, mine: Connection) -> Child:
        arguments = its, mine, os.getpid(), run, folder
        child = Child(context.Process(target=_serve, args=arguments, daemon=False), END)
        child.start()
        return child

    return Zygote(start)


def fork_copy(
    zygote: Zygote, process: BaseProcess, own: Any, folder: str = "", passed: Sequence[int] = ()
) -> Forked:
    """Have a copy of the consumer fork a child that becomes `process`.

    Args:
        zygote: the copy.
        process: the consumer's process object.
        own: argument of the copy's `make`.
        folder: folder of the process's socket, to be removed when the consumer dies.
        passed: descriptors for the process.

    Raises:
        OSError: it could not be forked.
    """
    return Forked(zygote, (own, multiprocessing_names.identity_of(process)), folder, passed)


# ---- a fresh interpreter --------------------------------------------------------------------------------


class Interpreters:
    """The interpreters of this process, each with the number of its users: loaders, and pools.

    One lock is held while an interpreter starts and while one ends, so an end is over before the next start.
    The collector and signal handlers give interpreters back in the middle of anything, also of these methods:
    `give_back` only appends to a queue, and whoever has the lock, or can have it at once, empties the queue.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.running: dict[Hashable, Zygote] = {}
        self._given_back: deque[Zygote] = deque()

    def take(self, key: Hashable, start: Callable[[], Zygote]) -> Zygote:
        """Return the interpreter with this key, started now if none is running, for one more user."""
        with self._lock:
            zygote = self.running.get(key)
            if zygote is None or not zygote.join():
                zygote = self.running[key] = start()
                zygote.users = 1
        self._end_unused()
        return zygote

    def give_back(self, zygote: Zygote) -> None:
        """Take one user less into account; an interpreter without users ends."""
        self._given_back.append(zygote)
        self._end_unused()

    def _end_unused(self) -> None:
        while self._given_back and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(IndexError):  # the collector came in between, and took it
                    self._leave(self._given_back.popleft())
            finally:
                self._lock.release()

    def _leave(self, zygote: Zygote) -> None:
        zygote.users -= 1
        if not zygote.users:
            zygote.close()
            for key in [key for key, each in self.running.items() if each is zygote]:
                del self.running[key]


_interpreters = Interpreters()


def _forget() -> None:
    """In a forked child: they are the parent's, and notice its end if no child holds it."""
    global _interpreters
    parents, _interpreters = _interpreters, Interpreters()
    for zygote in parents.running.values():
        zygote.forget()


process_id.in_forked_children(_forget)


class Use:
    """A loader's or a pool's use of an interpreter.

    Args:
        method: "spawn" or "forkserver".

    Attributes:
        zygote: the interpreter, started now or by another user whose workers would inherit the same.

    Raises:
        OSError: processes or descriptors are used up.
    """

    def __init__(self, method: str) -> None:
        self._owner = 0
        preload = multiprocessing_names.preloaded() if method == "forkserver" else []
        # torch's workers always have the fork server's surroundings; but rights that were given up are gone.
        rest = (inherited.rest(), spawn.get_executable()) if method == "spawn" else None
        key = method, *preload, inherited.rights(), rest
        self.zygote = _interpreters.take(
            key, lambda: Zygote(lambda its, _: _start_interpreter(its, method, preload))
        )
        self._owner = os.getpid()

    def close(self) -> None:
        """End the use. A second call has no effect, nor has one in a forked child."""
        owner, self._owner = self._owner, 0
        if owner == os.getpid():
            _interpreters.give_back(self.zygote)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A loader does not close its use: it ends with the loader, or with the program.
        if not is_finalizing():
            self.close()


def _start_interpreter(its: Connection, method: str, preload: list[str]) -> Child:
    # Python's fork server imports the user's `__main__` from 3.12.8, 3.13.1 and 3.14 on.
    imports_main = (3, 12, 8) <= sys.version_info < (3, 13) or sys.version_info >= (3, 13, 1)
    main = _preparation().get("init_main_from_path") if imports_main else None
    arguments = its.fileno(), os.getpid(), method, preload, main
    process = contexts.SpawnProcess(target=_serve_afresh, args=arguments, name="fastq_loader: zygote")
    child = Child(process, END, lambda process: _Interpreter(process, its.fileno()))
    resource_tracker.ensure_running()  # before the block, whose signals it would unblock
    with without_signals(*KEPT_OUT):  # until it has handlers
        child.start()
    # Until it serves, the kernel kills it when the other end is shut down or closed: it may be importing.
    fcntl.fcntl(its, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(its, fcntl.F_SETOWN, child.pid)
    fcntl.fcntl(its, fcntl.F_SETFL, fcntl.fcntl(its, fcntl.F_GETFL) | os.O_ASYNC)
    return child


class LaunchEnvironment:
    """Folder, `sys.path` and arguments of this process now, for a pool's workers, which may start much later.
    To be closed.

    Attributes:
        prepared: multiprocessing's preparation data for a child, without its name.
        cwd: descriptor of the folder, which may be renamed meanwhile.
    """

    def __init__(self) -> None:
        self.prepared = _preparation()
        self.cwd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        cwd, self.cwd = self.cwd, -1
        if cwd >= 0:
            os.close(cwd)


def _preparation() -> dict[str, Any]:
    prepared = spawn.get_preparation_data("")
    prepared["sys_argv"] = list(prepared["sys_argv"])
    return {key: value for key, value in prepared.items() if key != "dir"}


class _Interpreter(popen_fork.Popen):
    """multiprocessing's handle of a child that is a fresh interpreter, which does not import `__main__`."""

    def __init__(self, process: BaseProcess, passed: int) -> None:
        self._passed = passed
        super().__init__(process)

    def _launch(self, process: Any) -> None:
        prepared = {key: value for key, value in _preparation().items() if not key.startswith("init_main")}
        written, descriptors = payload.write_process(prepared, process)
        tracker: Any = resource_tracker.getfd()
        command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=written)
        try:
            passed = [tracker, written, self._passed, *descriptors]
            self.pid = util.spawnv_passfds(os.fsencode(spawn.get_executable()), command, passed)
        finally:
            payload.close_all([written, *descriptors])
        self.sentinel = -1
        self.finalizer = None


def fork_interpreter(zygote: Zygote, process: BaseProcess, setup: Setup, moment: LaunchEnvironment) -> Forked:
    """Have an interpreter fork a child that becomes `process`.

    Raises:
        TypeError, AttributeError, PicklingError: the process cannot be pickled.
        OSError: it could not be forked.
    """
    written, descriptors = payload.write_process({**moment.prepared, "name": process.name}, process)
    try:
        return Forked(zygote, setup.plan.grace, setup.folder, [moment.cwd, written, *descriptors])
    finally:
        payload.close_all([written, *descriptors])


def _become_pickled(method: str, grace: float, passed: list[int], sentinel: int) -> int:
    """In a child of an interpreter: do what multiprocessing's fork server does; return the exit code."""
    import numpy as np
    import torch

    from fastq_loader.workers.main import prepare_signals

    cwd, written, *descriptors = passed
    os.fchdir(cwd)
    os.close(cwd)
    prepare_signals(grace)
    # Seeded as if the worker had imported these itself: the user's modules may draw before it is seeded.
    np.random.seed()
    torch.default_generator.seed()
    payload.receive_process(descriptors)
    code = multiprocessing_names.become_pickled(written, sentinel)
    if method == "spawn":  # a program runs exit handlers; a fork server's child does not before Python 3.13
        atexit._run_exitfuncs()
    return code


# ---- in the zygote -------------------------------------------------------------------------------


def _serve_afresh(connection: int, consumer: int, method: str, preload: list[str], main: str | None) -> None:
    """Entry point of an interpreter."""
    import fastq_loader.workers.main  # noqa: F401 - imports torch, too

    # As `multiprocessing.forkserver.main` does.
    if main is not None and "__main__" in preload:
        with multiprocessing_names.importing_main():
            spawn.import_main_path(main)
    for module in preload:
        with contextlib.suppress(ImportError):
            __import__(module)
    gc.collect()
    exits.forget()
    served = Connection(connection)
    fcntl.fcntl(served, fcntl.F_SETFL, fcntl.fcntl(served, fcntl.F_GETFL) & ~os.O_ASYNC)
    served.send((0, None))  # for `wait`; number 0 is no request's, so `ask` skips it
    _serve(served, None, consumer, partial(_become_pickled, method), "")


def _serve(connection: Connection, others: Connection | None, consumer: int, run: Run, folder: str) -> None:
    """Fork workers until the consumer, whose end of the connection is `others`, closes it or dies."""
    if others is not None:
        others.close()
    # A garbage collector that scanned inherited and imported objects would copy all their pages.
    gc.freeze()
    calls.name_process("fastq_zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers set handlers of their own
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, KEPT_OUT)
    # The consumer's SIGCHLD handler must not run here; and if SIGCHLD is ignored, exit codes are lost.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children: dict[int, str] = {}  # process id → the folder of its socket
    with contextlib.suppress(EOFError, ConnectionError, ProcessLookupError):  # the consumer is gone
        death = calls.pidfd_open(consumer)
        while death not in readable([connection.fileno(), death], None):
            number, kind, *arguments = connection.recv()
            answer: Any = None
            try:
                if kind == _FORK:
                    request, passed, socket_folder = arguments
                    descriptors = [calls.receive_descriptor(connection.fileno()) for _ in range(passed)]
                    answer = _fork(partial(run, request, descriptors, death), handler)
                    children[answer] = socket_folder
                    for descriptor in descriptors:
                        os.close(descriptor)
                elif kind == _REAP:
                    (pid,) = arguments
                    # ChildProcessError if it was reaped before, and an interrupt lost the answer.
                    answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    children.pop(pid, None)
            except OSError as error:
                answer = error
            connection.send((number, answer))
    # A worker that is still importing would not notice the consumer's death for some time.
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for each in {folder, *children.values()} - {""}:
        remove_folder(each)
    os._exit(0)


def _fork(run: Callable[[], int], handler: Any) -> int:
    """Fork a child that runs `run` with the consumer's handler of SIGCHLD; return its process id."""
    with without_signals(*KEPT_OUT):  # until it has handlers
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if handler is not None:  # None: it was not set from Python
                    signal.signal(signal.SIGCHLD, handler)
                code = run()
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(Exception):  # it is closed, or there is none
                        stream.flush()
                os._exit(code)
    return pid
