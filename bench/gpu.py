"""`python -m bench gpu`: batches onto a GPU, as the arms of `gpu_arms` bring them there.

One shape of batches after the other; of a shape all arms are alive in this process with their workers up,
and take turns block by block, because the speed of a machine drifts by more than arms differ. On a machine
without a GPU nothing is measured, and that is no error.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

import fastq_loader.device.backend
from bench import gpu_plots, gpu_report, machine, report
from bench.arguments import Options
from bench.gpu_arms import SHAPES, START_METHOD, Arm, ReadyMade, Shape, host_only, leaves, make
from bench.gpu_measure import PAUSE_S, CudaDevice, Device, Pace, peak_rate, timed_block
from bench.gpu_results import (
    BOUNCE,
    EPOCHS,
    LABELS,
    OURS,
    RESIDENT,
    ArmResult,
    GpuResults,
    ShapeResult,
    step_unit,
)
from bench.measure import reason, time_limit
from bench.proc import wait_until_quiet

LENGTHS = ("0.5", "1", "2", "4")  # of steps, in units of the shape
LIMIT_S = 540.0  # no block starts after it: what is left to do then fits into the rest of ten minutes
STARTING_S = 60.0
HANGING_S = 30.0  # beyond a block's own length
CLOSING_S = 15.0
WARM_UP_S = 6.0  # at most, to use every block and buffer once: the system makes a gigabyte of pages in 2 s
ENDING_S = 15.0  # beyond the time for blocks; the epochs take a second or two for each arm
EPOCH_BATCHES = 32  # of the epochs after which one looks at the device's memory
SUPPLY_BLOCKS = 3
DESCRIPTORS = 65_536  # torch sends each field through one of its own

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """How a shape is measured.

    Attributes:
        rounds: blocks of each kind and arm. `seconds`: length of a block.
        until: no block starts after this moment of `time.monotonic`.
    """

    workers: int
    start_method: str
    rounds: int
    seconds: float
    until: float

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until


class ShapeRun:
    """The arms of a shape that are alive, and what is known of all of them."""

    def __init__(self, shape: Shape, device: Device, setting: Setting, tick: Tick) -> None:
        self.results = {name: ArmResult(label) for name, label in LABELS.items()}
        self.left_out: list[str] = []
        self._shape = shape
        self._device = device
        self._setting = setting
        self._tick = tick
        self._arms: dict[str, Arm] = {}

    def start(self, name: str) -> None:
        """Start an arm, look at its first batch, and let it use all its memory."""
        if self._setting.over:
            self._fail(name, "no time was left to start it")
            return
        try:
            with time_limit(STARTING_S):
                arm = self._arms[name] = make(
                    name,
                    self._shape,
                    self._device.torch,
                    self._setting.workers,
                    self._setting.start_method,
                )
                began = time.perf_counter()
                batch = arm.next()
                self._device.wait(self._device.mark())
                first_batch = time.perf_counter() - began
                _check(batch, self._shape)
                until = time.monotonic() + WARM_UP_S
                for _ in range(3 * arm.ahead):
                    self._device.wait(self._device.mark())
                    arm.next()
                    if time.monotonic() > until:
                        break
            if name != RESIDENT:
                self._update(name, first_batch=first_batch)
        except Exception as error:
            self._fail(name, reason(error))
        self._tick(f"{self._shape.name}: {name} started")

    def rounds(self, unit: float) -> None:
        """All blocks, to and fro, so that no arm always runs after the same other one."""
        paces = {"drain": Pace(), **{length: Pace(float(length) * unit) for length in LENGTHS}}
        paces["ready"] = Pace(pause=PAUSE_S)
        for number in range(self._setting.rounds):
            names = [name for name in self.results if name in self._arms]
            for kind, pace in paces.items():
                for name in names if number % 2 == 0 else reversed(names):
                    if name not in self._arms or (name == RESIDENT and not pace.step):
                        continue
                    if self._setting.over:
                        self.left_out.append(f"round {number + 1}, {kind}, {name}")
                        continue
                    self._block(name, kind, pace)
                    self._tick(f"{self._shape.name}: {name}, {kind}")
            for name in names:
                if name != RESIDENT and name in self._arms and not self._setting.over:
                    self._copy(name)

    def _block(self, name: str, kind: str, pace: Pace) -> None:
        try:
            wait_until_quiet()
            with time_limit(self._setting.seconds + HANGING_S):
                block = timed_block(self._arms[name], self._device, pace, self._setting.seconds)
        except Exception as error:
            self._fail(name, reason(error))
            return
        result = self.results[name]
        into = {"drain": result.drain, "ready": result.ready}
        (into[kind] if kind in into else result.steps.setdefault(kind, [])).append(block)

    def _copy(self, name: str) -> None:
        """The arm's kind of copies, without a loader: torch's of each leaf, ours of the whole batch."""
        memory, pieces = (name, 1) if name in OURS else (BOUNCE, self._shape.fields)
        try:
            seconds = self._device.copy_seconds(memory, self._shape.nbytes, pieces)
        except Exception as error:
            self._fail(name, reason(error))
        else:
            self.results[name].copy_rates.append(self._shape.nbytes / seconds)

    def finish(self, name: str) -> None:
        """What is to be had at the end only: counters, and the device's memory after many epochs."""
        try:
            with time_limit(HANGING_S):
                self._update(name, staging=self._arms[name].staging())
                if time.monotonic() > self._setting.until + ENDING_S:
                    self.left_out.append(f"memory after {EPOCHS[1]} epochs, {name}")
                    return
                reserved, done = {}, 0
                self._device.release()
                for epochs in EPOCHS:
                    self._arms[name].epochs(epochs - done, EPOCH_BATCHES)
                    reserved[str(epochs)], done = self._device.reserved(), epochs
                self._update(name, reserved=reserved)
        except Exception as error:  # what it has of blocks holds all the same
            self.results[name].notes.append(f"epochs: {reason(error)}")
        self._tick(f"{self._shape.name}: {name}, epochs")

    def alive(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self._arms]

    def close(self) -> None:
        for name in list(self._arms):
            self._close(name)

    def _close(self, name: str) -> None:
        arm = self._arms.pop(name, None)
        if arm is not None:
            try:
                with time_limit(CLOSING_S):
                    arm.close()
            except Exception as error:
                self.results[name].notes.append(f"closing: {reason(error)}")

    def _fail(self, name: str, why: str) -> None:
        """An arm that broke has no figures, also where it had some."""
        self.results[name] = ArmResult(LABELS[name], failure=why)
        self._close(name)

    def _update(self, name: str, **values: Any) -> None:
        self.results[name] = ArmResult(**{**vars(self.results[name]), **values})


def _check(batch: Any, shape: Shape) -> None:
    expected = ReadyMade(shape).batch()
    for own, other in zip(leaves(batch), leaves(expected), strict=True):
        if not torch.equal(own.cpu(), other):
            raise RuntimeError("wrong batches")


def measure_shape(shape: Shape, device: Device, setting: Setting, tick: Tick) -> ShapeResult:
    """All arms with one shape of batches."""
    copy_seconds = device.copy_seconds(BOUNCE, shape.nbytes, 1)
    peaks = [peak_rate(device)]
    supply = _supply(shape, device, setting)
    unit = step_unit(copy_seconds, statistics.median(supply))
    tick(f"{shape.name}: supply")
    run = ShapeRun(shape, device, setting, tick)
    with ExitStack() as stack:
        stack.callback(run.close)
        for name in LABELS:
            run.start(name)
        run.rounds(unit)
        for name in run.alive(OURS):
            run.finish(name)
    peaks.append(peak_rate(device))
    return ShapeResult(
        shape.name,
        shape.description,
        shape.nbytes,
        shape.fields,
        setting.workers,
        setting.start_method,
        peaks,
        copy_seconds,
        supply,
        unit,
        run.results,
        run.left_out,
    )


def _supply(shape: Shape, device: Device, setting: Setting) -> list[float]:
    """Batches per second that the workers make and a consumer takes, on the host."""
    arm = host_only(shape, setting.workers, setting.start_method)
    try:
        with time_limit(STARTING_S):
            for _ in range(3 * arm.ahead):
                arm.next()
            blocks = [timed_block(arm, device, Pace(), setting.seconds) for _ in range(SUPPLY_BLOCKS)]
    finally:
        arm.close()
    return [block.batches / block.seconds for block in blocks]


def shape_settings(
    shapes: Sequence[Shape], options: Options, workers: int, start_method: str, limit: float
) -> Iterator[tuple[Shape, Setting]]:
    """Each shape may start blocks for its share of the time that is left when it begins."""
    end = time.monotonic() + limit
    for number, shape in enumerate(shapes):
        began = time.monotonic()
        until = began + (end - began) / (len(shapes) - number)
        yield shape, Setting(workers, start_method, options.blocks, options.seconds, until)


def worker_count(options: Options, cores: int) -> int:
    """As many as the machine has cores, but for the consumer's and that of torch's pin thread."""
    return options.workers["gpu"][0] if options.workers["gpu"] else max(1, cores - 2)


def main(options: Options) -> int:
    """The command; 0 also where there is no GPU."""
    try:
        fastq_loader.device.backend.parse("cuda")
    except ValueError as error:
        print(f"Nothing was measured, because there is no GPU to measure: {error}.")
        return 0
    _allow_descriptors()
    machine.use_one_thread()
    run(options, CudaDevice(), SHAPES, START_METHOD)
    return 0


def _allow_descriptors() -> None:
    """Before the fork server starts, whose children have the same limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def run(options: Options, device: Device, shapes: Sequence[Shape], start_method: str) -> GpuResults:
    """Measure, show each shape when it is there, and write what was asked for."""
    here = machine.describe(["torch", "numpy", "fastq-loader"]) | device.describe()
    workers = worker_count(options, here["cores"])
    results = GpuResults({"workers": workers, "blocks": options.blocks, "seconds": options.seconds}, here)
    output = report.console()
    output.print(gpu_report.machine_line(here), highlight=False, soft_wrap=True)
    for shape, setting in shape_settings(shapes, options, workers, start_method, LIMIT_S):
        results.shapes.append(measure_shape(shape, device, setting, _progress))
        _progress("")
        output.print(gpu_report.shape_tables(results.shapes[-1]))
        if options.json is not None:  # also what there is of a run that is broken off
            options.json.write_text(json.dumps(asdict(results), indent=1) + "\n")
    output.print(gpu_report.LEGEND, highlight=False, soft_wrap=True)
    output.print(gpu_report.goals_table(results))
    if options.plot is not None:
        gpu_plots.write(results, options.plot)
    return results


def _progress(done: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{done}", end="", file=sys.stderr, flush=True)
