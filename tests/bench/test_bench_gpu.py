"""`python -m bench gpu`: figures, goals, tables, pictures, the command line; and whole runs in miniature.

A GPU is stood in for twice: by a device with the host's clock here, whose steps sleep, and by the late device
for the loaders' copies.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the bench extra is not installed")

from rich.console import Console

from bench import files, gpu, gpu_arms, gpu_measure, gpu_plots, gpu_report
from bench.arguments import GPU_SECONDS, SHORT_BLOCKS, SHORT_SECONDS, parse
from bench.gpu_arms import SHAPES, Arm, Batches, ReadyMade, Shape, make, prefetched
from bench.gpu_measure import AHEAD, COPIES, CudaDevice, Pace, _driver_version, timed_block
from bench.gpu_report import goals_table, shape_tables
from bench.gpu_results import (
    BOUNCE,
    LABELS,
    LARGE,
    OURS,
    PAGEABLE,
    PREFETCH,
    REGISTER,
    RESIDENT,
    TORCH,
    ArmResult,
    GpuBlock,
    GpuGoal,
    GpuResults,
    ShapeResult,
    cpu_per_gigabyte,
    goals,
    next_times,
    rates,
    share_of_peak,
    stall,
    stall_points,
    step_unit,
    supplied,
)
from bench.results import Latency, Spread, spread
from tests.support.late_device import LateStager, late_device

PNG = b"\x89PNG\r\n\x1a\n"
NO_PINNING = "ignore:'pin_memory' argument is set as true but no accelerator is found"
STAGING = {"pin": "register", "populate_seconds": 1.7, "register_seconds": 0.1, "pinned_bytes": 1 << 30}
LENGTHS = ("0.5", "1", "2", "4")


# ---- results that nobody measured ---------------------------------------------------------------


def block(
    batches: int = 100, rate: float = 100, cpu: float = 0.1, p50: float = 1e-3, gap: float = 0.0
) -> GpuBlock:
    """`rate` in batches per second; `gap` is the share of the time between steps."""
    seconds = batches / rate
    return GpuBlock(batches, seconds, cpu, Latency(batches, p50, 2 * p50, 3 * p50, 4 * p50), 1 - gap, gap)


def an_arm(name: str, batch_bytes: int, eta: float, p50: float, cpu: float, gap: float) -> ArmResult:
    """Three rounds around these figures, on a link of 50 GB/s."""
    rounds = (0.98, 1.0, 1.01)
    steps = {
        length: [block(gap=min(gap * shake / float(length), 0.9)) for shake in rounds] for length in LENGTHS
    }
    if name == RESIDENT:
        return ArmResult(LABELS[name], steps=steps)
    rate = eta * 50e9 / batch_bytes
    return ArmResult(
        LABELS[name],
        [block(rate=rate * shake, cpu=cpu) for shake in rounds],
        steps,
        [block(p50=p50 * shake) for shake in rounds],
        [min(1.02 * eta, 0.99) * 50e9 * shake for shake in (0.999, 1.0)],
        2.5,
        STAGING if name in OURS else {},
        {"2": 3 << 28, "20": 3 << 28} if name in OURS else {},
    )


def a_shape(name: str = LARGE) -> ShapeResult:
    shape = next(shape for shape in SHAPES if shape.name == name)
    slow = shape.fields > 1
    figures = {
        RESIDENT: (1.0, 0.0, 0.0, 0.001),
        TORCH: (0.02 if slow else 0.2, 4e-5 * shape.fields, 0.9, 0.6),
        PREFETCH: (0.03 if slow else 0.22, 5e-5 * shape.fields, 0.8, 0.3),
        PAGEABLE: (0.2, 2e-5 + 5e-7 * shape.fields, 0.5, 0.1),
        BOUNCE: (0.24, 2e-5 + 5e-7 * shape.fields, 0.3, 0.05),
        REGISTER: (0.97, 2e-5 + 5e-7 * shape.fields, 0.2, 0.011),
    }
    arms = {
        arm: an_arm(arm, shape.nbytes, eta, p50, cpu, gap) for arm, (eta, p50, cpu, gap) in figures.items()
    }
    copy = shape.nbytes / 49e9
    supply = 1 / (5 * copy) if slow else 1.5 / copy
    return ShapeResult(
        shape.name,
        shape.description,
        shape.nbytes,
        shape.fields,
        14,
        "forkserver",
        [49e9, 50e9],
        copy,
        [supply, supply * 0.9, supply * 1.1],
        step_unit(copy, supply),
        arms,
    )


def a_run() -> GpuResults:
    machine = {
        "device": "NVIDIA H200",
        "driver": "570.86.15",
        "cuda": "13.0",
        "cpu": "a CPU",
        "cores": 16,
        "memory": 128 << 30,
        "load_average": 0.5,
        "system": "Linux 6",
        "versions": {"torch": "2.11.0"},
        "date": "2026-11-20T12:00:00+00:00",
    }
    return GpuResults({"blocks": 3}, machine, [a_shape(shape.name) for shape in SHAPES])


def without(shape: ShapeResult, name: str) -> ShapeResult:
    broken = ArmResult(LABELS[name], failure="RuntimeError: it\nbroke")
    return replace(shape, arms={**shape.arms, name: broken})


def rendered(table: Any) -> str:
    written = io.StringIO()
    Console(width=160, file=written).print(table)
    return written.getvalue()


# ---- figures ------------------------------------------------------------------------------------


def test_steps_are_as_long_as_a_copy_unless_workers_are_slower() -> None:
    assert step_unit(0.001, supply=2000) == 0.001
    assert step_unit(0.001, supply=100) == pytest.approx(0.012)


def test_enough_is_supplied_when_workers_and_link_have_a_fifth_to_spare() -> None:
    link = replace(a_shape(), copy_seconds=0.001, supply=[5000.0], unit=0.001)
    assert [supplied(link, length) for length in LENGTHS] == [False, False, True, True]
    workers = replace(link, supply=[100.0], unit=step_unit(0.001, 100))
    assert [supplied(workers, length) for length in LENGTHS] == [False, True, True, True]


def test_eta_is_a_share_of_the_better_peak() -> None:
    shape = replace(a_shape(), batch_bytes=10**9, peaks=[40e9, 50e9])
    blocks = [block(batches=50, rate=25), block(batches=50, rate=50)]
    assert rates(shape, blocks) == [25e9, 50e9]
    assert share_of_peak(shape, rates(shape, blocks)) == Spread(0.75, 0.5, 1.0)
    assert share_of_peak(shape, []) is None


def test_a_stall_is_what_the_device_waits_between_steps() -> None:
    assert stall(GpuBlock(10, 1, 0, Latency(10, 0, 0, 0, 0), steps=0.3, gaps=0.1)) == pytest.approx(0.25)
    assert stall(GpuBlock(10, 1, 0, Latency(10, 0, 0, 0, 0))) == 0


def test_stalls_are_beyond_the_resident_arm_of_the_same_round() -> None:
    arms = {
        RESIDENT: ArmResult("", steps={"1": [block(gap=0.1), block(gap=0.3), block(gap=0.2)]}),
        TORCH: ArmResult("", steps={"1": [block(gap=0.4), block(gap=0.5)]}),  # no time for a third one
    }
    shape = replace(a_shape(), arms=arms)
    points = stall_points(shape, TORCH, "1")
    assert points is not None
    assert [points.median, points.low, points.high] == pytest.approx([25, 20, 30])
    assert stall_points(shape, TORCH, "2") is None
    assert stall_points(shape, REGISTER, "1") is None


def test_cost_figures() -> None:
    shape = replace(a_shape(), batch_bytes=10**8)
    assert cpu_per_gigabyte(shape, [block(batches=20, cpu=3.0)]) == spread([1.5])
    assert cpu_per_gigabyte(shape, []) is None
    assert next_times([block(p50=0.5), block(p50=1.5)]) == Spread(1.0, 0.5, 1.5)
    assert next_times([block(p50=0.5)], "p99") == spread([1.5])
    assert next_times([]) is None


# ---- goals --------------------------------------------------------------------------------------


def goal_of(found: list[GpuGoal], start: str) -> GpuGoal:
    (goal,) = [goal for goal in found if goal.measure.startswith(start)]
    return goal


def test_every_goal_of_the_table_is_there() -> None:
    found = goals(a_run())
    copies, drain = goal_of(found, "large: GB/s of the copies"), goal_of(found, "large: GB/s of a full drain")
    assert (copies.wanted, drain.wanted, copies.at_most) == (0.95, 0.95, False)
    assert copies.met
    assert drain.met
    assert drain.ratio == pytest.approx(0.97 / 0.95)
    cpu = goal_of(found, "large: consumer's CPU")
    assert cpu.met
    assert cpu.ratio == pytest.approx(4.5 / 3)
    for fields, torch_us, ours_us in ((32, 1280, 36), (500, 20_000, 270)):
        ready = goal_of(found, f"fields_{fields}: time of next()")
        assert ready.met
        assert ready.ratio == pytest.approx(torch_us / ours_us / 5)
    stalls = [goal.measure for goal in found if "stall" in goal.measure]
    assert [text.split(":")[0] for text in stalls] == ["large"] * 2 + ["fields_32"] * 3 + ["fields_500"] * 3
    assert len([goal for goal in found if "reserved" in goal.measure and goal.met]) == 3 * len(OURS)


def test_goals_that_are_not_met_say_so() -> None:
    slow = a_shape()
    slow.arms[REGISTER].drain[:] = [block(rate=0.9 * 50e9 / slow.batch_bytes)] * 3
    slow.arms[REGISTER].steps["2"][:] = [block(gap=0.05)] * 3
    slow.arms[REGISTER].reserved["20"] += 1
    found = goals(GpuResults({}, {}, [slow]))
    assert goal_of(found, "large: GB/s of a full drain").met is False
    two = goal_of(found, "large: stall beyond the resident arm, steps of 2")
    assert (two.met, two.at_most) == (False, True)
    assert two.ratio == pytest.approx(4.95 / 2, rel=0.01)
    assert goal_of(found, "large, register: reserved").met is False
    assert goal_of(found, "large, bounce: reserved").met is True


def test_goals_of_an_arm_that_broke_are_not_measured() -> None:
    for broken in (REGISTER, TORCH):
        found = goals(GpuResults({}, {}, [without(a_shape(), broken), without(a_shape("fields_32"), broken)]))
        assert goal_of(found, "large: consumer's CPU").met is None
        assert goal_of(found, "fields_32: time of next()").ratio is None
    assert goal_of(found, "large: GB/s of a full drain").met is True


# ---- tables and pictures ------------------------------------------------------------------------


def test_a_shape_is_shown() -> None:
    shape = a_shape()
    shape.left_out.extend(["round 3, drain, torch", "round 3, 4, torch"])
    shape.arms[BOUNCE].notes.append("closing: late")
    text = rendered(shape_tables(without(shape, PREFETCH)))
    assert "large: one uint8 tensor, 256 images of 3x224x224; 38.5 MB a batch, 14 workers, forkserver" in text
    assert "steps in units of 786 us: the copy of a batch" in text
    assert "stall, 1 " in text
    assert "stall, 2*" in text
    speed, costs = [line for line in text.splitlines() if line.strip().startswith("fastq_loader, register")]
    assert "0.97 (0.95-0.98)" in speed
    assert "0.50 (0.49..0.51)" in speed  # 1.1 points of steps of 2 / 2, less the resident arm's
    assert "768 MiB, 768 MiB" in costs
    assert "torch, side stream: not measured: RuntimeError: it" in text
    assert "fastq_loader, bounce: closing: late" in text
    assert "left out, because the time was over: 2 of round 3" in text
    assert "…" not in text


def test_slow_workers_are_the_unit_of_steps_and_the_table_says_so() -> None:
    assert "1.2 x the workers' time" in rendered(shape_tables(a_shape("fields_32")))


def test_goals_are_shown_with_their_verdicts() -> None:
    run = a_run()
    run.shapes[1] = without(run.shapes[1], REGISTER)
    lines = rendered(goals_table(run)).splitlines()
    (drain,) = [line for line in lines if "full drain / peak" in line]
    assert "at least 0.95" in drain
    assert " 1.02  met " in drain
    (ready,) = [line for line in lines if "fields_32: time of next()" in line]
    assert "not measured" in ready


def test_the_device_and_what_drives_it_are_named() -> None:
    line = gpu_report.machine_line(a_run().machine)
    assert line.startswith("NVIDIA H200, driver 570.86.15, CUDA 13.0\na CPU, 16 cores")


def test_results_come_back_from_their_file() -> None:
    run = a_run()
    assert files._restored(GpuResults, json.loads(json.dumps(asdict(run)))) == run


def test_pictures_are_drawn_and_again_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = a_run()
    run.shapes[1] = without(run.shapes[1], PREFETCH)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    paths = gpu_plots.write(run, first)
    assert [path.name for path in paths] == ["gpu-eta.png", "gpu-stall.png", "gpu-next.png"]
    for path, again in zip(paths, gpu_plots.write(run, second), strict=True):
        assert path.read_bytes().startswith(PNG)
        assert path.read_bytes() == again.read_bytes()


def test_there_are_pictures_of_what_was_measured() -> None:
    run = a_run()
    assert gpu_plots.pictures(replace(run, shapes=[])) == []
    assert len(gpu_plots.pictures(replace(run, shapes=run.shapes[:1]))) == 2  # one field: next() is no matter
    assert "H200, driver 570.86.15, torch 2.11.0, 16 cores, 2026-11-20" in gpu_plots.caption(run)


# ---- the command line ---------------------------------------------------------------------------


def test_gpu_is_a_run_of_its_own() -> None:
    options = parse(["gpu", "--workers", "0,6"])
    assert options.gpu
    assert (options.blocks, options.seconds, options.workers["gpu"]) == (SHORT_BLOCKS, GPU_SECONDS, (6,))
    assert gpu.worker_count(options, 16) == 6
    assert gpu.worker_count(parse(["gpu"]), 16) == 14
    assert gpu.worker_count(parse(["gpu"]), 1) == 1
    assert parse(["gpu", "--seconds", "2"]).seconds == 2
    other = parse([])
    assert (other.gpu, other.seconds) == (False, SHORT_SECONDS)


def test_gpu_is_no_workload(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["gpu", "rows"])
    assert "'gpu' is a run of its own" in capsys.readouterr().err


def test_without_a_gpu_it_says_so_and_exits_with_0(tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench", "gpu", "--json", str(written)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Nothing was measured, because there is no GPU")
    assert done.stdout.count("\n") == 1
    assert not written.exists()


# ---- arms ---------------------------------------------------------------------------------------

SMALL = Shape("small", "a few fields", 3, 2, (5,), torch.float32)
ONE = Shape(LARGE, "one tensor", 1, 4, (3, 8), torch.uint8)


def test_shapes_are_those_of_the_issue() -> None:
    assert [(shape.fields, shape.nbytes) for shape in SHAPES] == [
        (1, 38_535_168),
        (32, 32 * 64 * 1024),
        (500, 500 * 256),
    ]


@pytest.mark.parametrize("shape", [SMALL, ONE])
def test_a_batch_has_its_shape_and_no_two_fields_are_alike(shape: Shape) -> None:
    leaves = gpu_arms.leaves(ReadyMade(shape).batch())
    assert len(leaves) == shape.fields
    assert sum(leaf.nbytes for leaf in leaves) == shape.nbytes
    for leaf in leaves:
        assert (leaf.shape, leaf.dtype) == ((shape.samples, *shape.sample_shape), shape.dtype)
    assert len({tuple(leaf.flatten().tolist()) for leaf in leaves}) == shape.fields


def test_samples_are_made_in_the_worker() -> None:
    dataset = ReadyMade(ONE)
    fresh = len(pickle.dumps(dataset))
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again.batch(), dataset.batch())
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

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def record_event(self) -> str:
            story.append(f"recorded on {self.name}")
            return f"event {len([line for line in story if 'recorded' in line])}"

        def wait_event(self, event: str) -> None:
            story.append(f"{self.name} waits for {event}")

    @contextmanager
    def on(stream: Stream) -> Any:
        now[0] = stream.name
        yield
        now[0] = "consumer"

    class Leaf:
        def __init__(self, number: int) -> None:
            self.number = number

        def to(self, device: Any, non_blocking: bool) -> Leaf:
            story.append(f"copy {self.number} on {now[0]}")
            return self

        def record_stream(self, stream: Stream) -> None:
            story.append(f"{self.number} is {stream.name}'s too")

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("consumer"))
    side: Any = Stream("side")
    batches = prefetched([Leaf(1), Leaf(2)], torch.device("cpu"), side)
    assert next(batches).number == 1
    assert story == [
        "copy 1 on side",
        "recorded on side",
        "consumer waits for event 1",
        "1 is consumer's too",
        "copy 2 on side",
        "recorded on side",
    ]
    assert [leaf.number for leaf in batches] == [2]
    assert story[6:] == ["consumer waits for event 2", "2 is consumer's too"]


# ---- blocks -------------------------------------------------------------------------------------


class HostDevice:
    """A device whose steps take their time at once, on the host's clock."""

    torch = torch.device("cpu")

    def __init__(self) -> None:
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


def slow_arm(seconds: float, ahead: int = 0) -> Arm:
    def begin() -> Any:
        for number in itertools.count():
            time.sleep(seconds)
            yield number

    return Arm(None, begin, ahead)


def test_a_block_knows_steps_from_what_is_between_them() -> None:
    device = HostDevice()
    done = timed_block(slow_arm(0.004), device, Pace(step=0.002), 0.06)
    assert done.batches == done.next.calls == len(device.steps)
    assert set(device.steps) == {0.002}
    assert done.next.p50 >= 0.004
    assert done.steps >= 0.002 * done.batches
    assert done.gaps >= 0.004 * (done.batches - 1)  # what came before the first step is not between two
    assert done.steps + done.gaps + 0.004 <= done.seconds
    assert len(device.waited) == done.batches - AHEAD + 1


def test_what_was_ready_before_a_block_is_not_counted() -> None:
    arm = slow_arm(0.0, ahead=7)
    timed_block(arm, HostDevice(), Pace(pause=0.001), 0.001)  # at rest there is nothing to pass over
    assert arm.next() == 3
    done = timed_block(arm, HostDevice(), Pace(), 0.01)
    assert arm.next() == 4 + 7 + done.batches


def test_a_block_without_steps_has_no_stall() -> None:
    done = timed_block(slow_arm(0.001), HostDevice(), Pace(), 0.01)
    assert (done.steps, done.gaps) == (0, 0)


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


def cuda_device(patch: pytest.MonkeyPatch) -> tuple[CudaDevice, list[int]]:
    """Torch's CUDA, so far as it is called by name, over host memory; and the cycles that were asked for."""
    slept: list[int] = []

    def sleep(cycles: int) -> None:
        slept.append(cycles)
        Clocked.now += cycles / 2e6

    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "current_stream", lambda device: "consumer")
    patch.setattr(torch.cuda, "Event", Clocked)
    patch.setattr(torch.cuda, "_sleep", sleep)
    device = CudaDevice()
    device.torch = torch.device("cpu")
    return device, slept


def test_a_step_is_as_many_cycles_as_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device, slept = cuda_device(monkeypatch)
    start = device.mark()
    device.step(0.003)
    assert slept[-1] == pytest.approx(0.003 * 2e9)
    assert device.between(start, device.mark()) == pytest.approx(0.003)


@pytest.mark.parametrize("memory", [PAGEABLE, REGISTER])
def test_copies_are_timed_in_pieces(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = cuda_device(monkeypatch)
    stager = LateStager()
    monkeypatch.setattr(gpu_measure, "TorchStager", lambda device: stager)
    pieces: list[int] = []
    copy = torch.Tensor.copy_

    def timed(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        assert bool(stager.registered) == (memory == REGISTER)
        pieces.append(source.nbytes)
        Clocked.now += 0.5
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", timed)
    assert device.copy_seconds(memory, 4096, 4) == pytest.approx(4 * 0.5e-3)
    assert pieces == [1024] * 4 * (2 + COPIES)
    assert stager.registered == {}


def test_the_version_of_the_driver_is_found() -> None:
    assert (
        _driver_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan") == "570.86.15"
    )
    assert _driver_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1  Rel") == "580.1"
    assert _driver_version("nothing") == "unknown"


# ---- runs ---------------------------------------------------------------------------------------


def test_each_shape_has_its_share_of_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    settings = gpu.shape_settings(SHAPES, parse(["gpu"]), 3, "fork", 540.0)
    shape, setting = next(settings)
    assert (shape, setting.until) == (SHAPES[0], 1180)
    now[0] = 1060.0  # it left some
    shape, setting = next(settings)
    assert (shape, setting.until, setting.over) == (SHAPES[1], 1300, False)
    now[0] = 1400.0  # it took longer
    assert setting.over
    assert next(settings)[1].until == 1540


def quick(rounds: int = 1, limit: float = 60.0) -> gpu.Setting:
    return gpu.Setting(1, "fork", rounds, 0.02, time.monotonic() + limit)


@pytest.mark.processes
@pytest.mark.filterwarnings(NO_PINNING)
def test_a_whole_run_in_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(gpu, "EPOCH_BATCHES", 2)
    monkeypatch.setattr(gpu, "PAUSE_S", 0.001)
    monkeypatch.setattr(gpu, "wait_until_quiet", lambda: None)
    written = tmp_path / "results.json"
    arguments = ["gpu", "--workers", "1", "--blocks", "2", "--seconds", "0.01"]
    options = parse([*arguments, "--json", str(written), "--plot", str(tmp_path)])
    with late_device(monkeypatch):
        results = gpu.run(options, HostDevice(), (ONE, SMALL), "fork")
    for shape in results.shapes:
        assert shape.left_out == []
        assert shape.num_workers == 1
        # There is no side stream without CUDA: that arm has a reason, and the others have figures.
        assert "CUDA" in str(shape.arms[PREFETCH].failure)
        assert {
            length: len(blocks) for length, blocks in shape.arms[RESIDENT].steps.items()
        } == dict.fromkeys(LENGTHS, 2)
        for name in (TORCH, *OURS):
            arm = shape.arms[name]
            assert (arm.failure, arm.notes) == (None, [])
            assert len(arm.drain) == len(arm.ready) == len(arm.copy_rates) == 2
            assert {length: len(blocks) for length, blocks in arm.steps.items()} == dict.fromkeys(LENGTHS, 2)
            assert arm.first_batch is not None
        for name in OURS:
            assert shape.arms[name].staging["pin"] == name
            assert shape.arms[name].staging["copied_bytes"] > 0
            assert shape.arms[name].reserved == {"2": 1 << 21, "20": 1 << 21}
        assert shape.arms[TORCH].reserved == {}
        assert shape.arms[PAGEABLE].copy_rates == pytest.approx([25e9] * 2)
    assert files._restored(GpuResults, json.loads(written.read_text())) == results
    assert len(list(tmp_path.glob("gpu-*.png"))) == 3
    text = capsys.readouterr().out
    assert "small: a few fields" in text
    assert "large: GB/s of a full drain / peak" in text


@pytest.mark.processes
@pytest.mark.filterwarnings(NO_PINNING)
def test_when_the_time_is_over_what_is_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LENGTHS", ("1",))
    monkeypatch.setattr(gpu, "EPOCH_BATCHES", 2)
    with late_device(monkeypatch):
        run = gpu.ShapeRun(SMALL, HostDevice(), quick(), lambda done: None)
        for name in (RESIDENT, PAGEABLE):
            run.start(name)
        run._setting = replace(run._setting, until=time.monotonic())
        run.rounds(0.001)
        run.start(TORCH)
        run.finish(PAGEABLE)
        run.close()
    assert run.left_out == [
        "round 1, drain, pageable",
        "round 1, 1, resident",
        "round 1, 1, pageable",
        "round 1, ready, pageable",
    ]
    assert (run.results[PAGEABLE].drain, run.results[PAGEABLE].copy_rates) == ([], [])
    assert run.results[PAGEABLE].reserved["20"] > 0  # a few seconds beyond the blocks are for this
    assert run.results[TORCH].failure == "no time was left to start it"


@pytest.mark.processes
def test_an_arm_that_breaks_has_a_reason_and_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device(monkeypatch):
        run = gpu.ShapeRun(SMALL, HostDevice(), quick(rounds=2), lambda done: None)
        for name in (RESIDENT, PAGEABLE, BOUNCE):
            run.start(name)
        taken = itertools.count()

        def failing() -> Any:
            if next(taken) > 20:
                raise ValueError("no more")
            return run_next()

        run_next = run._arms[BOUNCE].next
        monkeypatch.setattr(run._arms[BOUNCE], "next", failing)
        run.rounds(0.001)
        run.close()
    assert run.results[BOUNCE] == ArmResult(LABELS[BOUNCE], failure="ValueError: no more")
    assert len(run.results[PAGEABLE].ready) == 2


@pytest.mark.processes
def test_wrong_batches_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_device(monkeypatch) as stager:
        monkeypatch.setattr(stager, "copy_async", lambda memory, source, nbytes: None)
        run = gpu.ShapeRun(SMALL, HostDevice(), quick(), lambda done: None)
        run.start(REGISTER)
    assert run.results[REGISTER].failure == "RuntimeError: wrong batches"


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
