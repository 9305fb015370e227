"""Worker processes of this machine, under any of multiprocessing's start methods.

Runs in the consumer. What the workers do is none of its business.

A worker may start late: under spawn and forkserver some do when the first batches have long been handed out,
and under these so do those that take the place of dead ones. Late workers start as if they had started at
`iter()`. A script may have changed into another folder since, set variables for its own children, extended
`sys.path`. What a new process gets of all that is noted when the pool starts (`LateStart`). The consumer's
own folder, environment and umask are never touched, not even for a moment: other threads run.

Under spawn that is what a program inherits. Under forkserver it is what multiprocessing hands over: a child
of the server has the server's environment, in torch as well. The server is ours. Python's own may be up
already, started by others and without torch, and then every worker imports that for itself, which takes
seconds and 90 MB each. Of the user's modules it imports what was chosen for Python's own
(`multiprocessing.set_forkserver_preload`) and no other: workers would share files and generators that a
module has made. It ends with the consumer.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import subprocess
from collections.abc import Callable, Sequence
from multiprocessing import context as contexts
from multiprocessing import (
    forkserver,
    popen_fork,
    popen_forkserver,
    popen_spawn_posix,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from types import FunctionType, SimpleNamespace
from typing import Any

from fastq_loader.errors import warn_user
from fastq_loader.ipc.endpoints import endpoint_folder, remove_folder
from fastq_loader.packing.pickling import explain, hint, pickles
from fastq_loader.system import calls, process_id
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers.children import Child, Stacks, Zygote
from fastq_loader.workers.config import Descriptors, Plan, Setup
from fastq_loader.workers.main import main
from fastq_loader.workers.worker_pool import KEPT_OUT, WorkerPool, own_fields

_PICKLE_WARNING = (  # torch/utils/data/dataloader.py
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)


class LocalPool(WorkerPool):
    """The processes of one pool, on this machine.

    Args:
        plan: what they do.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._make: Any = None  # a process object, with the arguments of multiprocessing.Process
        self._zygote: Zygote | None = None
        self._late: LateStart | None = None  # makes the processes of workers that start late
        self._stacks: Stacks | None = None

    def _begin(self) -> None:
        """Under spawn and forkserver a worker spends seconds of a core on its imports. Eight of them on two
        cores would all be up at the end, and the first batch would wait for that; started one for each core,
        the first workers load while `start_next` brings up the others. What is pickled for each of them is
        pickled here, so that all see the dataset as it is now.
        """
        plan = self._plan
        context: Any = multiprocessing.get_context() if plan.context is None else plan.context
        method = context.get_start_method()
        self.forks = method == "fork"
        self._make = context.Process
        self._stacks = Stacks()
        self._setup = self._told(descriptors=Descriptors(stacks=self._stacks.write_end))
        if not self.forks and context.Process._Popen in _WAYS:
            self._late = LateStart(context.Process)
        elif plan.restarts and calls.has_pidfd():
            self._zygote = Zygote(context, lambda own: self._process(self._told(**own)), self._setup.folder)
        if self._late is not None:
            self._make = self._late.process
        at_once = plan.workers if self._late is None else cores()
        while self._left() and (len(self._children) < at_once or not self._plan.payload.sealed):
            self.start_next()

    def _process(self, setup: Setup) -> BaseProcess:
        if setup.generation and self._zygote is not None:  # which has none
            return self._zygote.process(own_fields(setup))
        process: BaseProcess = self._make(target=main, args=(setup,), daemon=True)
        if self._plan.context is None:  # torch's name for it, which logs show
            process.name = f"Process-{process.name.rpartition('-')[2]}"
        return process

    def _start(self, child: Child) -> None:
        try:
            child.start()
        except (TypeError, AttributeError, PicklingError) as error:
            warn_user(_PICKLE_WARNING, UserWarning)
            raise _named(error, self._plan.payload.parts) from error
        finally:
            if not self._left() and not self._plan.restarts:
                self._plan.payload.unseal()

    def stacks(self, worker: int) -> str:
        """The Python stacks of a worker as it writes them now, whatever it is doing."""
        pid = self.pid(worker)
        if self._stacks is None or not pid:  # a signal to process 0 would go to everybody
            return "  (it was not started, or is gone)"
        return self._stacks.of(pid)

    def _give_back(self) -> None:
        """All have ended."""
        held = self._zygote, self._late, self._stacks
        self._zygote = self._late = self._stacks = None
        for one in held:
            if one is not None:
                one.close()


def cores() -> int:
    """How many workers that begin with their imports are started at once."""
    return len(os.sched_getaffinity(0))


def _named(error: Exception, parts: dict[str, Any]) -> Exception:
    """The same error with the path to what cannot be pickled, if it is among the user's objects."""
    for name, part in parts.items():
        if not pickles(part):
            return type(error)(f"{explain(part, error, name)}{hint()}")
    return error


# ---- late starts ------------------------------------------------------------------------------------

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

#: multiprocessing's ways to start a process, by what its process classes call.
_WAYS: dict[Callable[..., Any], type[popen_fork.Popen]] = {
    contexts.SpawnProcess._Popen: popen_spawn_posix.Popen,
    contexts.ForkServerProcess._Popen: popen_forkserver.Popen,
}


class LateStart:
    """Starts processes as if it were the moment in which this was made. To be closed.

    Args:
        process: the class of a context's processes.
    """

    def __init__(self, process: Any) -> None:
        self._preparation = spawn.get_preparation_data("")
        self._preparation["sys_argv"] = list(self._preparation["sys_argv"])
        self._executable = spawn.get_executable()
        self._environment = dict(os.environ)
        self._umask = _umask()
        self._cpus = os.sched_getaffinity(0)
        self._limits = [(limit, resource.getrlimit(limit)) for limit in _LIMITS]
        # The folder itself: it may have another name by then.
        self._folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        way = self._way(_WAYS[process._Popen])

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

    def close(self) -> None:
        folder, self._folder = self._folder, -1
        if folder >= 0:
            os.close(folder)

    def _way(self, popen: Any) -> type[popen_fork.Popen]:
        """multiprocessing's own way to start a process, as it would have been then. Its code runs with other
        names for the two functions that read today's surroundings; theirs stay as they are."""
        spawned = popen is popen_spawn_posix.Popen

        def preparation(name: str) -> dict[str, Any]:
            # A program that is in the right folder already, if there is a /proc, need not be told.
            known = "dir" if spawned and self._cwd else None
            told = {**self._preparation, "name": name}
            return {key: value for key, value in told.items() if key != known}

        names = {
            "spawn": SimpleNamespace(**{**vars(spawn), "get_preparation_data": preparation}),
            "util": SimpleNamespace(**{**vars(util), "spawnv_passfds": self._run}),
        }
        if not spawned:
            names["forkserver"] = SimpleNamespace(**{**vars(forkserver), "connect_to_new_process": _connect})
        launch = popen._launch
        named = FunctionType(launch.__code__, {**launch.__globals__, **names}, launch.__name__)
        return type(popen.__name__, (popen,), {"_launch": named})

    @property
    def _cwd(self) -> str | None:
        """The folder as the child finds it, which still has the descriptor."""
        path = f"/proc/self/fd/{self._folder}"
        return path if os.path.isdir(path) else None

    def _run(self, _: Any, command: list[Any], descriptors: list[int]) -> int:
        """Start a program with these descriptors, and all else as it was then; its process id. Takes the
        place of `multiprocessing.util.spawnv_passfds`."""
        with without_signals(*KEPT_OUT):  # a resource tracker that was started meanwhile has let them through
            process = subprocess.Popen(
                [self._executable, *command[1:]],
                env=self._environment,
                cwd=self._cwd,
                umask=self._umask,
                pass_fds=descriptors,
                restore_signals=False,
            )
        process.returncode = 0  # it is multiprocessing's to wait for
        # It waits for what it is told, so no code but the interpreter's has run in it yet.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(process.pid, self._cpus)
        for limit, values in self._limits:
            with contextlib.suppress(OSError, ValueError):  # a limit may not be taken back
                resource.prlimit(process.pid, limit, values)
        return process.pid


def _umask() -> int:
    """As the kernel shows it: os.umask() would change it. -1, which changes nothing, if it does not."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return -1


# ---- the server that workers are forked from under forkserver -----------------------------------------


class _Server(forkserver.ForkServer):
    """Python's fork server, with torch and ours imported, and with a socket that has no name: the temporary
    folder's may be too long for one, and a cleaner of /tmp would take it from a long training.
    """

    def __init__(self) -> None:
        super().__init__()
        own: Any = forkserver._forkserver  # has the modules that the user has chosen for Python's own
        self.set_forkserver_preload([*own._preload_modules, "torch", "fastq_loader.workers.warm"])
        self.socket = -1  # a descriptor of the socket's file, which is removed

    def ensure_running(self) -> None:
        folders: list[str] = []

        def address(_: str) -> str:
            folders.append(endpoint_folder())
            return os.path.join(folders[0], "forkserver")

        theirs = super().ensure_running
        names = {**theirs.__globals__, "connection": SimpleNamespace(arbitrary_address=address)}
        try:
            FunctionType(theirs.__code__, names)(self)
            if folders:  # it was started
                if self.socket >= 0:
                    os.close(self.socket)
                self.socket = os.open(os.path.join(folders[0], "forkserver"), os.O_PATH | os.O_CLOEXEC)
                self._forkserver_address = f"/proc/self/fd/{self.socket}"
        finally:
            for folder in folders:
                remove_folder(folder)


_server: Any = None
_owner = 0  # the process that has started it: a child of it needs one of its own


def _connect(descriptors: Sequence[int]) -> tuple[int, int]:
    """What `multiprocessing.forkserver.connect_to_new_process` does, with our server."""
    global _server, _owner
    resource_tracker.ensure_running()  # which lets signals through that are kept out here
    with without_signals(*KEPT_OUT):  # of the server for good, of its children until they have handlers
        if _owner != process_id.current():
            _server, _owner = _Server(), process_id.current()
        found: tuple[int, int] = _server.connect_to_new_process(descriptors)
    return found
