"""The command line, and two revisions of the package: what is meant, and what is said of others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import NO_GPU
from bench.arguments import parse
from bench.output.rows import Results
from bench.peers import LoaderSettings
from bench.programs import command
from bench.timing import against, steady
from bench.timing.against import AGAINST, NEW, NEW_WORKERS, OLD, RevisionLane
from bench.timing.rounds import Case, Plan, measure
from tests.conftest import ROOT


def test_what_is_named_is_what_runs(tmp_path: Path) -> None:
    line = "rows tokens --workers 0,4 --peers fastq_loader,torch --blocks 3 --seconds 0.1"
    options = parse(line.split())
    assert (options.peers, options.blocks, options.seconds) == (("fastq_loader", "torch"), 3, 0.1)
    found = [(case.kind, case.name, case.workers) for case in steady.cases(options, tmp_path)]
    assert found == [("steady", name, workers) for name in ("rows", "tokens") for workers in (0, 4)]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nosuch", "is not a workload"),
        (NEW_WORKERS, "is not a workload"),
        ("rows --device cuda", "is not a workload"),
        ("--peers torch,nosuch", "is not a peer"),
        ("--workers two", "whole numbers"),
        ("--blocks 0", "at least 1"),
        ("--seconds nan", "above 0"),
        ("--json /nosuch/x.json", "folder that exists"),
        ("--against HEAD --rounds 4", "at least 5 rounds to tell noise, got 4"),
        ("--against HEAD --device cuda", "not allowed"),
        ("--prefetch 16", "go with --against"),
        ("--again", "goes with --readme"),
        ("--again --readme a.jsonl --json a.jsonl", "names another file"),
        ("--train", "goes with --device"),
        ("--device cpu", "and --device cpu with --train"),
        ("large_u8 --device cuda --train", "is not a workload"),
        ("program nosuch", "invalid choice"),
        ("program csv_table --loader nosuch", "invalid choice"),
        ("program csv_table --limit -1", "megabytes"),
        ("program csv_table --data /nosuch", "folder that exists"),
    ],
)
def test_a_wrong_command_line_is_named(line: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, *rest = line.split()
    with pytest.raises(SystemExit):
        command.parse(rest) if first == "program" else parse([first, *rest])
    assert named in capsys.readouterr().err


def test_without_a_gpu_it_says_so_and_exits_with_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    written = tmp_path / "results.jsonl"
    line = [sys.executable, "-m", "bench", "--device", "cuda", "--json", str(written)]
    done = subprocess.run(line, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{NO_GPU}\n")
    assert not written.exists()


def git(folder: Path, *arguments: str) -> str:
    command = ("git", "-c", "user.name=a", "-c", "user.email=b", *arguments)
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "repository"
    package = root / "fastq_loader" / "__init__.py"
    backend = root / ".build" / "backend.py"
    for folder in (package.parent, backend.parent):
        folder.mkdir(parents=True)
    for file in (package, backend, root / "pyproject.toml", root / "README.md", root / "LICENSE"):
        file.write_text("committed")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    package.write_text("changed")
    monkeypatch.setattr(against, "ROOT", root)
    return root


@pytest.mark.processes
def test_both_revisions_are_packed(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}

    def install(source: Path, target: Path) -> None:
        assert (source / ".build" / "backend.py").exists(), "which builds the package"
        found[target.name] = (source / "fastq_loader" / "__init__.py").read_text()

    monkeypatch.setattr(against, "_install", install)
    cases = list(against.cases(parse(["rows", "--against", "HEAD", "--workers", "0,2"]), tmp_path))
    assert found == {OLD: "committed", NEW: "changed"}
    assert [(case.name, case.workers) for case in cases] == [("rows", 0), ("rows", 2)]
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    with pytest.raises(SystemExit, match="invalid reference: nosuch"):
        list(against.cases(parse(["--against", "nosuch"]), tmp_path))


@pytest.mark.processes
def test_each_revision_is_timed_in_a_process_of_its_own(tmp_path: Path) -> None:
    def lane(name: str, workload: str = "rows", **keywords: str) -> RevisionLane:
        settings = LoaderSettings(1, "fork", persistent=workload != NEW_WORKERS)
        trial = (str(ROOT), str(tmp_path), workload, settings, keywords, 0.01)
        return RevisionLane(name, name, trial=trial)

    lanes = [lane(OLD), lane(NEW, NEW_WORKERS, schedule="dynamic")]
    rows = measure(Case(AGAINST, "rows", 1, "fork", 2, lambda: Plan({}, lanes)))
    found = Results(rows).cases()[0].peers
    assert [len(found[name].rows) for name in (OLD, NEW)] == [2, 2]
    for row in found[OLD].rows + found[NEW].rows:
        assert row["batches"] > 0
        assert min(row["seconds"], row["consumer_cpu"], row["worker_cpu"]) > 0
