"""A Ray cluster of several nodes on this machine, with this process as its driver.

The head has no room for workers, so that every batch comes from another node.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray rewrites 127.0.0.1, and fails after a minute
    "RAY_USAGE_STATS_ENABLED": "0",
}
STORE = 512 << 20  # bytes of each node's object store
ENDING_S = 5.0


@contextmanager
def ray_nodes(nodes: int, cpus: int) -> Iterator[None]:
    """Start so many nodes with so many CPUs each, on loopback; all of them end on the way out."""
    os.environ.update(SETTINGS)
    ray: Any = importlib.import_module("ray")
    utils: Any = importlib.import_module("ray.cluster_utils")
    logging.getLogger("ray").setLevel(logging.ERROR)
    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    cluster = utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        for _ in range(nodes):
            cluster.add_node(num_cpus=cpus, object_store_memory=STORE)
        yield
    finally:
        left = _processes(cluster)
        ray.shutdown()
        cluster.shutdown()
        for process in psutil.wait_procs(left, ENDING_S)[1]:  # Ray may leave some behind
            process.kill()


def _processes(cluster: Any) -> list[psutil.Process]:
    """All that its nodes consist of now."""
    several = [each for node in cluster.list_all_nodes() for each in node.all_processes.values()]
    pids = [info.process.pid for infos in several for info in infos]
    roots = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [each for root in roots for each in (root, *root.children(recursive=True))]
