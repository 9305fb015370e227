"""A child process: how it is started, when it has ended, how it died, and what is left of it then.

Runs in the consumer. Where SIGCHLD is ignored, as daemons have it, the system reaps children by itself, or
somebody else does; multiprocessing takes a child whose exit code it cannot get for one that still runs. Only
a descriptor says when it has ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import popen_fork
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.system import calls

#: The exit code of a process that nobody here could ask for its own (multiprocessing's number for that).
UNKNOWN_EXIT = 255


class LaunchedProcess(BaseProcess):
    """A process that is started in a way of its own. Whoever has it may treat it like any other.

    Args:
        launch: starts it.
    """

    def __init__(self, launch: Callable[[], popen_fork.Popen]) -> None:
        super().__init__(daemon=True)
        self.launch = launch

    # The name that BaseProcess calls.
    @staticmethod
    def _Popen(process: LaunchedProcess) -> popen_fork.Popen:
        try:
            return process.launch()
        finally:
            del process.launch  # it may refer to the pool


class Child:
    """A process, and a descriptor that becomes readable when it has ended.

    Args:
        process: not started yet.
    """

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        self._descriptor = -1

    def start(self) -> None:
        """
        Raises:
            OSError: processes or descriptors are used up.
            Exception: what the start method pickles cannot be pickled.
        """
        self.process.start()
        with contextlib.suppress(OSError):  # no pidfd in this kernel or sandbox
            self._descriptor = calls.pidfd_open(self.pid)

    @property
    def pid(self) -> int:
        """0 until it is started."""
        return self.process.pid or 0

    @property
    def descriptor(self) -> int:
        """A pidfd. Else there is none, or an interrupt came before it was noted, and a thread waits for the
        child; it starts at the first use, when workers that are forked together have been. A child of a fork
        server is not ours to wait for: it has a pipe of multiprocessing's, and nobody else holds that."""
        if self._descriptor < 0:
            with contextlib.suppress(OSError, RuntimeError):  # descriptors or threads are used up
                self._descriptor = _end_of(self.pid)
        return self.process.sentinel if self._descriptor < 0 else self._descriptor

    def kill(self) -> None:
        """End it; returns when it has ended."""
        self.process.kill()
        calls.readable([self.descriptor], None)

    @property
    def killed(self) -> bool:
        """Whether it has ended by a signal, and not by itself."""
        code = self._exit_code()
        return code is not None and code < 0

    def death(self) -> tuple[str, str]:
        """How it died: in our words, and in those of torch's SIGCHLD handler."""
        code, worker = self._exit_code(), f"DataLoader worker (pid {self.pid})"
        if code is None:  # somebody else reaped it: SIGCHLD is ignored
            return "ended, its exit code is unknown", f"{worker} exited unexpectedly"
        if code >= 0:
            return f"exited with code {code}", (
                f"{worker} exited unexpectedly with exit code {code}. Details are lost due to "
                "multiprocessing. Rerunning with num_workers=0 may give better error trace."
            )
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        guess = " (by the kernel's out-of-memory killer?)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{guess}", f"{worker} is killed by signal: {signal.strsignal(-code)}. "

    def _exit_code(self) -> int | None:
        self.process.join()  # with a timeout, multiprocessing waits for all who hold the child's pipe
        return self.process.exitcode

    def release(self) -> None:
        """Close what is held here for a process that has ended, or was never started. Not by its own close():
        code outside may still ask it for its number and its exit code."""
        popen: Any = self.process._popen  # type: ignore[attr-defined]
        if popen is not None:
            self.process.join()
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)
            if popen.returncode is None:  # somebody else reaped it: SIGCHLD is ignored
                popen.returncode = UNKNOWN_EXIT
            popen.close()
        self.forget()

    def forget(self) -> None:
        """It is not multiprocessing's to end and to join when this process exits."""
        multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]


def _end_of(pid: int) -> int:
    """A descriptor that becomes readable when a child of this process has ended. Not a pipe that the child
    holds: its own children would hold it too.

    Raises:
        OSError: descriptors are used up, or the child is somebody else's.
        RuntimeError: threads are used up.
    """
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    ended, tell = multiprocessing.connection.Pipe(duplex=False)  # closed when they are dropped
    threading.Thread(target=_wait_for, args=(pid, tell), daemon=True).start()
    return os.dup(ended.fileno())


def _wait_for(pid: int, tell: Connection) -> None:
    """In a thread: write to a pipe when a child has ended; its exit code stays there to be asked for."""
    with contextlib.suppress(ChildProcessError):  # somebody else reaped it
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
        tell.send_bytes(b"!")
