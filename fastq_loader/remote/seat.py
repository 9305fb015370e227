"""An actor of Ray that holds room for a worker, and starts a machine's host if it is the first one there.

Runs in the process of the actor. One that starts no host needs neither this package nor torch there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import types
from typing import Any


def seat_class() -> type:
    """The class of the actors. Made in here, it is pickled as it stands."""

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
            from fastq_loader.remote.host_process import Host

            with self.starting:
                if self.host is None or not self.host.alive:
                    self.end()
                    self.host = Host(spec, self.where()[1], ports)
                    self.port = self.host.address().port
                return self.port

        def end(self) -> None:
            host, self.host = self.host, None
            if host is not None:
                host.close()

    return Seat
