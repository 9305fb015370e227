"""A Ray cluster of several nodes on this machine, with this process as its driver.

The head has no room for workers, so that every batch comes from another node.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from bench.timing.links import Link, limited_links

SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray rewrites 127.0.0.1, and fails after a minute
    "RAY_USAGE_STATS_ENABLED": "0",
}
LINKED = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}  # else `ray start` joins no cluster
STORE = 512 << 20  # bytes of each node's object store
STARTING_S, ENDING_S = 30.0, 5.0


@contextmanager
def ray_nodes(nodes: int, cpus: int) -> Iterator[None]:
    """Start so many nodes with so many CPUs each, on loopback; all of them end on the way out."""
    with _joined({}) as (_, cluster):
        for _ in range(nodes):
            cluster.add_node(num_cpus=cpus, object_store_memory=STORE)
        yield


@contextmanager
def linked_nodes(nodes: int, cpus: int) -> Iterator[list[Link]]:
    """Start so many nodes, each at the end of a link of its own."""
    with limited_links(nodes) as links, _joined({"node_ip_address": links[0].here}) as (ray, cluster):
        started: list[subprocess.Popen[bytes]] = []
        try:
            for link in links:  # one after the other: they share the folder of the cluster
                started.append(_start(link, cluster.address, cpus))
                _await(ray, 1 + len(started))
            yield links
        finally:
            ray.shutdown()  # else it tells of the nodes that are lost
            _end(started)


@contextmanager
def _joined(head: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Ray and a cluster of a head, which this process has joined."""
    os.environ.update(SETTINGS)
    ray: Any = importlib.import_module("ray")
    utils: Any = importlib.import_module("ray.cluster_utils")
    logging.getLogger("ray").setLevel(logging.ERROR)
    usual = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    cluster = utils.Cluster(initialize_head=True, head_node_args=usual | head)
    try:
        address = {f"_{name}": value for name, value in head.items()}
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error", **address)
        yield ray, cluster
    finally:
        left = _processes(cluster)
        ray.shutdown()
        cluster.shutdown()
        _reap(left)


def _start(link: Link, address: str, cpus: int) -> subprocess.Popen[bytes]:
    command = [*link.inside, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += [f"--address={address}", f"--node-ip-address={link.there}"]
    command += [f"--num-cpus={cpus}", f"--object-store-memory={STORE}"]
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return subprocess.Popen(command, env={**os.environ, **LINKED}, **quiet)


def _await(ray: Any, nodes: int) -> None:
    """Return when the cluster has so many nodes."""
    deadline = time.monotonic() + STARTING_S
    while sum(node["Alive"] for node in ray.nodes()) < nodes:
        if time.monotonic() > deadline:
            raise RuntimeError(f"a node of the cluster was not up within {STARTING_S:.0f} s")
        time.sleep(0.1)


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    left = [each for process in started for each in psutil.Process(process.pid).children(recursive=True)]
    for process in started:
        process.terminate()
    for process in started:
        process.wait()  # for the others: it gives them some seconds, and kills them
    _reap(left)


def _processes(cluster: Any) -> list[psutil.Process]:
    """All that its nodes consist of now."""
    several = [each for node in cluster.list_all_nodes() for each in node.all_processes.values()]
    pids = [info.process.pid for infos in several for info in infos]
    roots = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [each for root in roots for each in (root, *root.children(recursive=True))]


def _reap(left: Sequence[psutil.Process]) -> None:
    """Wait for processes that end; Ray may leave some behind."""
    for process in psutil.wait_procs(left, ENDING_S)[1]:
        process.kill()
