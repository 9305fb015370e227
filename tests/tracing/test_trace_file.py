"""The file of a trace: whole events, one writer, and nothing of a forked child's."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fastq_loader.tracing import trace
from fastq_loader.tracing.trace import TraceFile
from tests.conftest import run_script, running_script
from tests.support.traces import opened

EVENTS = ['{"n":1}', '{"n":2},\n{"n":3}']


def test_what_was_written_is_an_array_with_and_without_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    file = TraceFile(str(path))
    file.write([])
    assert path.read_text() == ""
    for _ in range(2):
        file.write(EVENTS)
        assert len(json.loads(path.read_text() + "]")) % 3 == 0, "each write has whole events"
    file.close()
    assert [event["n"] for event in json.loads(path.read_text())] == [1, 2, 3] * 2


def test_a_trace_without_events_and_an_older_file_that_is_longer(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("x" * 100)
    file = TraceFile(os.fsencode(path))
    file.write(EVENTS)
    file.close()
    assert len(json.loads(path.read_text())) == 3


def test_what_the_system_takes_in_parts_is_written_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(trace.os, "write", lambda fd, data: write(fd, data[:3]))
    file = TraceFile(str(tmp_path / "a.json"))
    file.write(EVENTS)
    file.close()
    assert len(json.loads((tmp_path / "a.json").read_text())) == 3


@pytest.mark.processes
def test_a_file_has_one_writer_also_of_other_processes(tmp_path: Path) -> None:
    path = str(tmp_path / "a.json")
    file = TraceFile(path)
    file.write(EVENTS)
    with pytest.raises(ValueError, match=r"path='.*a\.json': another trace is being written to this file"):
        TraceFile(path)
    result = run_script(f"from fastq_loader.tracing.trace import TraceFile; TraceFile({path!r})")
    assert "give every loader, and every rank, a file of its own" in result.stderr
    file.close()
    assert len(json.loads(Path(path).read_text())) == 3, "the others have not touched it"
    TraceFile(path).close()


@pytest.mark.processes
def test_a_forked_child_writes_nothing_and_does_not_keep_the_file_locked(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    file = TraceFile(str(path))
    file.write(EVENTS)
    if not (first := os.fork()):
        file.write(EVENTS)
        file.close()
        os._exit(0)
    assert os.waitpid(first, 0) == (first, 0)
    assert len(json.loads(path.read_text() + "]")) == 3
    with pytest.raises(ValueError, match="another trace"):
        TraceFile(str(path))
    if not (second := os.fork()):
        signal.pause()  # with the file open
    try:
        file.close()
        assert len(json.loads(path.read_text())) == 3
        TraceFile(str(path)).close()
    finally:
        os.kill(second, signal.SIGKILL)
        os.waitpid(second, 0)


@pytest.mark.parametrize("fault", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(trace.fcntl, "flock", refuse)
    TraceFile(str(tmp_path / "a.json")).close()
    assert json.loads((tmp_path / "a.json").read_text()) == []


def test_a_system_without_the_module_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "fcntl", None)
    TraceFile(str(tmp_path / "a.json")).close()
    assert json.loads((tmp_path / "a.json").read_text()) == []


def test_what_is_no_regular_file_is_not_truncated() -> None:
    file = TraceFile("/dev/null")
    file.write(EVENTS)
    file.close()


@pytest.mark.processes
def test_what_a_killed_writer_leaves_can_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    script = f"""
        import time
        from fastq_loader.tracing.trace import TraceFile
        file = TraceFile({str(path)!r})
        for at in range(100):
            file.write(['{{"n":%d}}' % at])
        print("written", flush=True)
        time.sleep(60)
    """
    with running_script(script) as running:
        running.wait_for("written")
        os.kill(running.pid, signal.SIGKILL)
        running.finish()
    assert [event["n"] for event in opened(path.read_text())] == list(range(100))
