"""A short run of the axes that have ways of their own, and of `--device cuda` over simulated devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.peers.device import OURS as STAGED
from bench.peers.device import PAGEABLE, REGISTER, RESIDENT, TORCH
from bench.timing.cluster import REMOTE
from bench.timing.device_clock import CudaDevice
from bench.timing.resume import FRESH, INLINE, OURS, PERMUTED, RESUMED, SHUFFLE, THEIRS, WITH, WITHOUT
from bench.timing.tuning import AUTO, TUNED, Setting, Tuned
from bench.workloads.slow import Naps

from bench import __main__ as command
from bench import run
from bench.arguments import parse
from bench.output import rows
from bench.output.rows import CaseRows, Results
from bench.timing import cluster, device, resume, tuning
from bench.timing.device import COPY, LENGTHS, LINK, PARTS
from bench.timing.rounds import Case, measure
from bench.workloads import Load
from bench.workloads.ready_made import LARGE, Shape
from fastq_loader import DataLoader, RayWorkers
from tests.support.bench_example import MACHINE
from tests.support.late_device import late_device

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


NO_PINNING = "ignore:'pin_memory' argument is set as true but no accelerator is found"
SMALL = Shape("small", "a few fields", 3, 2, (5,), torch.float32)
ONE = Shape(LARGE, "one tensor", 1, 4, (3, 8), torch.uint8)


class HostDevice(CudaDevice):
    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.mark = time.perf_counter  # type: ignore[method-assign]
        self.step = time.sleep  # type: ignore[method-assign]

    def between(self, first: float, second: float) -> float:
        return second - first

    def wait(self, mark: float) -> None:
        """What was marked is over."""

    def copy_seconds(self, memory: str, nbytes: int, pieces: int) -> float:
        return nbytes / 50e9 * (2 if memory == PAGEABLE else 1)

    def describe(self) -> dict[str, str]:
        return {"device": "a host", "driver": "none", "cuda": "none"}


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "SHAPES", {LARGE: ONE, "fields_32": SMALL})
    monkeypatch.setattr(device, "PAUSE_S", 0.001)
    monkeypatch.setattr("bench.timing.rounds.wait_until_quiet", lambda: None)


def device_cases(line: str) -> list[device.Case]:
    options = parse(["--device", "cuda", "--workers", "1", "--seconds", "0.01", *line.split()])
    return run.device_cases(options, HostDevice(), cores=2, start_method="fork")


@pytest.mark.processes
@pytest.mark.usefixtures("small_shapes")
@pytest.mark.filterwarnings(NO_PINNING)
def test_a_whole_run_in_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "results.jsonl"
    options = parse(["--device", "cuda", "--json", str(written)])
    with late_device(monkeypatch):
        here = MACHINE | HostDevice().describe()
        assert command.perform(options, here, device_cases("large fields_32 --blocks 2")) == 0
    for shape in rows.read(written).cases():
        assert "left_out" not in shape.facts
        asked = {LINK: [COPY], RESIDENT: LENGTHS, TORCH: PARTS, **dict.fromkeys(STAGED, PARTS)}
        for name, parts in asked.items():
            peer = shape.peers[name]
            assert (peer.failure, peer.about["notes"]) == (None, [])
            assert [len(peer.part(part)) for part in parts] == [2] * len(parts)
            assert len(peer.rows) == 2 * len(parts)
        copies = shape.part(PAGEABLE, COPY)
        assert (copies["bytes"] / copies["seconds"]).tolist() == pytest.approx([25e9] * 2, rel=0.1)
    text = capsys.readouterr().out
    assert text.startswith("a host, driver none")
    assert "fields_32: a few fields" in text
    assert "large: GB/s of a full drain / peak" in text


@pytest.mark.processes
@pytest.mark.usefixtures("small_shapes")
def test_batches_that_did_not_arrive_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device(monkeypatch) as stager:
        monkeypatch.setattr(stager, "copy_async", lambda memory, source, nbytes: None)
        (case,) = device_cases("large --blocks 2 --peers register")
        peer = Results(measure(case)).cases()[0].peers[REGISTER]
    assert (peer.failure, peer.rows) == ("RuntimeError: wrong batches", [])
