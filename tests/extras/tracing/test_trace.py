"""A trace: viewers show whatever happens, it adds up, and its file can be opened whatever becomes of it."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader import DataLoader
from fastq_loader.extras.tracing import trace
from fastq_loader.extras.tracing.trace import Recorder
from fastq_loader.statistics import counters, records
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.records import (
    CLOSE,
    DEVICE,
    DREW,
    DROP,
    END,
    ITER,
    PART,
    REPLACED,
    WAITED,
    Record,
    Step,
)
from tests.support.forking import end_of, fork
from tests.support.records import Played, answer, call, came, gives
from tests.support.thorough import examples
from tests.support.traces import Event, batches, check, interval, of, opened, read, tracks


def events_of(path: Path, *found: Record, origin: int = 0, far: Any = None) -> list[Event]:
    """The events of these records; times count from `origin`."""
    counters = Counters()
    if far is not None:
        counters.far_worker = far  # type: ignore[method-assign]
    recorder = Recorder(path / "folded.json", counters)
    recorder.origin = origin
    for record in found:
        recorder.fold(record)
    recorder.end()
    events = read(path / "folded.json")
    check(events)
    return events


def spans(found: list[Event], track: str) -> list[tuple[str, int, int]]:
    return [(span["name"], *interval(span)) for span in tracks(found)[track]]


def loaded(seq: int, *times: int, worker: int = 0, pid: int = 101, **others: Any) -> Step:
    """A batch that was loaded at these times: started, fetched, collated, finished."""
    started, fetched, collated, finished = times
    return came(answer(seq, started, collated, finished, fetched=fetched)._replace(**others), worker, pid)


def one_batch(path: Path, **others: Any) -> list[Event]:
    step = loaded(0, 70, 110, 150, 180, worker=1, **others)
    steps = (WAITED, 65, 190, "head_of_line", 0, None), step, (DEVICE, 192, 195)
    return events_of(
        path,
        call(ITER, 10, 40, (DREW, 20, 30, (0,))),
        gives(step[3], 60, 200, *steps),
        call(END, 300, 310, more=(0,)),
        call(CLOSE, 310, 350),
        call(DROP, 0, 360),
    )


def test_each_row_shows_its_part_of_a_batch(tmp_path: Path) -> None:
    found = one_batch(tmp_path)
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
    assert batches(found) == {(1, 0): (30, 200)}
    assert [event["name"] for event in of(found, "i")] == ["epoch 1 begins", "epoch 1 ends"]


def test_a_batch_lasts_from_its_first_task_and_a_new_worker_is_a_mark(tmp_path: Path) -> None:
    replaced = REPLACED, 50, 0, 102, "killed by SIGKILL: \ud800"
    step = loaded(0, 80, 85, 90, 95, attempt=1, pid=102)
    found = events_of(
        tmp_path,
        call(PART, 0, 12, (DREW, 8, 10, (0,))),
        gives(step[3], 45, 100, replaced, (DREW, 60, 60, (0,)), (records.STALE, *step[1:]), step),
    )
    assert spans(found, "consumer") == [("sampler", 8, 10), ("next", 45, 100)]
    assert batches(found) == {(1, 0): (10, 100)}
    assert len(spans(found, "worker 0 (pid 102)")) == 3
    (mark,) = of(found, "i")
    assert mark["name"] == "worker 0 was replaced"
    assert mark["args"] == {"about": "killed by SIGKILL: \ud800"}


def test_batches_that_are_ready_are_counted_at_each_that_is_handed_out(tmp_path: Path) -> None:
    steps = [loaded(seq, *range(20 + 5 * seq, 24 + 5 * seq)) for seq in (0, 2)]
    given = gives(steps[0][3], 18, 40, (DREW, 10, 12, (0, 1, 2)), *steps)
    found = events_of(tmp_path, given, call(DROP, 0, 50), call(DROP, 0, 60), call(DROP, 0, 70, epoch=2))
    ready = [(event["ts"], event["args"]["batches"]) for event in of(found, "C")]
    assert ready == [(0.040, 1), (0.050, 0)]
    assert [mark["name"] for mark in of(found, "i")] == ["epoch 1 is broken off"]


@examples(100)
@given(seed=st.integers(0, 1 << 32))
def test_spans_nest_and_agree_with_statistics_whatever_happens(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also where the trace begins later, and wherever its records are folded."""
    draw, texts, path = random.Random(seed), [], tmp_path_factory.mktemp("trace") / "a.json"
    begins = draw.choice((0, 5))
    for _ in range(2):
        played = Played(counters := Counters(), random.Random(seed))
        recorder: Any = None
        for number, _ in enumerate(itertools.chain((None,), played.epochs(30))):
            if number == begins:
                recorder = Recorder(path, counters)
                recorder.origin = played.tick() if begins else 0
                counters.follow(recorder.fold, identify=played.thread)
            if draw.random() < 0.3:
                counters.fold()
        recorder.end()
        check(events := read(path))
        texts.append([event for event in events if event["name"] != "process_name"])
        found = counters.snapshot().total
        for name, seconds in (("sampler", found.sampler_seconds), ("device", found.device_copy_seconds)):
            traced = sum(end - began for began, end in map(interval, of(events, "X", name)))
            assert begins or abs(traced - seconds * 1e9) < 2 * len(events)
    assert texts[0] == texts[1]


def loader() -> Any:
    return DataLoader(torch.arange(8), 2)


@pytest.fixture
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (counters, trace):
        monkeypatch.setattr(module, "_EVERY", 0)


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
        for seen, _ in enumerate(ours):
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
