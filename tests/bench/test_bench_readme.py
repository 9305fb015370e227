"""The README's figures are those of its file of results, and the tables say what is in the results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import files, plots, readme
from bench.results import PeerResult, Spread
from bench.words import number, ratio, size
from tests.support import bench_example

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "bench/results/here.json"
BEFORE, AFTER = "# A title\n\n", "\n\nProse.\n"


def cells(text: str, first: str) -> list[str]:
    """The cells of the table row that starts so."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_readme_is_what_its_results_say() -> None:
    text = (ROOT / "README.md").read_text()
    source = readme.source_of(text)
    if source is None:
        pytest.skip("the README names no file of results yet")
    assert readme.rewritten(text, files.read(ROOT / source), source) == text


def test_the_readme_links_to_pictures_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    source = readme.source_of(text)
    if source is None:
        pytest.skip("the README names no file of results yet")
    for picture in plots.pictures(files.read(ROOT / source)):
        assert (ROOT / source).with_suffix("").joinpath(picture.name).is_file()


def test_only_the_section_is_rewritten_and_again_the_same() -> None:
    old = f"{BEFORE}<!-- bench:begin -->\ntyped by hand\n<!-- bench:end -->{AFTER}"
    assert readme.source_of(old) is None
    new = readme.rewritten(old, bench_example.run(), SOURCE)
    assert new.startswith(BEFORE)
    assert new.endswith(AFTER)
    assert "typed by hand" not in new
    assert readme.source_of(new) == SOURCE
    assert readme.rewritten(new, bench_example.run(), SOURCE) == new


@pytest.mark.parametrize("count", [0, 2])
def test_a_readme_without_exactly_one_section_is_refused(count: int) -> None:
    text = "<!-- bench:begin -->\n<!-- bench:end -->\n" * count
    with pytest.raises(ValueError, match=f"has {count} sections"):
        readme.rewritten(text, bench_example.run(), SOURCE)


def test_results_without_the_two_that_are_compared_are_refused() -> None:
    run = bench_example.run()
    del run.workloads[1].peers["torch"]
    with pytest.raises(ValueError, match="'tokens' was measured without torch"):
        readme.rewritten("<!-- bench:begin -->\n<!-- bench:end -->\n", run, SOURCE)


def test_speed() -> None:
    name, torch, ours, times, share, best, inline = cells(
        readme.section(bench_example.run(), SOURCE), "**rows**"
    )
    assert name == "**rows**: what rows loads; 2.56 kB"
    assert (torch, ours) == ("100", "1,000")
    assert times == "10 (10-10)"
    assert share == "50% (50%-50%)"
    assert best == "Grain 200; 5.0 (5.0-5.0)"
    assert inline == "2,000 / 3,000"


def test_cost() -> None:
    _, p95, cpu, switches, pss, shared, descriptors = cells(
        readme.section(bench_example.run(), SOURCE), "rows |"
    )
    assert p95 == "2.0 / 2.0"
    assert cpu == "4,000 / 400"
    assert switches == "10 / 1.0"
    assert (pss, shared, descriptors) == ("200 / 200", "20 / 20", "30 / 30")


def test_moments() -> None:
    row = cells(readme.section(bench_example.run(), SOURCE), "epoch turn")
    assert row == [
        *("epoch turn", "rows", "2, fork"),
        *("40 (36-44)", "10 (9.0-11)", "4.0 (4.0-4.0)"),
    ]


def test_a_loop_by_hand_is_named_beside_the_loaders_without_workers() -> None:
    run = bench_example.run()
    run.workloads[0].peers["slicing by hand"] = bench_example.peer("slicing by hand", 2500)
    *_, best, inline = cells(readme.section(run, SOURCE), "**rows**")
    assert best.startswith("Grain")
    assert inline == "2,000 / 3,000; slicing by hand: 2,500"


def test_what_was_not_measured_is_named_and_not_hidden() -> None:
    run = bench_example.run()
    rows = run.workloads[0].peers
    rows["fastq_loader"] = PeerResult("fastq_loader", failure="gave\nwrong batches")
    rows["grain"] = replace(rows["grain"], notes=["batches of numpy arrays"])
    text = readme.section(run, SOURCE)
    assert cells(text, "**rows**")[2:5] == [readme.NONE] * 3
    assert cells(text, "rows |")[2] == f"4,000 / {readme.NONE}"
    assert "- fastq_loader: not measured, gave wrong batches (rows)\n" in text
    assert "- Grain: batches of numpy arrays (rows)\n" in text
    assert "- SPDL, threads: not measured, not installed\n" in text


def test_a_ratio_says_when_the_rounds_disagree() -> None:
    assert ratio(Spread(1.2, 1.1, 1.4)) == "1.2 (1.1-1.4)"
    assert ratio(Spread(1.2, 0.9, 1.4)) == "1.2 (0.90-1.4), within noise"


def test_numbers_and_sizes() -> None:
    assert [number(value) for value in (0, 0.051, 0.996, 9.94, 9.96, 12_345.6)] == [
        *("0", "0.05", "1.0", "9.9", "10", "12,346"),
    ]
    assert [size(999), size(2560), size(38.5e6)] == ["999 B", "2.56 kB", "38.5 MB"]
    assert [size(1 << 10, 1024), size(1 << 28, 1024)] == ["1 KiB", "256 MiB"]
