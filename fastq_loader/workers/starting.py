"""How a worker starts late as if it had started at `iter()`.

Runs in the consumer. Under spawn and forkserver some workers start when the first batches have long been
handed out, and so do those that take the place of dead ones. A script may have changed into another folder
since, set variables for its own children, extended `sys.path`. What a new process gets of all that is taken
down when the pool starts (`Surroundings`), and the late ones are started with it. The consumer's own folder,
environment and umask are never touched, not even for a moment: other threads run.

Under spawn that is what a program inherits. Under forkserver it is what multiprocessing hands over: a child
of the server has the server's environment, in torch as well.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import subprocess
from collections.abc import Callable
from multiprocessing import (
    context,
    forkserver,
    popen_fork,
    popen_forkserver,
    popen_spawn_posix,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.context import set_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import dump
from typing import Any

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class Surroundings:
    """What a process that is started now would get. To be closed."""

    def __init__(self) -> None:
        self._preparation = spawn.get_preparation_data("")
        self._preparation["sys_argv"] = list(self._preparation["sys_argv"])
        self._executable = spawn.get_executable()
        self._environment = dict(os.environ)
        status = _status()
        self._umask = int(status.get("Umask", "-1"), 8)
        # Not by os.sched_getaffinity(), which says how many may start at once, and may be told otherwise.
        self._cpus = _numbers(status.get("Cpus_allowed_list", ""))
        self._priority = os.getpriority(os.PRIO_PROCESS, 0)
        self._limits = [(limit, resource.getrlimit(limit)) for limit in _LIMITS]
        # The folder itself: it may have another name by then.
        self._folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        folder, self._folder = self._folder, -1
        if folder >= 0:
            os.close(folder)

    def preparation(self, name: str, with_folder: bool) -> dict[str, Any]:
        """What multiprocessing tells a new process before anything else; the folder to change to, too."""
        data: dict[str, Any] = {**self._preparation, "name": name}
        if not with_folder:
            del data["dir"]
        return data

    def run(self, command: list[Any], descriptors: list[int]) -> int:
        """Start a program with these descriptors, and all else as it was then; its process id."""
        process = subprocess.Popen(
            [self._executable, *command[1:]],
            env=self._environment,
            cwd=f"/proc/self/fd/{self._folder}",  # looked up in the child, which still has it
            umask=self._umask,
            pass_fds=descriptors,
            restore_signals=False,
        )
        process.returncode = 0  # it is multiprocessing's to wait for
        # It waits for what it is told, so no code of anybody's has run in it yet.
        with contextlib.suppress(OSError):  # a priority may not be taken back
            os.setpriority(os.PRIO_PROCESS, process.pid, self._priority)
        with contextlib.suppress(OSError):
            if self._cpus:
                os.sched_setaffinity(process.pid, self._cpus)
        for limit, values in self._limits:
            with contextlib.suppress(OSError, ValueError):  # nor a limit
                resource.prlimit(process.pid, limit, values)
        return process.pid


def _status() -> dict[str, str]:
    """What the kernel says about this thread: its umask can be read nowhere else without changing it."""
    try:
        with open("/proc/thread-self/status") as file:
            pairs = [line.split(":", 1) for line in file]
    except OSError:
        return {}
    return {name: value.strip() for name, value in pairs}


def _numbers(text: str) -> set[int]:
    """Those of a list like 0-3,8."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


class _Spawned(popen_spawn_posix.Popen):
    """multiprocessing's, but for what the program inherits (multiprocessing/popen_spawn_posix.py)."""

    _fds: list[int]

    def __init__(self, process: BaseProcess, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        super().__init__(process)

    def _launch(self, process_obj: Any) -> None:
        tracker = resource_tracker.getfd()
        assert tracker is not None, "it was started"
        self._fds.append(tracker)
        data = _pickled(self, self._surroundings.preparation(process_obj.name, False), process_obj)
        ends: list[int] = []
        try:
            self.sentinel, child_w = _pipe(ends)
            child_r, parent_w = _pipe(ends)
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_r)
            self.pid = self._surroundings.run(command, [*self._fds, child_r, child_w])
            ends.remove(self.sentinel)
            ends.remove(parent_w)
            self.finalizer = util.Finalize(self, _close_all, (self.sentinel, parent_w))
            with open(parent_w, "wb", closefd=False) as file:
                file.write(data)
        finally:
            _close_all(*ends)


class _Served(popen_forkserver.Popen):
    """The same for children of the fork server (multiprocessing/popen_forkserver.py)."""

    _fds: list[int]

    def __init__(self, process: BaseProcess, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        super().__init__(process)

    def _launch(self, process_obj: Any) -> None:
        data = _pickled(self, self._surroundings.preparation(process_obj.name, True), process_obj)
        self.sentinel, write_end = forkserver.connect_to_new_process(self._fds)
        # The child takes the consumer for dead when the last copy of its end is closed.
        self.finalizer = util.Finalize(self, _close_all, (os.dup(write_end), self.sentinel))
        with open(write_end, "wb", closefd=True) as file:
            file.write(data)
        self.pid = forkserver.read_signed(self.sentinel)


_WAYS: dict[Any, Callable[[Any, Surroundings], popen_fork.Popen]] = {
    context.SpawnProcess._Popen: _Spawned,
    context.ForkServerProcess._Popen: _Served,
}


class LateStart:
    """Starts processes as if it were the moment in which this was made. To be closed.

    Args:
        process: the class of a context's processes.
    """

    def __init__(self, process: Any) -> None:
        self._surroundings = surroundings = Surroundings()
        way = _WAYS[process._Popen]

        class Late(process):  # type: ignore[misc]
            # The name that BaseProcess calls.
            def _Popen(self, itself: Any) -> popen_fork.Popen:
                # What arrives is one of the context's own: this class is known here only.
                plain = process.__new__(process)
                vars(plain).update(vars(itself))
                return way(plain, surroundings)

        Late.__name__ = process.__name__  # it is part of a process's repr()
        self.process = Late

    @classmethod
    def of(cls, process: Any) -> LateStart | None:
        """None for processes that have a way of their own to start."""
        return cls(process) if process._Popen in _WAYS else None

    def close(self) -> None:
        self._surroundings.close()


def _pickled(popen: Any, *things: Any) -> memoryview:
    file = io.BytesIO()
    set_spawning_popen(popen)
    try:
        for thing in things:
            dump(thing, file)
    finally:
        set_spawning_popen(None)
    return file.getbuffer()


def _pipe(ends: list[int]) -> tuple[int, int]:
    pair = os.pipe()
    ends.extend(pair)
    return pair


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
