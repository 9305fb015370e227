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
import os
import resource
import subprocess
from collections.abc import Callable
from multiprocessing import context, popen_fork, popen_forkserver, popen_spawn_posix, spawn, util
from types import FunctionType, SimpleNamespace
from typing import Any

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class Surroundings:
    """What a process that is started now would get. To be closed."""

    def __init__(self) -> None:
        self._preparation = spawn.get_preparation_data("")
        self._preparation["sys_argv"] = list(self._preparation["sys_argv"])
        self._executable = spawn.get_executable()
        self._environment = dict(os.environ)
        self._umask = _umask()
        self._cpus = os.sched_getaffinity(0)
        self._priority = os.getpriority(os.PRIO_PROCESS, 0)
        self._limits = [(limit, resource.getrlimit(limit)) for limit in _LIMITS]
        # The folder itself: it may have another name by then.
        self._folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        folder, self._folder = self._folder, -1
        if folder >= 0:
            os.close(folder)

    def preparation(self, name: str) -> dict[str, Any]:
        """What multiprocessing tells a new process before anything else."""
        return {**self._preparation, "name": name}

    def preparation_in_folder(self, name: str) -> dict[str, Any]:
        """The same for a process that is in the right folder already, if there is a /proc."""
        known = "dir" if self._cwd else None
        return {key: value for key, value in self.preparation(name).items() if key != known}

    @property
    def _cwd(self) -> str | None:
        """The folder as the child finds it, which still has the descriptor."""
        path = f"/proc/self/fd/{self._folder}"
        return path if os.path.isdir(path) else None

    def run(self, _: Any, command: list[Any], descriptors: list[int]) -> int:
        """Start a program with these descriptors, and all else as it was then; its process id. Takes the
        place of `multiprocessing.util.spawnv_passfds`."""
        process = subprocess.Popen(
            [self._executable, *command[1:]],
            env=self._environment,
            cwd=self._cwd,
            umask=self._umask,
            pass_fds=descriptors,
            restore_signals=False,
        )
        process.returncode = 0  # it is multiprocessing's to wait for
        # It waits for what it is told, so no code of anybody's has run in it yet.
        with contextlib.suppress(OSError):  # a priority may not be taken back
            os.setpriority(os.PRIO_PROCESS, process.pid, self._priority)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(process.pid, self._cpus)
        for limit, values in self._limits:
            with contextlib.suppress(OSError, ValueError):  # nor a limit
                resource.prlimit(process.pid, limit, values)
        return process.pid


def _umask() -> int:
    """As the kernel shows it: os.umask() would change it. -1, which changes nothing, if it does not."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return -1


#: multiprocessing's ways to start a process, by what its process classes call.
_WAYS: dict[Callable[..., Any], type[popen_fork.Popen]] = {
    context.SpawnProcess._Popen: popen_spawn_posix.Popen,
    context.ForkServerProcess._Popen: popen_forkserver.Popen,
}


class LateStart:
    """Starts processes as if it were the moment in which this was made. To be closed.

    Args:
        process: the class of a context's processes.
    """

    def __init__(self, process: Any) -> None:
        self._surroundings = surroundings = Surroundings()
        way = _way(_WAYS[process._Popen], surroundings)

        class Late(process):  # type: ignore[misc]
            # The name that BaseProcess calls.
            @staticmethod
            def _Popen(itself: Any) -> popen_fork.Popen:
                # What arrives is one of the context's own: this class is known here only.
                plain = process.__new__(process)
                vars(plain).update(vars(itself))
                return way(plain)

        Late.__name__ = process.__name__  # it is part of a process's repr()
        self.process = Late

    @classmethod
    def of(cls, process: Any) -> LateStart | None:
        """None for processes that have a way of their own to start."""
        return cls(process) if process._Popen in _WAYS else None

    def close(self) -> None:
        self._surroundings.close()


def _way(popen: Any, surroundings: Surroundings) -> type[popen_fork.Popen]:
    """multiprocessing's own way to start a process, with these surroundings in place of today's.

    Its code runs with other names for the two functions that read them; nobody else's is touched.
    """
    spawned = popen is popen_spawn_posix.Popen
    preparation = surroundings.preparation_in_folder if spawned else surroundings.preparation
    names = {
        "spawn": SimpleNamespace(**{**vars(spawn), "get_preparation_data": preparation}),
        "util": SimpleNamespace(**{**vars(util), "spawnv_passfds": surroundings.run}),
    }
    launch = popen._launch
    named = FunctionType(launch.__code__, {**launch.__globals__, **names}, launch.__name__)
    return type(popen.__name__, (popen,), {"_launch": named})
