"""A process that has imported torch and becomes a script by a fork: a fifth of the time of a new interpreter.

The server runs no thread of its own and computes nothing. (numpy starts threads when it is imported; they end
at a fork, and come back where they are needed.) A fork gets its own session, environment, folder and streams,
and ends as every interpreter ends. It differs from a new interpreter in three points: what is imported below
is there, so its exit handlers were registered first; a traceback begins with the line that runs the script;
and the memory of what was imported is shared, and not looked through at the end.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import subprocess
import sys
from multiprocessing import process
from multiprocessing.connection import Connection
from types import CodeType
from typing import NamedTuple

# Neither the package nor its tests: a script imports those itself.
import hypothesis  # noqa: F401
import msgpack  # noqa: F401
import numpy
import pytest  # noqa: F401
import torch.multiprocessing
import torch.utils.data
import zmq  # noqa: F401


class Request(NamedTuple):
    """What a fork is to become; its standard input is empty."""

    script: str
    folder: str
    environment: dict[str, str]
    stdout: str
    stderr: str


def serve(descriptor: int) -> CodeType:
    """Fork for one request after the other, until the other end is closed; only the forks return, with what
    they are to run in `__main__`."""
    connection = Connection(descriptor)
    gc.collect()
    gc.freeze()  # a collection in a fork does not look at, and so copy, what was imported
    while True:
        try:
            request: Request = connection.recv()
        except EOFError:
            sys.exit()
        pid = os.fork()
        if not pid:
            os.setsid()
            connection.send(os.getpid())
            connection.close()
            return _become(request)
        connection.send(os.waitpid(pid, 0)[1])


def _become(request: Request) -> CodeType:
    for number, (path, mode) in enumerate(
        [(os.devnull, os.O_RDONLY), (request.stdout, os.O_WRONLY), (request.stderr, os.O_WRONLY)]
    ):
        opened = os.open(path, mode)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    process.ORIGINAL_DIR = request.folder
    sys.argv = [request.script]
    sys.path[0] = os.path.dirname(request.script)
    numpy.random.seed()  # drawn when it is imported, as torch's; `random` sees to itself
    torch.default_generator.seed()
    sys.excepthook = sys.__excepthook__  # with Python 3.10, pytest brings one of its own
    sys.modules["__main__"].__file__ = request.script
    with open(request.script) as file:
        return compile(file.read(), request.script, "exec", dont_inherit=True)


class WarmProcess:
    """A script that was forked, with as much of Popen's interface as `Script` needs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._returncode: int | None = None
        self.pid: int = connection.recv()

    def poll(self) -> int | None:
        if self._returncode is None and self._connection.poll():
            self._returncode = os.waitstatus_to_exitcode(self._connection.recv())
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """
        Raises:
            subprocess.TimeoutExpired: it has not ended after so many seconds.
        """
        if self._returncode is None and not self._connection.poll(timeout):
            raise subprocess.TimeoutExpired("script", timeout or 0)
        code = self.poll()
        assert code is not None
        return code


class ScriptServer:
    """The server as the tests see it, started with the first script.

    Attributes:
        pid, descriptor: of the server, and of the connection to it.
    """

    pid: int | None = None
    descriptor: int | None = None
    _running: WarmProcess | None = None

    def start(self, script: str, environment: dict[str, str], stdout: str, stderr: str) -> WarmProcess:
        path = environment["PYTHONPATH"]
        if self.pid is None:
            self._connect(path)
        assert path == self._path, "the server has another path: not with warm=True"
        assert self._running is None or self._running.poll() is not None, "one script at a time"
        self._connection.send(Request(script, os.getcwd(), environment, stdout, stderr))
        self._running = WarmProcess(self._connection)
        return self._running

    def _connect(self, path: str) -> None:
        self._connection, other = multiprocessing.Pipe()
        with other:
            code = f"from {__name__} import serve; exec(serve({other.fileno()}))"
            server = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self._path, self.pid, self.descriptor = path, server.pid, self._connection.fileno()
        atexit.register(server.wait)
        atexit.register(self._connection.close)  # before that


SERVER = ScriptServer()
