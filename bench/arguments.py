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
from bench.timing.against import NEW_WORKERS
from bench.timing.device import ARMS
from bench.timing.training import LANES
from bench.workloads import all_workloads, find_workload
from bench.workloads.ready_made import SHAPES
from bench.workloads.trainings import NAMES

T = TypeVar("T")

# One of each kind, for a run of a few minutes; --full takes all.
SHORT = ("jpeg", "csv", "large_u8", "rows", "tokens")
# What two revisions are compared by: the consumer's work, the workers', both, and starts of workers.
COMPARED = ("rows", "tokens", "objects", "csv", "large_u8", "large_f32", "fields", NEW_WORKERS)
USUAL_WORKERS, USUAL_PREFETCH = (2,), 2
SHORT_BLOCKS, SHORT_SECONDS = 5, 0.5
FULL_BLOCKS, FULL_SECONDS = 7, 0.8
TRAIN_BLOCKS, TRAIN_SECONDS = 3, 1.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line, `sys.argv` by default, with every default filled in.

    Raises:
        SystemExit: argparse's, when the line is wrong.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    full, device, against = options.full, options.device, options.against
    if options.train is not bool(options.train and device) or (device == "cpu" and not options.train):
        parser.error("--train goes with --device, and --device cpu with --train")
    shapes: Sequence[str] = NAMES if options.train else tuple(SHAPES)
    known_peers: Sequence[str] = tuple(LANES if options.train else ARMS if device else PEERS)
    if against is None and (options.prefetch != USUAL_PREFETCH or options.schedule or options.ceiling):
        parser.error("--prefetch, --schedule and --ceiling go with --against REVISION")
    if options.again and options.readme in (None, options.json):
        parser.error("--again goes with --readme FILE, and --json names another file then")
    # In five rounds the rounds of two revisions that are as fast agree once in 16 times.
    if against is not None and options.blocks and options.blocks < SHORT_BLOCKS:
        parser.error(f"--against needs at least {SHORT_BLOCKS} rounds to tell noise, got {options.blocks}")
    for name in options.workloads:
        if not (name in shapes if device else _is_workload(name) or (against and name == NEW_WORKERS)):
            parser.error(f"{name!r} is not a workload; see --list")
    if unknown := [name for name in options.peers if name not in known_peers]:
        parser.error(f"{unknown[0]!r} is not a peer; choose from {', '.join(known_peers)}")
    usual = shapes if device else COMPARED if against else all_workloads() if full else SHORT
    options.workloads = tuple(options.workloads or usual)
    options.workers = options.workers or ((0,) if device else USUAL_WORKERS)
    options.peers = options.peers or known_peers
    blocks, length = (FULL_BLOCKS, FULL_SECONDS) if full else (SHORT_BLOCKS, SHORT_SECONDS)
    if options.train:
        blocks, length = TRAIN_BLOCKS, TRAIN_SECONDS
    options.blocks, options.seconds = options.blocks or blocks, options.seconds or length
    return options


def _is_workload(name: str) -> bool:
    with suppress(KeyError, ValueError):
        return bool(find_workload(name))
    return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="fastq_loader beside torch's DataLoader, other loaders and the ceiling, in turn.",
    )
    seconds = checked("a number of seconds above 0", float, lambda value: 0 < value < math.inf)
    methods = multiprocessing.get_all_start_methods()
    add = parser.add_argument
    about = f"what to load: of --list, or bytes_N (default: {' '.join(SHORT)})"
    add("workloads", nargs="*", metavar="workload", help=about)
    add("--list", action="store_true", help="list workloads and peers, and stop")
    add("--full", action="store_true", help="every workload, longer blocks")
    instead = parser.add_mutually_exclusive_group().add_argument
    about = "batches onto a GPU; workloads are then shapes of batches, and peers ways there"
    instead("--device", choices=["cuda", "cpu"], help=f"{about}; cpu: small trainings, for a try")
    add("--train", action="store_true", help="with --device: whole trainings, three minutes")
    about = "this tree's package beside that of another revision, and no other loader"
    instead("--against", metavar="REVISION", help=f"{about} (default workloads: {' '.join(COMPARED)})")
    about = "the README's figures: measure what FILE has not of them, and write them"
    instead("--readme", type=results_file, metavar="FILE", help=about)
    about = "with --readme: measure again what FILE has, and say which figures are others now; write nothing"
    add("--again", action="store_true", help=about)
    add("--prefetch", type=positive, default=USUAL_PREFETCH, help="with --against: prefetch_factor of both")
    add("--schedule", metavar="NAME", help="with --against: schedule= of both (default: the loader's own)")
    add("--ceiling", action="store_true", help="with --against: the ceiling takes turns with both")
    add("--peers", type=_names, default=(), metavar="A,B", help="who loads (default: all of --list)")
    add("--workers", type=numbers, metavar="N,M", help="worker processes, also several numbers (default: 2)")
    about = f"timed blocks per peer (default: {SHORT_BLOCKS}; full: {FULL_BLOCKS})"
    add("--blocks", "--rounds", type=positive, help=about)
    add("--seconds", type=seconds, help=f"length of a block (default: {SHORT_SECONDS}; full: {FULL_SECONDS})")
    add("--start-method", choices=methods, default="fork", help="how workers are started (default: fork)")
    add("--json", type=results_file, metavar="FILE", help="write every block to this file, as a line of JSON")
    add("--resume", action="store_true", help="keep what FILE holds already, and measure only the rest")
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


positive = checked("a whole number of at least 1", int, lambda value: value >= 1)
results_file = checked(
    "a file in a folder that exists", Path, lambda it: it.parent.is_dir() and not it.is_dir()
)
numbers = checked(
    "whole numbers of at least 0",
    lambda text: tuple(dict.fromkeys(map(int, text.split(",")))),
    lambda value: min(value) >= 0,
)
