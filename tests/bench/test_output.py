"""What is written: rows that come back, figures in tables, and the README that is made of them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench import digest, machine
from bench.arguments import parse
from bench.output import readme, repeated, rows
from bench.output.layout import Table
from bench.output.rows import Results
from bench.output.summary import sentences
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
        (
            "large_u8: what large_u8 loads; 8 workers",
            "fastq_loader",
            1,
            [
                "100 (90..110)",
                "200 (180..220)",
                "400 (360..440)",
                "200 (180..220)",
                "100 (90..110)",
                "2.0 (2.0..2.0)",
            ],
        ),
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
    columns = next(cells for cells in lines if "torch" in cells)[1:]
    assert columns == [
        *("torch", "torch, 0 workers", "best other"),
        *("fastq_loader", "fastq_loader, 0 workers", "÷ torch"),
    ]
    assert by_name["rows"][1:-1] == ["100", "2,000", "200 (grain)", "1,000", "–"]  # noqa: RUF001
    assert by_name["rows"][torch_0] == "2,000"
    assert by_name["csv_table"][-1] == "2.0"
    assert (
        "\nlarge_u8 with 8 workers, torch / fastq_loader: first batch 200 / 100 ms, epoch 400 / 200" in text
    )
    assert "Commit 0123456789, A CPU, 2 cores, torch 2.13.0, 3 blocks of 1 s each, 2026-01-02" in text
    assert readme.source_of(text) == SOURCE


def package(root: Path, text: str) -> str:
    """A package of one file below `root`, and its digest."""
    (root / "fastq_loader").mkdir(exist_ok=True)
    (root / "fastq_loader" / "__init__.py").write_text(text)
    return digest.digest(root)


def test_a_release_refuses_the_figures_of_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme_of, results = tmp_path / "README.md", tmp_path / "here.jsonl"
    readme_of.write_text("no figures")
    own = package(tmp_path, "1")
    assert digest.main(tmp_path) == 1
    readme_of.write_text(readme.BEGIN.format(source="here.jsonl"))
    rows.append(results, [{**example.run(), "revision": {"commit": "aaa", "package": own}}])
    assert digest.main(tmp_path) == 0
    (tmp_path / "fastq_loader" / "README.md").write_text("is no code")
    assert digest.main(tmp_path) == 0
    other = package(tmp_path, "2")
    assert other != own
    assert digest.main(tmp_path) == 1
    rows.append(results, [{**example.run(), "revision": {"commit": "bbb", "package": other}}])
    assert digest.main(tmp_path) == 1, "some rows are old"
    assert "commits: aaa)" in capsys.readouterr().err


def test_tables_say_how_old_their_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [example.run(), example.run()]
    monkeypatch.setattr(machine, "_git", lambda *arguments: "7")
    expected = "Rows of another package than this: commit 0123456789 (2026-01-02, 7 commits ago)"
    assert machine.age(runs) == expected
    monkeypatch.setattr(machine, "digest", lambda: example.REVISION["package"])
    assert machine.age(runs) == ""


def test_figures_of_two_machines_do_not_stand_side_by_side() -> None:
    later = {"date": "2026-01-03", "load_average": 2.0}
    same, other = ({**example.run(), "machine": example.MACHINE | each} for each in (later, {"cores": 4}))
    assert readme.refusal([example.run(), same]) == ""
    assert "two machines: cores is 2, and 4" in readme.refusal([example.run(), other])


def test_a_new_run_says_which_figures_are_others() -> None:
    before = example.everything()
    same = repeated.repeated(before, example.everything())
    assert same.status == 0
    assert same.sentences == [
        # Four of each workload, two of the program, and five of each loader's start.
        "20 of 20 figures lie within the spread of those before; "
        "where nothing but chance differs, about 12 do.",
        "Outside, with ranges that overlap: none.",
        "Other figures than before: none.",
    ]
    other = [example.run(), *example.steady("tokens"), *example.starts(), *example.program()]
    for row in other:
        if row["row"] == "block" and row["peer"] == "torch" and row["kind"] != "starts":
            row["seconds"] *= 1.15 if row["kind"] == "steady" else 3
    found = repeated.repeated(before, Results(other))
    assert found.status == 1
    assert "14 of 20" in found.sentences[0]
    assert found.sentences[1].endswith("overlap: tokens (2 workers), torch, batches/s.")
    for name in ("rows (2 workers), torch, batches/s", "csv_table (2 workers), torch, seconds"):
        assert name in found.sentences[2]
        assert cells(found.table, name)[-1] == "NO"
    assert "large_u8" not in found.sentences[2]


SHORT: dict[str, tuple[dict[str, tuple[float, float]], list[str]]] = {
    "steady": (
        {"torch": (100, 100), "fastq_loader": (200, 600), "grain": (300, 300), "torch_0": (100, 700)},
        ["4.0 times (median; 2.0 in slow, 6.0 in fast) torch's", "loader.*faster in: slow.", "in: fast."],
    ),
    "training": (
        {
            "torch": (100, 100),
            "resident": (200, 200),
            "fastq_loader_pinned": (50, 170),
            "fastq_loader_device": (100, 180),
        },
        ["0.70 times (median; 0.50 in slow", "pin_memory=True it runs 1.1 times (median; 0.50", "in: slow."],
    ),
    "against": (
        {"old": (200, 200), "new": (150, 300)},
        ["1.1 times (median; 0.75 in slow, 1.5", "faster in every round in: fast.", "slower.*in: slow."],
    ),
    "device": (
        {
            "torch": (100, 100),
            "torch_side_stream": (200, 200),
            "register": (200, 600),
            "resident": (400, 600),
        },
        ["gives 4.0 times (median; 2.0 in slow", "gives 2.0 times.*Prefetcher", "gives 0.75 times"],
    ),
}


@pytest.mark.parametrize("kind", SHORT)
def test_a_run_ends_with_three_sentences(kind: str) -> None:
    rates, expected = SHORT[kind]
    cases = []
    for which, name in enumerate(("slow", "fast")):
        blocks = {peer: example.blocks(both[which]) for peer, both in rates.items()}
        for row in (row for of in blocks.values() for row in of if kind == "device"):
            row["part"] = "drain"
        cases += example.case(kind, name, {}, {peer: {} for peer in rates}, blocks)
    found = sentences(Results([example.run(), *cases]))
    assert len(found) == 3
    for sentence, part in zip(found, expected, strict=True):
        assert re.search(re.escape(part).replace(r"\.\*", ".*"), sentence), sentence


def test_programs_say_in_short_whether_they_agree() -> None:
    whole = "A whole program runs 2.0 times as fast as with torch's."
    same, none = "All loaders came", "No program was run both with cached and with torch's loader."
    first, *rest = sentences(Results(example.program()))
    assert (first.startswith(same), rest) == (True, [whole, none])
    rows = [row for row in example.program() if row.get("peer") != "torch"]
    alone = [row | {"peer": "cached"} if "peer" in row else row for row in rows]
    assert sentences(Results(alone))[2] == none
    differ = sentences(Results(example.program(end="loss 7")))
    assert differ[0].startswith("Loaders did NOT all come to the same")
