"""Connections that break, answers that find no memory, and threads that are used up."""

from __future__ import annotations

import os
import socket
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fastq_loader import DataLoader, Processes, WorkerDied
from fastq_loader.errors import WorkerReplaced
from tests.conftest import of_kind, open_descriptors, run_script
from tests.support.crimes import CrimeAt

pytestmark = pytest.mark.processes


def scribble(index: int) -> int:
    """Write to the connection of zmq, once: as a program does that closes a descriptor twice."""
    with suppress(FileExistsError):
        Path(os.environ["TMPDIR"], "scribbled").touch(exist_ok=False)
        for name, target in open_descriptors().items():
            if target.startswith("socket:"):
                with suppress(OSError), socket.socket(fileno=os.dup(name)) as end:
                    if end.getsockname():
                        end.send(b"\xff" * 99)
    return index


@pytest.mark.parametrize("schedule", ["round_robin", "dynamic"])
@pytest.mark.parametrize("restarts", [0, 1])
def test_p2_a_worker_whose_connection_breaks_is_dead(
    schedule: str, restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    loader: Any = DataLoader(
        CrimeAt(scribble, at=5),
        batch_size=None,
        num_workers=2,
        schedule=schedule,
        workers=Processes(max_restarts=restarts),
        multiprocessing_context="fork",
    )
    seen: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if restarts:
            seen.extend(loader)
            assert seen == list(range(12))
            (text,) = [str(warning.message) for warning in of_kind(caught, WorkerReplaced)]
        else:
            with pytest.raises(WorkerDied) as died:
                seen.extend(loader)
            assert seen == list(range(5))
            text = str(died.value)
    assert "was ended, because its connection to this process broke" in text


@pytest.mark.parametrize("kind", ["torch.utils.data.DataLoader", "OURS"])
def test_an_answer_that_finds_no_memory_is_an_error(kind: str) -> None:
    script = f"""
        from tests.support.tight import *

        class Texts(Numbered):
            def __getitem__(self, index):
                return bytes(200 << 20) if index == 2 else index

        batches = iter({kind}(Texts(9, 0), batch_size=None, num_workers=1))
        print(next(batches), next(batches))
        limited(150)
        try:
            print(len(next(batches)))
        except (MemoryError, RuntimeError) as error:
            print(type(error).__name__)
        """
    result = run_script(script, warm=True)
    assert result.returncode == 0, result.stderr
    numbers, error = result.stdout.splitlines()
    assert numbers == "0 1"
    assert error in ("MemoryError", "WorkerDied")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be a user that runs nothing else")
def test_p8_too_few_threads_are_an_error_and_the_process_lives() -> None:
    """zmq would end it by SIGABRT."""
    script = """
        from tests.support.tight import *
        import ctypes

        torch.set_num_threads(1)
        os.setuid(62_137)  # root is not bound by the limit
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self is its own again
        used, most = len(os.listdir("/proc/self/task")), resource.getrlimit(resource.RLIMIT_NPROC)[1]
        for extra in (0, 1, 2, 3, 4, 6, 8, 9, 10):
            resource.setrlimit(resource.RLIMIT_NPROC, (used + extra, most))
            try:
                print(list(OURS(range(3), batch_size=None, num_workers=2)))
            except OSError as error:
                assert "the loader needs 10 threads" in str(error) and "`ulimit -u`" in str(error), error
                assert len(os.listdir("/proc/self/task")) == used
                print("refused")
        """
    result = run_script(script, env={"TMPDIR": "/tmp"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["refused"] * 8 + ["[0, 1, 2]"]
