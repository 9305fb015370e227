"""A trace: viewers show whatever happens, it adds up, and its file can be opened whatever becomes of it."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader import DataLoader
from fastq_loader.ipc.messages import BATCH, BROKEN, ENDED, ERROR, PASSED, SKIPPED, Answer
from fastq_loader.statistics import notes
from fastq_loader.statistics.counters import Counters
from fastq_loader.tracing import trace
from fastq_loader.tracing.trace import Recorder
from tests.conftest import run_script
from tests.support.traces import Event, batches, check, interval, of, opened, read, tracks

PID = os.getpid()


class Played:
    """A trace that is told of what happens by hand, at times that count from its origin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recorder = Recorder(path, Counters())
        self.recorder.thread = lambda: PID
        self.recorder.origin = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorder, name)

    def events(self) -> list[Event]:
        self.recorder.end()
        found = read(self.path)
        check(found)
        return found


@pytest.fixture
def played(tmp_path: Path) -> Played:
    return Played(tmp_path / "played.json")


def answer(seq: int, started: int, fetched: int, collated: int, finished: int, **others: Any) -> Answer:
    head = Answer(1, seq, 0, BATCH, started, finished, (), (), None)
    return head._replace(**{"fetched": fetched, "collated": collated} | others)


def spans(found: list[Event], track: str) -> list[tuple[str, int, int]]:
    return [(span["name"], *interval(span)) for span in tracks(found)[track]]


def one_batch(played: Played, **others: Any) -> list[Event]:
    played.began(1, 10)
    played.drew(1, 20, 30)
    played.sent(1, 0, 35)
    played.left(1, None, 40)
    played.entered(1, 60)
    played.waited(1, "head_of_line", 65, 190)
    played.answered(1, 1, 101, answer(0, 70, 110, 150, 180)._replace(**others))
    played.used_device(1, 192, 195)
    played.left(1, 0, 200)
    played.entered(1, 300)
    played.left(1, None, 310)
    played.ended(1, 310)
    played.closed(310, 350)
    return played.events()


def test_each_row_shows_its_part_of_a_batch(played: Played) -> None:
    found = one_batch(played)
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
    assert batches(found) == {(1, 0): (35, 200)}
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
def test_times_leave_no_gap(played: Played, others: dict[str, Any], phases: tuple[int, int, int]) -> None:
    fetched, collated, finished = phases
    loading = [("fetch", 70, fetched), ("collate", fetched, collated), ("pack", collated, finished)]
    assert sorted(spans(one_batch(played, **others), "worker 1 (pid 101)")) == sorted(loading)


def test_workers_on_other_machines_have_rows_of_their_own(played: Played) -> None:
    places = {101: (812, "10.0.0.2"), 102: (812, '"b"'), 104: (0, "")}
    played.recorder._counters.far_worker = places.get  # type: ignore[assignment]
    for worker, pid in ((1, 101), (2, 102), (3, 103), (3, 812)):
        played.answered(1, worker, pid, answer(worker, *range(10, 14)))
    played.replaced(1, 4, 104, "it died", 90)  # and the next one is not up yet
    found = played.events()
    names = ["1 (pid 812 on 10.0.0.2)", '2 (pid 812 on "b")', "3 (pid 103)", "3 (pid 812)"]
    assert set(tracks(found)) == {f"worker {name}" for name in names}
    assert "worker 4 (not up yet)" in [event["args"]["name"] for event in of(found, "M", "thread_name")]


def test_what_began_before_the_trace_is_left_out(played: Played) -> None:
    played.recorder.origin = 100
    played.waited(1, "workers", 99, 110)
    played.drew(1, 120, 130)
    played.copied(64, 99, 110)
    played.answered(1, 0, 101, answer(0, 90, 95, 110, 120))
    played.left(1, 0, 140)
    found = played.events()
    assert {track: spans(found, track) for track in tracks(found)} == {
        "consumer": [("sampler", 20, 30)],
        "worker 0 (pid 101)": [("pack", 10, 20)],
    }
    assert not of(found, "b")


@pytest.mark.parametrize("kind", [ENDED, SKIPPED, PASSED])
def test_an_answer_without_a_batch_is_one_span(played: Played, kind: int) -> None:
    played.sent(1, 0, 10)
    played.answered(1, 0, 101, answer(0, 20, 20, 30, 40, kind=kind))
    played.left(1, 0, 50)
    found = played.events()
    assert len(spans(found, "worker 0 (pid 101)")) == 1
    assert not batches(found)


def test_a_batch_lasts_from_its_first_task_and_a_new_worker_is_a_mark(played: Played) -> None:
    played.sent(1, 0, 10)
    played.replaced(1, 0, 102, "killed by SIGKILL: \ud800", 50)
    played.sent(1, 0, 60)
    played.entered(1, 70)
    played.answered(1, 0, 102, answer(0, 80, 85, 90, 95, attempt=1))
    played.left(1, 0, 100)
    found = played.events()
    assert batches(found) == {(1, 0): (10, 100)}
    (mark,) = of(found, "i")
    assert mark["name"] == "worker 0 was replaced"
    assert mark["args"] == {"about": "killed by SIGKILL: \ud800"}


def test_the_step_of_the_last_batch_ends_with_the_next_epoch(played: Played) -> None:
    played.entered(1, 10)
    played.left(1, 0, 20)
    played.began(2, 30)
    played.left(2, None, 40)
    played.entered(2, 50)
    assert spans(played.events(), "consumer") == [("next", 10, 20), ("step", 20, 30), ("iter", 30, 40)]


def test_batches_that_are_ready_are_counted_at_each_that_is_handed_out(played: Played) -> None:
    for seq in range(3):
        played.sent(1, seq, 10 + seq)
    played.entered(1, 20)
    for seq in (0, 2):
        played.answered(1, 0, 101, answer(seq, *range(20 + 5 * seq, 24 + 5 * seq)))
    played.left(1, 0, 40)
    played.dropped(1, 50)
    ready = [(event["ts"], event["args"]["batches"]) for event in of(played.events(), "C")]
    assert ready == [(0.040, 1), (0.050, 0)]


def test_what_failed_before_it_was_fetched_has_no_times_of_an_earlier_batch(played: Played) -> None:
    played.entered(1, 40)
    played.loaded(1, 1, 41, 20, 42)
    played.left(1, None, 50)
    assert set(spans(played.events(), "consumer")[1:]) == {("fetch", 41, 41), ("collate", 41, 42)}


@given(draw=st.randoms(use_true_random=False))
def test_spans_nest_whatever_happens(draw: random.Random, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Epochs on two threads at once, each with two workers, whose answers are taken in any order."""
    played: Any = MagicMock()  # the trace begins later
    now, begins = 100, draw.choice((1, 5))

    def tick() -> int:
        nonlocal now
        now += draw.choice((1, 2, 10, 100))
        return now

    def answered(epoch: int, free: list[int], seq: int, sent: int) -> int:
        nonlocal now
        worker, kind = draw.randrange(2), draw.choice((BATCH, BATCH, ERROR, ENDED))
        times = [max(sent, free[worker]) + draw.choice((0, 1, 50))]
        for _ in range(3):
            times.append(times[-1] + draw.choice((0, 1, 50)))
        free[worker] = times[-1]
        now = max(now, times[-1])
        played.answered(epoch, worker, 100 * epoch + worker, answer(seq, *times, kind=kind))
        return kind

    def call(epoch: int, free: list[int], loading: dict[int, int], ready: list[int]) -> None:
        played.entered(epoch, tick(), draw.choice((PID, PID, 51)))
        for _ in range(draw.randrange(3)):
            played.waited(epoch, draw.choice(("workers", "memory")), tick(), tick())
            if loading:
                seq = draw.choice(sorted(loading))
                if answered(epoch, free, seq, loading.pop(seq)) != ENDED:
                    ready.append(seq)
            played.drew(epoch, tick(), tick())
            played.sent(epoch, now, tick())
            loading[now] = now
        if not ready:
            played.raised(epoch, None, KeyError("the sampler's"), tick())
        played.left(epoch, ready.pop(draw.randrange(len(ready))) if ready else None, tick())

    live: dict[int, Any] = {}
    for epoch in range(1, 30):
        if epoch == begins:
            played = Played(tmp_path_factory.mktemp("trace") / "a.json")
            played.recorder.origin = tick()
        if len(live) < draw.randrange(1, 4):
            played.began(epoch, tick())
            played.left(epoch, None, tick())
            live[epoch] = [now] * 2, {}, []
        if live:
            call(which := draw.choice(sorted(live)), *live[which])
            if draw.random() < 0.1:
                draw.choice((played.ended, played.dropped))(which, tick())
                del live[which]
    played.events()


def loader() -> Any:
    return DataLoader(torch.arange(8), 2)


@pytest.fixture
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (notes, trace):
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


@pytest.mark.processes
@pytest.mark.usefixtures("written_at_once")
def test_a_forked_child_writes_nothing_and_does_not_keep_the_file_locked(tmp_path: Path) -> None:
    ours, path = loader(), tmp_path / "a.json"
    with ours.trace(path):
        list(ours)
        if not (child := os.fork()):
            list(ours)
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        if not (second := os.fork()):
            signal.pause()  # with the file open
    try:
        check(read(path))
        assert len(of(read(path), "X", "fetch")) == 4
        with ours.trace(path):
            pass
    finally:
        os.kill(second, signal.SIGKILL)
        os.waitpid(second, 0)


def test_a_loader_that_was_traced_is_free(tmp_path: Path) -> None:
    with loader().trace(tmp_path / "a.json"):
        pass
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is Recorder]
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
        result = run_script(
            f"import fastq_loader; fastq_loader.DataLoader([1]).trace({str(path)!r}).__enter__()"
        )
        assert "give every loader, and every rank, a file of its own" in result.stderr
    assert len(read(path)) == 1, "the others have not touched it"


@pytest.mark.parametrize("fault", [errno.ENOLCK, errno.EOPNOTSUPP, None])
def test_locks_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int | None) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(fault, "no locks")

    if fault is None:
        monkeypatch.setattr(trace, "fcntl", None)
    else:
        monkeypatch.setattr(trace.fcntl, "flock", refuse)
    with loader().trace(tmp_path / "a.json"), loader().trace("/dev/null"):  # which is no regular file
        pass
    assert len(read(tmp_path / "a.json")) == 1
