"""The command line: what a bare one means, what is named, and what is wrong with others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pandas", reason="the bench extra is not installed")

from bench import run
from bench.__main__ import NO_GPU, main
from bench.arguments import AXES, COMPARED, SHORT, parse
from bench.peers import PEERS
from bench.peers.device import ARMS
from bench.programs import command
from bench.timing.against import AGAINST, NEW_WORKERS
from bench.workloads import all_workloads
from bench.workloads.ready_made import SHAPES


def test_a_bare_command_is_a_short_run_and_full_is_everything() -> None:
    bare, full = parse([]), parse(["--full"])
    assert (bare.axes, bare.json, bare.device) == (("steady",), None, None)
    assert (bare.workloads["steady"], bare.workers["steady"]) == (SHORT, (2,))
    assert bare.peers == tuple(PEERS)
    assert full.axes == tuple(AXES)
    assert full.workloads["steady"] == full.workloads["memory"] == tuple(all_workloads())
    assert full.blocks > bare.blocks


def test_what_is_named_is_what_runs(tmp_path: Path) -> None:
    line = "rows tokens --axis steady,turns --workers 0,4 --peers fastq_loader,torch --blocks 3 --seconds 0.1"
    options = parse(line.split())
    assert (options.peers, options.blocks, options.seconds) == (("fastq_loader", "torch"), 3, 0.1)
    found = [(case.axis, case.name, case.workers) for case in run.cases(options, tmp_path)]
    steady = [("steady", name, workers) for name in ("rows", "tokens") for workers in (0, 4)]
    assert found == [*steady, ("turns", "rows", 4), ("turns", "tokens", 4)]


SHARED_BY_ALL = {"bytes": 7}
DROP_INS = {"start": 6, "turns": 3}
OURS_ALONE = {"schedule": 6, "resume": 4, "insight": 5, "cluster": 6}


@pytest.mark.parametrize(
    ("peer", "axes"),
    [
        ("torch", SHARED_BY_ALL | DROP_INS | {"schedule": 4}),
        ("fastq_loader", SHARED_BY_ALL | DROP_INS | OURS_ALONE),
        ("grain", SHARED_BY_ALL),
    ],
)
def test_only_peers_that_are_asked_for_contend(peer: str, axes: dict[str, int], tmp_path: Path) -> None:
    every = ",".join(SHARED_BY_ALL | DROP_INS | OURS_ALONE)
    found = [case.axis for case in run.cases(parse(["--axis", every, "--peers", peer]), tmp_path)]
    assert {axis: found.count(axis) for axis in found} == axes


def test_two_revisions_have_usual_workloads_and_rounds() -> None:
    bare = parse(["--against", "HEAD~3"])
    assert (bare.workloads[AGAINST], bare.workers[AGAINST], bare.blocks) == (COMPARED, (2,), 5)
    assert (bare.prefetch, bare.schedule, bare.ceiling) == (2, None, False)
    line = f"rows {NEW_WORKERS} --against HEAD~3 --rounds 9 --prefetch 16 --schedule dynamic --workers 0,2"
    said = parse(line.split())
    assert (said.workloads[AGAINST], said.workers[AGAINST]) == (("rows", NEW_WORKERS), (0, 2))
    assert (said.blocks, said.prefetch, said.schedule) == (9, 16, "dynamic")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nosuch", "is not a workload"),
        (NEW_WORKERS, "is not a workload"),
        ("rows --device cuda", "is not a workload"),
        ("--peers torch,nosuch", "is not a peer"),
        ("--axis nosuch", "is not an axis"),
        ("--device tpu", "invalid choice"),
        ("--workers two", "whole numbers"),
        ("--workers -1", "whole numbers"),
        ("--blocks 0", "at least 1"),
        ("--seconds nan", "above 0"),
        ("--json /nosuch/x.json", "folder that exists"),
        ("--against HEAD --rounds 4", "at least 5 rounds to tell noise, got 4"),
        ("--against HEAD --device cuda", "not allowed"),
        ("--prefetch 16", "go with --against"),
        ("program nosuch", "invalid choice"),
        ("program csv_table --loader nosuch", "invalid choice"),
        ("program csv_table --rounds 0", "at least 1"),
        ("program csv_table --workers two", "whole numbers"),
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


def test_the_list_has_all_that_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert listed == {*all_workloads(), *PEERS, *AXES, *SHAPES, *ARMS}
