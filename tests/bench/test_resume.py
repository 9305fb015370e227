"""The axis of exact resume: what a state weighs, a short run of every case, and a resume that went wrong."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

pytest.importorskip("psutil", reason="the bench extra is not installed")

from bench import run
from bench.arguments import parse
from bench.output.rows import CaseRows, Results
from bench.timing import resume
from bench.timing.resume import FRESH, INLINE, OURS, PERMUTED, RESUMED, SHUFFLE, THEIRS, WITH, WITHOUT
from bench.timing.rounds import Case, measure
from fastq_loader import DataLoader


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Case]:
    """All of the axis with few items, of ours and torchdata's, with one worker and for one round."""
    monkeypatch.setattr(resume, "CALLS", 3)
    monkeypatch.setattr(resume, "STATE_ITEMS", dict.fromkeys(resume.STATE_ITEMS, 1000))
    monkeypatch.setattr(resume, "RESUMES", {1000: (5, (PERMUTED, OURS, THEIRS))})
    peers = f"{OURS},{THEIRS},{INLINE}"
    line = f"--axis resume --peers {peers} --workers 0,1 --blocks 1 --seconds 0.02"
    return {case.name: case for case in run.cases(parse(line.split()), tmp_path)}


def measured(case: Case) -> CaseRows:
    return Results(measure(case)).cases()[0]


def test_a_state_is_weighed_as_json_or_else_pickled() -> None:
    plain, tensors = {"batch": 17}, {"batch": torch.arange(17)}
    assert resume.state_bytes(plain) == len(json.dumps(plain))
    assert resume.state_bytes(tensors) == len(pickle.dumps(tensors))


@pytest.mark.processes
def test_every_contender_is_measured(cases: dict[str, Case]) -> None:
    pytest.importorskip("torchdata")
    expected = {
        resume.STATE: dict.fromkeys((OURS, THEIRS, INLINE, PERMUTED), (resume.STATE,)),
        resume.STEPS: dict.fromkeys((OURS, THEIRS), (WITHOUT, WITH)),
        "resume_1000": dict.fromkeys((PERMUTED, THEIRS), (FRESH, RESUMED))
        | {OURS: (FRESH, RESUMED, SHUFFLE)},
    }
    for name, case in cases.items():
        assert case.workers == 1
        found = measured(case)
        assert [peer.failure for peer in found.peers.values()] == [None] * len(found.peers)
        parts = {peer: tuple(row["part"] for row in of.rows) for peer, of in found.peers.items()}
        assert parts == expected.pop(name)
    assert not expected


@pytest.mark.processes
def test_states_are_asked_for_in_one_part_only(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = cases[resume.STEPS].plan().lanes[0]
    asked: list[str] = []
    part = ""
    monkeypatch.setattr(DataLoader, "state_dict", lambda loader: asked.append(part))
    try:
        lane.start()
        for part in (WITHOUT, WITH, WITHOUT):
            lane.block(part)
    finally:
        lane.close()
    assert set(asked) == {WITH}


@pytest.mark.processes
def test_another_batch_than_the_one_that_follows_is_no_figure(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataLoader, "load_state_dict", lambda loader, state: None)
    found = measured(cases["resume_1000"])
    assert "did not go on after batch 5" in str(found.peers[PERMUTED].failure)
