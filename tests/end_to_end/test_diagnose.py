"""The verdict about whole runs, each limited by one known cause, beside a stopwatch in the training loop."""

from __future__ import annotations

import pytest
import torch

from fastq_loader import DataLoader, empty
from tests.support.limited import CASES, Naps, play
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
    ],
)
def test_the_limit_and_its_share_are_those_of_the_stopwatch(
    names: list[str], workers: int, context: str | None
) -> None:
    """What other programs of the machine took may count for any cause; much of it is a cause itself."""
    for case, loader, watch in play([CASES[name] for name in names], workers, context):
        found, expected, disturbed = loader.diagnose(), case.lost(watch) / watch.total, case.disturbed(watch)
        told = f"{case.limit}: {expected:.0%} by the stopwatch, disturbed {disturbed:.0%}\n{found}"
        assert found.limit == case.limit or disturbed > 0.15, told
        if found.limit == case.limit:
            assert found.share == pytest.approx(expected, abs=0.05 + disturbed), told
        if found.limit == case.limit == "head_of_line" and disturbed < 0.15:
            slow = {f"batch {at}" for at in (5, 15, 25)}
            assert found.culprit is not None, told
            assert found.culprit.split(":")[0] in slow, told


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
