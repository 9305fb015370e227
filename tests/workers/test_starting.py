"""Processes that start late, in the surroundings of an earlier moment."""

from __future__ import annotations

import multiprocessing
from multiprocessing import popen_forkserver, popen_spawn_posix

from fastq_loader.workers.starting import LateStart


def test_the_code_of_multiprocessing_is_as_it_is_known() -> None:
    """It reads the surroundings through these names, and nothing else."""
    for popen, names in (
        (popen_forkserver.Popen, {"spawn", "get_preparation_data"}),
        (popen_spawn_posix.Popen, {"spawn", "get_preparation_data", "util", "spawnv_passfds"}),
    ):
        assert names <= set(popen._launch.__code__.co_names)  # type: ignore[attr-defined]


def test_processes_with_a_way_of_their_own_start_by_that() -> None:
    assert LateStart.of(multiprocessing.get_context("fork").Process) is None
