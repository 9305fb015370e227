"""Workers on other machines, as an argument (`workers=`).

Runs in the consumer. Ray is not imported here: options can be created, compared and stored where it is not
installed.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fastq_loader.errors import is_int
from fastq_loader.workers.kinds import WorkerKind

if TYPE_CHECKING:
    from fastq_loader.workers.config import Plan
    from fastq_loader.workers.worker_pool import WorkerPool

#: The oldest version of Ray that is tested.
RAY = (2, 52)
#: Machines of a cluster come and go, so the number is high; yet endless deaths end the iteration.
_RESTARTS = 100


@dataclass(frozen=True)
class RayWorkers(WorkerKind):
    """Workers on the machines of a Ray cluster; `workers="ray"` is short for `RayWorkers()`.

    `num_workers` is the maximum. Each worker is an actor that takes the resources below from the cluster. One
    that finds no room waits for it, also for a machine that joins in the middle of an epoch. With a "dynamic"
    schedule the others do its work meanwhile. With "round_robin", and with an iterable dataset, the epoch
    waits for it, because no other worker may. An epoch that cannot continue ends after `start_timeout`.
    Batches, their order and their bits are the same as with workers on this machine and the same `schedule`.

    Ray gives room to the first request, and `persistent_workers` keep it: two loaders that are alive at once,
    as for training and validation, need room for the workers of both, and so do the loaders of a job's ranks:
    give each of these its part as `num_workers`.

    If Ray was initialised before, it is used as it is. Otherwise `address` or the variable RAY_ADDRESS names
    the cluster to join. Without either, Ray is started on this machine alone. It stays joined or running
    until this process ends, or calls `ray.shutdown()`.

    Args:
        num_cpus: CPUs of each worker; may be a fraction. With 0 there is no limit to the workers on a
            machine.
        num_gpus: GPUs of each worker; a whole number, or a fraction below 1. A worker sees only its own.
        resources: other resources of the cluster that each worker takes, by name.
        strategy: the choice of machines: "SPREAD", "DEFAULT" (packed), or an object of
            `ray.util.scheduling_strategies`.
        runtime_env: Ray's, for the workers: packages, files, environment variables.
        address: of the cluster, "host:port"; "auto" is one that runs on this machine.
        ports: the first and the last TCP port that workers may listen on, for firewalls; None is any.
        max_restarts: number of workers that may die in an iteration and be replaced, as in `Processes`. None
            is 100. With an iterable dataset it is 0, the only possible value, because a new worker would read
            its part from the beginning.
        start_timeout: seconds that an epoch waits until workers have room and have opened the dataset: one of
            them with a "dynamic" schedule, otherwise all. Then WorkerDied names the resources or the machine
            that they wait for. 0 is no limit.

    Raises:
        TypeError, ValueError: an argument is invalid; the text names it, its value and the allowed ones. A
            loader with such workers raises RuntimeError if Ray is not installed.

    >>> RayWorkers(num_gpus=1.5)
    Traceback (most recent call last):
    ValueError: RayWorkers(num_gpus=1.5): num_gpus must be a whole number, or a fraction below 1
    """

    short_form: ClassVar[str | None] = "ray"
    is_remote: ClassVar[bool] = True
    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    strategy: Any = field(default="SPREAD", hash=False)
    runtime_env: Mapping[str, Any] | None = field(default=None, hash=False)
    address: str | None = None
    ports: tuple[int, int] | None = None
    max_restarts: int | None = None
    start_timeout: float = 600

    def __post_init__(self) -> None:
        self._check_amounts()
        strategy, address, ports = self.strategy, self.address, self.ports
        if isinstance(strategy, str):
            self._must("strategy", strategy in ("SPREAD", "DEFAULT"), 'be "SPREAD" or "DEFAULT"')
        else:
            kinds = 'be "SPREAD", "DEFAULT" or an object of ray.util.scheduling_strategies'
            self._must("strategy", type(strategy).__module__.startswith("ray."), kinds, TypeError)
        known = self.runtime_env is None or isinstance(self.runtime_env, Mapping)
        self._must("runtime_env", known, "be a dict, as for ray.init(), or None", TypeError)
        if address is not None:
            text = 'be "host:port", "auto" or None'
            self._must("address", isinstance(address, str), text, TypeError)
            client = (
                "not be Ray's client, which is no member of the cluster, so batches could not reach this "
            )
            client += 'process: run it on a machine of the cluster, with address="auto"'
            self._must("address", not address.startswith("ray://"), client)
            self._must("address", address == "auto" or bool(re.fullmatch(r"\S+:\d+", address)), text)
        if ports is not None:
            pair = isinstance(ports, tuple) and len(ports) == 2 and all(map(is_int, ports))
            self._must("ports", pair, "be (first, last), or None", TypeError)
            text = "be (first, last) with 1 <= first <= last <= 65535"
            self._must("ports", 1 <= ports[0] <= ports[1] <= 65535, text)
        if self.max_restarts is not None:
            self._check(self.max_restarts)
        self._must("start_timeout", _is_number(self.start_timeout), "be a number of seconds", TypeError)
        self._must("start_timeout", self.start_timeout >= 0, "be seconds, or 0 for no limit")

    def _check_amounts(self) -> None:
        for name in ("num_cpus", "num_gpus"):
            amount = getattr(self, name)
            self._must(name, _is_number(amount), "be a number", TypeError)
            self._must(name, 0 <= amount < math.inf, "be 0 or more")
        whole = self.num_gpus <= 1 or not self.num_gpus % 1
        self._must("num_gpus", whole, "be a whole number, or a fraction below 1")
        mapping = isinstance(self.resources, Mapping)
        self._must("resources", mapping, 'be a dict of numbers, as in {"decoder": 1}', TypeError)
        for name, amount in self.resources.items():
            fits = isinstance(name, str) and _is_number(amount)
            self._must("resources", fits, "have names as keys and numbers as values", TypeError)
            own = name in ("CPU", "GPU")
            self._must("resources", not own, f"not have {name!r}: use num_{name.lower()}s for it")
            self._must("resources", 0 < amount < math.inf, f"say more than 0 of {name!r}, or leave it out")

    def _must(self, name: str, holds: bool, text: str, error: type[Exception] = ValueError) -> None:
        if not holds:
            raise error(f"RayWorkers({name}={getattr(self, name)!r}): {name} must {text}")

    def restarts(self, iterable: bool) -> int:
        if self.max_restarts is None:
            return 0 if iterable else _RESTARTS
        return self.max_restarts

    def missing(self) -> str:
        try:
            version = importlib.metadata.version("ray")
        except importlib.metadata.PackageNotFoundError:
            found = "is not installed"
        else:
            if tuple(map(int, re.findall(r"\d+", version)[:2])) >= RAY:
                return ""
            found = f"is {version} here"
        install = "pip install 'fastq-loader[ray]'"
        return f"ray {RAY[0]}.{RAY[1]} or newer, which {found}: {install}"

    def make_pool(self, plan: Plan) -> WorkerPool:
        # Some systems lack the calls that these import.
        from fastq_loader.extras.remote.proxy_pool import ProxyPool
        from fastq_loader.extras.remote.ray_placement import RayPlacement

        return ProxyPool(plan, RayPlacement(self, plan.shared_tasks))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
