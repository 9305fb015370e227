"""What is written: rows that come back, figures in tables, and the README that is made of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.__main__ import main
from bench.arguments import parse
from bench.output import pictures, readme, rows
from bench.output.figures import ratio
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


@pytest.mark.parametrize("content", ["", "{}\n", "[]\n", '{"row":"run","version":2}\n', "no json"])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    with pytest.raises(SystemExit, match=r"results\.jsonl"):
        main(["--readme", str(path)])


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


def test_a_ratio_is_of_medians_and_its_range_is_within_rounds() -> None:
    assert ratio(pd.Series([40, 20, 44]), pd.Series([20, 10, 20])) == pytest.approx((2.0, 2.0, 2.2))
    assert ratio(pd.Series([40, 20]), None) is None
    assert ratio(pd.Series([40], index=[1]), pd.Series([20], index=[0])) is None, "no round in common"


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


def test_ratios_of_two_revisions_are_of_rounds() -> None:
    def case(name: str, rates: dict[str, tuple[float, ...]], **failed: dict[str, Any]) -> list[example.Row]:
        used = {"seconds": 1.0, "consumer_cpu": 0.01, "worker_cpu": 0.02, "switches": 10}
        blocks = {peer: [{"batches": rate, **used} for rate in of] for peer, of in rates.items()}
        facts = {"title": "The working tree against 1234567"}
        return example.case("against", name, facts, {peer: {} for peer in rates} | failed, blocks)

    faster = case("faster", {"old": (100, 200, 300), "new": (150, 240, 390), "ceiling": (200, 400, 600)})
    unclear = case("unclear", {"old": (100, 200, 300), "new": (90, 240, 300)})
    failed = case("failed", {"new": (100,)}, old={"label": "1234567", "failure": "no schedule"})
    (found,) = summary_tables(Results([example.run(), *faster, *unclear, *failed]))
    assert found.title == "The working tree against 1234567"
    row = cells(found, "faster")
    assert row[2:4] == ["200", "240"]
    assert row[4] == "1.30 (1.20..1.50)", "that of the medians is 1.20"
    assert row[5:] == ["50 → 42", "100 → 83", "50% → 60%"]
    assert cells(found, "unclear")[4] == "1.00 (0.90..1.20), within noise"
    assert cells(found, "failed")[2:5] == ["–", "100", "–"]  # noqa: RUF001
    assert found.notes == ["failed: 1234567: not measured: no schedule"]


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


def test_rows_of_another_package_or_machine_are_refused() -> None:
    run, now = example.run(), example.REVISION
    assert readme.refusal([run, example.run("2026-01-03")], now) == ""
    assert readme.refusal([run], now | {"commit": "9876543210"}) == "", "another commit with the same package"
    assert "not that of" in readme.refusal([run], now | {"package": "other"})
    assert "not committed" in readme.refusal([run], now | {"package": ""})
    elsewhere = run | {"machine": example.MACHINE | {"cores": 4}}
    assert "two machines: cores is 2, and 4" in readme.refusal([run, elsewhere], now)


@pytest.mark.parametrize("count", [0, 2])
def test_a_readme_without_exactly_one_section_is_refused(count: int, project: Path) -> None:
    (project / "README.md").write_text(EMPTY * count)
    with pytest.raises(ValueError, match=f"has {count} sections"):
        readme.texts(Results([example.run(), *example.steady()]), SOURCE, project)


@pytest.mark.parametrize("more", [{}, {"torch": {"failure": "no"}}])
def test_a_picture_is_drawn_of_what_was_measured_and_again_the_same(more: Any, tmp_path: Path) -> None:
    results = Results([example.run(), *example.steady(**more)])
    (first,), (second,) = (pictures.write(results, tmp_path / name) for name in ("first", "second"))
    assert first.name == "ratio-2-workers.png"
    assert first.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert first.read_bytes() == second.read_bytes()
    assert pictures.write(Results([example.run()]), tmp_path / "nothing") == []
