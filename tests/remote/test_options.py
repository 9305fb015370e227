"""What `workers=` may say about other machines."""

from __future__ import annotations

import pytest

from fastq_loader import DataLoader
from fastq_loader.remote.backend import RemoteBackend
from fastq_loader.workers.options import read_workers
from tests.support.hosts import LocalHosts, far
from tests.support.worker_setup import make_plan


def test_they_are_a_kind_of_workers_and_make_their_own_backend() -> None:
    kind = far(max_restarts=3)
    assert read_workers(kind) is kind
    assert isinstance(kind.backend(make_plan(range(3))), RemoteBackend)
    assert isinstance(kind.placement(), LocalHosts)


def test_a_wrong_number_of_restarts_is_named() -> None:
    with pytest.raises(ValueError, match=r"FarWorkers\(.*max_restarts=-1.*\): max_restarts must"):
        far(max_restarts=-1)


def test_a_loader_starts_nothing_before_it_is_iterated() -> None:
    before = len(LocalHosts.made)
    DataLoader(range(3), num_workers=1, workers=far())  # type: ignore[arg-type]
    assert len(LocalHosts.made) == before
