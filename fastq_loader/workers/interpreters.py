"""Starts fresh interpreters as zygotes, counts the users of each, and forks workers from them.

Runs in the consumer, on any thread; `_interpreter_main` runs in an interpreter, and `_run_pickled_process` in
the children that it has just forked. An interpreter serves all loaders of a process whose workers would
inherit the same state from it (`system.inherited`). It ends when no loader and no pool uses it any more. If
the consumer dies while an interpreter is still importing, the kernel kills the interpreter, which prints
nothing.
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
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from multiprocessing import context as contexts
from multiprocessing import popen_fork, resource_tracker, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.packing import pickling
from fastq_loader.system import exits, inherited, multiprocessing_names, process_id
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers import payload
from fastq_loader.workers.children import KEPT_OUT, Child
from fastq_loader.workers.config import Setup
from fastq_loader.workers.zygote import Forked, Zygote, serve


class Interpreters:
    """The interpreters of this process, each with the number of its users: loaders, and pools.

    A lock is held while an interpreter starts or ends, so one has ended before the next one starts. The
    garbage collector and signal handlers may call `give_back` at any point, even inside of these methods. So
    it only appends to a queue; a thread that gets the lock without waiting then empties the queue.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.running: dict[Hashable, Zygote] = {}
        self._given_back: deque[Zygote] = deque()

    def take(self, key: Hashable, start: Callable[[], Zygote]) -> Zygote:
        """Add a user to the interpreter with this key, and return it; start it if none is running."""
        with self._lock:
            zygote = self.running.get(key)
            if zygote is None or not zygote.join():
                zygote = self.running[key] = start()
        self._end_unused()
        return zygote

    def give_back(self, zygote: Zygote) -> None:
        """Remove a user. An interpreter without users ends."""
        self._given_back.append(zygote)
        self._end_unused()

    def _end_unused(self) -> None:
        while self._given_back and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(IndexError):  # a finalizer has emptied it meanwhile
                    self._remove_user(self._given_back.popleft())
            finally:
                self._lock.release()

    def _remove_user(self, zygote: Zygote) -> None:
        zygote.users -= 1
        if not zygote.users:
            zygote.close()
            self.running = {key: each for key, each in self.running.items() if each is not zygote}


_interpreters = Interpreters()


def _forget() -> None:
    """In a forked child, close the connections to the parent's interpreters, so that these notice the end of
    the parent at once."""
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
        zygote: the interpreter; shared with all users whose workers would inherit the same state.

    Raises:
        OSError: processes or descriptors are used up.
    """

    def __init__(self, method: str) -> None:
        self._owner = 0
        preload = multiprocessing_names.preloaded() if method == "forkserver" else []
        # torch's workers inherit from the fork server, whatever has changed since, except dropped rights.
        rest = (inherited.rest(), spawn.get_executable()) if method == "spawn" else None
        key = method, *preload, inherited.rights(), rest
        self.zygote = _interpreters.take(key, lambda: Zygote(partial(_start_interpreter, method, preload)))
        self._owner = os.getpid()

    def close(self) -> None:
        """Give the interpreter back. A second call has no effect, nor has one in a forked child."""
        owner, self._owner = self._owner, 0
        if owner == os.getpid():
            _interpreters.give_back(self.zygote)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Loaders do not call `close`: their use ends when they are collected, or with the program.
        if not is_finalizing():
            self.close()


def _start_interpreter(method: str, preload: list[str], connection: Connection) -> Child:
    # Python's fork server imports the user's `__main__` from 3.12.8, 3.13.1 and 3.14 on.
    imports_main = (3, 12, 8) <= sys.version_info < (3, 13) or sys.version_info >= (3, 13, 1)
    main = _preparation().get("init_main_from_path") if imports_main else None
    arguments = connection.fileno(), os.getpid(), method, preload, main
    process = contexts.SpawnProcess(target=_interpreter_main, args=arguments, name="fastq_loader: zygote")
    child = Child(process, signal.SIGKILL, lambda process: _InterpreterPopen(process, connection.fileno()))
    resource_tracker.ensure_running()  # before signals are blocked: it unblocks them
    with without_signals(*KEPT_OUT):  # until the child has its handlers
        child.start()
    # While the child imports, it cannot watch the consumer. So the kernel kills it if the other end closes.
    with contextlib.suppress(OSError):  # a sandbox forbids it, or the child has ended
        fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(connection, fcntl.F_SETOWN, child.pid)
        fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    return child


class LaunchEnvironment:
    """The working directory, `sys.path` and `sys.argv` of this process at this moment, for workers that may
    start much later. Must be closed.

    Attributes:
        prepared: multiprocessing's preparation data for a child, without its name.
        cwd: descriptor of the working directory, which is valid even if the directory is renamed.
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
    try:
        return Forked(zygote, setup.plan.grace, setup.folder, [environment.cwd, written, *descriptors])
    finally:
        payload.close_all([written, *descriptors])


def _run_pickled_process(method: str, grace: float, passed: list[int], sentinel: int) -> int:
    """In a child of an interpreter, run a pickled process, as multiprocessing's fork server does. Return the
    exit code."""
    import numpy as np
    import torch

    from fastq_loader.workers.main import prepare_signals

    cwd, written, *descriptors = passed
    os.fchdir(cwd)
    os.close(cwd)
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
    connection: int, consumer: int, method: str, preload: list[str], main: str | None
) -> None:
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
    served.send((0, None))  # ends `wait`; `ask` skips it, because no request has number 0
    serve(served, consumer, partial(_run_pickled_process, method), "")
