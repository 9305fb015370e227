"""What `workers=` may be."""

from __future__ import annotations

from typing import Any

import pytest

from fastq_loader import Processes
from fastq_loader.workers.options import WorkerKind, read_workers
from fastq_loader.workers.pool import WorkerPool
from tests.support.worker_setup import make_plan


def test_short_form_and_configuration_mean_the_same() -> None:
    assert read_workers("processes") == Processes() == Processes(max_restarts=0)
    workers = Processes(max_restarts=3)
    assert read_workers(workers) is workers
    assert isinstance(workers.backend(make_plan(range(3))), WorkerPool)


def test_a_kind_of_somebody_elses_is_one_too() -> None:
    class Played(WorkerKind):
        def backend(self, plan: Any) -> Any:
            return plan

    played = Played()
    assert read_workers(played) is played


@pytest.mark.parametrize(("restarts", "error"), [(-1, ValueError), ("1", TypeError), (True, TypeError)])
def test_a_wrong_number_of_restarts_is_named(restarts: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"Processes\\(max_restarts={restarts!r}\\): max_restarts must"):
        Processes(max_restarts=restarts)


@pytest.mark.parametrize(
    ("value", "error"), [("threads", ValueError), (4, TypeError), (None, TypeError), (Processes, TypeError)]
)
def test_what_is_no_kind_of_workers_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"workers=.* is unknown: .* how many there are is num_workers"):
        read_workers(value)
