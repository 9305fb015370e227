"""What starts the stand-ins of a pool: a small program that has imported all that they need, and forks them.

`Gateway` runs in the consumer, the program (`stand_in.serve`) in a process of its own. It imports neither
torch nor Ray, and has one thread and no context of zmq, so its forks are cheap and safe. A stand-in so costs
milliseconds, and the few pages that it changes. When the gateway has died, stand-ins that run go on. New ones
are then programs of their own, as they are where the system has no process descriptors.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import popen_fork, util
from multiprocessing.connection import Connection

import fastq_loader
from fastq_loader.system import calls
from fastq_loader.system.interrupts import without_signals
from fastq_loader.workers.backend import cores
from fastq_loader.workers.children import LaunchedProcess
from fastq_loader.workers.starting import Surroundings
from fastq_loader.workers.zygote import Ended, Forked, Zygote

#: Seconds that the program has for its imports; they may come over a network.
_IMPORTS = 60.0
#: Stand-ins that are forked at once. They connect to hosts at once, and a host that forks a worker lets the
#: others wait.
_AT_ONCE = 16

#: The package itself imports torch, and a stand-in needs none of it: a bare module takes its place. Threads
#: of a library for matrices would be lost in a fork.
_CODE = """
import os, sys, types
os.environ["OPENBLAS_NUM_THREADS"] = "1"
package = sys.modules["fastq_loader"] = types.ModuleType("fastq_loader")
package.__path__ = [sys.argv[1]]
sys.path[:] = sys.argv[2:]
from fastq_loader.remote import stand_in
"""


class Gateway:
    """The consumer's end. To be closed.

    Args:
        shared: descriptors that each stand-in has under the same numbers.
        folder: where the first of them bind their sockets.
    """

    def __init__(self, shared: Sequence[int], folder: str) -> None:
        self._shared = shared
        self._folder = folder
        self._surroundings = Surroundings()
        self._zygote: Zygote | None = None

    def open(self) -> None:
        """Start the program; it gets to its imports while others do other things.

        Raises:
            OSError: processes or descriptors are used up.
        """
        if calls.has_pidfd():
            with without_signals(signal.SIGINT):  # until it ignores them
                self._zygote = Zygote(self._make, _IMPORTS)

    @property
    def at_once(self) -> int:
        """How many stand-ins to start before one of them is up."""
        return cores() if self._zygote is None else _AT_ONCE

    def start(self) -> tuple[popen_fork.Popen, Connection]:
        """Start a stand-in.

        Returns:
            Its process, and this end of the pipe to it.

        Raises:
            OSError: processes or descriptors are used up.
        """
        if self._zygote is not None:
            try:
                return _with_pipe(partial(self._fork, self._zygote))
            except (Ended, ProcessLookupError):
                self._end()
        return _with_pipe(lambda its: self._program(its, f"main(stand_in.Pipe({its}))"))

    def close(self) -> None:
        """All stand-ins have ended."""
        self._end()
        self._surroundings.close()

    def forget(self) -> None:
        """This process is a forked copy: the program is its sibling."""
        if self._zygote is not None:
            self._zygote.forget()

    def _end(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()

    def _make(self, its: Connection, _: Connection) -> LaunchedProcess:
        call = f"serve(stand_in.Pipe({its.fileno()}), {os.getpid()}, {self._folder!r})"
        return LaunchedProcess(partial(self._program, its.fileno(), call))

    def _fork(self, zygote: Zygote, its: int) -> Forked:
        return Forked(zygote, passed=[its])

    def _program(self, its: int, call: str) -> Program:
        """A program that has an end of a pipe, and makes one call of `stand_in`."""
        path = self._surroundings.preparation("")["sys_path"]
        command = ["", "-c", f"{_CODE}stand_in.{call}", fastq_loader.__path__[0], *path]
        return Program(lambda kept: self._surroundings.run(None, command, [its, *self._shared, kept]))


def _with_pipe(start: Callable[[int], popen_fork.Popen]) -> tuple[popen_fork.Popen, Connection]:
    """Start a process with one end of a new pipe, and keep the other."""
    mine, its = multiprocessing.Pipe()
    with its:
        try:
            return start(its.fileno()), mine
        except BaseException:
            mine.close()
            raise


class Program(popen_fork.Popen):
    """What multiprocessing has of a child process, for a program.

    Args:
        run: starts it, with a descriptor that it keeps open, and returns its process id.
    """

    method = "exec"

    def __init__(self, run: Callable[[int], int]) -> None:
        self._run = run
        super().__init__(None)  # type: ignore[arg-type]

    def _launch(self, _: object) -> None:
        self.sentinel, kept = os.pipe()
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))
        try:
            self.pid = self._run(kept)
        finally:
            os.close(kept)
            del self._run
