"""The zygotes that are fresh interpreters: who uses one, and what a worker that is forked from it inherits.

Runs in the consumer, on any thread; `_serve_afresh` runs in an interpreter, and `_become_pickled` in the
children that it has just forked. An interpreter serves all loaders of a process whose workers would inherit
the same from it (`system.inherited`), and lives as long as one of them or of their pools uses it. If the
consumer dies while an interpreter is still importing, the kernel kills it, and it writes nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
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

from fastq_loader.system import exits, inherited, multiprocessing_names, process_id
from fastq_loader.system.interrupts import without_signals
from fastq_loader.system.unpatched import os
from fastq_loader.workers import payload
from fastq_loader.workers.children import END, KEPT_OUT, Child
from fastq_loader.workers.config import Setup
from fastq_loader.workers.zygote import Forked, Zygote, serve


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
            self.running = {key: each for key, each in self.running.items() if each is not zygote}


_interpreters = Interpreters()


def _forget() -> None:
    """In a forked child: they are the parent's. They notice its end at once if no child holds its end."""
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
        self.zygote = _interpreters.take(key, lambda: Zygote(partial(_start_interpreter, method, preload)))
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


def _start_interpreter(method: str, preload: list[str], its: Connection) -> Child:
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
    with contextlib.suppress(OSError):  # a sandbox refuses, or it has ended
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


def fork_interpreter(zygote: Zygote, moment: LaunchEnvironment, setup: Setup, process: BaseProcess) -> Forked:
    """Have an interpreter fork a child that becomes `process`, with the folder and paths of that moment.

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


# ---- in the interpreter ---------------------------------------------------------------------------------


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
    serve(served, consumer, partial(_become_pickled, method), "")
