"""The verdict about whole runs, each limited by one known cause, beside a stopwatch in the training loop."""

from __future__ import annotations

import pytest
import torch

from fastq_loader import DataLoader, empty
from tests.support.limited import CASES, Case, Naps, play
from tests.support.thorough import thorough

WARM = [name for name, case in CASES.items() if case.warm]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize(
    ("names", "workers", "context"),
    [
        (WARM, 2, "fork"),
        (["start_up"], 2, "fork"),
        pytest.param(["workers", "consumer", "sampler", "device_copy"], 0, None, marks=thorough()),
        pytest.param(["workers", "head_of_line", "balanced"], 4, "fork", marks=thorough()),
        pytest.param(["start_up"], 2, "spawn", marks=thorough()),
    ],
)
def test_the_limit_and_its_share_are_those_of_the_stopwatch(
    names: list[str], workers: int, context: str | None
) -> None:
    """Where other programs have disturbed a case, it counts alone."""
    wrong = misjudged([CASES[name] for name in names], workers, context)
    for case in wrong:
        assert not (again := misjudged([case], workers, context)), again[case]


def misjudged(cases: list[Case], workers: int, context: str | None) -> dict[Case, str]:
    """Cases, each with what is wrong about its diagnosis."""
    wrong = {}
    for case, loader, watch in play(cases, workers, context):
        found = loader.diagnose()
        expected = case.lost(watch) / watch.total
        right = (found.limit, found.share) == (case.limit, pytest.approx(expected, abs=0.05))
        if case.limit == "head_of_line":
            slow = {f"batch {at}" for at in (5, 15, 25)}
            right &= found.culprit is not None and found.culprit.split(":")[0] in slow
        if not right:
            wrong[case] = f"{case.limit}: {expected:.0%} by the stopwatch\n{found}"
    return wrong


@pytest.mark.processes
def test_new_memory_for_batches_that_are_kept_is_told_from_loading() -> None:
    with DataLoader(range(24), 1, num_workers=2, collate_fn=big_and_untouched) as loader:
        kept = list(loader)
        found = loader.diagnose()
    assert len(kept) == 24
    assert found.epoch.memory_seconds > found.epoch.workers_seconds, str(found)
    assert any("batches are kept" in line for line in found.advice)


def big_and_untouched(_: list[int]) -> torch.Tensor:
    """16 MiB that nobody writes to, so that making its pages is the work."""
    return empty((1 << 22,), torch.float32)


@pytest.mark.processes
def test_it_may_be_asked_in_the_middle_of_an_epoch_and_changes_nothing() -> None:
    with DataLoader(Naps(0.002), 1, sampler=range(40), num_workers=2) as loader:
        batches = [(int(batch), loader.diagnose().epoch.batches) for batch in loader]
        assert batches == [(number, number + 1) for number in range(40)]
