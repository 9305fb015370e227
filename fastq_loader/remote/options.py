"""What a user says about workers on other machines: `workers=`.

Runs in the consumer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastq_loader.remote.backend import RemoteBackend
from fastq_loader.remote.encryption import Tls
from fastq_loader.remote.placement import Placement
from fastq_loader.workers.backend import WorkerBackend
from fastq_loader.workers.config import Plan
from fastq_loader.workers.options import WorkerKind


@dataclass(frozen=True)
class FarWorkers(WorkerKind):
    """Workers on other machines. `num_workers` is the most that are used; as many run as find a place.

    Args:
        placement: makes what starts hosts and finds places, for one pool.
        max_restarts: see `Processes`.
        tls: encrypts the connections; without it, batches travel as they are.
    """

    placement: Callable[[], Placement]
    max_restarts: int = 0
    tls: Tls | None = None

    def backend(self, plan: Plan) -> WorkerBackend:
        return RemoteBackend(plan, self.placement(), self.tls)
