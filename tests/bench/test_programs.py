"""Workloads and programs: the same every time, and to the bit with every loader; what is said of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.programs import PROGRAMS, case, report, run
from bench.programs.track import Track
from tests.support.thorough import thorough


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first one leaves a folder for compiled code in TMPDIR
    return tmp_path_factory.mktemp("programs")


@thorough(after=1)
@pytest.mark.processes
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_loader_trains_the_same_to_the_bit(name: str, folder: Path) -> None:
    own = case.files(folder, name, PROGRAMS[name], few=True)
    ends = set()
    for loader in PROGRAMS[name].loaders:
        track = Track()
        found = run.run(name, loader, 2, 2, own, track)
        ends |= {found["end"]} if loader not in PROGRAMS[name].apart else set()
        values, samples = found.get("cached", (0, 0))[:2]
        assert (values == samples > 0) == loader.startswith("cached"), "a cache holds all"
        assert len(track.passes) == (4 if name == "files_by_id" else 2)
        assert all(
            0 < this.waited <= this.seconds and this.batches * this.memory > 0 for this in track.passes
        )
    assert len(ends) == 1


@pytest.mark.processes
def test_the_command_runs_a_program_under_its_limit(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = (
        f"program csv_table --loader fastq_loader --workers 0 --epochs 2 --few --data {folder} --limit 2000"
    )
    assert main(line.split()) == 0
    printed = capfd.readouterr().out
    assert report.SAME in printed
    assert "each process may have 2,000 MB of data (RLIMIT_DATA)" in printed
