"""Which limit is named, and what is to blame."""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.insight.evidence import Evidence
from fastq_loader.insight.model import Costs, Setting
from fastq_loader.insight.verdict import Diagnosis, diagnose
from fastq_loader.statistics.snapshots import (
    CAUSES,
    EpochStatistics,
    LateBatch,
    StagingStatistics,
    WorkerStatistics,
)

LIMITS = {*CAUSES, "balanced", "unknown"}


def epoch_of(batches: int = 100, seconds: float = 10.0, **shares: float) -> EpochStatistics:
    """An epoch with these shares; the rest is the consumer's."""
    spent = {"consumer": 1 - sum(shares.values()), **shares}
    return EpochStatistics(
        1, batches, seconds, **{f"{cause}_seconds": share * seconds for cause, share in spent.items()}
    )


def evidence_of(busy: float = 0.5, **shares: Any) -> Evidence:
    """A run with two workers, which are busy for a part of the time."""
    epoch = epoch_of(**shares)
    load = 2 * busy * epoch.seconds / max(1, epoch.batches)
    return Evidence(epoch, Costs((load,)), Setting(2))


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause != "consumer"])
def test_the_largest_loss_is_the_limit(cause: str) -> None:
    found = diagnose(evidence_of(**{"sampler": 0.15, cause: 0.3}))
    assert (found.limit, found.share) == (cause, pytest.approx(0.3))


@given(st.lists(st.integers(0, 100), min_size=8, max_size=8).filter(any), st.floats(0, 1))
def test_of_any_epoch_there_is_one_limit_and_its_share(parts: list[int], busy: float) -> None:
    shares = {cause: part / sum(parts) for cause, part in zip(CAUSES, parts, strict=True)}
    found = diagnose(evidence_of(busy, **shares))
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
    ("shares", "busy", "limit", "share"),
    [
        ({}, 0.5, "consumer", 1.0),
        ({"workers": 0.19, "transport": 0.09}, 0.5, "consumer", 0.72),
        ({"workers": 0.19, "transport": 0.09}, 0.8, "balanced", 0.28),
        ({"workers": 0.21, "transport": 0.09}, 0.8, "workers", 0.21),
        ({"workers": 0.19, "transport": 0.11}, 0.8, "transport", 0.11),
        ({"workers": 0.3, "head_of_line": 0.4}, 1.0, "head_of_line", 0.4),
    ],
)
def test_little_waiting_is_no_limit(shares: dict[str, float], busy: float, limit: str, share: float) -> None:
    found = diagnose(evidence_of(busy, **shares))
    assert (found.limit, found.share) == (limit, pytest.approx(share))


@pytest.mark.parametrize(
    ("batches", "seconds", "shares", "limit"),
    [
        (0, 0.0, {}, "unknown"),
        (7, 10.0, {"workers": 0.9}, "unknown"),
        (100, 0.04, {"workers": 0.9}, "unknown"),
        (1, 10.0, {"start_up": 0.9}, "start_up"),
        (1, 0.04, {"start_up": 0.9}, "unknown"),
        (0, 10.0, {"start_up": 0.9}, "unknown"),
        (7, 10.0, {"start_up": 0.3, "workers": 0.5}, "unknown"),
    ],
)
def test_too_little_data_says_nothing_but_for_a_slow_start(
    batches: int, seconds: float, shares: dict[str, float], limit: str
) -> None:
    found = diagnose(evidence_of(batches=batches, seconds=seconds, **shares))
    assert found.limit == limit
    if limit == "unknown":
        assert (found.share, found.culprit, found.advice) == (0.0, None, ())


LATE = LateBatch(1, 412, seconds=1.9, load_seconds=2.1, sample=26211, sample_seconds=2.0)


@pytest.mark.parametrize(
    ("late", "culprit"),
    [
        ((LATE,), "batch 412, sample 26211: 1.9 s of 7.4 s"),
        ((LATE, replace(LATE, batch=3)), "batch 412, sample 26211: 1.9 s of 7.4 s"),
        ((replace(LATE, sample_seconds=1.0),), "batch 412: 1.9 s of 7.4 s"),
        ((replace(LATE, load_seconds=0.0, sample=None, sample_seconds=0.0),), "batch 412: 1.9 s of 7.4 s"),
        ((replace(LATE, sample="x" * 1000),), f"batch 412, sample '{'x' * 12}...{'x' * 13}': 1.9 s of 7.4 s"),
        ((), None),
    ],
)
def test_the_batch_that_held_up_most_is_named(late: tuple[LateBatch, ...], culprit: str | None) -> None:
    run = replace(evidence_of(head_of_line=0.74), late=late)
    assert diagnose(run).culprit == culprit


def test_late_batches_are_to_blame_for_the_head_of_the_line_only() -> None:
    assert diagnose(replace(evidence_of(workers=0.74), late=(LATE,))).culprit is None


def test_collating_is_named_where_it_takes_longer_than_reading() -> None:
    worker = WorkerStatistics(0, 70, fetch_seconds=1.0, collate_seconds=3.0)
    run = replace(evidence_of(workers=0.8), workers=(worker,))
    assert diagnose(run).culprit == "default_collate: 6 s of 8 s"
    assert diagnose(replace(run, collate="pad")).culprit == "pad: 6 s of 8 s"
    quick = replace(worker, collate_seconds=0.9)
    assert diagnose(replace(run, workers=(quick,))).culprit is None


def test_sampler_and_transform_are_named() -> None:
    assert diagnose(replace(evidence_of(sampler=0.5), sampler="Mine")).culprit == "Mine: 5 s of 5 s"
    on_host = replace(evidence_of(device_copy=0.5), transform="normalize")
    assert diagnose(on_host).culprit == "normalize: 5 s of 5 s"
    assert diagnose(replace(on_host, staging=StagingStatistics("cuda"))).culprit is None
    assert diagnose(evidence_of(device_copy=0.5)).culprit is None


def test_advice_is_for_all_that_is_worth_mentioning() -> None:
    lines = diagnose(replace(evidence_of(0.9, workers=0.5, start_up=0.3), cpus=8.0)).advice
    assert [line.split()[0] for line in lines] == ["num_workers", "persistent_workers=True:"]


def test_it_is_immutable_and_travels_and_every_field_is_explained() -> None:
    found = diagnose(evidence_of(workers=0.5))
    assert pickle.loads(pickle.dumps(found)) == found
    assert repr(found).startswith("Diagnosis(limit='workers', share=0.5")
    for field in fields(Diagnosis):
        assert field.name in str(Diagnosis.__doc__)
        with pytest.raises(FrozenInstanceError):
            setattr(found, field.name, 1)
    assert all(f'"{limit}":' in str(Diagnosis.__doc__) for limit in LIMITS)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "no such encoding", None])
def test_where_the_terminal_has_no_blocks_it_prints_ascii(
    encoding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        pass

    Terminal.encoding = encoding  # type: ignore[assignment]
    run = replace(evidence_of(workers=0.5), cpus=8.0, sampler="Größe")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert str(diagnose(run)).isascii()
    monkeypatch.setattr(sys, "stdout", None)  # a program without a console
    assert str(diagnose(run)).isascii()
    Terminal.encoding = "utf-8"  # type: ignore[assignment]
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert "█" in str(diagnose(run))
