"""A trace: viewers show whatever happens, it adds up, and its file can be opened whatever becomes of it."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import random
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader import DataLoader
from fastq_loader.extras.tracing import trace
from fastq_loader.extras.tracing.trace import Recorder
from fastq_loader.ipc.messages import BROKEN, ENDED, ERROR, PASSED, SKIPPED
from fastq_loader.statistics import counters, records
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.records import (
    CLOSE,
    COPY,
    DEVICE,
    DREW,
    DROP,
    END,
    ITER,
    LOADED,
    PART,
    REPLACED,
    WAITED,
    Record,
    Step,
)
from fastq_loader.system import locks
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


@pytest.mark.parametrize(
    ("others", "phases"),
    [
        ({"kind": ERROR, "fetched": 0, "collated": 160}, (70, 160, 180)),  # of an earlier batch
        ({"kind": ERROR, "fetched": 20, "collated": 30}, (70, 70, 180)),
        ({"kind": BROKEN, "fetched": 0, "collated": 0}, (180, 180, 180)),
        ({"fetched": 500, "collated": 400}, (180, 180, 180)),
    ],
)
def test_times_leave_no_gap(tmp_path: Path, others: dict[str, Any], phases: tuple[int, int, int]) -> None:
    fetched, collated, finished = phases
    loading = [("fetch", 70, fetched), ("collate", fetched, collated), ("pack", collated, finished)]
    assert sorted(spans(one_batch(tmp_path, **others), "worker 1 (pid 101)")) == sorted(loading)


def test_workers_on_other_machines_have_rows_of_their_own(tmp_path: Path) -> None:
    places = {101: (812, "10.0.0.2"), 102: (812, '"b"'), 104: (0, "")}
    processes = (1, 101), (2, 102), (3, 103), (3, 812)
    answers = [loaded(worker, *range(10, 14), worker=worker, pid=pid) for worker, pid in processes]
    replaced = REPLACED, 90, 4, 104, "it died"  # and the next one is not up yet
    found = events_of(tmp_path, gives(None, 1, 95, *answers, replaced), far=places.get)
    names = ["1 (pid 812 on 10.0.0.2)", '2 (pid 812 on "b")', "3 (pid 103)", "3 (pid 812)"]
    assert set(tracks(found)) == {"consumer", *(f"worker {name}" for name in names)}
    assert "worker 4 (not up yet)" in [event["args"]["name"] for event in of(found, "M", "thread_name")]


def test_what_began_before_the_trace_is_left_out(tmp_path: Path) -> None:
    wait, drew, step = (
        (WAITED, 99, 110, "workers", 0, None),
        (DREW, 120, 130, ()),
        loaded(0, 90, 95, 110, 120),
    )
    copied = call(COPY, 99, 110, more=(64,))
    replaced = REPLACED, 99, 0, 101, "it died"
    given = gives(step[3], 98, 140, wait, replaced, drew, step)
    found = events_of(tmp_path, copied, call(ITER, 90, 95), given, origin=100)
    assert {track: spans(found, track) for track in tracks(found)} == {
        "consumer": [("sampler", 20, 30)],
        "worker 0 (pid 101)": [("pack", 10, 20)],
    }
    assert not of(found, "b")
    assert not of(found, "i")


@pytest.mark.parametrize("kind", [ENDED, SKIPPED, PASSED])
def test_an_answer_without_a_batch_is_one_span(tmp_path: Path, kind: int) -> None:
    steps = (DREW, 5, 10, (0,)), loaded(0, 20, 20, 30, 40, kind=kind)
    found = events_of(tmp_path, gives(0, 4, 50, *steps))
    assert len(spans(found, "worker 0 (pid 101)")) == 1
    assert not batches(found)


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


def test_the_step_of_the_last_batch_ends_with_the_next_epoch(tmp_path: Path) -> None:
    found = events_of(tmp_path, gives(0, 10, 20), call(ITER, 30, 40, epoch=2), gives(None, 50, 60, epoch=2))
    expected = [("next", 10, 20), ("step", 20, 30), ("iter", 30, 40), ("next", 50, 60)]
    assert spans(found, "consumer") == expected


def test_batches_that_are_ready_are_counted_at_each_that_is_handed_out(tmp_path: Path) -> None:
    steps = [loaded(seq, *range(20 + 5 * seq, 24 + 5 * seq)) for seq in (0, 2)]
    given = gives(steps[0][3], 18, 40, (DREW, 10, 12, (0, 1, 2)), *steps)
    found = events_of(tmp_path, given, call(DROP, 0, 50), call(DROP, 0, 60), call(DROP, 0, 70, epoch=2))
    ready = [(event["ts"], event["args"]["batches"]) for event in of(found, "C")]
    assert ready == [(0.040, 1), (0.050, 0)]
    assert [mark["name"] for mark in of(found, "i")] == ["epoch 1 is broken off"]


def test_what_failed_before_it_was_fetched_has_no_times_of_an_earlier_batch(tmp_path: Path) -> None:
    found = spans(events_of(tmp_path, gives(None, 40, 50, (LOADED, 41, 42, 1, 20))), "consumer")
    assert set(found[1:]) == {("fetch", 41, 41), ("collate", 41, 42)}


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


def test_it_ends_with_an_exception(tmp_path: Path) -> None:
    ours, path = loader(), tmp_path / "a.json"
    with pytest.raises(KeyError), ours.trace(path):
        raise KeyError(next(iter(ours)))
    list(ours)
    check(read(path))
    assert len(of(read(path), "X", "fetch")) == 1


def test_it_may_end_on_another_thread_and_each_that_iterates_has_a_row(tmp_path: Path) -> None:
    ours, path = loader(), tmp_path / "a.json"
    batches = iter(ours)
    context = ours.trace(path)
    context.__enter__()
    next(batches)

    def iterate() -> None:
        list(ours)
        context.__exit__(None, None, None)

    thread = threading.Thread(target=iterate)
    thread.start()
    thread.join()
    assert len(list(batches)) == 3
    check(read(path))
    names = [event["args"]["name"] for event in of(read(path), "M", "thread_name")]
    assert names[0] == "consumer"
    assert names[1].startswith("consumer (thread ")


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


def test_records_that_are_folded_when_it_has_ended_are_not_written(tmp_path: Path) -> None:
    recorder = Recorder(path := tmp_path / "a.json", Counters())
    recorder.end()
    other = os.open(tmp_path / "b", os.O_WRONLY | os.O_CREAT)  # has the descriptor now
    try:
        recorder.fold(call(END, time.monotonic_ns(), time.monotonic_ns() + 10**9, more=(0,)))
    finally:
        os.close(other)
    assert (tmp_path / "b").read_bytes() == b""
    assert len(read(path)) == 1


@pytest.mark.usefixtures("written_at_once")
def test_the_end_of_a_trace_that_failed_leaves_the_next_one_alone(tmp_path: Path) -> None:
    ours = loader()
    failed = ours.trace("/dev/full")
    failed.__enter__()
    list(ours)
    with ours.trace(tmp_path / "a.json"):
        with pytest.raises(OSError, match="No space left"):
            failed.__exit__(None, None, None)
        list(ours)
    assert len(of(read(tmp_path / "a.json"), "X", "fetch")) == 4


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


def test_a_loader_that_was_traced_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*arguments: Any) -> Recorder:
        made.add(recorder := Recorder(*arguments))
        return recorder

    made = weakref.WeakSet[Recorder]()
    monkeypatch.setattr(trace, "Recorder", make)
    with loader().trace(tmp_path / "a.json"):
        assert len(made) == 1
    gc.collect()
    assert not made
    assert len(json.loads((tmp_path / "a.json").read_text())) == 1


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


@pytest.mark.parametrize("fault", [errno.ENOLCK, errno.EOPNOTSUPP, None])
def test_locks_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int | None) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(fault, "no locks")

    if fault is None:
        monkeypatch.setattr(locks, "fcntl", None)
    else:
        monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with loader().trace(tmp_path / "a.json"), loader().trace("/dev/null"):  # which is no regular file
        pass
    assert len(read(tmp_path / "a.json")) == 1
