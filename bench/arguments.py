"""The command line of `python -m bench`, and what it means when little is said."""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from bench.peers import PEERS
from bench.peers.device import ARMS
from bench.timing.against import AGAINST, NEW_WORKERS
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
    "resume": "state_dict(), a loop that calls it, first batch after a resume, torchdata beside it",
    "insight": 'tune() and num_workers="auto" beside all settings that they could have chosen',
    "cluster": "workers on other machines, over loopback and limited links, beside Ray's own ways",
}
# One of each kind, for a run of a few minutes; --full takes all.
SHORT = ("jpeg", "csv", "large_u8", "rows", "tokens")
# What an axis runs when no workload is named: bound by messages, by memory and by the dataset.
FEW = ("rows", "large_u8", "jpeg")
SIZES = tuple(f"bytes_{1 << power}" for power in range(10, 29, 3))  # 1 KiB to 256 MiB
# What two revisions are compared by: the consumer's work, the workers', both, and starts of workers.
COMPARED = ("rows", "tokens", "objects", "csv", "large_u8", "large_f32", "fields", NEW_WORKERS)
WORKLOADS = {"steady": SHORT, "memory": SHORT, "workers": FEW, "start": ("rows",), "turns": FEW}
WORKLOADS[AGAINST] = COMPARED
WORKERS = {"workers": (0, 1, 2, 4), "start": (2, 8), "device": ()}
USUAL_WORKERS, USUAL_PREFETCH = (2,), 2
SHORT_BLOCKS, SHORT_SECONDS = 5, 0.5
FULL_BLOCKS, FULL_SECONDS = 7, 0.8
DEVICE_SECONDS = 0.4  # some 500 blocks have to fit into nine minutes


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line, `sys.argv` by default, with every default filled in.

    `workloads` and `workers` are given for each axis; with a device for "device", and there are no `axes`.

    Raises:
        SystemExit: argparse's, when the line is wrong.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    full, device, against = options.full, options.device, options.against
    everything, peers = (SHAPES, ARMS) if device else (all_workloads(), PEERS)
    if against is None and (options.prefetch != USUAL_PREFETCH or options.schedule or options.ceiling):
        parser.error("--prefetch, --schedule and --ceiling go with --against REVISION")
    # In five rounds the rounds of two revisions that are as fast agree once in 16 times.
    if against is not None and options.blocks and options.blocks < SHORT_BLOCKS:
        parser.error(f"--against needs at least {SHORT_BLOCKS} rounds to tell noise, got {options.blocks}")
    for kind, given, known in (
        ("a workload", options.workloads, [*everything, NEW_WORKERS] if against else everything),
        ("a peer", options.peers, peers),
        ("an axis", options.axes, AXES),
    ):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is not {kind}; choose from {', '.join(known)}")
    usual = {"device": tuple(SHAPES)} if device else WORKLOADS
    if full:
        usual = {axis: tuple(everything) if of is SHORT else of for axis, of in usual.items()}
    options.axes = () if device else tuple(AXES) if full else options.axes
    options.workloads = {axis: tuple(options.workloads) or of for axis, of in usual.items()}
    options.workloads |= {} if device else {"bytes": SIZES}
    options.workers = {
        axis: options.workers or WORKERS.get(axis, USUAL_WORKERS) for axis in (*AXES, AGAINST, "device")
    }
    options.peers = options.peers or tuple(peers)
    options.blocks = options.blocks or (FULL_BLOCKS if full else SHORT_BLOCKS)
    options.seconds = options.seconds or (
        DEVICE_SECONDS if device else FULL_SECONDS if full else SHORT_SECONDS
    )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="fastq_loader beside torch's DataLoader, other loaders and the ceiling, in turn.",
    )
    positive = checked("a whole number of at least 1", int, lambda value: value >= 1)
    seconds = checked("a number of seconds above 0", float, lambda value: 0 < value < math.inf)
    file = checked("a file in a folder that exists", Path, lambda it: it.parent.is_dir() and not it.is_dir())
    methods = multiprocessing.get_all_start_methods()
    add = parser.add_argument
    add("workloads", nargs="*", metavar="workload", help=f"what to load (default: {' '.join(SHORT)})")
    add("--list", action="store_true", help="list workloads, peers and axes, and stop")
    add("--full", action="store_true", help="every axis and workload, longer blocks")
    about = f"of {', '.join(AXES)} (default: steady)"
    add("--axis", dest="axes", type=_names, default=("steady",), metavar="A,B", help=about)
    instead = parser.add_mutually_exclusive_group().add_argument
    about = "batches onto a GPU, in ten minutes; workloads are then shapes of batches, and peers ways there"
    instead("--device", choices=["cuda"], help=about)
    about = "this tree's package beside that of another revision, and no other loader"
    instead("--against", metavar="REVISION", help=f"{about} (default workloads: {' '.join(COMPARED)})")
    add("--prefetch", type=positive, default=USUAL_PREFETCH, help="with --against: prefetch_factor of both")
    add("--schedule", metavar="NAME", help="with --against: schedule= of both (default: the loader's own)")
    add("--ceiling", action="store_true", help="with --against: the ceiling takes turns with both")
    add("--peers", type=_names, default=(), metavar="A,B", help="who loads (default: all of --list)")
    add("--workers", type=numbers, metavar="N,M", help="worker processes, also several numbers (default: 2)")
    about = f"timed blocks per peer (default: {SHORT_BLOCKS}; full: {FULL_BLOCKS})"
    add("--blocks", "--rounds", type=positive, help=about)
    add("--seconds", type=seconds, help=f"length of a block (default: {SHORT_SECONDS}; full: {FULL_SECONDS})")
    add("--start-method", choices=methods, default="fork", help="how workers are started (default: fork)")
    add("--json", type=file, metavar="FILE", help="write every block to this file, as a line of JSON")
    add("--resume", action="store_true", help="keep what FILE holds already, and measure only the rest")
    about = "measure nothing: write the READMEs' figures, all tables and the picture from FILE"
    add("--readme", type=Path, metavar="FILE", help=about)
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def checked(what: str, convert: Callable[[str], T], holds: Callable[[T], bool]) -> Callable[[str], T]:
    """A type of argument: checked before the run, not after minutes of it."""

    def check(text: str) -> T:
        with suppress(ValueError):
            value = convert(text)
            if holds(value):
                return value
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")

    return check


numbers = checked(
    "whole numbers of at least 0",
    lambda text: tuple(dict.fromkeys(map(int, text.split(",")))),
    lambda value: min(value) >= 0,
)
