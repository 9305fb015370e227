"""What is written: rows that come back, tables, READMEs whose figures are those of their rows, pictures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pandas", reason="the bench extra is not installed")
pytest.importorskip("rich", reason="the bench extra is not installed")
pytest.importorskip("matplotlib", reason="the bench extra is not installed")

from rich.console import Console

from bench.__main__ import main, perform
from bench.arguments import parse
from bench.output import pictures, readme, rows, timeline
from bench.output.layout import Table, in_markdown, on_console
from bench.output.rows import Results
from bench.output.tables import case_tables, summary_tables
from bench.timing.cluster import LABELS
from bench.timing.rounds import Case, Lane, Plan
from tests.support import bench_example as example

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "bench/results/here.jsonl"
EMPTY = "<!-- bench:begin -->\n<!-- bench:end -->\n"
BOTH = ["ratio-2-workers", "ceiling-2-workers"]
PNG = b"\x89PNG\r\n\x1a\n"


def table(results: Results, title: str) -> Table:
    every = [*summary_tables(results), *(each for case in results.cases() for each in case_tables(case))]
    return next(each for each in every if each.title.startswith(title))


def cells(found: Table, first: str) -> list[str]:
    """The cells of the row that starts so."""
    return next(list(row) for row in found.frame.itertuples(index=False) if row[0].startswith(first))


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    rows.append(path, [example.run(), *example.steady()])
    rows.append(path, example.turns())
    found = rows.read(path)
    written = Results([example.run(), *example.steady(), *example.turns()])
    assert [case.facts for case in found.cases()] == [case.facts for case in written.cases()]
    assert found.cases()[0].peers == written.cases()[0].peers
    assert (found.machine, found.days) == (example.MACHINE, "2026-01-02")


@pytest.mark.parametrize("content", ["", "{}\n", "[]\n", '{"row":"run","version":2}\n', "no json"])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"results\.jsonl"):
        rows.read(path)
    with pytest.raises(SystemExit, match=r"results\.jsonl"):
        main(["--readme", str(path)])


class OneBlock(Lane):
    def block(self, part: str) -> list[dict[str, Any]]:
        return [{"seconds": 1.0}]


def test_a_resumed_run_measures_only_what_is_left_and_says_when(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    planned: list[int] = []

    def case(workers: int) -> Case:
        def plan() -> Plan:
            planned.append(workers)
            return Plan({"description": ""}, [OneBlock("torch", "torch"), OneBlock("fastq_loader", "ours")])

        return Case("turns", "rows", workers, "fork", 1, plan)

    options = parse(["--json", str(path)])
    assert perform(options, example.MACHINE, [case(1)]) == 0
    later = example.MACHINE | {"date": "2026-01-03T00:00:00+00:00"}
    resumed = parse(["--json", str(path), "--resume"])
    assert perform(resumed, later, [case(1), case(2)]) == 0
    assert planned == [1, 2]
    assert rows.read(path).days == "2026-01-02 to 2026-01-03"
    assert capsys.readouterr().out.count("1,000 (1,000..1,000)") == 2 + 4
    assert perform(options, later, []) == 0, "without --resume the file begins anew"
    assert rows.read(path).days == "2026-01-03"


def test_every_peer_is_shown_or_named_with_the_reason() -> None:
    results = Results(example.steady(grain={"failure": "not\ninstalled"}, torch_0={"notes": ["a note"]}))
    found = table(results, "rows: what rows loads; 2.56 kB a batch; 2 workers, fork")
    assert found.notes == ["grain: not measured: not installed", "torch_0: a note"]
    assert cells(found, "fastq_loader") == [
        *("fastq_loader", "1,000 (900..1,100)", "2.56 MB", "50%", "10 (10..10)"),
        *("1.0", "2.0", "3.0", "0.10 + 0.30", "1.0"),
    ]
    Console(width=200, file=(written := io.StringIO())).print(on_console(found))
    assert "grain: not measured: not installed" in written.getvalue()
    assert "…" not in written.getvalue()
    assert "| fastq_loader | 1,000 (900..1,100) |" in in_markdown(found)


@pytest.mark.parametrize(
    ("title", "first", "begin", "expected"),
    [
        ("Speed with 2 workers (fork)", "rows: what rows loads; 2.56 kB", 1, ["100", "1,000", "10 (10..10)"]),
        ("Speed", "rows: what", 4, ["50% (50%..50%)", "grain 200; 5.0 (5.0..5.0)", "2,000 / –"]),  # noqa: RUF001
        ("Cost with 2 workers (fork)", "rows", 1, ["2.0 / 2.0", "4,000 / 400", "10 / 1.0", "200 / 200"]),
        ("Cost", "rows", 5, ["20 / 20", "30 / 30"]),
        ("Moments", "epoch turn", 1, ["rows", "2, fork", "40 (36..44)", "10 (9.0..11)", "4.0 (4.0..4.0)"]),
        ("stalls", "bound: sum of costs / 2", 1, ["1.00", "1.00"]),
        ("stalls", "list schedule", 1, ["1.00"]),
        ("stalls", "dynamic", 1, ["1.10 (1.00..1.15)", "1.10 (1.00..1.15)"]),
        ("stalls", "dynamic", -3, ["45%", "0.50", "16 (16..16)"]),
        ("stalls", "torch", -2, ["", ""]),
        ("verdicts", "workers", 1, ["workers", "workers, 3 of 3", "90 (90..90)"]),
        ("verdicts", "sampler", 4, ["87 (87..87)", "3.0 (3.0..3.0)"]),
        ("tune_csv", "tune", 1, ["", "100 (90..110)", "0.91 (0.91..0.91)", "0.91 (0.91..0.91)"]),
        ("tune_csv", "4 workers", 1, ["80", "95 (86..105)", "0.86 (0.86..0.87)", "0.86 (0.86..0.87)"]),
        ("cost", "fastq_loader", 2, ["0.99 (0.99..0.99)", "", "400 (364..444)"]),
        ("cost", "traced", 2, ["", "0.90 (0.90..0.90)"]),
        ("loopback", "remote", 1, ["200 (180..220)", "2,000 (1,800..2,200)", "", "1.0", "2.0"]),
        ("loopback", "actors", 3, ["5.00 (5.00..5.00)", "", ""]),
        ("links_small", "remote", 1, ["10 (9.0..11)", "0.80 (0.72..0.88)", "0.50 (0.45..0.55)"]),
        ("work_10", "local", 3, ["0.80 (0.80..0.80)"]),
        ("turn", "remote", 1, ["8.0 (7.2..8.8)", "2.00 (2.00..2.00)"]),
        ("What the death of a worker costs", "", 3, ["10 (10..10)", "60 (50..70)", "50 (40..60)", "80"]),
        ("state_dict: ", "fastq_loader", 1, ["20 (18..22)", "4 kB"]),
        ("steps: ", "fastq_loader", 1, ["1,000 (909..1,111)", "800 (727..889)", "0.80 (0.80..0.80)"]),
        ("resume_8: ", "fastq_loader", 1, ["0.50 (0.45..0.55)", "1.00 (0.90..1.10)", "0.80 (0.72..0.88)"]),
        ("resume_8: ", "fastq_loader", 4, ["0.50 (0.45..0.55)", "1.25 (1.25..1.25)"]),
        ("resume_9: ", "fastq_loader_permuted", 3, ["–", "0.50 (0.45..0.55)", "–"]),  # noqa: RUF001
        ("Goals", "state_dict(): fastq_loader", 1, ["at most 50 µs", "20 (18..22)", "met"]),
        ("Goals", "state: fastq_loader", 1, ["at most 10 kB", "4.0 (4.0..4.0)", "met"]),
        ("Goals", "batches per second with", 1, ["at least 0.98 x", "0.80 (0.80..0.80)", "missed"]),
        ("Goals", "resume, beyond", 1, ["at most 1 s", "0.50 (0.45..0.55)", "met"]),
        ("Goals", "resume / torch.randperm", 1, ["at most 2 x", "1.25 (1.25..1.25)", "met"]),
        ("Goals", "stalls", 1, ["at most 1.2 x", "1.10 (1.00..1.15)", "met"]),
        ("Goals", "kills, 1 worker", 1, ["at most 80 ms", "60 (50..70)", "met"]),
    ],
)
def test_figures_in_tables(title: str, first: str, begin: int, expected: list[str]) -> None:
    assert cells(table(example.everything(), title), first)[begin:][: len(expected)] == expected


@pytest.mark.parametrize(
    ("title", "sentence"),
    [
        (
            "loopback",
            "The rate of RayWorkers is 0.80 times that of workers here, 0.80 times that of a bare recv_into, "
            "5.00 times that of actors which return tensors, 10.00 times that of Ray Data.",
        ),
        ("links_large", "Batches fill 1.00 of the links; a bare recv_into fills 1.00."),
        ("turn", "A turn takes 2.00 times as long with RayWorkers as with workers here."),
    ],
)
def test_a_table_of_other_machines_says_what_it_shows(title: str, sentence: str) -> None:
    assert table(example.everything(), title).notes[0] == sentence


def test_a_table_without_figures_has_its_reason_alone() -> None:
    results = Results(example.cluster(**{name: {"failure": "needs Ray"} for name in LABELS}))
    found = table(results, "loopback")
    assert {*found.notes} == {f"{name}: not measured: needs Ray" for name in LABELS}
    notes = "\n".join(f"- {note}" for note in found.notes)
    assert in_markdown(found) == f"{found.title}\n\n{found.about}\n\n{notes}"


def test_what_was_not_measured_is_named() -> None:
    by_hand = Results(example.steady(**{"slicing by hand": {}}))
    assert cells(table(by_hand, "Speed"), "rows")[-1].endswith("; slicing by hand: –")  # noqa: RUF001
    without = Results([*example.turns(grain={"failure": "no epochs"}), *example.schedule()])
    assert cells(table(without, "Moments"), "epoch turn")[5] == "–"  # noqa: RUF001
    assert cells(table(without, "Moments"), "grain: not measured: no epochs")
    assert table(without, "stalls").notes == ["round_robin: not measured: no such argument"]


def test_a_shape_is_shown() -> None:
    results = example.device_run(torch_side_stream={"failure": "no stream"})
    results.cases()[0].facts["left_out"] = ["round 3: torch drain", "round 3: torch 4"]
    speed = table(results, "large: what large loads; 38.5 MB a batch")
    costs = table(results, "large: what it costs")
    assert {"stall, 1", "stall, 2*"} <= set(speed.frame.columns)
    assert cells(speed, "fastq_loader, register")[2:4] == ["0.97 (0.97..0.97)", "0.99 (0.99..0.99)"]
    assert cells(costs, "fastq_loader, register")[-5:] == ["1.7", "0.10", "1 GiB", "768 MiB", "768 MiB"]
    assert costs.notes[0].endswith("steps in units of 786 µs: the copy of a batch")
    assert costs.notes[1:] == [
        "torch, side stream: not measured: no stream",
        "no time was left for 2 blocks, the first of them round 3: torch drain",
    ]
    assert table(results, "fields_32: what it costs").notes[0].endswith("1.2 x the workers' time")


def test_the_readmes_are_what_their_results_say() -> None:
    sources = {readme.source_of((ROOT / name).read_text()) for name in readme.SECTIONS}
    (source,) = sources
    assert source is not None
    results = rows.read(ROOT / source)
    for path, text in readme.texts(results, source, ROOT).items():
        assert path.read_text() == text
    for picture in pictures.pictures(results):
        assert (ROOT / source).with_suffix("").joinpath(picture.name).is_file()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "bench").mkdir()
    for name in readme.SECTIONS:
        (tmp_path / name).write_text(f"# A title\n\n{EMPTY}\nProse.\n")
    return tmp_path


def test_only_the_section_is_rewritten_and_again_the_same(project: Path) -> None:
    results = example.everything()
    for path, text in readme.texts(results, SOURCE, project).items():
        assert text.startswith("# A title\n\n<!-- bench:begin: written by")
        assert text.endswith("<!-- bench:end -->\n\nProse.\n")
        assert readme.source_of(text) == SOURCE
        path.write_text(text)
    assert readme.texts(results, SOURCE, project) == {
        project / name: (project / name).read_text() for name in readme.SECTIONS
    }
    short, long = ((project / name).read_text() for name in readme.SECTIONS)
    assert "| rows: what rows loads | 100 | 200 (grain) | 1,000 | 10 (10..10) |" in short
    assert "(bench/results/here/ratio-2-workers.png)" in short
    assert "(results/here/timeline-stalls.png)" in long


def test_cases_of_another_machine_name_it(project: Path) -> None:
    elsewhere = example.run()
    elsewhere["machine"] = elsewhere["machine"] | {"cpu": "Abacus"}
    results = Results([example.run(), *example.steady(), elsewhere, *example.insight()])
    long = readme.texts(results, SOURCE, project)[project / "bench/README.md"]
    assert long.count("Measured on ") == 1
    assert f"### {readme.HEADINGS['insight']}\n\nMeasured on Abacus, 2 cores.\n" in long


@pytest.mark.parametrize("count", [0, 2])
def test_a_readme_without_exactly_one_section_is_refused(count: int, project: Path) -> None:
    (project / "README.md").write_text(EMPTY * count)
    with pytest.raises(ValueError, match=f"has {count} sections"):
        readme.texts(example.everything(), SOURCE, project)


def test_results_without_the_two_that_are_compared_are_refused(project: Path) -> None:
    results = Results([example.run(), *(row for row in example.steady() if row.get("peer") != "torch")])
    with pytest.raises(ValueError, match="'rows' was measured without torch"):
        readme.texts(results, SOURCE, project)


@pytest.mark.parametrize(
    ("results", "names"),
    [
        (example.everything(), [*BOTH, "bytes-2-workers", "cost", "timeline-stalls"]),
        (Results([example.run(), *example.steady(torch={"failure": "no"})]), BOTH),
        (Results([example.run()]), []),
    ],
)
def test_pictures_are_drawn_of_what_was_measured_and_again_the_same(
    results: Results, names: list[str], tmp_path: Path
) -> None:
    paths = pictures.write(results, tmp_path / "first")
    assert [path.name for path in paths] == [f"{name}.png" for name in names]
    for path, again in zip(paths, pictures.write(results, tmp_path / "second"), strict=True):
        assert path.read_bytes().startswith(PNG)
        assert path.read_bytes() == again.read_bytes()


def test_slow_batches_and_deliveries_that_cannot_be_told_apart() -> None:
    frame = timeline.work(Results(example.schedule()).cases()[0].peers["dynamic"])
    assert list(frame[frame["slow"]]["batch"]) == [0]
    assert timeline.together([0.1, 0.5, 0.52, 0.54, 1.0], 0.03) == [(0.1, 1), (0.54, 3), (1.0, 1)]
