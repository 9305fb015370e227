"""A host as whoever starts it sees it; what it does is in `host`.

Runs wherever somebody wants a host beside itself: in an actor on another machine, or in a test. Imports no
torch, because an actor has no other use for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

from fastq_loader.remote.link import Address
from fastq_loader.system import calls

#: Seconds that a host has to end its workers and itself.
_ENDING = 1.0
#: It finds the package, and the user's modules, where its starter does.
_CODE = (
    "import sys; sys.path[:] = sys.argv.pop(1).split(':'); from fastq_loader.remote.host import main; main()"
)


class Host:
    """A host that was started by this process.

    Args:
        spec: what it is told, pickled.
        address: of this machine, where it listens.
        ports: those that it may listen at; 0 is any.

    Attributes:
        pid: its process id.
    """

    def __init__(self, spec: bytes, address: str, ports: Iterable[int] = (0,)) -> None:
        told = calls.memfd_create("fastq_loader host")
        try:
            with open(told, "wb", closefd=False) as file:
                file.write(spec)
            path = ":".join(sys.path)
            command = [sys.executable, "-c", _CODE, path, str(told), address, *map(str, ports)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[told])
        finally:
            os.close(told)
        self.pid = self._process.pid
        self._host = address

    def address(self) -> Address:
        """Where it listens; waits until it does.

        Raises:
            OSError: it has ended.
        """
        assert self._process.stdout is not None, "it was started with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"the host (pid {self.pid}) ended before it was up")
        return Address(self._host, int(line))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it, and its workers; returns when it has ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "it was started with pipes"
            pipe.close()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:  # it is at its imports
            self._process.kill()
            self._process.wait()
