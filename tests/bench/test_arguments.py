"""The command line, and two revisions of the package: what is meant, and what is said of others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import NO_GPU
from bench.arguments import parse
from bench.programs import command
from bench.timing import steady


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
        ("--workers two", "whole numbers"),
        ("--json /nosuch/x.json", "folder that exists"),
        ("--against HEAD --rounds 4", "at least 5 rounds to tell noise, got 4"),
        ("--again", "goes with --readme"),
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
