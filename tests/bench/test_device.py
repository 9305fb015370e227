"""`--device cuda` over stand-ins: a device with the host's clock, whose steps sleep, and the late device."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pandas", reason="the bench extra is not installed")

from bench import __main__ as command
from bench import run
from bench.arguments import parse
from bench.output import rows
from bench.output.rows import Results
from bench.peers.device import (
    OURS,
    PAGEABLE,
    REGISTER,
    RESIDENT,
    TORCH,
    Arm,
)
from bench.timing import device
from bench.timing.device import COPY, LENGTHS, LINK, PARTS
from bench.timing.device_clock import AHEAD, CudaDevice, Pace, timed_block
from bench.timing.rounds import measure
from bench.workloads.ready_made import LARGE, Shape
from tests.support.bench_example import MACHINE
from tests.support.late_device import late_device

NO_PINNING = "ignore:'pin_memory' argument is set as true but no accelerator is found"
SMALL = Shape("small", "a few fields", 3, 2, (5,), torch.float32)
ONE = Shape(LARGE, "one tensor", 1, 4, (3, 8), torch.uint8)


class HostDevice(CudaDevice):
    """A device whose steps take their time at once, on the host's clock."""

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.steps: list[float] = []
        self.waited: list[float] = []
        self.mark = time.perf_counter  # type: ignore[method-assign]
        self.wait = self.waited.append  # type: ignore[method-assign]

    def between(self, first: float, second: float) -> float:
        return second - first

    def step(self, seconds: float) -> None:
        self.steps.append(seconds)
        time.sleep(seconds)

    def copy_seconds(self, memory: str, nbytes: int, pieces: int) -> float:
        return nbytes / 50e9 * (2 if memory == PAGEABLE else 1)

    def describe(self) -> dict[str, str]:
        return {"device": "a host", "driver": "none", "cuda": "none"}


def slow_arm(seconds: float, ahead: int = 0) -> Arm:
    def begin() -> Any:
        for number in itertools.count():
            time.sleep(seconds)
            yield number

    return Arm(begin, ahead)


def test_a_block_knows_steps_from_what_is_between_them() -> None:
    host = HostDevice()
    done = timed_block(slow_arm(0.004), host, Pace(step=0.002), 0.06)
    assert done["batches"] == len(host.steps)
    assert set(host.steps) == {0.002}
    assert done["p50"] >= 0.004
    assert done["steps"] >= 0.002 * done["batches"]
    assert done["gaps"] >= 0.004 * (done["batches"] - 1)  # what came before the first step is not between two
    assert done["steps"] + done["gaps"] + 0.004 <= done["seconds"]
    assert len(host.waited) == done["batches"] - AHEAD + 1


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "SHAPES", {LARGE: ONE, "fields_32": SMALL})
    monkeypatch.setattr(device, "PAUSE_S", 0.001)
    monkeypatch.setattr("bench.timing.rounds.wait_until_quiet", lambda: None)


def cases(line: str) -> list[device.Case]:
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
        assert command.perform(options, here, cases("large fields_32 --blocks 2")) == 0
    for shape in rows.read(written).cases():
        assert "left_out" not in shape.facts
        asked = {LINK: [COPY], RESIDENT: LENGTHS, TORCH: PARTS, **dict.fromkeys(OURS, PARTS)}
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
        (case,) = cases("large --blocks 2 --peers register")
        peer = Results(measure(case)).cases()[0].peers[REGISTER]
    assert (peer.failure, peer.rows) == ("RuntimeError: wrong batches", [])
