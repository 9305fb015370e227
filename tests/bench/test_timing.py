"""What is timed: rounds with lanes that break; and a short run of the steady state."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bench.output.rows import CaseRows, Results
from bench.peers import PEERS, Entry, LoaderSettings, Unsupported, make_peer
from bench.peers.torch_loader import TorchInline
from bench.timing import rounds, starts, steady
from bench.timing.batches import compare
from bench.timing.processes import descendants
from bench.timing.rounds import Case, Lane, Plan, measure
from bench.workloads import Cycled, Load, jpeg
from tests.conftest import ROOT


def measured(case: Case) -> CaseRows:
    return Results(measure(case)).cases()[0]


class Noting(Lane):
    def __init__(self, name: str, story: list[str], breaks: str = "") -> None:
        super().__init__(name, name)

        def tell(what: str, part: str = "") -> None:
            story.append(f"{name} {what} {part}".strip())
            if what == breaks:
                raise ValueError(what)

        def block(part: str) -> list[rounds.Row]:
            tell("block", part)
            return [{"seconds": 1.0}]

        def start() -> None:
            self.closing.callback(tell, "close")
            tell("start")

        self.start, self.block = start, block  # type: ignore[method-assign]
        self.finish = lambda: tell("finish") or {"p50": 1.0}  # type: ignore[method-assign]


def noted(lanes: list[Lane], **plan: Any) -> CaseRows:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "wait_until_quiet", lambda: None)
        return measured(Case("steady", "noted", 1, "fork", 2, lambda: Plan({}, lanes, **plan)))


def test_lanes_take_turns_to_and_fro_part_by_part() -> None:
    story: list[str] = []
    found = noted([Noting("a", story), Noting("b", story)], parts=("x", "y"))
    ends = ["a finish", "a close", "b finish", "b close"]
    forth, back = (["a", "b"], ["b", "a"])
    blocks = [f"{name} block {part}" for order in (forth, back) for part in "xy" for name in order]
    assert story == ["a start", "b start", *blocks, *ends]
    rows = [(row["part"], row["block"]) for row in found.peers["a"].rows]
    assert rows == [("x", 0), ("y", 0), ("x", 1), ("y", 1)]
    assert found.peers["a"].about["p50"] == 1.0


@pytest.mark.parametrize(
    ("breaks", "failure", "notes", "blocks"),
    [
        ("start", "ValueError: start", [], 0),
        ("block", "ValueError: block", [], 0),
        ("finish", None, ["ValueError: finish"], 2),
        ("close", None, ["closing: ValueError: close"], 2),
    ],
)
def test_a_broken_lane_has_a_reason(breaks: str, failure: str | None, notes: list[str], blocks: int) -> None:
    story: list[str] = []
    found = noted([Noting("bad", story, breaks), Noting("good", story)])
    assert (found.peers["bad"].failure, found.peers["bad"].about["notes"]) == (failure, notes)
    assert len(found.peers["bad"].rows) == blocks
    assert (found.peers["good"].failure, len(found.peers["good"].rows)) == (None, 2)
    assert story.count("bad close") == story.count("good close") == 1


BATCH: dict[str, Any] = {"x": torch.arange(6).reshape(2, 3), "rest": [np.ones(2), "text", None]}


def steady_case(peers: list[str], folder: Path, name: str = "rows") -> Case:
    options = Namespace(peers=peers, start_method="fork", blocks=2, seconds=0.03)
    return steady.case(name, 1, options, folder)


@pytest.mark.processes
def test_the_steady_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grain", None)  # as if it were not installed
    found = measured(steady_case(["torch", "fastq_loader", "grain", "torch_0"], tmp_path))
    assert "not installed" in str(found.peers["grain"].failure)
    assert found.facts["batch_bytes"] == 64 * (8 * 4 + 8)
    for name in ("ceiling", "torch", "fastq_loader", "torch_0"):
        peer = found.peers[name]
        assert (peer.failure, peer.about["notes"], len(peer.rows)) == (None, [], 2)
        assert all(row["batches"] and row["seconds"] for row in peer.rows)
        assert any(row["worker_cpu"] for row in peer.rows) == (name != "torch_0")
        assert any(row["consumer_cpu"] for row in peer.rows) == (name != "ceiling")
        assert ("p95" in peer.about) == (name != "ceiling")


def hanging(batches: Iterator[Any]) -> Iterator[Any]:
    yield from islice(batches, 100)
    time.sleep(60)


BAD: dict[str, Callable[[Iterator[Any]], Iterator[Any]]] = {
    "hanging": hanging,
    "wrong": lambda batches: ([rows + 1, labels] for rows, labels in batches),
    "short": lambda batches: islice(batches, 0),
}


@pytest.mark.processes
def test_a_failing_peer_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bench.peers.bad", bad := ModuleType("bad"))
    for name, epoch in BAD.items():
        methods = {"epoch": lambda self, epoch=epoch: epoch(TorchInline.epoch(self))}
        setattr(bad, name, type(name, (TorchInline,), methods))
        monkeypatch.setitem(PEERS, name, Entry("bad", name, name))
    monkeypatch.setattr(rounds, "HANGING_S", 1.0)
    monkeypatch.setattr(rounds, "STARTING_S", 1.0)
    found = measured(steady_case([*BAD, "torch_0"], tmp_path))
    assert {name: peer.failure for name, peer in found.peers.items()} == {
        "ceiling": None,
        "hanging": "TimeoutError: took more than 1 s",
        "wrong": "RuntimeError: wrong batches: batch[0] has other values",
        "short": "RuntimeError: it gave no batch",
        "torch_0": None,
    }


@pytest.mark.processes
@pytest.mark.parametrize("name", ["spdl_threads", "grain_threads"])
def test_threads_give_torchs_batches_in_their_order_without_processes(name: str) -> None:
    pytest.importorskip(name.partition("_")[0])
    load = Load(Cycled(torch.arange(30).reshape(10, 3)), batch_size=4, batches=6, reads_files=True)
    settings, before = LoaderSettings(2, "fork"), (descendants(), threading.active_count())
    torchs, peer = (make_peer(each, load, settings) for each in ("torch_0", name))
    for _ in range(2):
        pairs = zip(peer.epoch(), torchs.epoch(), strict=True)
        assert [compare(batch, expected) for batch, expected in pairs] == [([], [])] * 6
    next(peer.epoch())  # one that stops in the middle
    assert (descendants(), threading.active_count() > before[1]) == (before[0], True)
    peer.close()


@pytest.fixture
def photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Six of them, cut in the same place by everybody, and not flipped."""
    monkeypatch.setattr(jpeg, "FILES", 6)
    monkeypatch.setattr(jpeg.JpegFolder, "corner", lambda self, width, height: (16, 8))
    monkeypatch.setattr(jpeg.JpegFolder, "flipped", lambda self: False)
    return replace(jpeg.BYTES.load(tmp_path), batch_size=4, batches=3)


@pytest.mark.processes
def test_spdls_own_decoder_gives_torchs_photographs_in_their_order(photographs: Load) -> None:
    pytest.importorskip("spdl.io")
    try:
        peer = make_peer("spdl_decoder", photographs, LoaderSettings(2, "fork"))
    except Unsupported as error:
        pytest.skip(str(error))
    torchs = make_peer("torch_0", photographs, LoaderSettings(2, "fork"))
    for (pixels, labels), expected in zip(peer.epoch(), torchs.epoch(), strict=True):
        assert compare([pixels, labels], expected, values=False) == ([], [])
        assert labels.tolist() == expected[1].tolist()
        assert (pixels.float() - expected[0].float()).abs().mean() < 4, "another decoder rounds in other ways"
    peer.close()


def test_spdls_own_decoder_says_what_it_lacks(photographs: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    spdl_io = pytest.importorskip("spdl.io")

    def missing() -> None:
        raise RuntimeError("Failed to import libspdl.")

    monkeypatch.setattr(spdl_io.utils, "get_ffmpeg_versions", missing)
    with pytest.raises(Unsupported, match="apt-get install ffmpeg"):
        make_peer("spdl_decoder", photographs, LoaderSettings(2, "fork"))
    with pytest.raises(Unsupported, match="only JPEG files, as uint8"):
        make_peer("spdl_decoder", Load(Cycled(torch.arange(30)), 4), LoaderSettings(2, "fork"))


@pytest.mark.processes
def test_a_loader_alone_has_its_start_and_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "wait_until_quiet", lambda: None)
    monkeypatch.setattr(starts, "MEASURED", (("rows", 2),))
    (case,) = starts.cases(Namespace(start_method="fork", blocks=1), tmp_path)
    for peer in measured(case).peers.values():
        assert peer.failure is None
        (row,) = peer.rows
        assert 0 < row["first"] < row["epoch"] * 100
        assert row["batches"] * row["epoch"] / starts.EPOCH <= row["seconds"] * starts.EPOCHS
        assert 0 < row["uss"] < row["pss"]


def test_grain_has_no_threads_for_data_in_memory() -> None:
    pytest.importorskip("grain")
    load = Load(Cycled(torch.arange(30)), batch_size=4, batches=6)
    with pytest.raises(Unsupported, match="in memory"):
        make_peer("grain_threads", load, LoaderSettings(2, "fork"))


@pytest.mark.processes
def test_a_run_has_no_lines_of_other_libraries_and_says_what_it_does() -> None:
    pytest.importorskip("grain", reason="whose workers log that jax is missing")
    line = "-m bench jpeg --peers torch,grain,grain_threads --workers 1 --blocks 1 --seconds 0.01"
    done = subprocess.run([sys.executable, *line.split()], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[1 of 1, 0 s] measuring steady jpeg, 1 worker (fork)\n")
    assert "Grain, threads" in done.stdout
    assert "not measured" not in done.stdout
    assert "In short: " in done.stdout
