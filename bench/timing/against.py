"""Two revisions of the package in turn: one that git has, and the working tree as it is.

Both are installed in the same way, with what is built of C, into a folder each. A process for each (see
`timing.revision`) imports the package from there, and this bench's workloads from here. The processes live
side by side, and the one that is not timed waits for a line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers import Unsupported
from bench.timing.ceiling import CEILING, CeilingLane
from bench.timing.processes import Owners
from bench.timing.revision import Trial, workload_and_load
from bench.timing.rounds import Case, Lane, Plan, Row

AXIS = "against"
OLD, NEW = "old", "new"
ROOT = Path(__file__).resolve().parents[2]
STOPPING_S = 10.0
PIP = "-m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target"


@dataclass(eq=False, kw_only=True)
class RevisionLane(Lane):
    """The process of one revision."""

    trial: Trial

    def start(self) -> None:
        path = [self.trial.package, str(ROOT), os.environ.get("PYTHONPATH")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.timing.revision", json.dumps(self.trial._asdict())],
            cwd=self.trial.folder,  # not here, where `-m` would find the working tree's package first
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends that one
        )
        self.closing.callback(_end, self._process)
        self._answer()

    def block(self, part: str) -> list[Row]:
        print(file=self._process.stdin, flush=True)
        return [self._answer()]

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found: Row = json.loads(line or "null") or {}
        if not line:
            raise Unsupported(f"its process ended with exit code {self._process.wait()}")
        if "failure" in found:
            raise Unsupported(found["failure"])
        return found


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(STOPPING_S)
        except subprocess.TimeoutExpired:
            process.kill()


def cases(options: Namespace, folder: Path) -> list[Case]:
    """One for each workload and number of workers, after both revisions were installed into the folder.

    Raises:
        ValueError: there is no such revision, or one cannot be installed.
    """
    commit = _commit(options.against)
    with worktree(commit, folder / "worktree") as old:
        _install(old, folder / OLD)
    # A build leaves files beside its source, and takes up what an earlier one has left.
    here, unwanted = folder / "here", shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "fastq_loader", here / "fastq_loader", ignore=unwanted)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, here)
    _install(here, folder / NEW)
    several = [(name, workers) for name in options.workloads[AXIS] for workers in options.workers[AXIS]]
    method, rounds = options.start_method, options.blocks
    return [
        Case(AXIS, *each, method, rounds, partial(_plan, *each, options, commit, folder)) for each in several
    ]


def _commit(revision: str) -> str:
    wanted = f"{revision}^{{commit}}"
    try:
        return _run("git", "rev-parse", "--verify", "--short", "--end-of-options", wanted)
    except ValueError as error:
        raise ValueError(f"{revision!r} is not a commit; name a hash, a branch or a tag: {error}") from error


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """The files of a commit in a new folder, of which git knows nothing afterwards."""
    try:
        _run("git", "worktree", "add", "--detach", str(folder), commit)
        yield folder
    finally:
        try:
            _run("git", "worktree", "remove", "--force", str(folder))
        except ValueError:  # it was interrupted before it was there, or somebody removed the folder
            _run("git", "worktree", "prune")


def _install(source: Path, target: Path) -> None:
    _run(sys.executable, *PIP.split(), str(target), str(source))


def _run(*command: str) -> str:
    """What a command prints; ValueError with the last line of its complaint."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command)}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout.strip()


def _plan(name: str, workers: int, options: Namespace, commit: str, folder: Path) -> Plan:
    files = folder / "files"
    files.mkdir(exist_ok=True)
    keywords = {"schedule": options.schedule} if options.schedule else {}
    settings: dict[str, Any] = {"prefetch_factor": options.prefetch} | keywords
    workload, load = workload_and_load(name, files)
    labels = {OLD: commit, NEW: "the working tree"}
    lanes: list[Lane] = []
    for which, label in labels.items():
        package = str(folder / which)
        trial = Trial(
            package,
            str(files),
            name,
            workers,
            options.start_method,
            options.prefetch,
            keywords,
            options.seconds,
        )
        lanes.append(RevisionLane(which, label, options.seconds, trial=trial))
    if options.ceiling:
        ceiling = CeilingLane(
            CEILING, "the ceiling", options.seconds, load=load, workers=workers, owners=Owners()
        )
        lanes.insert(0, ceiling)
    facts = {"description": workload.description, "revision": commit, "settings": settings}
    return Plan(facts, lanes)
