"""A place for a worker on another machine: how it is had at the machine's host, and how a host is started.

Runs in an actor of Ray on that machine, or in a test, and imports no torch: nothing else here needs it. The
first place of a pool on a machine starts the host; the others find it by the name of a local socket, which
follows from what the host is told. A connection to that socket is the place: when it ends, for any reason,
the host ends the worker there, and with the last place itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

from fastq_loader.system import calls

#: It finds the package, and the user's modules, where its starter does.
_CODE = (
    "import sys; sys.path[:] = sys.argv.pop(1).split(':'); from fastq_loader.remote.host import main; main()"
)

#: Hosts that this process has started, and not reaped.
hosts: list[subprocess.Popen[bytes]] = []


def attach(
    spec: bytes, address: str, ports: Sequence[int], node: str, environment: dict[str, str]
) -> tuple[socket.socket, int, int]:
    """Have a place at a host on this machine, which is started if there is none.

    Args:
        spec: what the host is told, a pickled `HostSpec`.
        address: of this machine, where it listens.
        ports: those that it may listen at; 0 is any.
        node: of several machines in one, this.
        environment: variables for the worker there.

    Returns:
        A connection that is to be kept open, the port where the host listens, and the place's number there.

    Raises:
        OSError: the host ended before it was up.
    """
    # Abstract, so nothing is left of it; the spec holds the pool's token, so the name cannot be foreseen.
    name = "\0fastq_loader " + hashlib.sha256(spec + node.encode()).hexdigest()
    place = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(name)
            except OSError:  # there is one
                place.connect(name)
            else:
                listener.listen()
                place.connect(name)  # before the host is there: it ends with its last place
                _start(spec, listener.fileno(), address, ports)
        place.sendall(json.dumps(environment).encode() + b"\n")
        said: list[bytes] = []
        with contextlib.suppress(ConnectionResetError):
            said = place.recv(100).split()
        if not said:
            raise OSError(f"the host on {address} ended before it was up")
        return place, int(said[0]), int(said[1])
    except BaseException:
        place.close()
        raise


def _start(spec: bytes, listener: int, address: str, ports: Sequence[int]) -> None:
    hosts[:] = [host for host in hosts if host.poll() is None]  # reaps the others
    with open(calls.memfd_create("fastq_loader host"), "w+b") as told:
        told.write(spec)
        told.seek(0)
        command = [sys.executable, "-c", _CODE, ":".join(sys.path), str(listener), address, *map(str, ports)]
        hosts.append(subprocess.Popen(command, stdin=told, pass_fds=[listener]))


def actor_class() -> type:
    """The class of the actors, each of which holds resources for one worker. Made in here, it is pickled as
    it stands."""

    class Reservation:
        def __init__(self) -> None:
            self.place: Any = None

        def stay(self) -> None:
            threading.Event().wait()

        def where(self) -> str:
            ray: Any = importlib.import_module("ray")
            return str(ray.util.get_node_ip_address())

        def attach(self, spec: bytes, ports: list[int]) -> tuple[str, str, int, int]:
            if "fastq_loader" not in sys.modules:
                found = importlib.util.find_spec("fastq_loader")
                if found is None:
                    raise ModuleNotFoundError("fastq_loader is not installed on this machine")
                # The package itself imports torch, and an actor needs none of it.
                package = sys.modules["fastq_loader"] = types.ModuleType("fastq_loader")
                package.__path__ = list(found.submodule_search_locations or ())
            # By their names: what this module holds would be sent along.
            here: Any = importlib.import_module("fastq_loader.remote.host_process")
            ray: Any = importlib.import_module("ray")
            node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
            # Ray says so in this process alone: CUDA_VISIBLE_DEVICES, and what others have in its place.
            devices = {
                name: value
                for name, value in os.environ.items()
                if "_VISIBLE_" in name or name == "ONEAPI_DEVICE_SELECTOR"
            }
            before = self.place
            self.place, port, number = here.attach(spec, address, ports, node, devices)
            if before is not None:  # its worker is lost
                before.close()
            return node, address, port, number

    return Reservation
