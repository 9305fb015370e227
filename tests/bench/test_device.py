"""A short run of `--device cuda` over a simulated device."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from bench import run
from bench.arguments import parse
from bench.output import rows
from bench.output.rows import Results
from bench.timing import device
from bench.timing.device import ARMS, COPY, DRAIN, LENGTHS, LINK, RESIDENT, CudaDevice
from bench.timing.rounds import Case, measure
from bench.workloads.ready_made import Shape
from tests.support.bench_example import MACHINE
from tests.support.late_device import late_device

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


@pytest.mark.processes
@pytest.mark.usefixtures("small_shapes")
def test_batches_that_did_not_arrive_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device(monkeypatch) as stager:
        monkeypatch.setattr(stager, "copy_async", lambda memory, source, nbytes: None)
        (case,) = device_cases("large --blocks 2 --peers register")
        peer = Results(measure(case)).cases()[0].peers["register"]
    assert (peer.failure, peer.rows) == ("RuntimeError: wrong batches", [])
