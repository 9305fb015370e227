"""The verdict about whole runs, each limited by one known cause, beside a stopwatch in the training loop."""

from __future__ import annotations

import pytest
import torch

from fastq_loader import DataLoader, empty
from tests.support.limited import CASES, Naps, play

RUNS = [
    *((name, 2, "fork") for name in CASES),
    *((name, 4, "fork") for name in ("workers", "head_of_line", "balanced")),
    ("start_up", 2, "spawn"),
    *((name, 0, "fork") for name in ("workers", "consumer", "sampler", "device_copy")),
]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize(("name", "workers", "context"), RUNS)
def test_the_limit_and_its_share_are_those_of_the_stopwatch(name: str, workers: int, context: str) -> None:
    case = CASES[name]
    loader, watch = play(case, workers, context)
    with loader:
        found = loader.diagnose()
    expected = case.lost(watch) / watch.total
    text = f"{case.limit}: {expected:.0%} by the stopwatch\n{found}"
    assert (found.limit, found.share) == (case.limit, pytest.approx(expected, abs=0.05)), text


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
def test_the_slow_sample_is_named() -> None:
    loader, _ = play(CASES["head_of_line"], 2, "fork")
    with loader:
        found = loader.diagnose()
        assert found.culprit is not None
        assert found.culprit.split(":")[0] in {f"batch {at}, sample {at}" for at in (5, 15, 25)}


@pytest.mark.processes
def test_it_may_be_asked_in_the_middle_of_an_epoch_and_changes_nothing() -> None:
    with DataLoader(Naps(0.002), 1, sampler=range(40), num_workers=2) as loader:
        batches = [(int(batch), loader.diagnose().epoch.batches) for batch in loader]
        assert batches == [(number, number + 1) for number in range(40)]
