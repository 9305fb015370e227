"""A short run of the axes that have ways of their own: exact resume, `tune`, workers on other machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("psutil", reason="the bench extra is not installed")


from bench import run
from bench.arguments import parse
from bench.output.rows import CaseRows, Results
from bench.timing import cluster, resume, tuning
from bench.timing.cluster import LABELS, LOOPBACK, REMOTE, TURN
from bench.timing.resume import FRESH, INLINE, OURS, PERMUTED, RESUMED, SHUFFLE, THEIRS, WITH, WITHOUT
from bench.timing.rounds import Case, measure
from bench.timing.tuning import AUTO, TUNED, Setting, Tuned
from bench.workloads import Load
from bench.workloads.slow import Naps
from fastq_loader import DataLoader, RayWorkers

Cases = Callable[..., dict[str, Case]]


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cases:
    monkeypatch.setattr(resume, "CALLS", 3)
    monkeypatch.setattr(resume, "STATE_ITEMS", dict.fromkeys(resume.STATE_ITEMS, 1000))
    monkeypatch.setattr(resume, "RESUMES", {1000: (5, (PERMUTED, OURS, THEIRS))})
    monkeypatch.setattr(cluster, "WORKERS", 2)
    data = Tuned("numbers", lambda folder: Load(Naps(0.0, 1), 2), step=0.001)
    monkeypatch.setattr(tuning, "loads", lambda: {"numbers": data})
    monkeypatch.setattr(tuning, "settings", lambda cpus, waits: [Setting(1), Setting(0)])

    def found(axis: str, more: str = "") -> dict[str, Case]:
        line = f"--axis {axis} --workers 0,1 --blocks 1 --seconds 0.02 {more}"
        return {case.name: case for case in run.cases(parse(line.split()), tmp_path)}

    return found


def measured(case: Case) -> CaseRows:
    return Results(measure(case)).cases()[0]


@pytest.mark.processes
def test_every_contender_of_a_resume_is_measured(cases: Cases) -> None:
    pytest.importorskip("torchdata")
    expected = {
        resume.STATE: dict.fromkeys((OURS, THEIRS, INLINE, PERMUTED), (resume.STATE,)),
        resume.STEPS: dict.fromkeys((OURS, THEIRS), (WITHOUT, WITH)),
        "resume_1000": dict.fromkeys((PERMUTED, THEIRS), (FRESH, RESUMED))
        | {OURS: (FRESH, RESUMED, SHUFFLE)},
    }
    for name, case in cases("resume", f"--peers {OURS},{THEIRS},{INLINE}").items():
        found = measured(case)
        assert [peer.failure for peer in found.peers.values()] == [None] * len(found.peers)
        parts = {peer: tuple(row["part"] for row in of.rows) for peer, of in found.peers.items()}
        assert parts == expected.pop(name)
    assert not expected


@pytest.mark.processes
def test_another_batch_is_no_figure(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "load_state_dict", lambda loader, state: None)
    found = measured(cases("resume", f"--peers {OURS}")["resume_1000"])
    assert "did not go on after batch 5" in str(found.peers[PERMUTED].failure)


@pytest.mark.processes
def test_what_is_chosen_takes_turns_with_every_setting(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def tune(loader: DataLoader[Any], *arguments: Any, **more: Any) -> Any:
        given[:] = loader.num_workers, *arguments
        rows = [SimpleNamespace(batches_per_second=500.0)]
        new = DataLoader(loader.dataset, 2, sampler=loader.sampler)
        return SimpleNamespace(settings={"num_workers": 0}, rows=rows, loader=new)

    monkeypatch.setattr(tuning, "tune", tune)
    assert cases("insight", "--peers torch") == {}
    found = measured(cases("insight")["tune_numbers"])
    assert given == [2, 0.001, 1.0]
    assert list(found.peers) == [TUNED, str(Setting(1)), str(Setting(0)), AUTO]
    assert {peer.failure for peer in found.peers.values()} == {None}
    assert [row["batches"] for peer in found.peers.values() for row in peer.rows] == [10] * 4, (
        "500/s for 20 ms"
    )
    assert (found.peers[TUNED].label, found.peers[TUNED].about["num_workers"]) == ("tune: 0 workers", 0)
    assert found.peers[AUTO].label.count(",") == 2, "two epochs before the first block"


def test_without_ray_the_reason_is_given(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayWorkers, "missing", lambda workers: "ray, which is not installed")
    for name, case in cases("cluster").items():
        failures = {name: peer.failure for name, peer in measured(case).peers.items()}
        assert failures == {REMOTE: "needs ray, which is not installed"}, name


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")  # Ray's own
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("name", [LOOPBACK, TURN])
def test_every_contender_is_measured(name: str, cases: Cases) -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    found = measured(cases("cluster")[name])
    assert {*found.peers} <= {*LABELS}
    assert {peer.failure for peer in found.peers.values()} == {None}
    assert all(len(peer.rows) == 1 for peer in found.peers.values())
