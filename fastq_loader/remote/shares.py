"""How many workers each loader may have in a Ray cluster that several loaders use.

Runs in an actor of its own, which the first loader that is in the cluster for a while makes, and which ends
with that loader; then another one makes it. Each loader reports what it wants and has, every few seconds,
and hears what it may have. Who is not heard any more is forgotten, so nobody has to say goodbye.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

#: The name of the actor, and the namespace that it is in.
NAME, NAMESPACE = "shares", "fastq_loader"


def shares_class() -> type:
    """The class of the actor. Made in here, it is pickled as it stands: the actor needs no package."""

    class Shares:
        forget = 10.0  # seconds without a report until a loader is forgotten

        def __init__(self) -> None:
            self.loaders: dict[str, tuple[float, int, int, float]] = {}  # when, wanted, had, CPUs of each
            self.measured: list[tuple[float, float]] = []  # when, and CPUs that loaders have or that are free

        def report(self, loader: str, want: int, have: int, cpus: float) -> int:
            """How many workers a loader may have that wants and has so many, each of which takes `cpus`.

            All get the same number, as far as they want so many and the CPUs suffice, and at least one.
            """
            now = time.monotonic()
            self.loaders[loader] = now, want, have, cpus
            self.loaders = {name: said for name, said in self.loaders.items() if now - said[0] < self.forget}
            free = importlib.import_module("ray").available_resources().get("CPU", 0.0)
            there = free + sum(have * cpus for _, _, have, cpus in self.loaders.values())
            # A CPU on its way from one loader to another one is missed for a while, so the highest counts.
            self.measured = [one for one in self.measured if now - one[0] < self.forget] + [(now, there)]
            return max(1, self.divided(max(cpus for _, cpus in self.measured))[loader])

        def divided(self, left: float) -> dict[str, int]:
            given = dict.fromkeys(sorted(self.loaders), 0)
            hungry = list(given)
            while hungry:
                for name in list(hungry):
                    _, want, _, cpus = self.loaders[name]
                    if given[name] < want and cpus <= left:
                        given[name] += 1
                        left -= cpus
                    else:
                        hungry.remove(name)
            return given

    return Shares


def shares_actor(ray: Any) -> Any:
    """The one actor of the cluster; it is made if there is none."""
    options = {"name": NAME, "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
    return ray.remote(shares_class()).options(**options).remote()
