"""A Ray cluster of several nodes on this machine, and what the loader has running on it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.conftest import _read, descendants, open_descriptors, process_table, wait_until

#: The beginning of the command lines of processes that are the loader's, and not Ray's own.
OURS = "ray::FarWorker"
#: In the environment of all that this test run starts.
MARK = f"FASTQ_LOADER_TESTS={os.getpid()}"


class Nodes:
    """The cluster, and this process as its driver.

    Attributes:
        address: for other drivers.
        nodes: their numbers of CPUs.
    """

    def __init__(self) -> None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray rewrites 127.0.0.1
        os.environ.update([MARK.split("=")])
        import ray
        from ray.cluster_utils import Cluster

        self._ray: Any = ray
        self.nodes: dict[Any, int] = {}
        self._before = set(descendants())
        # The head has no room for workers, so that all other nodes can be removed.
        self._cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.address: str = self._cluster.address
        ray.init(address=self.address, log_to_driver=False)

    def resize(self, *cpus: int) -> None:
        """Start and remove nodes until these are there, and wait until Ray has freed their CPUs.

        Existing nodes stay, because a new one takes seconds to start. Ray frees the CPUs of a killed program
        some time after its end, and a rank that starts earlier gets a smaller share.
        """
        missing = list(cpus)
        for node, number in list(self.nodes.items()):
            if number in missing:
                missing.remove(number)
            else:  # in an orderly way: Ray knows at once, and places nothing there
                self._cluster.remove_node(node, allow_graceful=True)
                del self.nodes[node]
        for number in missing:
            self.add(number)

        def free() -> float:
            return float(self._ray.available_resources().get("CPU", 0))

        wait_until(lambda: free() + len(remote_processes()) >= sum(cpus), 30)

    def add(self, cpus: int, gpus: int = 0) -> None:
        self.nodes[self._cluster.add_node(num_cpus=cpus, num_gpus=gpus)] = cpus

    def remove(self, node: Any) -> None:
        """Pull its plug: nothing there ends in an orderly way."""
        self._cluster.remove_node(node, allow_graceful=False)
        del self.nodes[node]

    def close(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()
        for pid in set(descendants()) - self._before:  # Ray may leave agents behind
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def remote_processes() -> dict[int, str]:
    """The loader's actors in clusters of this test run, and what their workers have forked, by process id."""
    lines = {entry.pid: _read(f"/proc/{entry.pid}/cmdline") for entry in process_table() if not entry.zombie}
    ours = {pid: line for pid, line in lines.items() if line.startswith(OURS)}
    # An orphan is no descendant any more, and who has renamed itself has overwritten its environment.
    family = {os.getpid(): None, **descendants()} if ours else {}
    return {
        pid: line.replace("\0", " ")[:200]
        for pid, line in ours.items()
        if pid != os.getpid() and (pid in family or MARK in _read(f"/proc/{pid}/environ"))
    }


def far_workers() -> list[int]:
    """Process ids of the far workers that have opened their dataset."""
    return sorted(pid for pid, line in remote_processes().items() if line.startswith(f"{OURS}.run"))


@contextmanager
def nothing_left() -> Iterator[None]:
    """No process of the loader is left in the cluster, and no thread or shared memory of it in this one."""

    def held() -> dict[str, Any]:
        return {
            "processes": remote_processes(),
            "threads": {thread.name for thread in threading.enumerate() if "fastq" in thread.name},
            "memory": {
                f"{fd} {name}" for fd, name in open_descriptors().items() if name.startswith("/memfd:fastq")
            },
        }

    before = held()
    yield
    assert wait_until(lambda: held() == before, 100), f"left behind: {held()}, where there was {before}"
