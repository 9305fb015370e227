"""`--device cuda` over stand-ins: a device with the host's clock, whose steps sleep, and the late device."""

from __future__ import annotations

import itertools
import pickle
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils._pytree import tree_leaves

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
from bench.timing.device_clock import AHEAD, COPIES, CudaDevice, Pace, timed_block
from bench.timing.rounds import measure
from bench.workloads.ready_made import LARGE, SHAPES, ReadyMade, Shape
from tests.support.bench_example import MACHINE
from tests.support.datasets import assert_same
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


@pytest.mark.parametrize("shape", [SMALL, ONE])
def test_samples_are_made_in_the_worker_and_no_two_fields_are_alike(shape: Shape) -> None:
    dataset = ReadyMade(shape)
    fresh = len(pickle.dumps(dataset))
    leaves = tree_leaves(dataset.batch())
    assert len({tuple(leaf.flatten().tolist()) for leaf in leaves}) == shape.fields
    assert sum(leaf.nbytes for leaf in leaves) == shape.nbytes
    expected = (shape.samples, *shape.sample_shape), shape.dtype
    assert {(leaf.shape, leaf.dtype) for leaf in leaves} == {expected}
    assert len(pickle.dumps(dataset)) == fresh
    assert_same(pickle.loads(pickle.dumps(dataset)).batch(), dataset.batch())


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


def test_what_was_ready_before_a_block_is_not_counted() -> None:
    arm = slow_arm(0.0, ahead=7)
    timed_block(arm, HostDevice(), Pace(pause=0.001), 0.001)  # at rest there is nothing to pass over
    assert arm.next() == 3
    done = timed_block(arm, HostDevice(), Pace(), 0.01)
    assert arm.next() == 4 + 7 + done["batches"]
    assert (done["steps"], done["gaps"]) == (0, 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torch's CUDA, so far as it is called by name, over host memory.

    `now` counts the milliseconds of a GPU whose cycles are two in a nanosecond.
    """
    fake = MagicMock(now=0.0, registered=[])

    def event(enable_timing: bool, blocking: bool) -> Any:
        assert enable_timing
        assert blocking, "a wait that spins is CPU time"
        made = MagicMock()
        made.record.side_effect = lambda stream: setattr(made, "at", fake.now)
        made.elapsed_time.side_effect = lambda later: later.at - made.at
        return made

    fake.Event.side_effect = event
    fake._sleep.side_effect = lambda count: setattr(fake, "now", fake.now + count / 2e6)
    runtime = fake.cudart.return_value
    runtime.cudaHostRegister.side_effect = lambda address, nbytes, flags: fake.registered.append(address) or 0
    runtime.cudaHostUnregister.side_effect = lambda address: fake.registered.remove(address) or 0
    for name in ("Event", "_sleep", "cudart", "current_stream", "current_device", "check_error"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    fake.current_device.return_value = 0
    fake.device = CudaDevice()
    fake.device.torch = torch.device("cpu")
    return fake


@pytest.mark.parametrize("memory", [PAGEABLE, REGISTER])
def test_steps_are_cycles_and_copies_are_timed_in_pieces(
    memory: str, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = cuda.device.mark()
    cuda.device.step(0.003)
    assert cuda.device.between(start, cuda.device.mark()) == pytest.approx(0.003)
    pieces: list[int] = []

    def timed(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
        assert non_blocking
        assert bool(cuda.registered) == (memory == REGISTER)
        pieces.append(source.nbytes)
        cuda.now += 0.5

    monkeypatch.setattr(torch.Tensor, "copy_", timed)
    assert cuda.device.copy_seconds(memory, 4096, 4) == pytest.approx(4 * 0.5e-3)
    assert pieces == [1024] * 4 * (2 + COPIES)
    assert cuda.registered == []


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
            assert ("first_batch" in peer.about) == (name in (TORCH, *OURS))
        for name in OURS:
            assert shape.peers[name].about["staging"]["pin"] == name
            assert shape.peers[name].about["staging"]["copied_bytes"] > 0
        copies = shape.part(PAGEABLE, COPY)
        assert (copies["bytes"] / copies["seconds"]).tolist() == pytest.approx([25e9] * 2, rel=0.1)
    text = capsys.readouterr().out
    assert text.startswith("a host, driver none")
    assert "fields_32: a few fields" in text
    assert "large: GB/s of a full drain / peak" in text


def test_there_are_as_many_workers_as_cores_but_two() -> None:
    for line, cores, workers in ((["--workers", "0,6"], 16, 6), ([], 16, 14), ([], 1, 1)):
        options = parse(["--device", "cuda", *line])
        found = run.device_cases(options, HostDevice(), cores)
        assert [(case.name, case.workers) for case in found] == [(name, workers) for name in SHAPES]


@pytest.mark.processes
@pytest.mark.usefixtures("small_shapes")
def test_batches_that_did_not_arrive_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device(monkeypatch) as stager:
        monkeypatch.setattr(stager, "copy_async", lambda memory, source, nbytes: None)
        (case,) = cases("large --blocks 2 --peers register")
        peer = Results(measure(case)).cases()[0].peers[REGISTER]
    assert (peer.failure, peer.rows) == ("RuntimeError: wrong batches", [])
