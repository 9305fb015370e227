"""Traces from their beginning to their end: one at a time, closed whatever happens, and what they leave."""

from __future__ import annotations

import errno
import gc
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fastq_loader import DataLoader
from fastq_loader.statistics import notes
from fastq_loader.statistics.counters import Counters
from fastq_loader.tracing import trace
from fastq_loader.tracing.trace import Trace
from tests.support.traces import check, of, opened, read


def loader() -> Any:
    return DataLoader(torch.arange(8), 2)


def test_a_trace_has_what_happens_in_it_and_nothing_of_before_and_after(tmp_path: Path) -> None:
    ours, path = loader(), tmp_path / "a.json"
    list(ours)
    with ours.trace(path):
        list(ours)
        list(ours)
    list(ours)
    events = read(path)
    check(events)
    marks = [mark["name"] for mark in of(events, "i")]
    assert marks == ["epoch 2 begins", "epoch 2 ends", "epoch 3 begins", "epoch 3 ends"]
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


def test_nothing_is_opened_at_the_call_and_a_trace_may_be_taken_twice(tmp_path: Path) -> None:
    ours, path = loader(), tmp_path / "a.json"
    traced = ours.trace(path)
    assert not path.exists()
    for batches in (4, 2):
        with traced:
            for _, _ in zip(range(batches), ours, strict=False):
                pass
        assert len(of(read(path), "X", "fetch")) == batches


def test_two_traces_of_one_loader_at_once_are_refused(tmp_path: Path) -> None:
    ours, traced = loader(), loader().trace(tmp_path / "c.json")
    with ours.trace(tmp_path / "a.json"):
        with pytest.raises(RuntimeError, match=r"is being traced already.*b\.json.*end that trace first"):
            ours.trace(tmp_path / "b.json").__enter__()
        list(ours)
    assert not (tmp_path / "b.json").exists()
    assert len(of(read(tmp_path / "a.json"), "X", "fetch")) == 4, "the first one goes on"
    with traced, pytest.raises(RuntimeError, match="is being traced already"):
        traced.__enter__()
    check(read(tmp_path / "c.json"))


def test_a_file_that_cannot_be_opened_is_an_error_before_anything_else(tmp_path: Path) -> None:
    ours = loader()
    with pytest.raises(FileNotFoundError, match="nowhere"), ours.trace(tmp_path / "nowhere" / "a.json"):
        raise AssertionError("it began")
    assert ours._resources.counters.observer is None
    with pytest.raises(TypeError, match=r"expected str, bytes or os\.PathLike object, not int"):
        ours.trace(3)


def test_two_loaders_that_write_to_one_file_are_refused(tmp_path: Path) -> None:
    other = loader().trace(tmp_path / "a.json")
    with loader().trace(tmp_path / "a.json"), pytest.raises(ValueError, match="another trace is being"):
        other.__enter__()


def test_it_ends_with_an_exception(tmp_path: Path) -> None:
    ours = loader()

    def train() -> None:
        with ours.trace(tmp_path / "a.json"):
            for _ in ours:
                raise KeyError

    with pytest.raises(KeyError):
        train()
    assert ours._resources.counters.observer is None
    check(read(tmp_path / "a.json"))


def test_it_may_end_on_another_thread(tmp_path: Path) -> None:
    ours = loader()
    batches = iter(ours)
    context = ours.trace(tmp_path / "a.json")
    context.__enter__()
    next(batches)
    thread = threading.Thread(target=context.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert len(list(batches)) == 3
    check(read(tmp_path / "a.json"))


def test_each_thread_that_iterates_has_a_track(tmp_path: Path) -> None:
    ours = loader()
    with ours.trace(tmp_path / "a.json"):
        list(ours)
        thread = threading.Thread(target=list, args=(ours,))
        thread.start()
        thread.join()
    check(read(tmp_path / "a.json"))
    names = [event["args"]["name"] for event in of(read(tmp_path / "a.json"), "M", "thread_name")]
    assert names[0] == "consumer"
    assert names[1].startswith("consumer (thread ")


class Full:
    """A disk that is full from the third write on."""

    def __init__(self) -> None:
        self.writes = 0

    def write(self, fd: int, data: bytes) -> int:
        self.writes += 1
        if self.writes > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)


@pytest.mark.parametrize("kind", [None, KeyError])
def test_a_full_disk_ends_the_trace_and_is_said_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception] | None
) -> None:
    for module in (notes, trace):
        monkeypatch.setattr(module, "_EVERY", 0)
    full, ours = Full(), loader()

    def train() -> None:
        with ours.trace(tmp_path / "a.json"):
            monkeypatch.setattr(trace.os, "write", full.write)
            assert len(list(ours)) == 4
            assert ours._resources.counters.observer is None
            if kind is not None:
                raise kind

    with pytest.raises(kind or OSError, match=None if kind else "No space left"):
        train()
    monkeypatch.undo()
    assert full.writes == 4, "a third one, and one for the end of the array"


def test_the_end_of_a_trace_leaves_a_later_one_alone(tmp_path: Path) -> None:
    counters = Counters()
    first, second = (Trace(tmp_path / name, counters) for name in "ab")
    first.__enter__()
    counters.observe(None)  # the disk was full
    with second:
        first.__exit__(None)
        assert counters.observer is not None


def test_it_is_written_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, path = loader(), tmp_path / "a.json"
    for module in (notes, trace):
        monkeypatch.setattr(module, "_EVERY", 0)
    with ours.trace(path):
        for seen, _ in enumerate(ours):
            assert len(of(opened(path.read_text()), "X", "fetch")) == seen + 1


def test_it_is_not_written_for_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters, path = Counters(), tmp_path / "a.json"
    with Trace(path, counters):
        epoch = counters.begin_epoch(trace.time.monotonic_ns(), 0).counted()
        first = None
        for _ in range(100):
            epoch.entered(epoch._left)
            epoch.left(epoch._left + 1000, seq=1)
            first = first or path.stat().st_size
        assert path.stat().st_size == first


@pytest.mark.processes
def test_a_forked_child_that_iterates_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (notes, trace):
        monkeypatch.setattr(module, "_EVERY", 0)
    ours, path = loader(), tmp_path / "a.json"
    with ours.trace(path):
        list(ours)
        if not (child := os.fork()):
            list(ours)
            os._exit(ours._resources.counters.observer is not None)
        assert os.waitpid(child, 0) == (child, 0), "it goes on, and is not observed"
    check(read(path))
    assert len(of(read(path), "X", "fetch")) == 4


def test_a_loader_that_was_traced_is_free(tmp_path: Path) -> None:
    counters = Counters()
    with Trace(tmp_path / "a.json", counters):
        pass
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is trace._Recorder]
    assert len(json.loads((tmp_path / "a.json").read_text())) == 1
