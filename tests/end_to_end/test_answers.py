"""Answers on their way: one that is finished leaves at once, whatever its size, and outlives its worker."""

from __future__ import annotations

import gc
import os
import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from fastq_loader import DataLoader, Processes
from fastq_loader.errors import WorkerDied, WorkerReplaced
from fastq_loader.workers import main, stopping
from tests.conftest import running_script, wait_until
from tests.support.crimes import kill_itself
from tests.support.datasets import Sized, identity
from tests.support.thorough import is_thorough, thorough

pytestmark = pytest.mark.processes

SIZE, BATCHES, LAST = 64, 6, 3
TEXT = "x" * 60_000
LIMIT_S = 60


@dataclass(eq=False)
class Texts(Sized, Dataset):
    """Batches of 4 MB of text. Batch LAST waits for the file `go`; if it is `deadly`, it kills one worker."""

    folder: Path
    deadly: bool = False
    length: int = SIZE * BATCHES

    def __getitem__(self, index: int) -> str:
        if index == SIZE * LAST:
            (self.folder / "came").touch()
            assert wait_until((self.folder / "go").exists, LIMIT_S)
            if self.deadly and not (self.folder / "died").exists():
                (self.folder / "died").touch()
                kill_itself(0)
        return f"{index} {TEXT}"


def number(batch: list[str]) -> int:
    """The number of a batch that is whole."""
    first = int(batch[0].split()[0])
    assert batch == [f"{index} {TEXT}" for index in range(first, first + SIZE)]
    return first // SIZE


@pytest.mark.parametrize("kind", [TorchDataLoader, DataLoader])
def test_what_is_finished_comes_while_its_worker_loads_the_next(kind: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": LAST + 1, "timeout": LIMIT_S}
    loader = kind(Texts(tmp_path), batch_size=SIZE, collate_fn=identity, **options)
    batches = iter(loader)
    assert wait_until((tmp_path / "came").exists, LIMIT_S)
    assert [number(next(batches)) for _ in range(LAST)] == list(range(LAST))
    (tmp_path / "go").touch()
    assert [number(batch) for batch in batches] == list(range(LAST, BATCHES))


@thorough(but={"method": "fork", "schedule": "dynamic", "in_order": True})
@pytest.mark.usefixtures("warm_interpreter" if is_thorough else "tmp_path")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("schedule", ["round_robin", "dynamic"])
@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_death_costs_the_batch_that_was_being_loaded(
    method: str, schedule: str, restarts: int, in_order: bool, tmp_path: Path
) -> None:
    """The consumer reads nothing until the worker has come to the deadly batch."""
    options: dict[str, Any] = {
        "num_workers": 1,
        "prefetch_factor": LAST + 1,
        "multiprocessing_context": method,
    }
    options |= {"schedule": schedule, "in_order": in_order, "workers": Processes(max_restarts=restarts)}
    dataset = Texts(tmp_path, deadly=True)
    found: list[int] = []
    with (
        warnings.catch_warnings(),
        DataLoader(dataset, batch_size=SIZE, collate_fn=identity, **options) as loader,
    ):
        warnings.simplefilter("ignore", WorkerReplaced)
        batches = iter(loader)
        assert wait_until((tmp_path / "came").exists, LIMIT_S)
        (tmp_path / "go").touch()
        assert wait_until((tmp_path / "died").exists, LIMIT_S)
        if restarts:
            found += map(number, batches)
        else:
            text = rf"SIGKILL.* batch {LAST} \(indices {SIZE * LAST}\.\."
            with pytest.raises(WorkerDied, match=text):
                found += map(number, batches)
    assert found == list(range(BATCHES if restarts else LAST))


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """All but some are in use, when earlier loaders have given theirs back."""
    gc.collect()
    stopping.wait()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    opened: list[int] = []
    try:
        while len(opened) < 256:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    try:
        for _ in range(left):
            os.close(opened.pop())
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@thorough(after=1)
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("left", [0, 1, 3])
def test_files_that_are_opened_after_iter_leave_the_connections(
    method: str, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to a worker that connects later, as all do under spawn."""

    def open_late(setup: Any, blocks: Any) -> Any:
        assert setup.worker == 0 or wait_until((tmp_path / "go").exists, LIMIT_S)
        return opens(setup, blocks)

    opens = main.open_socket
    monkeypatch.setattr(main, "open_socket", open_late)
    loader = DataLoader(range(8), num_workers=2, multiprocessing_context=method, timeout=LIMIT_S)
    batches = iter(loader)
    with few_descriptors(left):
        (tmp_path / "go").mkdir()  # which takes no descriptor
        assert [batch.item() for batch in batches] == list(range(8))


@thorough(after=1)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_that_lack_descriptors_to_start_are_an_error_that_names_the_limit(method: Any) -> None:
    """And the next epoch has them."""
    with DataLoader(range(9), num_workers=2, multiprocessing_context=method) as loader:
        for _ in range(2):
            assert len(list(loader)) == 9
            with few_descriptors(0), pytest.raises(OSError, match=r"needs \d+ descriptors .* `ulimit -n`"):
                iter(loader)


#: Four forked workers. A child of the user's is forked between the starts of two, and one of a worker: both
#: hold copies of connections for as long as the test likes.
FORKS = """
    import os, signal, sys, time, warnings
    from fastq_loader import DataLoader
    from fastq_loader.workers.local_pool import LocalPool
    from tests.support.datasets import Made

    def fork():
        if os.fork() == 0:
            time.sleep(1000)

    def start_and_fork(pool, child):
        starts(pool, child)
        begun.append(child)
        if len(begun) == 2:
            fork()

    def sample(index):
        if index == 1:
            fork()
        return index, os.getpid()

    warnings.simplefilter("ignore")
    begun, starts, LocalPool._start = [], LocalPool._start, start_and_fork
    loader = DataLoader(
        Made(sample, 4000), None, num_workers=4, multiprocessing_context="fork", persistent_workers=True
    )
    batches = iter(loader)
    pids = [next(batches)[1] for _ in range(4)]
    if "kill" in {how!r}:
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        try:
            list(batches)
        except RuntimeError as error:
            assert "SIGKILL" in str(error) and time.monotonic() - killed < 30, error
        else:
            sys.exit("no death")
    if "close" in {how!r}:
        began = time.monotonic()
        loader.close()
        assert time.monotonic() - began < 30
        assert not any(os.path.exists(f"/proc/{{pid}}") for pid in pids)
    print("ready", *pids, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["kill", "close", ""])
@thorough(after=2)
def test_p3_nobody_relies_on_the_end_of_a_connection_that_others_hold(how: str) -> None:
    with running_script(FORKS.format(how=how), warm=True) as script:
        script.wait_for("ready")
        os.kill(script.pid, signal.SIGKILL)
        # The two children of user code are the user's.
        assert wait_until(lambda: len(script.processes()) <= 2, 30), script.processes()
        for process in script.processes():
            os.kill(process.pid, signal.SIGKILL)
