"""The picture of a trace: it is drawn of what a loader wrote, with twelve batches and their arrows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the bench extra is not installed")

from matplotlib.figure import Figure

from bench.output import trace


@pytest.fixture(scope="module", autouse=True)
def _fonts_are_open() -> None:
    """matplotlib keeps the files of fonts open, once something was drawn."""
    figure = Figure()
    figure.text(0, 0, "text")
    figure.savefig(io.BytesIO())


@pytest.mark.processes
def test_twelve_batches_of_a_recorded_epoch_are_drawn(tmp_path: Path) -> None:
    trace.record(tmp_path / "trace.json")
    figure = Figure()
    trace.draw(json.loads((tmp_path / "trace.json").read_text()), figure, skip=11)
    top, bottom = figure.axes
    names = [label.get_text() for label in top.get_yticklabels()]
    assert names == ["consumer", "worker 0", "worker 1"]
    written = [text.get_text() for text in top.texts]
    assert set(map(str, range(11, 11 + trace.BATCHES))) <= set(written)
    assert written.count("") > trace.BATCHES, "arrows"
    assert bottom.get_ylim()[1] > 1
    trace.main(str(tmp_path / "trace.png"), str(tmp_path / "trace.json"))
    assert (tmp_path / "trace.png").stat().st_size > 10_000
