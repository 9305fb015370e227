"""A child process: how it is started, when it has ended, how it died, and its stacks.

Runs in the consumer, but for `leave_with` and `write_stacks`, which run in a worker. Where SIGCHLD is
ignored, as daemons have it, the system reaps children by itself, or other code does; multiprocessing takes a
child whose exit code it cannot get for one that still runs. Only a descriptor says when it has ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import popen_fork
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.ipc.endpoints import remove_folder
from fastq_loader.system import calls
from fastq_loader.system.calls import readable
from fastq_loader.system.interrupts import without_signals

#: The exit code of a process that could not be asked for its own (multiprocessing's number for that).
UNKNOWN_EXIT = 255

#: Starts a process.
Launch = Callable[[BaseProcess], popen_fork.Popen]

#: Ends a process of ours that outlives SIGTERM: a real-time signal, which nobody else sends, with the default
#: action.
END = getattr(signal, "SIGRTMIN", 34) + 8

#: Would print a traceback in a worker, or end it, before it has handlers.
KEPT_OUT = signal.SIGINT, signal.SIGTERM


class Child:
    """A process, and a descriptor that becomes readable when it has ended.

    Args:
        process: not started yet.
        ended_by: the signal that its `terminate` sends.
        launch: starts it in another way than its own.
    """

    def __init__(
        self, process: BaseProcess, ended_by: int = signal.SIGTERM, launch: Launch | None = None
    ) -> None:
        self.process = process
        self._ended_by = ended_by
        self._launch: Launch = launch or type(process)._Popen  # type: ignore[attr-defined]
        self._descriptor = -1

    def start(self) -> None:
        """
        Raises:
            OSError: processes or descriptors are used up.
            Exception: what the start method pickles cannot be pickled.
        """
        _started.add(self.process)
        vars(self.process)["_Popen"] = self._launched
        self.process.start()
        if not self._has_pidfd:
            with contextlib.suppress(OSError):  # no pidfd in this kernel or sandbox
                self._descriptor = calls.pidfd_open(self.pid)

    def disown(self) -> None:
        """It ends by itself: multiprocessing is not to join it when this process exits."""
        _not_ours([self.process])

    def _launched(self, process: Any) -> Any:
        """In the place of `BaseProcess._Popen`: before multiprocessing knows the child, which it ends itself
        when the program exits, its `terminate` is ours. An interrupt may come at any time."""
        del vars(process)["_Popen"]  # what is pickled for a child that is spawned does not have it
        popen: Any = self._launch(process)
        del self._launch  # it may refer to the pool
        vars(popen)["terminate"] = partial(popen._send_signal, self._ended_by)
        return popen

    @property
    def pid(self) -> int:
        """0 until it is started."""
        return self.process.pid or 0

    @property
    def _has_pidfd(self) -> bool:
        """Whether its sentinel is one. That of multiprocessing's own children is a pipe."""
        return getattr(self.process._popen, "sentinel_is_pidfd", False)  # type: ignore[attr-defined]

    @property
    def descriptor(self) -> int:
        """A pidfd. Else there is none, or an interrupt came before it was noted, and a thread waits for the
        child; it starts at the first use, when workers that are forked together have been. A child of a fork
        server is not ours to wait for: it has a pipe of multiprocessing's, which no other process holds."""
        if self._descriptor < 0 and not self._has_pidfd:
            # What a handler raises in the middle of `Thread.start` would come out as another error.
            with without_signals(), contextlib.suppress(OSError, RuntimeError):  # they are used up
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
        if code is None:  # other code reaped it: SIGCHLD is ignored; or its parent, the zygote, is gone
            return "ended, its exit code is unknown", f"{worker} exited unexpectedly"
        if code >= 0:
            return f"exited with code {code}", (
                f"{worker} exited unexpectedly with exit code {code}. Details are lost due to "
                "multiprocessing. Rerunning with num_workers=0 may give better error trace."
            )
        if -code == END:
            return "was ended by terminate()", f"{worker} is killed by signal: Terminated. "
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        guess = " (by the kernel's out-of-memory killer?)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{guess}", f"{worker} is killed by signal: {signal.strsignal(-code)}. "

    def _exit_code(self) -> int | None:
        self.process.join()  # with a timeout, multiprocessing waits for all who hold the child's pipe
        popen = self.process._popen  # type: ignore[attr-defined]
        return None if getattr(popen, "is_unknown", False) else self.process.exitcode

    def release(self) -> None:
        """Close what is held here for a process that has ended, or was never started. Not by its own close():
        code outside may still ask it for its number and its exit code."""
        popen: Any = self.process._popen  # type: ignore[attr-defined]
        if popen is not None:
            self.process.join()
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)
            if popen.returncode is None:  # other code reaped it: SIGCHLD is ignored
                popen.returncode = UNKNOWN_EXIT
            popen.close()
        _not_ours([self.process])


def _not_ours(processes: Iterable[BaseProcess]) -> None:
    """multiprocessing is not to end and to join them when this process exits."""
    multiprocessing.process._children.difference_update(processes)  # type: ignore[attr-defined]


_started: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


if hasattr(os, "register_at_fork"):
    # A child of the user's own os.fork() is no parent of our processes. multiprocessing does not know that.
    os.register_at_fork(after_in_child=lambda: _not_ours(_started))


def _end_of(pid: int) -> int:
    """A descriptor that becomes readable when a child of this process has ended. Not a pipe that the child
    holds: its own children would hold it too.

    Raises:
        OSError: descriptors are used up, or the child is not this process's.
        RuntimeError: threads are used up.
    """
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    ended, tell = multiprocessing.connection.Pipe(duplex=False)  # closed when they are dropped
    threading.Thread(target=_wait_for, args=(pid, tell), daemon=True).start()
    return os.dup(ended.fileno())


def _wait_for(pid: int, tell: Connection) -> None:
    """In a thread: write to a pipe when a child has ended; its exit code stays there to be asked for."""
    with contextlib.suppress(ChildProcessError):  # other code reaped it
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(BrokenPipeError):  # it is not needed any more
        tell.send_bytes(b"!")


def leave_with(consumer: int, folder: str = "", with_group: bool = False) -> None:
    """In a child: leave when the consumer dies, however it dies and whatever this process is doing.

    Args:
        consumer: its process id.
        folder: of sockets, to be removed then.
        with_group: end all of this process's group.
    """
    arguments = consumer, folder, with_group, os.getppid()
    threading.Thread(target=_leave_with, args=arguments, daemon=True).start()


def _leave_with(consumer: int, folder: str, with_group: bool, parent: int) -> None:
    known = multiprocessing.parent_process()
    try:
        with contextlib.suppress(ProcessLookupError):  # it is gone
            calls.readable([calls.pidfd_open(consumer)], None)
    except OSError:  # no pidfd in this kernel or sandbox: the pipe that multiprocessing keeps
        if known is not None:
            calls.readable([known.sentinel], None)
        while known is None and os.getppid() == parent:
            time.sleep(0.1)
    if folder:
        remove_folder(folder)
    if with_group:
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


# ---- stacks -----------------------------------------------------------------------------------------

#: A real-time signal, because user code has uses of its own for the named ones.
_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 7
#: Seconds that a worker has to begin with its stacks, and between two lines of them.
_FIRST_LINE, _NEXT_LINE = 0.3, 0.02


def write_stacks(descriptor: int) -> None:
    """In a worker: write the stacks of all threads to `descriptor` whenever the consumer asks."""
    faulthandler.register(_SIGNAL, descriptor, all_threads=True)


class Stacks:
    """The Python stacks of workers that hang: a worker writes them to a pipe when a signal tells it to. All
    workers of a pool write to one pipe. faulthandler's C code writes, whatever the interpreter is doing.

    Attributes:
        write_end: for the workers.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def of(self, pid: int) -> str:
        """The stacks of a worker as they are now."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)
        text, patience = b"", _FIRST_LINE
        while readable([self._read_end], patience):
            text += os.read(self._read_end, 1 << 16)
            patience = _NEXT_LINE
        return text.decode(errors="replace") or "  (it did not write them)"

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)
