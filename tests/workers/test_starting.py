"""Processes that start late, in the surroundings of an earlier moment."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import popen_forkserver, popen_spawn_posix, spawn, util
from pathlib import Path
from typing import Any

import pytest

from fastq_loader.workers.starting import LateStart


@pytest.mark.processes
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_is_started_by_multiprocessings_own_code_as_of_then(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose functions are nobody else's problem meanwhile."""
    kind: Any = multiprocessing.get_context(method).Process
    monkeypatch.chdir(tmp_path)
    late = LateStart.of(kind)
    assert late is not None
    (tmp_path / "after").mkdir()
    monkeypatch.chdir(tmp_path / "after")
    own = spawn.get_preparation_data, util.spawnv_passfds
    process = late.process(target=os.symlink, args=("nowhere", "here"), daemon=True)
    assert isinstance(process, kind)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert (tmp_path / "here").is_symlink()
    assert (spawn.get_preparation_data, util.spawnv_passfds) == own
    process.close()
    late.close()


def test_the_code_of_multiprocessing_is_as_it_is_known() -> None:
    """It reads the surroundings through these names, and nothing else."""
    for popen, names in (
        (popen_forkserver.Popen, {"spawn", "get_preparation_data"}),
        (popen_spawn_posix.Popen, {"spawn", "get_preparation_data", "util", "spawnv_passfds"}),
    ):
        assert names <= set(popen._launch.__code__.co_names)  # type: ignore[attr-defined]


def test_processes_with_a_way_of_their_own_start_by_that() -> None:
    assert LateStart.of(multiprocessing.get_context("fork").Process) is None
