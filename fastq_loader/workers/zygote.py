"""A process that waits to fork workers: the consumer's end of it, and the zygote itself.

`Zygote` and `Forked` run in the consumer, on any thread; `_serve` and what it calls run in the zygote, on
its only thread, and in the children that it has just forked. There are two:

- `copy_of_consumer`, under fork: the consumer as it is when the pool starts. A worker that was forked from
  the consumer itself in the middle of a training run would see the dataset as it is then, copy the page
  tables of a process that has grown meanwhile, and inherit its sockets, threads' locks and devices.
- `interpreter`, under spawn and forkserver: a fresh one that has imported torch and ours, which takes
  seconds and 90 MB, and nothing of the user's. Under forkserver it has the modules that were chosen for
  Python's own server (`multiprocessing.set_forkserver_preload`), as torch's workers do. A worker forks from
  it in milliseconds, and goes on as multiprocessing's own child would: it imports the user's `__main__` and
  unpickles its process.

A zygote ends with its consumer, however that ends. It outlives SIGTERM, which all processes of a job may
get. An interpreter serves all loaders of a process that are in the same surroundings, and lives as long as
one of them or of their pools refers to it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import context as contexts
from multiprocessing import forkserver, popen_fork, resource_tracker, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.ipc.endpoints import remove_folder
from fastq_loader.system import calls, process_id
from fastq_loader.system.calls import readable
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers import payload
from fastq_loader.workers.children import END, KEPT_OUT, UNKNOWN_EXIT, Child
from fastq_loader.workers.config import Setup

#: Runs in a child of the zygote: takes a request, descriptors that came with it, and one that becomes
#: readable when the consumer dies; returns the exit code.
Run = Callable[[Any, list[int], int], int]

_FORK, _REAP, _QUIT = "fork", "reap", "quit"

#: Seconds that the zygote has to end in; half of those that it has to answer in. The first half is over at
#: once where both processes were stopped meanwhile.
_PATIENCE, _ANSWER = 1.0, 5.0


class Zygote:
    """The consumer's end of a process that forks others.

    Args:
        start: starts it, given the connection that it serves and the other end of it.
    """

    def __init__(self, start: Callable[[Connection, Connection], Child]) -> None:
        self._owner = process_id.current()
        self._lock = threading.RLock()  # active_children() of another thread asks too
        self._requests = 0
        self._ready = self._over = False
        self._connection, other = multiprocessing.Pipe()
        with other:
            self._child = start(other, self._connection)
        self._child.disown()

    @property
    def usable(self) -> bool:
        """Whether it runs, as a child of this process."""
        return self._owner == process_id.current() and not readable([self._child.descriptor], 0)

    def wait(self) -> None:
        """Wait until an interpreter is up, or has ended, which `ask` finds. Signals may cut that short."""
        if not self._ready:
            readable([self._connection.fileno(), self._child.descriptor], None)
            self._ready = True

    def ask(self, *request: Any, passed: Sequence[int] = ()) -> Any:
        """The zygote's answer to a request.

        Args:
            request: what it is sent.
            passed: descriptors that it is sent after it.

        Raises:
            OSError: it could not fork; or it is gone, or does not answer.
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
        sources = self._connection.fileno(), self._child.descriptor  # its children hold its end too
        number = 0
        # Where there are other threads, the handler of a signal may have raised in the middle of a request.
        while number < self._requests:
            ready = readable(sources, _ANSWER) or readable(sources, _ANSWER)
            if self._connection.fileno() not in ready:
                self._child.kill()  # it may be stopped
                raise EOFError
            number, answer = self._connection.recv()
        return answer

    def close(self) -> None:
        """End the zygote; its workers have ended. May be called again after an interrupt."""
        if self._over or self._owner != process_id.current():
            return
        with contextlib.suppress(OSError), self._lock:
            self._connection.send((0, _QUIT))  # a child of the user's may hold this end too
        self._connection.close()
        if not readable([self._child.descriptor], _PATIENCE):
            self._child.process.kill()
        self._child.release()
        self._over = True

    def __del__(self) -> None:
        if "_child" in vars(self):
            self.close()


class Forked(popen_fork.Popen):
    """multiprocessing's handle of a child process, for one that is the zygote's child.

    Args:
        zygote: forks it, now.
        request: for the zygote's `Run`.
        folder: of its socket, to be removed when the consumer dies.
        passed: descriptors for it.

    Attributes:
        is_unknown: nobody knows how it ended.
        sentinel_is_pidfd: see `Child`.
    """

    is_unknown = False
    sentinel_is_pidfd = True

    def __init__(self, zygote: Zygote, request: Any, folder: str, passed: Sequence[int] = ()) -> None:
        self._zygote: Zygote | None = zygote
        self._folder = folder
        self._reaping = threading.RLock()  # a handler of a signal may come in between
        super().__init__((request, passed))  # type: ignore[arg-type]

    def _launch(self, launched: Any) -> None:
        request, passed = launched
        assert self._zygote is not None, "it is not closed"
        self.pid = self._zygote.ask(_FORK, request, len(passed), self._folder, passed=passed)
        self.sentinel = calls.pidfd_open(self.pid)  # its parent has not reaped it, so the number is its own
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and readable([self.sentinel], 0 if flag == os.WNOHANG else None):
            with self._reaping:  # any thread that starts a process polls all of them
                if self.returncode is None:
                    self._reap()
        return self.returncode

    def _reap(self) -> None:
        try:
            code = None if self._zygote is None else self._zygote.ask(_REAP, self.pid)
        except OSError:
            code = None
        if self.returncode is None:
            self.is_unknown = code is None  # the zygote is gone, and with it the exit code
            self.returncode = UNKNOWN_EXIT if code is None else code

    def close(self) -> None:
        super().close()
        self._zygote = None  # which ends when nobody refers to it

    def _send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and has not been reaped
                calls.pidfd_send_signal(self.sentinel, number)


# ---- a copy of the consumer ---------------------------------------------------------------------------


def copy_of_consumer(context: Any, make: Callable[..., BaseProcess], folder: str) -> Zygote:
    """A zygote that is this process as it is now.

    Args:
        context: multiprocessing's, of start method fork.
        make: in a child, makes its process object, from what `fork_copy` was given and the descriptors that
            came with it.
        folder: of sockets, to be removed when the consumer dies: there may be no worker yet to do it.

    Raises:
        OSError: processes or descriptors are used up.
    """

    def run(request: Any, passed: list[int], sentinel: int) -> int:
        own, record = request
        return _become(make(own, *passed), record, sentinel)

    def start(its: Connection, mine: Connection) -> Child:
        arguments = its, mine, os.getpid(), run, folder
        child = Child(context.Process(target=_serve, args=arguments, daemon=False), END)
        child.start()
        return child

    return Zygote(start)


#: Attributes by which a process is known in itself: its name and number, and who its parent is. They come
#: from the object that the consumer has of it.
_RECORD = "_identity", "_name", "_parent_name", "_parent_pid"


def fork_copy(
    zygote: Zygote, process: BaseProcess, own: Any, folder: str = "", passed: Sequence[int] = ()
) -> Forked:
    """Have a copy of the consumer fork a child that becomes `process`.

    Args:
        zygote: the copy.
        process: as the consumer knows it.
        own: what the process is made from there.
        folder: of its socket, to be removed when the consumer dies.
        passed: descriptors for it.

    Raises:
        OSError: it could not be forked.
    """
    record = {name: vars(process)[name] for name in _RECORD}
    return Forked(zygote, (own, record), folder, passed)


def _become(process: BaseProcess, record: dict[str, Any], sentinel: int) -> int:
    """In a child: go on as a process of multiprocessing's; its exit code."""
    vars(process).update(record)
    code: int = process._bootstrap(parent_sentinel=sentinel)  # type: ignore[attr-defined]
    return code


# ---- a fresh interpreter --------------------------------------------------------------------------------

#: Those that are in use, by the surroundings in which each was started, and by process.
_interpreters: weakref.WeakValueDictionary[Any, Zygote] = weakref.WeakValueDictionary()
_starting = threading.RLock()


def _forget() -> None:
    global _interpreters, _starting
    _interpreters, _starting = weakref.WeakValueDictionary(), threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def interpreter(method: str) -> Zygote:
    """A zygote that is a fresh interpreter, started now or by another loader in the same surroundings.

    Args:
        method: "spawn", or "forkserver", whose zygote is kept in whatever surroundings: torch's workers
            have those of the server, too.

    Raises:
        OSError: processes or descriptors are used up.
    """
    server: Any = forkserver._forkserver
    preload = server._preload_modules if method == "forkserver" else ()
    key = method, *preload, *(_surroundings() if method == "spawn" else ())
    with _starting:
        found = _interpreters.get(key)
        if found is None or not found.usable:
            found = _interpreters[key] = Zygote(lambda its, _: _start_interpreter(its, method, list(preload)))
        return found


_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def _surroundings() -> tuple[Any, ...]:
    """Surroundings that a new program inherits, but for its folder."""
    streams = [os.fstat(descriptor) for descriptor in (0, 1, 2)]
    return (
        frozenset(os.environ.items()),
        _umask(),
        frozenset(os.sched_getaffinity(0)),
        tuple(resource.getrlimit(limit) for limit in _LIMITS),
        tuple((stream.st_dev, stream.st_ino) for stream in streams),
        os.getpriority(os.PRIO_PROCESS, 0),
        spawn.get_executable(),
    )


def _umask() -> int:
    """As the kernel shows it: os.umask() would change it. -1 if it does not."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return -1


def _start_interpreter(its: Connection, method: str, preload: list[str]) -> Child:
    # Python's server imports the user's `__main__` from 3.12.8, 3.13.1 and 3.14 on.
    imports_main = "init_main_from_path" in forkserver.ForkServer.ensure_running.__code__.co_consts
    main = _preparation().get("init_main_from_path") if imports_main else None
    arguments = its.fileno(), os.getpid(), method, preload, main
    process = contexts.SpawnProcess(target=_serve_afresh, args=arguments, name="fastq_loader: zygote")
    child = Child(process, END, lambda process: _Interpreter(process, its.fileno()))
    resource_tracker.ensure_running()  # which lets signals through that are kept out here
    with without_signals(*KEPT_OUT):  # until it has handlers
        child.start()
    return child


class Moment:
    """A folder, `sys.path` and arguments as they are when this is made: those of the workers of a pool,
    which may start much later. To be closed.

    Attributes:
        prepared: what multiprocessing prepares a child with, but for its name.
        cwd: a descriptor of the folder, which may have another name by then.
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
    """multiprocessing's handle of a child that is a fresh interpreter, for one that does not import
    `__main__`."""

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


def fork_interpreter(zygote: Zygote, process: BaseProcess, setup: Setup, moment: Moment) -> Forked:
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
    """In a child of an interpreter: what multiprocessing's fork server does in its children."""
    import numpy as np
    import torch

    from fastq_loader.workers.main import prepare_signals

    cwd, written, *descriptors = passed
    os.fchdir(cwd)
    os.close(cwd)
    prepare_signals(grace)
    # New in each worker, as if it had imported these itself: the user's modules may draw before it is seeded.
    np.random.seed()
    torch.default_generator.seed()
    payload.receive_process(descriptors)
    code: int = spawn._main(written, sentinel)
    if method == "spawn":  # a program has exit handlers; a child of a fork server has none before Python 3.13
        atexit._run_exitfuncs()
    return code


# ---- in the zygote -------------------------------------------------------------------------------


def _serve_afresh(connection: int, consumer: int, method: str, preload: list[str], main: str | None) -> None:
    """Entry point of an interpreter."""
    import fastq_loader.workers.main  # noqa: F401 - and with it torch

    # As `multiprocessing.forkserver.main` does.
    if main is not None and "__main__" in preload:
        multiprocessing.current_process()._inheriting = True  # type: ignore[attr-defined]
        try:
            spawn.import_main_path(main)
        finally:
            del multiprocessing.current_process()._inheriting  # type: ignore[attr-defined]
    for module in preload:
        with contextlib.suppress(ImportError):
            __import__(module)
    gc.collect()
    served = Connection(connection)
    served.send((0, None))  # it is up: no answer, and passed over where one is due
    _serve(served, None, consumer, partial(_become_pickled, method), "")


def _serve(connection: Connection, others: Connection | None, consumer: int, run: Run, folder: str) -> None:
    """Fork workers until the consumer, whose end `others` is, says that it needs no more, or dies."""
    if others is not None:
        others.close()
    # A collector that looked at what was inherited or imported would copy every page of it.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers set handlers of their own
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, KEPT_OUT)
    # A handler of the consumer's is not for here, and where it is ignored exit codes are lost.
    inherited = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children: dict[int, str] = {}  # process id → the folder of its socket
    with contextlib.suppress(EOFError, ConnectionError, ProcessLookupError):  # the consumer is gone
        death = calls.pidfd_open(consumer)
        while death not in readable([connection.fileno(), death], None):
            number, kind, *arguments = connection.recv()
            if kind == _QUIT:
                os._exit(0)
            answer: Any = None
            try:
                if kind == _FORK:
                    request, passed, folder = arguments
                    descriptors = [calls.receive_descriptor(connection.fileno()) for _ in range(passed)]
                    answer = _fork(partial(run, request, descriptors, death), inherited)
                    children[answer] = folder
                    for descriptor in descriptors:
                        os.close(descriptor)
                elif kind == _REAP:
                    (pid,) = arguments
                    # A ChildProcessError where it was reaped and an interrupt lost the answer.
                    answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    children.pop(pid, None)
            except OSError as error:
                answer = error
            connection.send((number, answer))
        # One that is still at its imports would not see for some time that the consumer is gone.
        for pid in children:
            os.kill(pid, signal.SIGKILL)
    for each in {folder, *children.values()} - {""}:
        remove_folder(each)
    os._exit(0)


def _fork(run: Callable[[], int], handler: Any) -> int:
    """Fork a child, which has the consumer's handler of SIGCHLD; its process id."""
    with without_signals(*KEPT_OUT):  # until it has handlers
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if handler is not None:  # else it was not set from Python
                    signal.signal(signal.SIGCHLD, handler)
                code = run()
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                util._flush_std_streams()  # type: ignore[attr-defined]
                os._exit(code)
    return pid
