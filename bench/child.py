"""Measuring one peer alone: the command line of a fresh process, written and read in one place.

`python -m bench.memory` and `python -m bench.start` are such processes; the bench starts them, nobody else.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.machine import use_one_thread
from bench.peers import LoaderSettings, Peer, peer_class
from bench.workloads import Load, Workload, find_workload


@dataclass(frozen=True)
class Alone:
    """What such a process measures."""

    workload: Workload
    load: Load
    peer: type[Peer]
    settings: LoaderSettings


def command(module: str, workload: str, peer: str, folder: Path, settings: LoaderSettings) -> list[str]:
    """The command that runs a module of the bench on one peer; `folder` holds the workload's files."""
    arguments = [workload, peer, str(folder), str(settings.num_workers), settings.start_method]
    return [sys.executable, "-m", module, *arguments]


def alone(module: str) -> Alone:
    """What the command line asks for, with the dataset built and the peer imported."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("workload")
    parser.add_argument("peer")
    parser.add_argument("folder", type=Path)
    parser.add_argument("workers", type=int)
    parser.add_argument("start_method")
    arguments = parser.parse_args()
    use_one_thread()
    workload = find_workload(arguments.workload)
    settings = LoaderSettings(arguments.workers, arguments.start_method)
    return Alone(workload, workload.build(arguments.folder), peer_class(arguments.peer), settings)
