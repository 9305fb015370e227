"""The resources of a Ray cluster: which of its machines can run a worker.

Runs in the consumer, when a pool starts. Ray is passed as an argument; its private modules are imported where
they are needed.
"""

from __future__ import annotations

import importlib
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

#: Seconds for a newly started Ray to report whether it has an autoscaler.
_MONITOR = 15.0

_log = logging.getLogger("fastq_loader")


def takes_of(options: Any) -> dict[str, float]:
    """Resources of each worker."""
    all_kinds = {"CPU": options.num_cpus, "GPU": options.num_gpus, **options.resources}
    return {name: amount for name, amount in all_kinds.items() if amount}


def look_for_room(ray: Any, options: Any, takes: dict[str, float]) -> None:
    """Check that some machine of the cluster can run a worker, now or after autoscaling.

    Raises:
        ValueError: no machine ever could.
    """
    machines, grows = [node["Resources"] for node in ray.nodes() if node["Alive"]], False
    if not _fits(takes, machines):
        kinds, grows = _addable()
        machines += kinds
    if _fits(takes, machines):
        return
    text = _no_room(options, takes, machines)
    if not grows:
        raise ValueError(f"{text}, and none is added by itself. Add such a machine first, or ask for less")
    _log.warning("%s. Workers wait for the autoscaler to add one.", text)


def _no_room(options: Any, takes: dict[str, float], machines: list[dict[str, float]]) -> str:
    """Describe which resources no machine has enough of."""
    most = {name: max((one.get(name, 0) for one in machines), default=0) for name in takes}
    lacks = [name for name in takes if most[name] < takes[name]] or list(takes)
    names = dict.fromkeys({"CPU": "num_cpus", "GPU": "num_gpus"}.get(name, "resources") for name in lacks)
    asked = ", ".join(f"{name}={getattr(options, name)!r}" for name in names)
    wanted = " and ".join(f"{takes[name]:g} {name} (the most is {most[name]:g})" for name in lacks)
    return f"RayWorkers({asked}): no machine of the Ray cluster has {wanted}"


def _fits(takes: dict[str, float], machines: list[dict[str, float]]) -> bool:
    return any(all(one.get(name, 0) >= amount for name, amount in takes.items()) for one in machines)


def waits_for(
    starting: Sequence[str | None], takes: dict[str, float], total: dict[str, float], free: dict[str, float]
) -> str:
    """Describe why workers have no place yet.

    Args:
        starting: for each of them the machine where it has room, or None.
        takes: resources of each worker.
        total: resources of the cluster.
        free: unused resources of the cluster.
    """
    reasons = []
    if waiting := starting.count(None):
        each = " and ".join(f"{amount:g} {name}" for name, amount in takes.items())
        has = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in takes)
        room = f" (each takes {each}; free in the cluster: {has})" if takes else ""
        reasons.append(f"workers that wait for a machine with room: {waiting}{room}")
    if machines := sorted({node for node in starting if node}):
        reasons.append(f"the dataset is still being opened on {', '.join(machines)}")
    return " and ".join(reasons) or "no worker is being started"


def _addable() -> tuple[list[dict[str, float]], bool]:
    """The kinds of machines that an autoscaler may add, if it lists them; and whether there may be others."""
    try:
        state = importlib.import_module("ray._private.state").state
        if (config := state.get_cluster_config()) is not None:
            groups = [group for group in config.node_group_configs if group.max_count]
            return [dict(group.resources) for group in groups], False
        kv, until = importlib.import_module("ray.experimental.internal_kv"), time.monotonic() + _MONITOR
        while not (status := kv._internal_kv_get("__autoscaling_status")) and time.monotonic() < until:
            time.sleep(0.1)  # Ray has just been started
        nodes = json.loads(status)["autoscaler_report"]["node_type_mapping"]
        # Without an autoscaler each machine is listed as a kind of its own.
        return [], any(not kind.startswith("node_") for kind in nodes.values())
    except Exception:  # these names are private to Ray, and another version may have others
        return [], True
