"""A child process: its start, its end, its cause of death, and its stacks.

Runs in the consumer, except for `leave_with` and `write_stacks`, which run in the child. If SIGCHLD is
ignored, as in daemons, the system reaps children by itself; other code may reap them, too. multiprocessing
then cannot get a child's exit code, and takes the child for running. Only a descriptor shows that it ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import weakref
from collections.abc import Callable
from multiprocessing import popen_fork
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.system import calls, multiprocessing_names, process_id
from fastq_loader.system.calls import readable

#: The exit code of a process whose own one is unknown (multiprocessing's number for that).
UNKNOWN_EXIT = 255

#: Function that starts a process.
Launch = Callable[[BaseProcess], popen_fork.Popen]

#: Signals to block until a worker has handlers: before, they would print a traceback in it, or end it.
BLOCKED = signal.SIGINT, signal.SIGTERM


class Child:
    """A process, and a descriptor that becomes readable when it has ended.

    Args:
        process: the process object, not yet started.
        ended_by: the signal that its `terminate` sends.
        launch: starts the process, instead of the function of its class.
    """

    def __init__(
        self, process: BaseProcess, ended_by: int = signal.SIGTERM, launch: Launch | None = None
    ) -> None:
        self.process = process
        self._ended_by = ended_by
        self._launch: Launch = launch or multiprocessing_names.starter(type(process))
        self._descriptor: int | None = None

    def start(self) -> None:
        """Start the process.

        Raises:
            OSError: processes or descriptors are used up.
            Exception: the start method has to pickle something that cannot be pickled.
        """
        _started.add(self.process)
        multiprocessing_names.start_by(self.process, self._launched)
        _ = self.descriptor

    def disown(self) -> None:
        """Keep multiprocessing from joining the process when this one exits: it ends by itself."""
        multiprocessing_names.disown([self.process])

    def _launched(self, process: Any) -> Any:
        """Start the process, and set its `terminate` before multiprocessing registers the child:
        multiprocessing terminates its children when the program exits. An interrupt may come at any time."""
        popen = self._launch(process)
        del self._launch  # it may refer to the pool
        if self._ended_by == signal.SIGKILL:
            vars(popen)["terminate"] = popen.kill
        return popen

    @property
    def pid(self) -> int:
        """Process id; 0 until the process is started."""
        return self.process.pid or 0

    @property
    def descriptor(self) -> int:
        """Descriptor that becomes readable when the process has ended: a pidfd; multiprocessing's pipe if
        none could be opened, because the process was reaped already or descriptors are used up."""
        if self._descriptor is None:
            try:
                self._descriptor = calls.pidfd_open(self.pid)
            except OSError:
                self._descriptor = self.process.sentinel
        return self._descriptor

    def kill(self) -> None:
        """Kill the process, and wait until it has ended. A released one has."""
        if self._descriptor != -1:
            self.process.kill()
            calls.readable([self.descriptor], None)

    @property
    def killed(self) -> bool:
        """Whether the process was ended by a signal, and not by itself."""
        return (self._exit_code() or 0) < 0

    def death(self) -> tuple[str, str]:
        """How the process died: our text, and the text of torch's SIGCHLD handler."""
        code, worker = self._exit_code(), f"DataLoader worker (pid {self.pid})"
        if code is None:  # reaped by other code or by the system; or its parent, the zygote, has ended
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
        self.process.join()  # with a timeout it would wait for every process that holds the child's pipe
        return self.process.exitcode

    def release(self) -> None:
        """Close the descriptors of a process that has ended or was never started. Does not call the process's
        own close(): other code may still read its process id and exit code."""
        popen = multiprocessing_names.handle_of(self.process)
        if popen is not None:
            self.process.join()
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor not in (None, -1, popen.sentinel):
                os.close(descriptor)
            if popen.returncode is None:  # reaped by other code, or by the system
                popen.returncode = UNKNOWN_EXIT
            popen.close()
        self.disown()


_started: weakref.WeakSet[BaseProcess] = weakref.WeakSet()

# A child that user code forks with os.fork() is not their parent, which multiprocessing does not know.
process_id.in_forked_children(lambda: multiprocessing_names.disown(_started))


def leave_with(consumer: int, with_group: bool = False) -> None:
    """In a child: exit when the consumer dies, however it dies and whatever this process is doing.

    Args:
        consumer: process id of the consumer.
        with_group: whether to kill the whole process group of this process.
    """

    def leave() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            calls.readable([calls.pidfd_open(consumer)], None)
        if with_group:
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=leave, name="fastq_loader: leaving", daemon=True).start()


# ---- stacks -----------------------------------------------------------------------------------------

#: Signal that requests stacks: a real-time signal, because user code may use the named ones.
_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 7
#: Seconds to wait for the first line of a worker's stacks, and for each further line.
_FIRST_LINE, _NEXT_LINE = 0.3, 0.02


def write_stacks(descriptor: int) -> None:
    """In a worker: write the stacks of all threads to `descriptor` whenever the consumer asks."""
    faulthandler.register(_SIGNAL, descriptor, all_threads=True)


class Stacks:
    """The Python stacks of workers that hang. A worker writes them to a pipe when it gets a signal; all
    workers of a pool share the pipe. faulthandler's C code writes, whatever the interpreter is doing.

    Attributes:
        write_end: the end of the pipe for the workers.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def of(self, pid: int) -> str:
        """Return the current stacks of the worker with process id `pid`."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)
        text, patience = b"", _FIRST_LINE
        while readable([self._read_end], patience):
            text += os.read(self._read_end, 1 << 16)
            patience = _NEXT_LINE
        return text.decode(errors="replace").strip("\n") or "  (it did not write them)"

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)
