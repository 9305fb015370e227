"""What the user is told of workers that die or hang. With real workers: tests/end_to_end/test_faults.py."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader.consumer.deaths import Deaths, death
from fastq_loader.errors import LoaderTimeout, WorkerDied, WorkerReplaced
from fastq_loader.scheduling.events import Break, Wait

INDICES = [7, 8]


def deaths(**group: Any) -> Deaths:
    """Those of a pool whose group says this."""
    scheduler = SimpleNamespace(
        index_of=lambda seq: INDICES,
        epoch=1,
        pending_tasks={(1, 4): SimpleNamespace(ticket=40)},
    )
    plan = SimpleNamespace(timeout=2.5)
    return Deaths(plan, SimpleNamespace(**group), scheduler)  # type: ignore[arg-type]


def test_a_death_ends_the_iteration_and_says_why() -> None:
    raised = death("worker 3 was killed", cause := RuntimeError("torch's text"))
    assert isinstance(raised.error, WorkerDied)
    assert raised.error.__cause__ is cause
    assert raised.fatal == str(raised.error) == "worker 3 was killed"


def test_the_error_for_a_death_names_the_batch_and_has_torchs_text_as_its_cause() -> None:
    pool = deaths(
        death=lambda worker: (f"was killed ({worker})", "torch's text"),
        report=lambda worker, cause, seq, index: f"worker {worker} {cause} at {seq}: {index}",
    )
    raised = pool.of(Break(3, 4, [5]))
    assert str(raised.error) == raised.fatal == "worker 3 was killed (3) at 4: [5]"
    assert str(raised.error.__cause__) == "torch's text"
    assert pool.report(3, "died", 4) == "worker 3 died at 4: [7, 8]"
    assert pool.report(3, "died", None) == "worker 3 died at None: None"


def test_the_worker_that_hangs_is_the_one_with_the_task_or_the_one_that_the_claims_name() -> None:
    claims = SimpleNamespace(holder=lambda ticket: ticket // 10)
    pool = deaths(claims=claims, late_for=lambda ticket: ticket // 20)
    assert pool.who_is_late(Wait(1, 4, 0)) == (1, 1)
    assert pool.who_is_late(Wait(None, 4, 0)) == (4, 2)


def test_a_timeout_says_how_long_and_for_what() -> None:
    pool = deaths(report_late=lambda worker, seq, index: f"worker {worker}, batch {seq}, {index}")
    raised = pool.timed_out(2, 4)
    assert isinstance(raised.error, LoaderTimeout)
    assert str(raised.error) == "DataLoader timed out after 2.5 seconds: worker 2, batch 4, [7, 8]"
    assert raised.fatal is None, "the next call waits again"


def test_a_replacement_is_a_warning_and_an_error_only_where_the_user_says_so() -> None:
    pool = deaths()
    with pytest.warns(WorkerReplaced, match=r"it died; another one .*\n.*here"):
        assert pool.warn_of_replacement("it died", "here") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error", WorkerReplaced)
        raised = pool.warn_of_replacement("it died", "")
    assert raised is not None
    assert isinstance(raised.error, WorkerReplaced)
    assert raised.fatal is None
