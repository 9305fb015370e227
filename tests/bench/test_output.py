"""What is written: rows that come back, figures in tables, and the README that is made of them."""

from __future__ import annotations

from pathlib import Path

from bench.output import readme, rows
from bench.output.rows import Results
from tests.support import bench_example as example

ROOT = Path(__file__).resolve().parents[2]


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    rows.append(path, [example.run(), *example.steady()])
    rows.append(path, example.program())
    found = rows.read(path)
    written = Results([example.run(), *example.steady(), *example.program()])
    assert [case.facts for case in found.cases()] == [case.facts for case in written.cases()]
    assert found.cases()[0].peers == written.cases()[0].peers
    assert found.machine == example.MACHINE


def test_the_readme_names_the_file_of_its_figures() -> None:
    source = readme.source_of((ROOT / "README.md").read_text())
    assert source is not None
    assert (ROOT / source).is_file()
