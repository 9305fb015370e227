"""A short run of the steady state, whose rows come back from their file; ties; and the README's figures."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.output import readme, rows
from bench.output.figures import CEILING
from bench.timing import rounds, steady

ROOT = Path(__file__).resolve().parents[2]
RATES = st.lists(st.integers(1, 9), min_size=3, max_size=3)


@pytest.mark.processes
def test_the_steady_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grain", None)  # as if it were not installed
    monkeypatch.setattr(rounds, "level", lambda lanes: lanes[1:3])  # torch and ours
    peers = ["torch", "fastq_loader", "grain", "torch_0"]
    options = Namespace(peers=peers, start_method="fork", blocks=2, seconds=0.1)
    found = rounds.measure(steady.case("rows", 1, options, tmp_path)._replace(ties=3))
    path = tmp_path / "rows.jsonl"
    rows.append(path, [rows.run_row({"cpu": "A CPU"}, {}, {}), *found])
    results = rows.read(path)
    case = results.cases()[0]
    assert results.machine == {"cpu": "A CPU"}
    assert "not installed" in str(case.peers["grain"].failure)
    assert case.facts["batch_bytes"] == 64 * (8 * 4 + 8)
    for name, blocks in {CEILING: 2, "torch": 3, "fastq_loader": 3, "torch_0": 2}.items():
        peer = case.peers[name]
        assert (peer.failure, peer.about["notes"], len(peer.rows)) == (None, [], blocks)
        assert all(row["batches"] and row["seconds"] for row in peer.rows)
        assert any(row["worker_cpu"] for row in peer.rows) == (name != "torch_0")
        assert any(row["consumer_cpu"] for row in peer.rows) == (name != CEILING)
        assert ("p95" in peer.about) == (name != CEILING)


@given(torchs=RATES, other=RATES, failed=st.booleans())
def test_a_tie_is_where_rounds_disagree_on_which_is_faster(
    torchs: list[int], other: list[int], failed: bool
) -> None:
    found = {"other": other, "torch": torchs, "failed": [], "twice": [2 * rate for rate in torchs]}
    lanes = [
        rounds.Lane(name, name, rows=[{"batches": rate, "seconds": 1.0} for rate in rates])
        for name, rates in found.items()
        if not (failed and name == "torch")
    ]
    beyond = [own - torch for own, torch in zip(other, torchs, strict=True)]
    tied = min(beyond) <= 0 <= max(beyond) and not failed
    assert [lane.peer for lane in rounds.level(lanes)] == (["other", "torch"] if tied else [])


def test_the_readme_names_the_file_of_its_figures() -> None:
    source = readme.source_of((ROOT / "README.md").read_text())
    assert source is not None
    assert (ROOT / source).is_file()
