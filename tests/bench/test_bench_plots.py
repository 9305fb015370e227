"""Every picture of a run is drawn, without a display; what they look like is for eyes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import plots
from bench.results import Results
from tests.support import bench_example

PNG = b"\x89PNG\r\n\x1a\n"


def test_pictures_are_those_that_there_are_figures_for() -> None:
    run = bench_example.run()
    names = [picture.name for picture in plots.pictures(run)]
    assert names == ["ratio-2-workers.png", "ceiling-2-workers.png", "bytes-2-workers.png", "cost.png"]
    assert plots.pictures(Results(run.arguments, run.machine)) == []


def test_each_number_of_workers_has_pictures_of_its_own() -> None:
    run = bench_example.run()
    run.workloads.append(bench_example.workload("rows", num_workers=4))
    names = [picture.name for picture in plots.pictures(run)]
    assert names[:4] == [
        f"{kind}-{workers}-workers.png" for workers in (2, 4) for kind in ("ratio", "ceiling")
    ]


def test_all_are_written_and_again_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = bench_example.run()
    # Peers that only one panel has, and figures that are not there.
    run.workloads[0].peers["slicing by hand"] = bench_example.peer("slicing by hand", 2500)
    del run.workloads[1].peers["torch"]
    paths = plots.write(run, tmp_path / "first")
    assert [path.name for path in paths] == [picture.name for picture in plots.pictures(run)]
    for path, again in zip(paths, plots.write(run, tmp_path / "second"), strict=True):
        content = path.read_bytes()
        assert content.startswith(PNG)
        assert again.read_bytes() == content
