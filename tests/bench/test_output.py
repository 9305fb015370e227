"""What is written: rows that come back, figures in tables, and the README that is made of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.arguments import parse
from bench.output import readme, rows
from bench.output.layout import Table
from bench.output.rows import Results
from bench.output.tables import case_tables, summary_tables
from bench.run import perform
from bench.timing.rounds import Case, Lane, Plan
from tests.support import bench_example as example

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "bench/results/here.jsonl"
EMPTY = "<!-- bench:begin -->\n<!-- bench:end -->\n"


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    rows.append(path, [example.run(), *example.steady()])
    rows.append(path, example.program())
    found = rows.read(path)
    written = Results([example.run(), *example.steady(), *example.program()])
    assert [case.facts for case in found.cases()] == [case.facts for case in written.cases()]
    assert found.cases()[0].peers == written.cases()[0].peers
    assert found.machine == example.MACHINE


class OneBlock(Lane):
    def block(self, part: str) -> list[dict[str, Any]]:
        return [{"batches": 1000, "seconds": 1.0, "consumer_cpu": 0.1, "worker_cpu": 0.1, "switches": 1}]


def test_a_resumed_run_measures_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    planned: list[int] = []

    def case(workers: int) -> Case:
        def plan() -> Plan:
            planned.append(workers)
            return Plan(
                {"description": "", "batch_bytes": 1.0},
                [OneBlock("torch", "torch"), OneBlock("fastq_loader", "ours")],
            )

        return Case("steady", "rows", workers, "fork", 1, plan)

    options = parse(["--json", str(path)])
    assert perform(options, example.MACHINE, [case(1)]) == 0
    later = example.MACHINE | {"date": "2026-01-03T00:00:00+00:00"}
    resumed = parse(["--json", str(path), "--resume"])
    assert perform(resumed, later, [case(1), case(2)]) == 0
    assert planned == [1, 2]
    assert rows.read(path).caption.endswith("2026-01-02 to 2026-01-03")
    assert capsys.readouterr().out.count("1,000 (1,000..1,000)") == 4
    assert perform(options, later, [case(3)]) == 0, "without --resume the file begins anew"
    assert rows.read(path).caption.endswith(", 2026-01-03")


def table(results: Results, title: str) -> Table:
    every = [*summary_tables(results), *(each for case in results.cases() for each in case_tables(case))]
    return next(each for each in every if each.title.startswith(title))


def cells(found: Table, first: str) -> list[str]:
    return next(list(row) for row in found.frame.itertuples(index=False) if row[0].startswith(first))


@cache
def everything(title: str) -> Table:
    return table(example.everything(), title)


@pytest.mark.parametrize(
    ("title", "first", "begin", "expected"),
    [
        ("Speed with 2 workers (fork)", "rows: what rows loads; 2.56 kB", 1, ["100", "2,000"]),
        (
            "Speed",
            "rows: what",
            4,
            ["1,000", "10 (10..10)", "50% (50%..50%)", "grain 200; 5.0 (5.0..5.0)"],
        ),
        ("Cost with 2 workers (fork)", "rows", 1, ["2.0 / 2.0", "4,000 / 400", "10 / 1.0"]),
        ("csv_table: ", "fastq_loader", 1, ["3.0 (2.0..4.0)", "2.0", "0.50", "750 (500..1,000)"]),
    ],
)
def test_figures_in_tables(title: str, first: str, begin: int, expected: list[str]) -> None:
    assert cells(everything(title), first)[begin:][: len(expected)] == expected


def test_the_readme_names_the_file_of_its_figures() -> None:
    source = readme.source_of((ROOT / "README.md").read_text())
    assert source is not None
    assert (ROOT / source).is_file()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(f"# A title\n\n{EMPTY}\nProse.\n")
    return tmp_path


def test_the_readme_has_torch_without_workers_the_programs_and_the_commit(project: Path) -> None:
    found = readme.texts(example.everything(), SOURCE, project)
    text = found[project / "README.md"]
    assert text.startswith("# A title\n")
    assert text.endswith("\nProse.\n")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    torch_0 = next(cells for cells in lines if "torch" in cells).index("torch, 0 workers")
    by_name = {cells[0].split(":")[0]: cells for cells in lines if cells}
    assert by_name["rows"][torch_0] == "2,000"
    assert by_name["csv_table"][-1] == "2.0"
    assert "Commit 0123456789, A CPU, 2 cores, torch 2.13.0, 3 blocks of 1 s each, 2026-01-02" in text
    assert readme.source_of(text) == SOURCE
