"""A trace: viewers show whatever happens, it adds up, and its file can be opened whatever becomes of it."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader import DataLoader
from fastq_loader.extras.tracing import trace
from fastq_loader.extras.tracing.trace import Recorder
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.records import CLOSE, CUT, END, ITER, PACKED, Record
from tests.support.forking import end_of, fork
from tests.support.loaders import exactly
from tests.support.records import Played, gives, record
from tests.support.thorough import examples
from tests.support.traces import Event, asynchronous, batches, check, interval, of, opened, read, tracks


def spans(found: list[Event], track: str) -> list[tuple[str, int, int]]:
    return [(span["name"], *interval(span)) for span in tracks(found)[track]]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """Of a trace whose times count from 0."""
    recorder = Recorder(tmp_path / "a.json", Counters())
    recorder.origin = 0
    yield recorder
    with suppress(OSError):
        recorder.end()


def events_of(recorder: Recorder, path: Path, *records: Record) -> list[Event]:
    for each in records:
        recorder.add(PACKED.pack(*each), None)
    recorder.end()
    events = read(path / "a.json")
    check(events)
    return events


def test_each_row_shows_its_part_of_a_batch(recorder: Recorder, tmp_path: Path) -> None:
    parts = {"wait_from": 65, "wait_until": 190, "head": 125, "device": 3, "device_until": 195}
    found = events_of(
        recorder,
        tmp_path,
        record(ITER, 10, 40, drew=10, drew_until=30),
        gives(60, 200, (70, 110, 150, 180), worker=1, pid=101, sent=30, **parts),
        record(END, 300, 310),
        record(CLOSE, 310, 350),
    )
    assert spans(found, "consumer") == [
        ("iter", 10, 40),
        ("sampler", 20, 30),
        ("next", 60, 200),
        ("wait: head of line", 65, 190),
        ("device", 192, 195),
        ("step", 200, 300),
        ("next", 300, 310),
        ("end of the workers", 310, 350),
    ]
    loading = [("fetch", 70, 110), ("collate", 110, 150), ("pack", 150, 180)]
    assert spans(found, "worker 1 (pid 101)") == loading
    assert batches(found) == {(0, 0): (30, 200)}
    assert [event["name"] for event in of(found, "i")] == ["epoch 0 begins", "epoch 0 ends"]


def test_what_happens_beside_the_calls_is_there_too(recorder: Recorder, tmp_path: Path) -> None:
    recorder.add_replaced(0, 102, "killed by SIGKILL: \ud800")
    recorder.add_copy(64, 5, 9)
    for epoch in (0, 0, 1):
        recorder.add_drop(epoch, 50)
    found = events_of(recorder, tmp_path, record(CUT, 10, 90, drew=5, drew_until=25))
    assert spans(found, "consumer") == [("next", 10, 25), ("sampler", 20, 25)]
    replaced, *marks = of(found, "i")
    assert (replaced["name"], replaced["args"]) == (
        "worker 0 was replaced",
        {"about": "killed by SIGKILL: \ud800"},
    )
    assert [mark["name"] for mark in marks] == ["epoch 0 is broken off", "epoch 1 is broken off"]
    assert len(asynchronous(found, "copy to the device")) == 1


@examples(100)
@given(seed=st.integers(0, 1 << 32))
def test_spans_nest_whatever_happens(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also where the trace begins later."""
    draw, path = random.Random(seed), tmp_path_factory.mktemp("trace") / "a.json"
    begins = draw.choice((0, 5))
    played = Played(counters := Counters(), random.Random(seed))
    recorder = Recorder(path, counters)
    for number, _ in enumerate(itertools.chain((None,), played.epochs(30))):
        if number == begins:
            recorder.origin = played.tick() if begins else 0
            counters.trace = recorder
    recorder.end()
    check(read(path))


def loader() -> Any:
    return DataLoader(torch.arange(8), 2)


@pytest.fixture
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_EVERY", 0)


def test_a_trace_has_what_happens_in_it_and_nothing_of_before_and_after(tmp_path: Path) -> None:
    ours, path = loader(), tmp_path / "a.json"
    list(ours)
    traced = ours.trace(path)
    assert not path.exists()
    with traced:
        list(ours)
        list(ours)
    list(ours)
    events = read(path)
    check(events)
    marks = [mark["name"] for mark in of(events, "i")]
    assert marks == ["epoch 1 begins", "epoch 1 ends", "epoch 2 begins", "epoch 2 ends"]
    assert len(of(events, "X", "step")) == 8


def test_an_epoch_that_is_under_way_is_traced_and_goes_on_after(tmp_path: Path) -> None:
    ours, path = loader(), tmp_path / "a.json"
    batches = iter(ours)
    next(batches)
    with ours.trace(str(path)):
        next(batches)
        next(batches)
    assert len(list(batches)) == 1
    check(read(path))
    assert [span["args"]["batch"] for span in of(read(path), "X", "next")] == [1, 2]


def test_two_traces_of_one_loader_at_once_are_refused(tmp_path: Path) -> None:
    ours = loader()
    with ours.trace(tmp_path / "a.json"):
        with pytest.raises(RuntimeError, match=r"is being traced already.*b\.json.*end that trace first"):
            ours.trace(tmp_path / "b.json").__enter__()
        list(ours)
    assert not (tmp_path / "b.json").exists()
    assert len(of(read(tmp_path / "a.json"), "X", "fetch")) == 4, "the first one goes on"


def test_a_file_that_cannot_be_opened_is_an_error_before_anything_else(tmp_path: Path) -> None:
    ours = loader()
    with pytest.raises(FileNotFoundError, match="nowhere"), ours.trace(tmp_path / "nowhere" / "a.json"):
        raise AssertionError("it began")
    with ours.trace(tmp_path / "a.json"):  # no other trace has begun
        pass


@pytest.mark.usefixtures("written_at_once")
@pytest.mark.parametrize("kind", [None, KeyError])
def test_a_full_disk_ends_the_trace_and_is_said_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception] | None
) -> None:
    ours, writes = loader(), []

    def write(fd: int, data: bytes) -> int:
        writes.append(data)
        if len(writes) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)

    def train() -> None:
        with ours.trace(tmp_path / "a.json"):
            monkeypatch.setattr(trace.os, "write", write)
            assert len(list(ours)) == 4
            if kind is not None:
                raise kind

    with pytest.raises(kind or OSError, match=None if kind else "No space left"):
        train()
    monkeypatch.undo()
    assert len(writes) == 3, "nothing is tried after the first that failed"


@pytest.mark.usefixtures("written_at_once")
def test_it_is_written_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, path, write = loader(), tmp_path / "a.json", os.write
    path.write_text("x" * 10_000)  # an older file, which is longer
    with ours.trace(path), monkeypatch.context() as patch:
        patch.setattr(trace.os, "write", lambda fd, data: write(fd, data[:30]))
        for seen, _ in enumerate(exactly(4, ours)):
            assert len(of(opened(path.read_text()), "X", "fetch")) == seen + 1
    check(read(path))


@pytest.mark.processes
@pytest.mark.usefixtures("written_at_once")
def test_a_forked_child_writes_nothing_and_does_not_keep_the_file_locked(tmp_path: Path) -> None:
    ours, path = loader(), tmp_path / "a.json"
    with ours.trace(path):
        list(ours)
        assert end_of(fork(lambda: list(ours))) == 0
        second = fork(signal.pause)  # with the file open
    try:
        check(read(path))
        assert len(of(read(path), "X", "fetch")) == 4
        with ours.trace(path):
            pass
    finally:
        os.kill(second, signal.SIGKILL)
        end_of(second)


@pytest.mark.processes
def test_a_file_has_one_writer_also_of_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with loader().trace(path):
        with (
            pytest.raises(ValueError, match=r"path='.*a\.json': another trace is being written to this file"),
            loader().trace(str(path)),
        ):
            raise AssertionError("it began")

        def write() -> None:
            with pytest.raises(ValueError, match="give every loader, and every rank, a file of its own"):
                loader().trace(path).__enter__()

        assert end_of(fork(write)) == 0
    assert len(read(path)) == 1, "the others have not touched it"
