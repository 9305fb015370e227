"""A short run of the steady state, whose rows come back from their file; and the README's figures."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest

from bench.output import readme, rows
from bench.output.rows import CaseRows
from bench.timing import steady
from bench.timing.rounds import Case, measure

ROOT = Path(__file__).resolve().parents[2]


def measured(case: Case, path: Path) -> CaseRows:
    """After their way through a file."""
    rows.append(path, [rows.run_row({"cpu": "A CPU"}, {}, {}), *measure(case)])
    found = rows.read(path)
    assert found.machine == {"cpu": "A CPU"}
    return found.cases()[0]


def steady_case(peers: list[str], folder: Path, name: str = "rows") -> Case:
    options = Namespace(peers=peers, start_method="fork", blocks=2, seconds=0.03)
    return steady.case(name, 1, options, folder)


@pytest.mark.processes
def test_the_steady_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grain", None)  # as if it were not installed
    case = steady_case(["torch", "fastq_loader", "grain", "torch_0"], tmp_path)
    found = measured(case, tmp_path / "rows.jsonl")
    assert "not installed" in str(found.peers["grain"].failure)
    assert found.facts["batch_bytes"] == 64 * (8 * 4 + 8)
    for name in ("ceiling", "torch", "fastq_loader", "torch_0"):
        peer = found.peers[name]
        assert (peer.failure, peer.about["notes"], len(peer.rows)) == (None, [], 2)
        assert all(row["batches"] and row["seconds"] for row in peer.rows)
        assert any(row["worker_cpu"] for row in peer.rows) == (name != "torch_0")
        assert any(row["consumer_cpu"] for row in peer.rows) == (name != "ceiling")
        assert ("p95" in peer.about) == (name != "ceiling")


def test_the_readme_names_the_file_of_its_figures() -> None:
    source = readme.source_of((ROOT / "README.md").read_text())
    assert source is not None
    assert (ROOT / source).is_file()
