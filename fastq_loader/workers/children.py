"""A child process: how it is started, when it has ended, how it died, its stacks; and one that forks others.

Runs in the consumer, but for `_serve`, which runs in the zygote, and `leave_with` and `write_stacks`, which
run in a worker. Where SIGCHLD is ignored, as daemons have it, the system reaps children
by itself, or other code does; multiprocessing takes a child whose exit code it cannot get for one that still
runs. Only a descriptor says when it has ended.

A `Zygote` waits to fork others: what the fork server is for the other start methods. It is forked together
with the first workers where dead ones are to be replaced, and before the first proxy of a worker on another
machine. A worker that was forked from the consumer in the middle of a training run would see the dataset as
it is then, copy the page tables of a process that has grown meanwhile, and inherit its sockets, threads'
locks and devices. The zygote is a copy of the consumer as it was at the start, with one thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing import popen_fork, reduction, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fastq_loader.ipc.endpoints import remove_folder
from fastq_loader.system import calls
from fastq_loader.system.calls import readable
from fastq_loader.system.interrupts import without_signals

#: The exit code of a process that could not be asked for its own (multiprocessing's number for that).
UNKNOWN_EXIT = 255

#: Makes a process object in the zygote, from the arguments that `Forked` was called with.
Make = Callable[..., BaseProcess]

#: Ends a process of ours that outlives SIGTERM: a real-time signal, which nobody else sends, with the default
#: action.
END = getattr(signal, "SIGRTMIN", 34) + 8

_FORK, _REAP, _QUIT = "fork", "reap", "quit"

#: Seconds that the zygote has to end in; half of those that it has to answer in. The first half is over at
#: once where both processes were stopped meanwhile.
_PATIENCE, _ANSWER = 1.0, 5.0


class LaunchedProcess(BaseProcess):
    """A process that is started in a way of its own. It may be treated like any other.

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
        ended_by: the signal that its `terminate` sends.
    """

    def __init__(self, process: BaseProcess, ended_by: int = signal.SIGTERM) -> None:
        self.process = process
        self._ended_by = ended_by
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
        with contextlib.suppress(OSError):  # no pidfd in this kernel or sandbox
            self._descriptor = calls.pidfd_open(self.pid)

    def _launched(self, process: Any) -> Any:
        """In the place of `BaseProcess._Popen`: before multiprocessing knows the child, which it ends itself
        when the program exits, its `terminate` is ours. An interrupt may come at any time."""
        del vars(process)["_Popen"]  # what is pickled for a child that is spawned does not have it
        popen: Any = process._Popen(process)
        vars(popen)["terminate"] = partial(popen._send_signal, self._ended_by)
        return popen

    @property
    def pid(self) -> int:
        """0 until it is started."""
        return self.process.pid or 0

    @property
    def descriptor(self) -> int:
        """A pidfd. Else there is none, or an interrupt came before it was noted, and a thread waits for the
        child; it starts at the first use, when workers that are forked together have been. A child of a fork
        server is not ours to wait for: it has a pipe of multiprocessing's, which no other process holds."""
        if self._descriptor < 0:
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
        if code is None:  # other code reaped it: SIGCHLD is ignored
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


# ---- a process that forks others ----------------------------------------------------------------------


class Zygote:
    """The consumer's end of one that is a copy of this process as it is now.

    Args:
        context: multiprocessing's, of start method fork.
        make: in the zygote, makes the process object of a worker.
        folder: of sockets, to be removed when the consumer dies: there may be no worker yet to do it.
    """

    def __init__(self, context: Any, make: Make, folder: str) -> None:
        self._lock = threading.RLock()  # active_children() of another thread asks too
        self._requests = 0
        self._connection, other = multiprocessing.Pipe()
        arguments = other, self._connection, os.getpid(), make, folder
        with other:
            self._child = Child(context.Process(target=_serve, args=arguments, daemon=True), END)
            self._child.start()

    def process(self, *arguments: Any) -> BaseProcess:
        """A worker, to be started like any other process."""
        return LaunchedProcess(partial(Forked, self, arguments))

    def ask(self, *request: Any, passed: Sequence[int] = ()) -> Any:
        """The zygote's answer to a request.

        Args:
            request: what it is sent.
            passed: descriptors that it is sent after it.

        Raises:
            OSError: it could not fork; or it is gone, or does not answer.
        """
        try:
            with self._lock, without_signals():
                answer = self._ask(request, passed)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise OSError("the process that starts new workers has ended") from error
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _ask(self, request: tuple[Any, ...], passed: Sequence[int]) -> Any:
        self._requests += 1
        self._connection.send((self._requests, *request))
        for descriptor in passed:
            reduction.send_handle(self._connection, descriptor, self._child.pid)
        sources = self._connection.fileno(), self._child.descriptor  # its children hold its end too
        number = 0
        # Where there are other threads, the handler of a signal may have raised in the middle of a request.
        while number < self._requests:
            ready = readable(sources, _ANSWER) or readable(sources, _ANSWER)
            if self._connection.fileno() not in ready:
                self._child.kill()  # it may be stopped
                raise EOFError
            number, answer = self._connection.recv()
        return answer

    def close(self) -> None:
        """End the zygote; its workers have ended."""
        with contextlib.suppress(OSError), self._lock:
            self._connection.send((0, _QUIT))  # a child of the user's may hold this end too
        self._connection.close()
        if not readable([self._child.descriptor], _PATIENCE):
            self._child.process.kill()
        self._child.release()


class Forked(popen_fork.Popen):
    """What multiprocessing has of a child process, for one that is the zygote's child.

    Args:
        zygote: forks it, now.
        arguments: of the zygote's `make`.
        passed: descriptors for it, which come after them.
    """

    def __init__(self, zygote: Zygote, arguments: tuple[Any, ...], passed: Sequence[int] = ()) -> None:
        self._zygote = zygote
        super().__init__((arguments, passed))  # type: ignore[arg-type]

    def _launch(self, request: Any) -> None:
        arguments, passed = request
        self.pid = self._zygote.ask(_FORK, arguments, len(passed), passed=passed)
        self.sentinel = calls.pidfd_open(self.pid)  # its parent has not reaped it, so the number is its own
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and readable([self.sentinel], 0 if flag == os.WNOHANG else None):
            try:
                code = self._zygote.ask(_REAP, self.pid)
            except OSError:  # the zygote is gone, and with it the exit code
                code = None
            self.returncode = UNKNOWN_EXIT if code is None else code
        return self.returncode

    def _send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and has not been reaped
                calls.pidfd_send_signal(self.sentinel, number)


# ---- in the zygote -------------------------------------------------------------------------------


def _serve(connection: Connection, others: Connection, consumer: int, make: Make, folder: str) -> None:
    """Fork workers until the consumer, whose end `others` is, says that it needs no more, or dies."""
    others.close()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers set handlers of their own
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    # A handler of the consumer's is not for here, and where it is ignored exit codes are lost.
    inherited = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # multiprocessing lets no daemon have children, because they would not be ended: these leave with the
    # consumer.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    children: dict[int, BaseProcess] = {}
    with contextlib.suppress(EOFError, ConnectionError, ProcessLookupError):  # the consumer is gone
        death = calls.pidfd_open(consumer)
        while death not in readable([connection.fileno(), death], None):
            number, kind, *arguments = connection.recv()
            if kind == _QUIT:
                os._exit(0)
            try:
                if kind == _FORK:
                    values, passed = arguments
                    values += tuple(reduction.recv_handle(connection) for _ in range(passed))
                    answer: Any = _fork(children, make(*values), inherited)
                else:
                    process = children.pop(*arguments)
                    process.join()
                    answer = process.exitcode
            except OSError as error:
                answer = error
            connection.send((number, answer))
    # Workers that still run see for themselves that the consumer is gone. They are not waited for: that would
    # be this process's exit handlers' doing.
    remove_folder(folder)
    os._exit(0)


def _fork(children: dict[int, BaseProcess], process: BaseProcess, inherited: Any) -> int:
    if inherited is not None:  # else it was not set from Python
        signal.signal(signal.SIGCHLD, inherited)  # what the first workers have
    try:
        process.start()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert process.pid is not None, "it was started"
    children[process.pid] = process
    return process.pid
