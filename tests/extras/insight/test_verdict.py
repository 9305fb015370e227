"""Which limit is named, what is to blame, the page that says so, and what it is all based on."""

from __future__ import annotations

import html
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler, default_collate

from fastq_loader import DataLoader, ToDevice
from fastq_loader.extras.insight import verdict
from fastq_loader.extras.insight.model import Costs, LoaderFacts, RunProfile, Setting
from fastq_loader.extras.insight.snapshots import CAUSES, EpochStatistics, LateBatch, WorkerStatistics
from fastq_loader.extras.insight.verdict import Diagnosis, diagnose
from fastq_loader.statistics.snapshots import StagingStatistics
from tests.support.datasets import Stream, identity
from tests.support.limited import Naps
from tests.support.thorough import examples

LIMITS = {*CAUSES, "balanced", "unknown"}


def epoch_of(batches: int = 100, seconds: float = 10.0, **shares: float) -> EpochStatistics:
    by_cause = {"consumer": 1 - sum(shares.values()), **shares}
    return EpochStatistics(
        1,
        batches,
        seconds=seconds,
        **{f"{cause}_seconds": share * seconds for cause, share in by_cause.items()},
    )


def profile_of(busy: float = 0.5, **shares: Any) -> RunProfile:
    """A run with two workers, which are busy for a part of the time."""
    epoch = epoch_of(**shares)
    load = 2 * busy * epoch.seconds / max(1, epoch.batches)
    return RunProfile(epoch, Costs((load,)), Setting(2))


@examples(100)
@given(st.lists(st.integers(0, 100), min_size=8, max_size=8).filter(any), st.floats(0, 1))
def test_of_any_epoch_there_is_one_limit_and_its_share(parts: list[int], busy: float) -> None:
    shares = {cause: part / sum(parts) for cause, part in zip(CAUSES, parts, strict=True)}
    found = diagnose(profile_of(busy, **shares))
    lost = {cause: share for cause, share in shares.items() if cause != "consumer"}
    assert found.limit in LIMITS - {"unknown"}
    assert 0 <= found.share <= 1.0001
    if found.limit in lost:
        assert found.share == pytest.approx(lost[found.limit])
        assert found.share >= max(share for cause, share in lost.items() if cause != "workers") - 1e-9
    else:
        assert all(share < 0.2 for share in lost.values())
        expected = {"consumer": shares["consumer"], "balanced": sum(lost.values())}
        assert found.share == pytest.approx(expected[found.limit])


@pytest.mark.parametrize(
    ("batches", "seconds", "shares", "limit"),
    [
        (0, 0.0, {}, "unknown"),
        (7, 10.0, {"workers": 0.9}, "unknown"),
        (100, 0.04, {"workers": 0.9}, "unknown"),
        (1, 10.0, {"start_up": 0.9}, "start_up"),
        (1, 0.04, {"start_up": 0.9}, "unknown"),
        (7, 10.0, {"start_up": 0.3, "workers": 0.5}, "unknown"),
    ],
)
def test_too_little_says_nothing(batches: int, seconds: float, shares: dict[str, float], limit: str) -> None:
    found = diagnose(profile_of(batches=batches, seconds=seconds, **shares))
    assert found.limit == limit
    if limit == "unknown":
        assert (found.share, found.culprit, found.advice) == (0.0, None, ())


def test_the_batch_that_held_up_most_is_named() -> None:
    late = LateBatch(1, 412, seconds=1.9, load_seconds=2.1)
    run = replace(profile_of(head_of_line=0.74), late=(late, replace(late, batch=3)))
    assert diagnose(run).culprit == "batch 412: 1.9 s of 7.4 s"
    assert diagnose(replace(run, late=())).culprit is None


def test_collating_is_named_where_it_takes_longer_than_reading() -> None:
    worker = WorkerStatistics(0, 70, fetch_seconds=1.0, collate_seconds=3.0)
    run = replace(profile_of(workers=0.8), workers=(worker,))
    assert diagnose(run).culprit == "default_collate: 6 s of 8 s"
    assert diagnose(replace(run, loader=LoaderFacts(collate="pad"))).culprit == "pad: 6 s of 8 s"
    quick = replace(worker, collate_seconds=0.9)
    assert diagnose(replace(run, workers=(quick,))).culprit is None


def test_sampler_and_transform_are_named() -> None:
    mine = replace(profile_of(sampler=0.5), loader=LoaderFacts(sampler="Mine"))
    assert diagnose(mine).culprit == "Mine: 5 s of 5 s"
    on_host = replace(profile_of(device_copy=0.5), loader=LoaderFacts(transform="normalize"))
    assert diagnose(on_host).culprit == "normalize: 5 s of 5 s"
    assert diagnose(replace(on_host, staging=StagingStatistics("cuda"))).culprit is None
    assert diagnose(profile_of(device_copy=0.5)).culprit is None


EPOCH = EpochStatistics(
    epoch=3,
    batches=1563,
    seconds=12.4,
    consumer_seconds=4.96,
    workers_seconds=7.378,
    transport_seconds=0.062,
    wait_p50=0.00008,
    wait_p95=0.031,
    wait_p99=0.09,
    recorded_batches=1563,
)
WORKER = WorkerStatistics(
    *(0, 70, 0, 100, 9.0),
    fetch_seconds=8.0,
    collate_seconds=0.5,
    packing_seconds=0.5,
    idle_seconds=1.0,
)
PAGE = Diagnosis(
    "workers",
    0.595,
    "pad: 4 s of 7.4 s",
    ("num_workers 2 → 4: about 1.8 ×, until the consumer limits; 2 cores are free",),
    EPOCH,
    (WORKER,),
    "num_workers=1, prefetch_factor=2, round_robin",
)


def test_a_page_as_it_is_printed() -> None:
    assert verdict.text(PAGE).splitlines() == [
        "Loading limits: 60% of the time was spent waiting for it.",
        "  pad: 4 s of 7.4 s",
        "",
        "Epoch 3: 1,563 batches in 12.4 s, 126 a second; num_workers=1,",
        "prefetch_factor=2, round_robin",
        "",
        "  training step      4.96 s  40%  ████████████████",
        "  loading            7.38 s  60%  ███████████████████████▊",
        "  transport           62 ms   0%  ▎",
        "",
        "  next() took  p50 80 µs   p95 31 ms   p99 90 ms",
        "",
        "  worker     busy  blocked     idle    fetch  collate     pack",
        "  0           90%       0%      10%    80 ms     5 ms     5 ms",
        "",
        "What would help:",
        "  - num_workers 2 → 4: about 1.8 ×, until the consumer limits; 2 cores are free",
    ]


def test_a_long_epoch_says_of_which_batches_its_causes_are() -> None:
    page = verdict.text(replace(PAGE, epoch=replace(EPOCH, batches=20_000, seconds=120.0)))
    assert "Epoch 3: 20,000 batches in 120 s" in page
    assert "Of the last 1,563 batches:\n  training step      4.96 s  40%" in page


def test_what_is_the_users_is_escaped_in_html() -> None:
    found = replace(PAGE, culprit="<script>alert('&')</script>")
    assert found._repr_html_() == f"<pre>{html.escape(verdict.text(found))}</pre>"
    assert "<script>" not in found._repr_html_()


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(verdict, "diagnose", lambda run: run)
    return lambda loader, epoch=None: loader.diagnose(epoch)


def run(**arguments: Any) -> DataLoader[Any]:
    loader: DataLoader[Any] = DataLoader(**{"dataset": range(10), **arguments})
    list(loader)
    return loader


class Mine(SequentialSampler):
    pass


class MyBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"sampler": "SequentialSampler", "shuffles": False, "pins": False}),
        ({"shuffle": True}, {"sampler": "RandomSampler", "shuffles": True}),
        ({"batch_sampler": MyBatches(range(10), 2, False)}, {"sampler": "MyBatches", "shuffles": False}),
        ({"batch_sampler": BatchSampler(Mine(range(10)), 2, False)}, {"sampler": "Mine"}),
        ({"collate_fn": sum}, {"collate": "sum"}),
        ({"collate_fn": default_collate}, {"collate": ""}),
        ({"device": ToDevice("cpu", transform=identity)}, {"transform": "identity", "staging": None}),
        ({"dataset": Stream("tensors", [5])}, {"iterable": True}),
    ],
)
def test_arguments_that_matter(evidence: Any, arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    found = evidence(run(**arguments))
    known = {**vars(found), **vars(found.loader)}
    assert {name: known[name] for name in expected} == expected
    assert found.setting.num_workers == 0
    assert found.costs is not None
    assert found.workers == ()


def test_what_workers_have_for_themselves_is_a_line_where_it_is_much() -> None:
    lines = [
        "".join(diagnose(replace(profile_of(), private_bytes=(each, each))).advice)
        for each in (0, 600_000_000, 700_000_000)
    ]
    assert ["share(dataset)" in line for line in lines] == [False, False, True]
    assert "workers have 1.1 GB that they do not share" in lines[2]


def test_before_the_first_epoch_nothing_is_known() -> None:
    for loader in (DataLoader(range(3)), DataLoader.__new__(DataLoader)):  # its constructor never ran
        assert loader.diagnose().limit == "unknown"
        assert str(loader.diagnose()) == "Nothing can be said yet: there is too little data."
        with pytest.raises(ValueError, match="epoch=0 is unknown: use the number of an epoch, once there is"):
            loader.diagnose(0)


def test_the_newest_epoch_that_was_long_enough_is_taken_unless_another_is_asked_for(evidence: Any) -> None:
    loader: DataLoader[Any] = DataLoader(Naps(0.01), sampler=range(8))
    list(loader)
    list(loader)
    next(iter(loader))
    assert evidence(loader).epoch.epoch == 1
    assert evidence(loader, 0).epoch.epoch == 0
    assert evidence(loader, 0).costs.loads != evidence(loader).costs.loads
    assert evidence(loader, 2).epoch.epoch == 2
    together = evidence(loader, "all")
    assert (together.epoch.epoch, together.epoch.batches) == (None, 17)
    assert len(together.costs.loads) == 8, "of the one that was long enough"
    for unknown in (3, -1, "none"):
        text = f"epoch={unknown!r} is unknown: use the number of the epochs 0 to 2, 'all' for all together"
        with pytest.raises(ValueError, match=text):
            loader.diagnose(unknown)
