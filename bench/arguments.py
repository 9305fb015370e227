"""The command line of `python -m bench`, and what it means when little is said."""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers import PEERS
from bench.workloads import all_workloads

AXES = {
    "steady": "batches per second once it runs, for each workload",
    "bytes": "the same for batches from 1 KB to 256 MB",
    "workers": "the same for a growing number of workers",
    "start": "time to the first batch, by start method and number of workers",
    "turns": "first batch, cold first epoch, epoch turns, break and restart, torch against fastq_loader",
    "schedule": "order without the stall: slow samples, a slow consumer, killed workers; 1 to 4 workers",
}
# In place of workloads: a run of its own, onto a GPU.
GPU = "gpu"
GPU_SECONDS = 0.4  # some 500 blocks have to fit into nine minutes
# One of each kind, for a run of a few minutes; --full takes all.
SHORT = ("jpeg", "csv", "large_u8", "rows", "tokens")
# What an axis runs when no workload is named: bound by messages, by memory and by the dataset.
FEW = ("rows", "large_u8", "jpeg")
START_WORKLOADS = ("rows",)
START_WORKERS = (2, 8)
STEADY_WORKERS = (2,)
WORKER_AXIS = (0, 1, 2, 4)
SHORT_BLOCKS, SHORT_SECONDS = 5, 0.5
FULL_BLOCKS, FULL_SECONDS = 7, 0.8


@dataclass(frozen=True)
class Options:
    """A run, with every default filled in.

    Attributes:
        axes: what is measured, of `AXES`.
        workloads: names, for each axis that has any.
        workers: numbers of worker processes, for each axis.
        peers: names.
        blocks: timed blocks of a peer, and repetitions of a turn and of an epoch.
        seconds: length of a block.
        memory: also measure peak memory and descriptors.
        json: the file to write; None is no file.
        resume: go on with what that file holds.
        plot: the folder to draw into; None is no picture.
        gpu: measure batches on their way to a GPU, and none of the axes.
    """

    axes: tuple[str, ...]
    workloads: dict[str, tuple[str, ...]]
    workers: dict[str, tuple[int, ...]]
    peers: tuple[str, ...]
    blocks: int
    seconds: float
    start_method: str
    memory: bool
    json: Path | None
    resume: bool
    plot: Path | None
    list_only: bool = False
    gpu: bool = False


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options of a command line, `sys.argv` by default; argparse's SystemExit when it is wrong."""
    parser = _parser()
    given = parser.parse_args(arguments)
    gpu = given.workloads == [GPU]
    if GPU in given.workloads and not gpu:
        parser.error(f"'{GPU}' is a run of its own, without workloads")
    axes = tuple(AXES) if given.full else tuple(dict.fromkeys(given.axis or ("steady",)))
    named = () if gpu else tuple(dict.fromkeys(given.workloads))
    everything = tuple(all_workloads()) if given.full else SHORT
    return Options(
        axes=axes,
        workloads={
            "steady": named or everything,
            "workers": named or FEW,
            "start": named or START_WORKLOADS,
            "turns": named or FEW,
        },
        workers={
            "steady": given.workers or STEADY_WORKERS,
            "bytes": given.workers or STEADY_WORKERS,
            "workers": given.workers or WORKER_AXIS,
            "start": tuple(filter(None, given.workers or START_WORKERS)),
            "turns": tuple(filter(None, given.workers or STEADY_WORKERS)),
            "gpu": tuple(filter(None, given.workers or ())),
        },
        peers=tuple(dict.fromkeys(given.peers or (name for name, entry in PEERS.items() if entry.usual))),
        blocks=given.blocks or (FULL_BLOCKS if given.full else SHORT_BLOCKS),
        seconds=given.seconds or (GPU_SECONDS if gpu else FULL_SECONDS if given.full else SHORT_SECONDS),
        start_method=given.start_method,
        memory=given.full if given.memory is None else given.memory,
        json=given.json,
        resume=given.resume,
        plot=given.plot,
        list_only=given.list,
        gpu=gpu,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="fastq_loader beside torch's DataLoader, other loaders and the ceiling, in turn.",
    )
    parser.add_argument(
        "workloads",
        nargs="*",
        type=_workload,
        metavar="workload",
        help=f"what to load (default: {' '.join(SHORT)}), or '{GPU}': batches onto a GPU, in ten minutes",
    )
    parser.add_argument("--list", action="store_true", help="list workloads, peers and axes, and stop")
    parser.add_argument("--full", action="store_true", help="every axis and workload, memory, longer blocks")
    parser.add_argument("--axis", type=_axes, metavar="A,B", help=f"of {', '.join(AXES)} (default: steady)")
    parser.add_argument(
        "--peers", type=_peers, metavar="A,B", help="who loads (default: all but those marked in --list)"
    )
    parser.add_argument(
        "--workers", type=_counts, metavar="N,M", help="worker processes, also several numbers (default: 2)"
    )
    parser.add_argument(
        "--blocks",
        type=_positive,
        help=f"timed blocks per peer (default: {SHORT_BLOCKS}; {FULL_BLOCKS} in full)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        help=f"length of a block (default: {SHORT_SECONDS}; {FULL_SECONDS} in full)",
    )
    parser.add_argument(
        "--start-method",
        choices=multiprocessing.get_all_start_methods(),
        default="fork",
        help="how workers are started (default: fork)",
    )
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        help="measure peak memory and descriptors, each peer alone (default: only in full)",
    )
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write every raw figure to this file")
    parser.add_argument(
        "--resume", action="store_true", help="keep what FILE holds already, and measure only the rest"
    )
    parser.add_argument("--plot", type=_folder, metavar="FOLDER", help="draw pictures into this folder")
    return parser


def _workload(text: str) -> str:
    return text if text == GPU else _one_of(text, all_workloads(), "a workload")


def _peers(text: str) -> tuple[str, ...]:
    return tuple(_one_of(name.strip(), PEERS, "a peer") for name in text.split(","))


def _axes(text: str) -> tuple[str, ...]:
    return tuple(_one_of(name.strip(), AXES, "an axis") for name in text.split(","))


def _one_of(name: str, known: Collection[str], what: str) -> str:
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r} is not {what}; choose from {', '.join(known)}")
    return name


def _counts(text: str) -> tuple[int, ...]:
    counts = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise argparse.ArgumentTypeError(f"must be whole numbers of at least 0, got {text!r}")
        counts.append(int(part))
    return tuple(dict.fromkeys(counts))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds


def _new_file(text: str) -> Path:
    """Checked before the run, not after minutes of it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must name a file in a folder that exists, got {text!r}")
    return path


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"must name a folder that exists, got {text!r}")
    return path
