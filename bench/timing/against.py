"""Two revisions of the package in turn: one that git has, and the working tree as it is.

Both are installed in the same way, with what is built of C, into a folder each. A process for each imports
the package from there, and this bench from here. The processes live side by side, and the one that is not
timed waits for a line.

This module runs in both kinds of process. That of a revision (`answers`) may have an older package: nothing
that it imports here may use more of it than `DataLoader`. It makes a loader and answers with a line. For
every line that it reads it times a block and answers with another one. An answer is JSON: the fields of a
row, or in `failure` why there are none. The end of its input is its own end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import fastq_loader
from bench.digest import ROOT
from bench.output.layout import say
from bench.peers import LoaderSettings, Unsupported
from bench.peers.fastq import FastqLoader
from bench.timing.ceiling import CEILING, CeilingLane
from bench.timing.processes import Owners, named, usage
from bench.timing.rounds import Case, Lane, Plan, Row, reason
from bench.timing.steady import PeerLane
from bench.workloads import Load, Workload, find_workload

AGAINST = "against"
OLD, NEW = "old", "new"
NEW_WORKERS = "new_workers"
"""The name of `rows` with new workers in each epoch."""
EPOCH = 64  # batches of it
STOPPING_S = 10.0
PIP = "-m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target"

# ---- the process of a run -----------------------------------------------------------------------


def cases(options: Namespace, folder: Path) -> list[Case]:
    """One for each workload and number of workers, after both revisions were installed into the folder.

    Raises:
        SystemExit: there is no such revision, or one cannot be installed.
    """
    say(f"installing {options.against} and the working tree")
    with worktree(options.against, folder / "worktree") as old:
        commit = _run("git", "-C", str(old), "rev-parse", "--short", "HEAD")
        _install(old, folder / OLD)
    # A build leaves files beside its source, and takes up what an earlier one has left.
    here, unwanted = folder / "here", shutil.ignore_patterns("__pycache__", "*.so")
    for folder_of_source in ("fastq_loader", ".build"):
        shutil.copytree(ROOT / folder_of_source, here / folder_of_source, ignore=unwanted)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, here)
    _install(here, folder / NEW)
    several = [(name, workers) for name in options.workloads for workers in options.workers]
    plans = [partial(_plan, *each, options, commit, folder) for each in several]
    method, rounds = options.start_method, options.blocks
    return [Case(AGAINST, *each, method, rounds, plan) for each, plan in zip(several, plans, strict=True)]


@contextmanager
def worktree(revision: str, folder: Path) -> Iterator[Path]:
    """The files of a revision in a new folder, of which git knows nothing afterwards."""
    try:
        _run("git", "worktree", "add", "--detach", str(folder), revision)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # it may be there in part, after an interrupt
        _run("git", "worktree", "prune")


def _install(source: Path, target: Path) -> None:
    _run(sys.executable, *PIP.split(), str(target), str(source))


def _run(*command: str) -> str:
    """What a command prints. Where it fails, its complaint ends the run."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"python -m bench --against: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _plan(name: str, workers: int, options: Namespace, commit: str, folder: Path) -> Plan:
    keywords = {"schedule": options.schedule} if options.schedule else {}
    settings = LoaderSettings(workers, options.start_method, options.prefetch, name != NEW_WORKERS)
    (files := folder / "files").mkdir(exist_ok=True)
    workload, load = _workload(name, files)
    length, lanes = options.seconds, list[Lane]()
    if options.ceiling:
        lanes = [CeilingLane(CEILING, CEILING, length, load=load, workers=workers, owners=Owners())]
    for which, label in {OLD: commit, NEW: "the working tree"}.items():
        trial = (str(folder / which), str(files), name, settings, keywords, length)
        lanes.append(RevisionLane(which, label, length, trial=trial))
    more = "".join(f", {name} {value}" for name, value in keywords.items())
    title = f"The working tree against {commit}: {options.start_method}, prefetch {options.prefetch}{more}"
    return Plan({"description": workload.description, "title": title}, lanes)


@dataclass(eq=False, kw_only=True)
class RevisionLane(Lane):
    """The process of one revision. `trial`: what `lane_of` is given there."""

    trial: Sequence[Any]

    def start(self) -> None:
        package, folder = self.trial[:2]
        path = os.pathsep.join((package, str(ROOT), os.environ.get("PYTHONPATH", "")))
        command = [sys.executable, "-m", "bench.timing.against", json.dumps(self.trial)]
        both: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # Not started here, where `-m` would find the working tree's package first; and Ctrl-C is for this
        # process, which ends that one.
        env = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        process: Any = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **both)
        self._process = self.closing.enter_context(process)
        for end in (process.kill, partial(process.wait, STOPPING_S), process.stdin.close):
            self.closing.callback(end)  # the last one ends it, the first one where that fails
        self._answer()

    def block(self, part: str) -> list[Row]:
        print(file=self._process.stdin, flush=True)
        return [self._answer()]

    def _answer(self) -> Row:
        found: Row = json.loads(self._process.stdout.readline() or '{"failure": "its process died"}')
        if "failure" in found:
            raise Unsupported(found["failure"])
        return found


# ---- the process of a revision ------------------------------------------------------------------


class EpochsLane(PeerLane):
    """Whole epochs, from `iter()` until the last batch and the end of the workers."""

    def _timed(self, length: float) -> Row:
        self._discard(EPOCH)  # what is left of one that was begun
        batches, before, started = 0, usage(()), perf_counter()
        while (seconds := perf_counter() - started) < length:
            self._batches = self._peer.epoch()
            batches += self._discard(EPOCH + 1)  # the call that ends the epoch ends the workers
        return {"batches": batches, "seconds": seconds, **named(usage(()) - before)}


def lane_of(
    package: str, folder: str, name: str, settings: Sequence[Any], keywords: dict[str, Any], seconds: float
) -> PeerLane:
    """The loader of a workload and the loop that consumes it, not started yet.

    Args:
        package: the folder that the package has to come from. `folder`: where workloads keep their files.
        settings: of `LoaderSettings`. `keywords`: arguments of the loader beyond torch's.
        seconds: of a block.
    """
    if not Path(fastq_loader.__file__).is_relative_to(package):
        raise RuntimeError(f"the package came from {fastq_loader.__file__}, not from {package}")
    workload, load = _workload(name, Path(folder))
    loader = staticmethod(partial(fastq_loader.DataLoader, **keywords))
    peer = type("Revision", (FastqLoader,), {"loader_class": loader})
    make, burst = partial(peer, load, LoaderSettings(*settings)), max(1, settings[0])
    lane = EpochsLane if name == NEW_WORKERS else PeerLane
    return lane("", "", seconds, make=make, workload=workload, load=load, burst=burst, owners=Owners())


def _workload(name: str, folder: Path) -> tuple[Workload, Load]:
    workload = find_workload("rows" if name == NEW_WORKERS else name)
    load = workload.load(folder)
    return workload, replace(load, batches=EPOCH) if name == NEW_WORKERS else load


def answers(trial: Sequence[Any]) -> Iterator[Row]:
    """One when the loader runs, and one for every line of input, until one says why it is the last."""
    try:
        with closing(lane_of(*trial)) as lane:
            lane.start()
            yield {}
            for _ in sys.stdin:
                yield lane.block("")[0]
    except Exception as error:
        yield {"failure": reason(error)}


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr  # what a dataset prints is no answer
    for answer in answers(json.loads(sys.argv[1])):
        print(json.dumps(answer), file=output, flush=True)
