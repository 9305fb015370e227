"""Workloads and programs: the same every time, and to the bit with every loader; what is said of a run."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fastq_loader
from bench.__main__ import main
from bench.output.rows import CaseRows, Results
from bench.peers import LoaderSettings
from bench.peers.torch_loader import loader_arguments
from bench.programs import CACHED, PROGRAMS, case, photographs, report, run
from bench.programs.track import Track
from bench.timing.ceiling import as_worker
from bench.workloads import Load, all_workloads, files, find_workload, jpeg, ready_made, tables
from tests.support import bench_example as example
from tests.support.datasets import assert_same
from tests.support.thorough import thorough

NAMES = [*all_workloads(), "bytes_1024"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "FILES", 4)
    monkeypatch.setattr(ready_made, "IMAGES", 2)
    monkeypatch.setattr(ready_made, "LARGEST_SET", 1 << 20)
    monkeypatch.setattr(files, "FILES", 6)
    monkeypatch.setattr(tables, "ALL_ROWS", 3 * tables.BATCH + 1)


def built(name: str, folder: Path) -> Load:
    return find_workload(name).load(folder)


def batches(load: Load) -> Iterator[Any]:
    torch.manual_seed(0)
    return iter(DataLoader(**loader_arguments(load, LoaderSettings(0, "fork"))))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", NAMES)
def test_batches_are_the_same_again_and_from_a_spawned_worker(name: str, tmp_path: Path) -> None:
    load = built(name, tmp_path)
    first = list(islice(batches(load), 2))
    assert len(first) == 2
    assert_same(list(islice(batches(load), 2)), first)
    assert_same(list(islice(batches(pickle.loads(pickle.dumps(load))), 2)), first)


@pytest.mark.usefixtures("small")
@thorough(but={"workers": 3})
@pytest.mark.parametrize("workers", [1, 2, 3, 16])
def test_a_worker_streams_its_records(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PASSES", 1)
    dataset: Any = built("stream", tmp_path).dataset
    everything = list(dataset)
    assert len(everything) == files.RECORDS
    for worker in range(workers):
        with as_worker(worker, workers, dataset):
            assert_same(list(dataset), everything[worker::workers])


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first one leaves a folder for compiled code in TMPDIR
    return tmp_path_factory.mktemp("programs")


def program_files(folder: Path, name: str) -> Path:
    return case.files(folder, name, PROGRAMS[name], few=True)


@thorough(after=1)
@pytest.mark.processes
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_loader_trains_the_same_to_the_bit(name: str, folder: Path) -> None:
    own = program_files(folder, name)
    ends = set()
    for loader in PROGRAMS[name].loaders:
        track = Track()
        found = run.run(name, loader, 2, 2, own, track)
        ends.add(found["end"])
        values, samples = found.get("cached", (0, 0))[:2]
        assert (values == samples > 0) == loader.startswith("cached"), "a cache holds all"
        assert len(track.passes) == (4 if name == "files_by_id" else 2)
        assert all(
            0 < this.waited <= this.seconds and this.batches * this.memory > 0 for this in track.passes
        )
    assert len(ends) == 1


def test_a_pass_that_is_not_shown_asks_the_loader_for_nothing_but_batches() -> None:
    """Statistics while it is timed would count against the one loader that has any."""

    class Counts(fastq_loader.DataLoader[Any]):
        calls = 0

        def statistics(self) -> Any:
            Counts.calls += 1
            return super().statistics()

    for shown, calls in ((False, 0), (True, 2)):  # once before the pass, and once for its first batch
        Counts.calls = 0
        for _ in islice(Track(shown)(Counts(range(8), 4), "a pass"), 2):
            assert Counts.calls == calls


def photographs_end(own: Path, workers: int, **options: Any) -> Any:
    torch.manual_seed(0)
    loss, predictions = photographs.train(own, num_workers=workers, epochs=2, **options)
    return loss, predictions.tolist()


@pytest.mark.processes
def test_photographs_end_the_same_with_other_workers_and_after_a_resume(folder: Path, tmp_path: Path) -> None:
    own, saved = program_files(folder, "photographs"), tmp_path / "checkpoint"
    expected = photographs_end(own, 0)
    assert expected == photographs_end(own, 0) == photographs_end(own, 2)
    photographs_end(own, 2, checkpoint=saved, stop=8)
    torch.rand(3)
    assert photographs_end(own, 1, checkpoint=saved) == expected


@pytest.mark.processes
def test_a_cache_takes_what_the_limit_leaves_and_says_how_much_of_the_table_that_is(folder: Path) -> None:
    own = program_files(folder, "image_table")
    room = 3 * 128 * 128 * 4
    found = run.run("image_table", CACHED, 1, 1, own, Track(), room)
    values, samples, nbytes, most = found["cached"]
    assert most == room >= nbytes > 0
    assert 0 < values < samples
    blocks = {loader: [dict(found)] for loader in ("torch", CACHED)}
    del blocks["torch"][0]["cached"]
    rows = example.case("program", "image_table", {}, {each: {} for each in blocks}, blocks)
    notes = report.table(Results(rows).cases()[0]).notes
    of = f"{CACHED}: holds {values} of {samples} samples ({values / samples:.0%}) in"
    assert f"{of} {nbytes / 1e6:.1f} of the {most / 1e6:.1f} MB that it may take" in notes
    assert any(
        note.startswith(
            f"{CACHED}: 1.0 times as fast as torch's from the second epoch on, 1.0 times in the "
            "whole run; the first epoch 1.0 times as fast, and +0 MB of memory"
        )
        for note in notes
    )
    assert not any(note.startswith("torch: holds") for note in notes)


ALONE = """
import runpy, sys
for name, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.argv = [name, folder]
    runpy.run_path(f"{name}.py", run_name="__main__")
"""


@thorough()
@pytest.mark.processes
def test_programs_run_alone_where_only_the_package_is(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/fastq_loader").symlink_to(Path(fastq_loader.__file__).parent)
    given: list[Any] = []
    for name in PROGRAMS:
        shutil.copy(ROOT / f"bench/programs/{name}.py", tmp_path)
        assert 60 <= len((tmp_path / f"{name}.py").read_text().splitlines()) <= 120
        given += [name, program_files(folder, name)]
    command = [sys.executable, "-W", "ignore:This DataLoader will create", "-c", ALONE, *given]
    environment = {**os.environ, "PYTHONPATH": "installed"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("loss") >= len(PROGRAMS)


@pytest.mark.processes
def test_the_command_runs_a_program_under_its_limit(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = (
        f"program csv_table --loader fastq_loader --workers 0 --epochs 2 --few --data {folder} --limit 2000"
    )
    assert main(line.split()) == 0
    printed = capfd.readouterr().out
    assert report.SAME in printed
    assert "each process may have 2,000 MB of data (RLIMIT_DATA)" in printed


def told(end: str) -> CaseRows:
    return Results(example.program(end=end)).cases("program")[0]


def test_one_bit_of_difference_is_told() -> None:
    assert report.agree(told("loss 0.5, predictions abc"))
    other = told("loss 0.5000000000000001, predictions abc")
    assert not report.agree(other)
    note = report.table(other).notes[0]
    assert report.DIFFERENT in note
    assert "0.5000000000000001" in note
    failed = Results(example.program(fastq_loader={"failure": "was killed"})).cases()[0]
    assert not report.agree(failed)
