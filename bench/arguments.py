"""The command line of `python -m bench`, and what it means when little is said."""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.peers import PEERS
from bench.peers.device import ARMS
from bench.workloads import all_workloads
from bench.workloads.ready_made import SHAPES

T = TypeVar("T")

AXES = {
    "steady": "batches per second once it runs, for each workload",
    "bytes": "the same for batches from 1 KB to 256 MB",
    "workers": "the same for a growing number of workers",
    "memory": "peak memory and descriptors, each peer alone",
    "start": "time to the first batch, by start method and number of workers",
    "turns": "first batch, cold first epoch, epoch turns, break and restart, torch against fastq_loader",
    "schedule": "order without the stall: slow samples, a slow consumer; 2 and 4 workers",
    "kills": "what the death of a worker costs; 1 and 4 workers",
}
# One of each kind, for a run of a few minutes; --full takes all.
SHORT = ("jpeg", "csv", "large_u8", "rows", "tokens")
# What an axis runs when no workload is named: bound by messages, by memory and by the dataset.
FEW = ("rows", "large_u8", "jpeg")
SIZES = tuple(f"bytes_{1 << power}" for power in range(10, 29, 3))  # 1 KiB to 256 MiB
WORKLOADS = {
    "steady": SHORT,
    "memory": SHORT,
    "bytes": SIZES,
    "workers": FEW,
    "start": ("rows",),
    "turns": FEW,
}
WORKERS = {"workers": (0, 1, 2, 4), "start": (2, 8), "device": ()}
USUAL_WORKERS = (2,)
SHORT_BLOCKS, SHORT_SECONDS = 5, 0.5
FULL_BLOCKS, FULL_SECONDS = 7, 0.8
DEVICE_SECONDS = 0.4  # some 500 blocks have to fit into nine minutes


@dataclass(frozen=True)
class Options:
    """A run, with every default filled in.

    Attributes:
        axes: what is measured, of `AXES`; none with a device.
        workloads, workers: names, and numbers of worker processes, for each axis that has any.
        peers: names, with a device those of arms.
        blocks: timed blocks of a peer, and repetitions of a turn and of an epoch.
        seconds: length of a block.
        json: the file to write rows to; None is no file. `resume`: go on with what it holds.
        plot: the folder to draw into; None is no picture.
        device: measure batches on their way to it; None: on the host.
        readme: write the READMEs from this file of results, and measure nothing.
    """

    axes: tuple[str, ...]
    workloads: dict[str, tuple[str, ...]]
    workers: dict[str, tuple[int, ...]]
    peers: tuple[str, ...]
    blocks: int
    seconds: float
    start_method: str
    json: Path | None
    resume: bool
    plot: Path | None
    device: str | None
    readme: Path | None
    list: bool


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options of a command line, `sys.argv` by default; argparse's SystemExit when it is wrong."""
    parser = _parser()
    given = parser.parse_args(arguments)
    full, device = given.full, given.device
    everything, peers = (SHAPES, ARMS) if device else (all_workloads(), PEERS)
    try:
        named = _known(given.workloads, everything, "a workload")
        some = _known(given.peers, peers, "a peer")
        axes = _known(AXES if full else given.axis, AXES, "an axis")
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    usual = {"device": tuple(SHAPES)} if device else WORKLOADS
    named_or = {axis: tuple(everything) if full and of is SHORT else of for axis, of in usual.items()}
    return Options(
        axes=() if device else axes,
        workloads={axis: of if axis == "bytes" else named or of for axis, of in named_or.items()},
        workers={axis: given.workers or WORKERS.get(axis, USUAL_WORKERS) for axis in (*AXES, "device")},
        peers=some or tuple(name for name in peers if device or PEERS[name].usual),
        blocks=given.blocks or (FULL_BLOCKS if full else SHORT_BLOCKS),
        seconds=given.seconds or (DEVICE_SECONDS if device else FULL_SECONDS if full else SHORT_SECONDS),
        **{
            name: getattr(given, name)
            for name in ("start_method", "json", "resume", "plot", "readme", "list")
        },
        device=device,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="fastq_loader beside torch's DataLoader, other loaders and the ceiling, in turn.",
    )
    numbers = _checked("whole numbers of at least 0", _numbers)
    positive = _checked("a whole number of at least 1", int, lambda value: value >= 1)
    seconds = _checked("a number of seconds above 0", float, lambda value: 0 < value < math.inf)
    file = _checked("a file in a folder that exists", Path, lambda it: it.parent.is_dir() and not it.is_dir())
    folder = _checked("a folder that exists", Path, Path.is_dir)
    methods = multiprocessing.get_all_start_methods()
    add = parser.add_argument
    add("workloads", nargs="*", metavar="workload", help=f"what to load (default: {' '.join(SHORT)})")
    add("--list", action="store_true", help="list workloads, peers and axes, and stop")
    add("--full", action="store_true", help="every axis and workload, longer blocks")
    add(
        "--axis",
        type=_names,
        default=("steady",),
        metavar="A,B",
        help=f"of {', '.join(AXES)} (default: steady)",
    )
    about = "batches onto a GPU, in ten minutes; workloads are then shapes of batches, and peers ways there"
    add("--device", choices=["cuda"], help=about)
    add("--peers", type=_names, default=(), metavar="A,B", help="who loads (default: nearly all of --list)")
    add("--workers", type=numbers, metavar="N,M", help="worker processes, also several numbers (default: 2)")
    add(
        "--blocks",
        type=positive,
        help=f"timed blocks per peer (default: {SHORT_BLOCKS}; full: {FULL_BLOCKS})",
    )
    add("--seconds", type=seconds, help=f"length of a block (default: {SHORT_SECONDS}; full: {FULL_SECONDS})")
    add("--start-method", choices=methods, default="fork", help="how workers are started (default: fork)")
    add("--json", type=file, metavar="FILE", help="write every block to this file, as a line of JSON")
    add("--resume", action="store_true", help="keep what FILE holds already, and measure only the rest")
    add("--plot", type=folder, metavar="FOLDER", help="draw pictures into this folder")
    about = "measure nothing: write the figures and pictures of the READMEs from FILE"
    add("--readme", type=Path, metavar="FILE", help=about)
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(map(int, text.split(","))))
    if min(numbers) < 0:
        raise ValueError
    return numbers


def _known(names: Collection[str], known: Collection[str], what: str) -> tuple[str, ...]:
    """The names, each once."""
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not {what}; choose from {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def _checked(
    what: str, convert: Callable[[str], T], holds: Callable[[T], bool] = lambda value: True
) -> Callable[[str], T]:
    """A type of argument: checked before the run, not after minutes of it."""

    def check(text: str) -> T:
        with suppress(ValueError):
            value = convert(text)
            if holds(value):
                return value
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")

    return check
