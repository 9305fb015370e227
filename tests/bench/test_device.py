"""`--device cuda` over stand-ins: a device with the host's clock, whose steps sleep, and the late device."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("pandas", reason="the bench extra is not installed")

from bench import __main__ as command
from bench import run
from bench.arguments import parse
from bench.output import rows
from bench.output.rows import CaseRows, Results
from bench.peers.device import (
    BOUNCE,
    OURS,
    PAGEABLE,
    REGISTER,
    RESIDENT,
    SIDE_STREAM,
    TORCH,
    Arm,
    Batches,
    make,
    prefetched,
)
from bench.timing import device
from bench.timing.device import COPY, DRAIN, LENGTHS, LINK, PARTS, READY
from bench.timing.device_clock import AHEAD, COPIES, CudaDevice, Pace, driver_version, timed_block
from bench.timing.rounds import measure
from bench.workloads.ready_made import LARGE, SHAPES, ReadyMade, Shape
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

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None:
        self.waited.append(mark)

    def between(self, first: float, second: float) -> float:
        return second - first

    def step(self, seconds: float) -> None:
        self.steps.append(seconds)
        time.sleep(seconds)

    def copy_seconds(self, memory: str, nbytes: int, pieces: int) -> float:
        return nbytes / 50e9 * (2 if memory == PAGEABLE else 1)

    def reserved(self) -> int:
        return 1 << 21

    def release(self) -> None:
        pass

    def describe(self) -> dict[str, str]:
        return {"device": "a host", "driver": "none", "cuda": "none"}


# ---- arms ---------------------------------------------------------------------------------------


def test_shapes_are_those_of_the_goals() -> None:
    sizes = [(1, 38_535_168), (32, 32 * 64 * 1024), (500, 500 * 256)]
    assert [(shape.fields, shape.nbytes) for shape in SHAPES.values()] == sizes


@pytest.mark.parametrize("shape", [SMALL, ONE])
def test_samples_are_made_in_the_worker_and_no_two_fields_are_alike(shape: Shape) -> None:
    dataset = ReadyMade(shape)
    fresh = len(pickle.dumps(dataset))
    leaves = tree_leaves(pickle.loads(pickle.dumps(dataset)).batch())
    assert len(leaves) == shape.fields
    assert sum(leaf.nbytes for leaf in leaves) == shape.nbytes
    for leaf, other in zip(leaves, tree_leaves(dataset.batch()), strict=True):
        assert (leaf.shape, leaf.dtype) == ((shape.samples, *shape.sample_shape), shape.dtype)
        assert torch.equal(leaf, other)
    assert len({tuple(leaf.flatten().tolist()) for leaf in leaves}) == shape.fields
    assert len(pickle.dumps(dataset)) == fresh


def test_an_epoch_is_as_long_as_it_is_told_or_until_it_is_stopped() -> None:
    batches = Batches(3)
    endless = iter(batches)
    assert list(itertools.islice(endless, 5)) == [[0, 1, 2]] * 5
    batches.stopped = True
    assert list(endless) == []
    batches.stopped, batches.length = False, 2
    assert len(list(batches)) == 2


def test_the_prefetcher_copies_the_next_batch_before_it_hands_one_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story: list[str] = []
    now = ["consumer"]

    @contextmanager
    def on(stream: Any) -> Any:
        now[0] = stream.name
        yield
        now[0] = "consumer"

    def stream(name: str) -> Any:
        def record_event() -> str:
            story.append(f"recorded on {name}")
            return f"event {len([line for line in story if 'recorded' in line])}"

        return SimpleNamespace(
            name=name,
            record_event=record_event,
            wait_event=lambda event: story.append(f"{name} waits for {event}"),
        )

    class Leaf:
        def __init__(self, number: int) -> None:
            self.number = number

        def to(self, device: Any, non_blocking: bool) -> Leaf:
            story.append(f"copy {self.number} on {now[0]}")
            return self

        def record_stream(self, stream: Any) -> None:
            story.append(f"{self.number} is {stream.name}'s too")

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream("consumer"))
    batches = prefetched([Leaf(1), Leaf(2)], torch.device("cpu"), stream("side"))
    assert next(batches).number == 1
    first = ["copy 1 on side", "recorded on side", "consumer waits for event 1", "1 is consumer's too"]
    assert story == [*first, "copy 2 on side", "recorded on side"]
    assert [leaf.number for leaf in batches] == [2]
    assert story[6:] == ["consumer waits for event 2", "2 is consumer's too"]


@pytest.mark.processes
def test_epochs_follow_the_one_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device(monkeypatch):
        arm = make(REGISTER, SMALL, torch.device("cpu"), 1, "fork")
        try:
            for _ in range(5):
                arm.next()
            before = arm.staging()["copies"]
            arm.epochs(2, 3)
            # The epoch before is taken to its end first: what was asked for already, and no more.
            assert 6 <= arm.staging()["copies"] - before <= 6 + arm.ahead
            arm.next()
        finally:
            arm.close()


# ---- blocks -------------------------------------------------------------------------------------


def slow_arm(seconds: float, ahead: int = 0) -> Arm:
    def begin() -> Any:
        for number in itertools.count():
            time.sleep(seconds)
            yield number

    return Arm(None, begin, ahead)


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


class Clocked:
    """An event of a GPU whose only work is to count cycles, two in a nanosecond."""

    now = 0.0  # milliseconds

    def __init__(self, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing
        assert blocking, "a wait that spins is CPU time"

    def record(self, stream: str) -> None:
        assert stream == "consumer"
        self.at = Clocked.now

    def synchronize(self) -> None:
        Clocked.now += 0.02  # the host wakes up

    def elapsed_time(self, later: Clocked) -> float:
        return later.at - self.at


@pytest.fixture
def cycles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Torch's CUDA, so far as it is called by name, over host memory; and the cycles that were asked for."""
    slept: list[int] = []

    def sleep(count: int) -> None:
        slept.append(count)
        Clocked.now += count / 2e6

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "consumer")
    monkeypatch.setattr(torch.cuda, "Event", Clocked)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    return slept


def test_a_step_is_as_many_cycles_as_were_measured(cycles: list[int]) -> None:
    cuda = CudaDevice()
    start = cuda.mark()
    cuda.step(0.003)
    assert cycles[-1] == pytest.approx(0.003 * 2e9)
    assert cuda.between(start, cuda.mark()) == pytest.approx(0.003)


@pytest.mark.usefixtures("cycles")
@pytest.mark.parametrize("memory", [PAGEABLE, REGISTER])
def test_copies_are_timed_in_pieces(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[int] = []

    def register(address: int, nbytes: int, flags: int) -> int:
        registered.append(address)
        return 0

    def unregister(address: int) -> int:
        registered.remove(address)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    cuda = CudaDevice()
    cuda.torch = torch.device("cpu")
    pieces: list[int] = []
    copy = torch.Tensor.copy_

    def timed(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        assert bool(registered) == (memory == REGISTER)
        pieces.append(source.nbytes)
        Clocked.now += 0.5
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", timed)
    assert cuda.copy_seconds(memory, 4096, 4) == pytest.approx(4 * 0.5e-3)
    assert pieces == [1024] * 4 * (2 + COPIES)
    assert registered == []


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan", "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1  Rel", "580.1"),
        ("nothing", "unknown"),
    ],
)
def test_the_version_of_the_driver_is_found(text: str, version: str) -> None:
    assert driver_version(text) == version


# ---- runs ---------------------------------------------------------------------------------------


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "SHAPES", {LARGE: ONE, "fields_32": SMALL})
    monkeypatch.setattr(device, "EPOCH_BATCHES", 2)
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
        # There is no side stream without CUDA: that arm has a reason, and the others have figures.
        assert "CUDA" in str(shape.peers[SIDE_STREAM].failure)
        for name, parts in {
            LINK: [COPY],
            RESIDENT: LENGTHS,
            TORCH: PARTS,
            **dict.fromkeys(OURS, PARTS),
        }.items():
            peer = shape.peers[name]
            assert (peer.failure, peer.about["notes"]) == (None, [])
            assert [len(peer.part(part)) for part in parts] == [2] * len(parts)
            assert len(peer.rows) == 2 * len(parts)
            assert ("first_batch" in peer.about) == (name in (TORCH, *OURS))
            assert ("reserved_20" in peer.about) == (name in OURS)
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


def broken_run(monkeypatch: pytest.MonkeyPatch, arms: str, breaks: Callable[[Any], None]) -> CaseRows:
    """The first shape by these arms; `breaks` gets the device's stager."""
    with late_device(monkeypatch) as stager:
        (case,) = cases(f"large --blocks 2 --peers {arms}")
        breaks(stager)
        return Results(measure(case)).cases()[0]


@pytest.mark.processes
@pytest.mark.usefixtures("small_shapes")
def test_an_arm_that_breaks_has_a_reason_and_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = itertools.count()
    following = Arm.next

    def failing(arm: Arm) -> Any:
        if arm.staging().get("pin") == BOUNCE and next(taken) > 20:
            raise ValueError("no more")
        return following(arm)

    monkeypatch.setattr(Arm, "next", failing)
    found = broken_run(monkeypatch, "resident,pageable,bounce", lambda stager: None)
    assert (found.peers[BOUNCE].failure, found.peers[BOUNCE].rows) == ("ValueError: no more", [])
    assert len(found.part(PAGEABLE, READY)) == len(found.part(PAGEABLE, DRAIN)) == 2


@pytest.mark.processes
@pytest.mark.usefixtures("small_shapes")
def test_wrong_batches_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_nothing(stager: Any) -> None:
        monkeypatch.setattr(stager, "copy_async", lambda memory, source, nbytes: None)

    found = broken_run(monkeypatch, "register", copy_nothing)
    assert found.peers[REGISTER].failure == "RuntimeError: wrong batches"


@pytest.mark.processes
@pytest.mark.usefixtures("small_shapes")
def test_no_block_starts_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "LIMIT_S", 0.0)
    found = broken_run(monkeypatch, "resident,pageable", lambda stager: None)
    assert {peer.failure for peer in found.peers.values()} == {"no time was left to start it"}
