"""Short runs of `--device cuda` over a simulated device, and of small trainings on the CPU."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

from bench import run
from bench.__main__ import main
from bench.arguments import parse
from bench.output import rows
from bench.output.rows import Results
from bench.timing import device, training
from bench.timing.device import ARMS, COPY, DRAIN, LENGTHS, LINK, RESIDENT, CudaDevice
from bench.timing.rounds import Case, measure
from bench.workloads import jpeg, trainings
from bench.workloads.ready_made import Shape
from tests.support.bench_example import MACHINE
from tests.support.late_device import late_device
from tests.support.thorough import thorough

NO_PINNING = "ignore:'pin_memory' argument is set as true but no accelerator is found"
SMALL = Shape("small", "a few fields", 3, 2, (5,), torch.float32)
ONE = Shape("large", "one tensor", 1, 4, (3, 8), torch.uint8)


class HostDevice(CudaDevice):
    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.mark = time.perf_counter  # type: ignore[method-assign]
        self.step = time.sleep  # type: ignore[method-assign]

    def between(self, first: float, second: float) -> float:
        return second - first

    def wait(self, mark: float) -> None:
        """What was marked is over."""

    def copy_seconds(self, nbytes: int) -> float:
        return nbytes / 50e9

    def describe(self) -> dict[str, str]:
        return {"device": "a host", "driver": "none", "cuda": "none"}


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "SHAPES", {"large": ONE, "fields_32": SMALL})
    monkeypatch.setattr("bench.timing.rounds.wait_until_quiet", lambda: None)


def device_cases(line: str) -> list[Case]:
    options = parse(["--device", "cuda", "--workers", "1", "--seconds", "0.01", *line.split()])
    return list(device.cases(options, HostDevice(), cores=2, start_method="fork"))


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
        assert run.perform(options, here, device_cases("large fields_32 --blocks 2")) == 0
    for shape in rows.read(written).cases():
        assert [*shape.peers] == [LINK, *ARMS]
        for name, peer in shape.peers.items():
            parts = [COPY] if name == LINK else LENGTHS if name == RESIDENT else (DRAIN, *LENGTHS)
            assert (peer.failure, peer.about["notes"]) == (None, [])
            assert [len(peer.part(part)) for part in parts] == [2] * len(parts)
            assert len(peer.rows) == 2 * len(parts)
        copies = shape.part(LINK, COPY)
        assert (copies["bytes"] / copies["seconds"]).tolist() == pytest.approx([50e9] * 2)
    text = capsys.readouterr().out
    assert text.startswith("a host, driver none")
    assert "fields_32: a few fields" in text
    assert "peak 50 GB/s" in text


@pytest.fixture(scope="module")
def _optimizer() -> None:
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first one leaves a folder for compiled code in TMPDIR


@thorough(after=1)
@pytest.mark.processes
@pytest.mark.usefixtures("_optimizer")
@pytest.mark.parametrize("name", trainings.NAMES)
def test_a_small_training_runs_with_every_loader(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jpeg, "FILES", 4)
    written = tmp_path / "results.jsonl"
    line = f"{name} --device cpu --train --workers 1 --blocks 2 --seconds 0.01 --json {written}"
    with torch.random.fork_rng():
        assert main(line.split()) == 0
    (case,) = rows.read(written).cases()
    assert [*case.peers] == [*training.LANES]
    for peer in case.peers.values():
        assert (peer.failure, len(peer.rows)) == (None, 2)
        assert all(row["waited"] < row["seconds"] and row["first"] > 0 for row in peer.rows)
    text = capsys.readouterr().out
    assert re.search(r"no GPU: small sizes, for a try, \d+ cores, commit \w", text)
    assert text.count("In short: With device= a training runs") == 1


@pytest.mark.processes
@pytest.mark.usefixtures("_optimizer")
def test_a_training_with_wrong_batches_has_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "to_device", lambda batch, device: tuple(each + 1 for each in batch))
    line = "table --device cpu --train --workers 1 --blocks 1 --peers torch --seconds 0.01"
    here = MACHINE | training.Host().describe()
    (case,) = training.cases(parse(line.split()), training.Host(), here, tmp_path)
    with torch.random.fork_rng():
        peer = Results(measure(case)).cases()[0].peers["torch"]
    assert (peer.failure, peer.rows) == ("RuntimeError: wrong batches", [])


@pytest.mark.processes
@pytest.mark.usefixtures("small_shapes")
def test_batches_that_did_not_arrive_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device(monkeypatch) as backend:
        monkeypatch.setattr(backend, "copy_async", lambda memory, source, nbytes: None)
        (case,) = device_cases("large --blocks 2 --peers register")
        peer = Results(measure(case)).cases()[0].peers["register"]
    assert (peer.failure, peer.rows) == ("RuntimeError: wrong batches", [])
