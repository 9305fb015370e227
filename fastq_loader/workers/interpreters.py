"""Starts fresh interpreters as zygotes, and forks workers from them.

Runs in the consumer, on any thread; `_interpreter_main` runs in an interpreter, and `_run_pickled_process` in
the children that it has just forked. An interpreter serves all loaders of a process that use its start
method, and ends when no pool and no open loader references it any more. If the consumer
dies while an interpreter is still importing, the kernel kills the interpreter, which prints nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Hashable
from functools import partial
from multiprocessing import context as contexts
from multiprocessing import popen_fork, resource_tracker, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.packing import pickling
from fastq_loader.system import inherited, multiprocessing_names, process_id
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers import payload
from fastq_loader.workers.children import BLOCKED, Child
from fastq_loader.workers.config import Setup
from fastq_loader.workers.zygote import Forked, Zygote, serve

#: The interpreters of this process, by start method and rights.
_running: weakref.WeakValueDictionary[Hashable, Zygote] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def interpreter(method: str) -> Zygote:
    """Return the interpreter of this process for a start method, "spawn" or "forkserver"; start it if there
    is none with the rights that this process has now. It lives as long as somebody references it.

    Raises:
        OSError: processes or descriptors are used up.
    """
    key = method, inherited.rights()
    with _lock:
        zygote = _running.get(key)
        if zygote is None or zygote.has_ended:
            resource_tracker.ensure_running()  # before signals are blocked: it unblocks them
            mask = {*signal.pthread_sigmask(signal.SIG_BLOCK, ()), *BLOCKED}  # until it has its handlers
            with without_signals():  # an interrupt would leave a child that nobody has
                zygote = _running[key] = Zygote(partial(_start_interpreter, method, mask))
    return zygote


def _forget() -> None:
    """In a forked child, close the connections to the parent's interpreters, so that these notice the end of
    the parent at once."""
    global _lock
    _lock = threading.RLock()
    for zygote in _running.values():
        zygote.forget()
    _running.clear()


process_id.in_forked_children(_forget)


def _start_interpreter(method: str, mask: set[int], connection: Connection) -> Child:
    preload = multiprocessing_names.preloaded() if method == "forkserver" else []
    # Python's fork server imports the user's `__main__` from 3.12.8, 3.13.1 and 3.14 on.
    imports_main = (3, 12, 8) <= sys.version_info < (3, 13) or sys.version_info >= (3, 13, 1)
    main = _preparation().get("init_main_from_path") if imports_main else None
    arguments = connection.fileno(), os.getpid(), method, mask, preload, main
    make = partial(contexts.SpawnProcess, target=_interpreter_main, args=arguments)
    process = multiprocessing_names.unnumbered(partial(make, name="fastq_loader: zygote"))
    child = Child(process, signal.SIGKILL, lambda process: _InterpreterPopen(process, connection.fileno()))
    child.start()
    # While the child imports, it cannot watch the consumer. So the kernel kills it if the other end closes.
    with contextlib.suppress(OSError):  # a sandbox forbids it, or the child has ended
        fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(connection, fcntl.F_SETOWN, child.pid)
        fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    return child


class LaunchEnvironment:
    """The surroundings of this process at this moment, for workers that may start much later. Must be closed.

    Attributes:
        prepared: multiprocessing's preparation data for a child, without its name: `sys.path`, `sys.argv`, …
        inherited: what a child of start method spawn inherits; None under forkserver, where torch's workers
            inherit from the server, whatever has changed since.
        cwd: descriptor of the working directory, which is valid even if the directory is renamed.
    """

    def __init__(self, method: str) -> None:
        self.prepared = _preparation()
        self.inherited = inherited.now() if method == "spawn" else None
        self.cwd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        cwd, self.cwd = self.cwd, -1
        if cwd >= 0:
            os.close(cwd)


def _preparation() -> dict[str, Any]:
    prepared = spawn.get_preparation_data("")
    prepared["sys_argv"] = list(prepared["sys_argv"])
    unwanted = ("dir", "init_main_from_path") if pickling.is_interactive() else ("dir",)
    return {key: value for key, value in prepared.items() if key not in unwanted}


class _InterpreterPopen(popen_fork.Popen):
    """Popen of multiprocessing for a child that is a fresh interpreter, and does not import `__main__`."""

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


def fork_interpreter(
    zygote: Zygote, environment: LaunchEnvironment, setup: Setup, process: BaseProcess
) -> Forked:
    """Fork a child of an interpreter. The child runs `process` in the given environment.

    Raises:
        TypeError, AttributeError, PicklingError: the process cannot be pickled.
        OSError: it could not be forked.
    """
    written, descriptors = payload.write_process({**environment.prepared, "name": process.name}, process)
    streams = _open_streams() if environment.inherited is not None else []
    request = setup.plan.grace, environment.inherited, streams
    try:
        return Forked(zygote, request, [environment.cwd, written, *streams, *descriptors])
    finally:
        payload.close_all([written, *descriptors])


def _open_streams() -> list[int]:
    """The open descriptors among 0 to 2."""
    streams = []
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.fstat(descriptor)
            streams.append(descriptor)
    return streams


def _run_pickled_process(method: str, request: Any, passed: list[int], sentinel: int) -> int:
    """In a child of an interpreter, run a pickled process, as multiprocessing's fork server does. Return the
    exit code."""
    import numpy as np
    import torch

    from fastq_loader.workers.main import prepare_signals

    grace, state, streams = request
    cwd, written, *others = passed
    descriptors = others[len(streams) :]
    os.fchdir(cwd)
    os.close(cwd)
    for stream, descriptor in zip(streams, others, strict=False):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    if state is not None:
        inherited.apply(state)
    prepare_signals(grace)
    # Seed both as a fresh import would: the user's modules may draw before the worker is seeded.
    np.random.seed()
    torch.default_generator.seed()
    payload.receive_process(descriptors)
    code = multiprocessing_names.become_pickled(written, sentinel)
    if method == "spawn":  # under forkserver, children run no exit handlers before Python 3.13
        atexit._run_exitfuncs()
    return code


# ---- in the interpreter ---------------------------------------------------------------------------------


def _interpreter_main(
    connection: int, consumer: int, method: str, mask: set[int], preload: list[str], main: str | None
) -> None:
    """Entry point of an interpreter."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    import fastq_loader.workers.main  # noqa: F401 - imports torch, too

    # As `multiprocessing.forkserver.main` does.
    if main is not None and "__main__" in preload:
        with multiprocessing_names.importing_main():
            spawn.import_main_path(main)
    for module in preload:
        with contextlib.suppress(ImportError):
            __import__(module)
    gc.collect()
    multiprocessing_names.forget_exit_handlers()
    served = Connection(connection)
    fcntl.fcntl(served, fcntl.F_SETFL, fcntl.fcntl(served, fcntl.F_GETFL) & ~os.O_ASYNC)
    with contextlib.suppress(ConnectionError):  # the consumer is gone, as `serve` sees
        served.send((0, None))  # ends `wait`; `ask` skips it, because no request has number 0
    serve(served, consumer, partial(_run_pickled_process, method))
