"""A host as whoever starts it sees it, and an actor of Ray that does; what a host does is in `host`.

Runs in the process of an actor on another machine, or in a test. Imports no torch, because an actor has no
other use for it; one that starts no host needs not even this package there.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterable
from typing import Any

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


def seat_class() -> type:
    """The class of the actors, which hold room for a worker, and start a machine's host if they are the first
    ones there. Made in here, it is pickled as it stands."""

    class Seat:
        def __init__(self) -> None:
            self.starting = threading.Lock()
            self.host: Any = None
            self.port = 0

        def where(self) -> tuple[str, str, dict[str, str]]:
            ray: Any = importlib.import_module("ray")
            # Ray says so in this process alone: CUDA_VISIBLE_DEVICES, and what others have in its place.
            devices = {
                name: value
                for name, value in os.environ.items()
                if "_VISIBLE_" in name or name == "ONEAPI_DEVICE_SELECTOR"
            }
            return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), devices

        def stay(self) -> None:
            threading.Event().wait()

        def listen(self, spec: bytes, ports: list[int]) -> int:
            if "fastq_loader" not in sys.modules:
                found = importlib.util.find_spec("fastq_loader")
                if found is None:
                    raise ModuleNotFoundError("fastq-loader[ray] is not installed on this machine")
                # The package itself imports torch, and an actor needs none of it.
                package = sys.modules["fastq_loader"] = types.ModuleType("fastq_loader")
                package.__path__ = list(found.submodule_search_locations or ())
            # By its name: what this module holds would be sent along.
            starter: Any = importlib.import_module("fastq_loader.remote.host_process")
            with self.starting:
                if self.host is None or not self.host.alive:
                    self.end()
                    self.host = starter.Host(spec, self.where()[1], ports)
                    self.port = self.host.address().port
                return self.port

        def end(self) -> None:
            host, self.host = self.host, None
            if host is not None:
                host.close()

    return Seat
