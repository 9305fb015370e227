"""What the world does to workers: surroundings that change, exits that take a while, forks, closed streams.

Each test is a defect that was found once, or the guard against it. Where torch's loader holds, it runs beside
ours.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from fastq_loader import DataLoader, empty
from tests.conftest import descendants, run_script, running_script, wait_until
from tests.crimes import CrimeAt, dawdle, ignore_sigterm_and_hang

LOADERS = pytest.mark.parametrize("loader_class", [TorchDataLoader, DataLoader], ids=["torch", "ours"])

#: Seconds that user code in a worker takes to write a file: more than it had before it was cut off, less than
#: torch gives it.
WRITING = 1.2


# ---- workers get to finish ----------------------------------------------------------------------------


def write_slowly(path: Path) -> None:
    with path.open("w") as file:
        file.write("begun")
        file.flush()
        time.sleep(WRITING)
        file.write(", done")


def at_finalize(folder: Path) -> None:
    Finalize(None, write_slowly, (folder / str(os.getpid()),), exitpriority=1)


def at_exit(folder: Path) -> None:
    atexit.register(write_slowly, folder / str(os.getpid()))


def nothing(folder: Path) -> None:
    pass


class Cleans(IterableDataset):
    """A stream whose workers have something to write at the end."""

    def __init__(self, folder: Path, prepare: Callable[[Path], None], in_finally: bool) -> None:
        self.folder = folder
        self.prepare = prepare
        self.in_finally = in_finally

    def __iter__(self) -> Iterator[int]:
        self.prepare(self.folder)
        try:
            yield from range(50)
        finally:
            if self.in_finally:
                write_slowly(self.folder / str(os.getpid()))


def contents(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.iterdir()]


@pytest.mark.processes
@LOADERS
@pytest.mark.parametrize(
    ("method", "prepare", "in_finally"),
    [
        ("fork", at_finalize, False),
        ("fork", nothing, True),
        ("spawn", at_exit, False),  # a process that multiprocessing forked has no exit handlers
        ("spawn", nothing, True),
    ],
)
def test_8_what_workers_do_at_their_exit_is_done(
    loader_class: Any, method: str, prepare: Callable[[Path], None], in_finally: bool, tmp_path: Path
) -> None:
    dataset = Cleans(tmp_path, prepare, in_finally)
    loader = loader_class(dataset, num_workers=2, multiprocessing_context=method)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    began = time.monotonic()
    del batches
    if loader_class is DataLoader:
        assert time.monotonic() - began < WRITING / 2, "the turn of the epoch waited"
        loader.close()
    assert contents(tmp_path) == ["begun, done"] * 2


class Caches(Dataset):
    """Every sample is written to a file, which takes a while for all but the first two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index > 1:
            write_slowly(self.folder / f"{index}-{time.monotonic_ns()}")
        return index


@pytest.mark.processes
@LOADERS
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=str)
def test_8_a_sample_that_is_being_loaded_is_finished_when_the_loop_breaks_off(
    loader_class: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    loader = loader_class(Caches(tmp_path), num_workers=2, **options)
    for batch in loader:
        if batch == 1:
            break
    assert wait_until(lambda: len(contents(tmp_path)) == 2, 5)
    if loader_class is DataLoader:
        loader.close()
    else:
        del loader
    del batch
    assert contents(tmp_path) == ["begun, done"] * 2


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "dynamic"}, {"schedule": "dynamic", "max_worker_restarts": 2}],
    ids=str,
)
def test_8_nobody_waits_for_workers_that_finish(options: dict[str, Any], tmp_path: Path) -> None:
    """Neither the break, nor the next epoch, whose workers are others."""
    loader = DataLoader(Caches(tmp_path), num_workers=2, **options)
    for files in (2, 4):
        began = time.monotonic()
        batches = iter(loader)
        assert next(batches) == 0
        assert next(batches) == 1
        assert wait_until(lambda files=files: len(contents(tmp_path)) == files, 5)  # type: ignore[misc]
        del batches
        assert time.monotonic() - began < WRITING * 0.8
    began = time.monotonic()
    loader.close()
    assert 0.2 < time.monotonic() - began < WRITING + 1
    assert len(contents(tmp_path)) == 4
    assert set(contents(tmp_path)) == {"begun, done"}


@pytest.mark.processes
@pytest.mark.parametrize("how", ["drop", "exhausted", "iterator"])
def test_8_they_are_gone_when_they_have_finished_though_nobody_asks(how: str, tmp_path: Path) -> None:
    dataset = Cleans(tmp_path, at_finalize, False)
    loader = DataLoader(dataset, num_workers=2, persistent_workers=how == "drop")
    batches = iter(loader)
    assert [next(batches).item() for _ in range(2)] == [0, 0]  # of either
    if how == "exhausted":
        assert len(list(batches)) == 98
    elif how == "iterator":
        del batches
    else:
        del batches, loader
    assert len(descendants()) == 2
    assert wait_until(lambda: not descendants(), WRITING + 2), "nobody reaped them"
    assert contents(tmp_path) == ["begun, done"] * 2


class FromSharedMemory(Dataset):
    """Samples that lie in the shared memory; all but the first two are written to a file a while later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = empty((100_000,), torch.float32).fill_(index)
        if index > 2:
            time.sleep(WRITING)
            (self.folder / str(index)).write_text(str(sample.unique().tolist()))
        return sample


@pytest.mark.processes
def test_8_what_they_write_to_stays_theirs_and_what_users_look_at_theirs(tmp_path: Path) -> None:
    loader = DataLoader(FromSharedMemory(tmp_path), batch_size=None, num_workers=1)
    batches = iter(loader)
    kept = [next(batches) for _ in range(3)]
    time.sleep(0.2)
    del batches
    dropped = kept.pop(1)
    del dropped
    loader.close()
    assert contents(tmp_path) == ["[3.0]"]
    assert [batch.unique().tolist() for batch in kept] == [[0.0], [2.0]]


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("close", ["", "loader.close()"], ids=["exit", "close"])
def test_8_the_exit_of_the_process_waits_for_them(close: str, persistent: bool, tmp_path: Path) -> None:
    result = run_script(
        f"""
        from pathlib import Path
        from fastq_loader import DataLoader
        from tests.test_hard_knocks_workers import Caches

        loader = DataLoader(Caches(Path({str(tmp_path)!r})), num_workers=2, persistent_workers={persistent})
        batches = iter(loader)
        next(batches), next(batches)
        {"del batches" if not persistent else ""}
        {close}
        """
    )
    assert (result.stderr, result.returncode, result.left) == ("", 0, ())
    assert contents(tmp_path) == ["begun, done"] * 2


@pytest.mark.processes
@pytest.mark.parametrize("crime", [dawdle, ignore_sigterm_and_hang])
def test_8_those_that_hang_are_ended_though_nobody_asks(crime: Callable[[int], None]) -> None:
    batches = iter(DataLoader(CrimeAt(crime, at=2), num_workers=2))
    assert [next(batches).item() for _ in range(2)] == [0, 1]
    time.sleep(0.3)
    began = time.monotonic()
    del batches
    assert time.monotonic() - began < 1
    assert wait_until(lambda: not descendants(), 8)
    assert time.monotonic() - began > 4, "torch gives them 5 s"


@pytest.mark.processes
def test_8_ctrl_c_ends_the_wait_and_the_workers() -> None:
    loader = DataLoader(CrimeAt(dawdle, at=2), num_workers=2, persistent_workers=True)
    batches = iter(loader)
    assert [next(batches).item() for _ in range(2)] == [0, 1]
    timer = threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    assert 0.5 < time.monotonic() - began < 2
    timer.join()
    assert wait_until(lambda: not descendants(), 2)
    loader.close()
    assert [batch.item() for batch in DataLoader(range(3), num_workers=2)] == [0, 1, 2]


@pytest.mark.processes
def test_8_ctrl_c_ends_the_wait_at_the_exit() -> None:
    source = """
        from fastq_loader import DataLoader
        from tests.crimes import CrimeAt, dawdle

        loader = DataLoader(CrimeAt(dawdle, at=2), num_workers=2)
        batches = iter(loader)
        next(batches), next(batches)
        print("end", flush=True)
    """
    with running_script(source) as script:
        script.wait_for("end")
        time.sleep(1)
        began = time.monotonic()
        os.killpg(script.pid, signal.SIGINT)
        result = script.finish()
    assert result.finished - began < 2
    assert result.left == ()
