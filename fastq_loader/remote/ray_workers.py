"""What a user says about workers on other machines: `workers=`.

Runs in the consumer. Ray is not imported here: options can be made, compared and stored where it is not
installed.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from fastq_loader.errors import is_int
from fastq_loader.workers.options import WorkerKind

if TYPE_CHECKING:
    from fastq_loader.remote.connection import Tls
    from fastq_loader.workers.backend import WorkerBackend
    from fastq_loader.workers.config import Plan

#: The oldest Ray that is tried.
RAY = (2, 52)
#: Machines of a cluster come and go, so the number is high; who dies again and again comes to an end.
_RESTARTS = 100


@dataclass(frozen=True)
class RayWorkers(WorkerKind):
    """Workers on the machines of a Ray cluster; `workers="ray"` is short for `RayWorkers()`.

    `num_workers` is the most that will be used. Each is placed by an actor that takes what is said here from
    the cluster. One that finds no room waits for it, also for a machine that joins in the middle of an epoch.
    With a "dynamic" schedule the others do its work meanwhile. With "round_robin", and with an iterable
    dataset, the epoch waits for it, because nobody else may. Batches, their order and their bits are those of
    workers on this machine with the same `schedule`.

    In a job of several ranks (`torch.distributed` is initialised, or WORLD_SIZE set) a loader with a
    "dynamic" schedule asks for its rank's part only: what the cluster has when workers start, divided by the
    ranks, and one worker at least. Else Ray gives room to who asks first, and `persistent_workers` keep it:
    two loaders that are alive at once, as for training and validation, need room for the workers of both.

    Ray that was initialised before is used as it is. Otherwise `address` or the variable RAY_ADDRESS says
    which cluster is joined. Without either a Ray of this machine's own is used. What was joined or started
    stays until this process ends, or calls `ray.shutdown()`.

    Args:
        num_cpus: CPUs that each worker takes; may be a fraction. With 0 nothing limits how many share a
            machine.
        num_gpus: GPUs that each worker takes; a whole number, or a fraction below 1. A worker sees its
            own and no others.
        resources: other resources of the cluster's that each takes, by name.
        strategy: how machines are chosen: "SPREAD", "DEFAULT" (packed), or an object of
            `ray.util.scheduling_strategies`.
        runtime_env: Ray's, for the workers: packages, files, environment variables.
        address: of the cluster, "host:port"; "auto" is one that runs on this machine.
        ports: the first and the last TCP port that workers may listen on, for firewalls; None is any.
        tls: a folder with `cert.pem`, `key.pem` and `ca.pem` on every machine, at the same path: connections
            are encrypted, and both sides show a certificate; one core moves 0.6 GB/s so, and else 2.5. With
            None both sides prove by the pool's token who they are, and nothing is encrypted.
        max_restarts: workers that may die in an iteration and be replaced, as in `Processes`. None is 100,
            and with an iterable dataset 0, which is all that goes with it: a new worker would read its part
            from the beginning.

    Raises:
        TypeError, ValueError: an argument, with its name, its value and what it may be. A loader with such
            workers raises RuntimeError where Ray is not installed.
    """

    short_form: ClassVar[str | None] = "ray"
    here: ClassVar[bool] = False
    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    strategy: Any = field(default="SPREAD", hash=False)
    runtime_env: Mapping[str, Any] | None = field(default=None, hash=False)
    address: str | None = None
    ports: tuple[int, int] | None = None
    tls: str | os.PathLike[str] | None = None
    max_restarts: int | None = None

    def __post_init__(self) -> None:
        self._check_amounts()
        self._check_strategy()
        if self.runtime_env is not None and not isinstance(self.runtime_env, Mapping):
            self._refuse(TypeError, "runtime_env", "must be a dict, as for ray.init(), or None")
        self._check_address()
        if self.ports is not None:
            self._check_ports(self.ports)
        if self.tls is not None and not isinstance(self.tls, str | os.PathLike):
            self._refuse(TypeError, "tls", "must be the path of a folder, or None")
        if self.max_restarts is not None:
            self._check(self.max_restarts)

    def restarts(self, iterable: bool) -> int:
        if self.max_restarts is None:
            return 0 if iterable else _RESTARTS
        return self.max_restarts

    def _refuse(self, error: type[Exception], name: str, text: str) -> NoReturn:
        raise error(f"RayWorkers({name}={getattr(self, name)!r}): {name} {text}")

    def _check_amounts(self) -> None:
        for name in ("num_cpus", "num_gpus"):
            amount = getattr(self, name)
            if not _is_number(amount):
                self._refuse(TypeError, name, "must be a number")
            if not 0 <= amount < math.inf:
                self._refuse(ValueError, name, "must be 0 or more")
        if self.num_gpus > 1 and self.num_gpus % 1:
            self._refuse(ValueError, "num_gpus", "must be a whole number, or a fraction below 1")
        if not isinstance(self.resources, Mapping):
            self._refuse(TypeError, "resources", 'must be a dict of numbers, as in {"decoder": 1}')
        for name, amount in self.resources.items():
            if not isinstance(name, str) or not _is_number(amount):
                self._refuse(TypeError, "resources", "must have names as keys and numbers as values")
            if name in ("CPU", "GPU"):
                self._refuse(ValueError, "resources", f"has {name!r}: use num_{name.lower()}s for it")
            if not 0 < amount < math.inf:
                self._refuse(ValueError, "resources", f"must say more than 0 of {name!r}, or leave it out")

    def _check_strategy(self) -> None:
        if isinstance(self.strategy, str):
            if self.strategy not in ("SPREAD", "DEFAULT"):
                self._refuse(ValueError, "strategy", 'must be "SPREAD" or "DEFAULT"')
        elif not type(self.strategy).__module__.startswith("ray."):
            self._refuse(
                TypeError,
                "strategy",
                'must be "SPREAD", "DEFAULT" or an object of ray.util.scheduling_strategies',
            )

    def _check_address(self) -> None:
        if self.address is None:
            return
        if not isinstance(self.address, str):
            self._refuse(TypeError, "address", 'must be "host:port", "auto" or None')
        if self.address.startswith("ray://"):
            self._refuse(
                ValueError,
                "address",
                "is Ray's client, which is no member of the cluster, so batches could not reach this "
                'process: run it on a machine of the cluster, with address="auto"',
            )
        if self.address != "auto" and not re.fullmatch(r"\S+:\d+", self.address):
            self._refuse(ValueError, "address", 'must be "host:port", "auto" or None')

    def _check_ports(self, ports: Any) -> None:
        if not isinstance(ports, tuple) or len(ports) != 2 or not all(map(is_int, ports)):
            self._refuse(TypeError, "ports", "must be (first, last), or None")
        if not 1 <= ports[0] <= ports[1] <= 65535:
            self._refuse(ValueError, "ports", "must be (first, last) with 1 <= first <= last <= 65535")

    def missing(self) -> str:
        try:
            version = importlib.metadata.version("ray")
        except importlib.metadata.PackageNotFoundError:
            found = "is not installed"
        else:
            if tuple(map(int, re.findall(r"\d+", version)[:2])) >= RAY:
                return ""
            found = f"is {version} here"
        return f"ray {RAY[0]}.{RAY[1]} or newer, which {found}: pip install 'fastq-loader[ray]'"

    def backend(self, plan: Plan) -> WorkerBackend:
        from fastq_loader.remote.proxy_pool import ProxyPool  # some systems lack what it is made of
        from fastq_loader.remote.ray_placement import RayPlacement

        return ProxyPool(plan, RayPlacement(self, plan.shared_tasks), self._encryption())

    def _encryption(self) -> Tls | None:
        if self.tls is None:
            return None
        files = [os.path.join(self.tls, name) for name in ("cert.pem", "key.pem", "ca.pem")]
        for file in files:
            if not os.path.isfile(file):
                self._refuse(
                    ValueError, "tls", f"must be a folder with cert.pem, key.pem and ca.pem: no {file}"
                )
        from fastq_loader.remote.connection import Tls

        return Tls(*files)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
