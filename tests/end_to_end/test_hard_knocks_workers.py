"""What the world does to workers: surroundings that change, slow exits, forks, closed streams and sockets."""

from __future__ import annotations

import atexit
import multiprocessing.context
import os
import resource
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from fastq_loader import DataLoader, Processes, WorkerDied, WorkerReplaced
from fastq_loader.workers import stopping
from tests.conftest import of_kind, open_descriptors, process_table, run_script, wait_until
from tests.end_to_end.test_restarts import Doomed
from tests.support.crimes import CrimeAt
from tests.support.gates import LIMIT, Gates, is_inside, once
from tests.support.loaders import MANY_WORKERS
from tests.support.thorough import thorough

pytestmark = [pytest.mark.processes, MANY_WORKERS]

#: Seconds that user code in a worker takes to write a file in a script: more than SIGTERM would leave it,
#: less than torch gives it.
WRITING = 0.8
DONE = ["begun, done"] * 2
LARGE = 100_000  # float32: a block of its own
DYNAMIC = {"schedule": "dynamic", "workers": Processes(max_restarts=2)}


def write_slowly(path: Path, gates: Gates | None = None) -> None:
    with path.open("w") as file:
        file.write("begun")
        file.flush()
        if gates is None:
            time.sleep(WRITING)
        else:
            gates.wait_at("written")
        file.write(", done")


@pytest.fixture
def folders_of_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Gates]:
    """Where samples are written, and the gates that they wait at."""
    monkeypatch.setattr(stopping, "ORDERLY", LIMIT)
    (folder := tmp_path / "written").mkdir()
    (gates := tmp_path / "gates").mkdir()
    return folder, Gates(gates)


@dataclass(eq=False)
class Cleans(IterableDataset):
    """A stream whose workers have something to write at the end, by some `means`."""

    folder: Path
    gates: Gates
    means: str

    def __iter__(self) -> Iterator[int]:
        path = self.folder / str(os.getpid())
        if self.means == "finalizer":
            Finalize(None, write_slowly, (path, self.gates), exitpriority=1)
        if self.means == "exit handler":
            atexit.register(write_slowly, path, self.gates)
        try:
            yield from range(50)
        finally:
            if self.means == "finally":
                write_slowly(path, self.gates)


def contents(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.iterdir()]


@pytest.mark.parametrize(
    ("method", "means"),
    [
        ("fork", "finalizer"),
        ("fork", "finally"),
        ("spawn", "exit handler"),  # a process that multiprocessing forked has none
    ],
)
@thorough(after=2)
def test_8_what_workers_do_at_their_exit_is_done(
    method: str, means: str, folders_of_gates: tuple[Path, Gates]
) -> None:
    """`close()` waits for it, and the end of the epoch does not."""
    folder, gates = folders_of_gates
    loader = DataLoader(Cleans(folder, gates, means), num_workers=2, multiprocessing_context=method)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    del batches
    gates.expect("written", 2)
    with once(lambda: is_inside(DataLoader.close), lambda: gates.open("written")):
        loader.close()
    assert contents(folder) == DONE


@dataclass(eq=False)
class Caches(Dataset):
    """Every sample is written to a file, which takes a while for all but the first two."""

    folder: Path
    gates: Gates | None = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index > 1:
            write_slowly(self.folder / f"{index}-{time.monotonic_ns()}", self.gates)
        return index

    def wait_for(self, files: int) -> None:
        """Until so many samples are being written, or were."""
        assert wait_until(lambda: len(contents(self.folder)) >= files, LIMIT)


def surroundings() -> dict[str, Any]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "folder": os.getcwd(),
        "path": "/hard/knocks" in sys.path,
        "arguments": sys.argv[1:],
        "variable": os.environ.get("HARD_KNOCKS"),
        "umask": status["Umask"].strip(),
        "cpus": status["Cpus_allowed_list"].strip(),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


#: A child of the fork server has the server's; what is multiprocessing's comes along.
OF_THE_SERVER = ("variable", "umask", "cpus", "priority", "files")


class Surrounded(Doomed):
    """What the worker sees, and what a file says whose path is relative."""

    def __getitem__(self, index: int) -> Any:
        self.perhaps_die(index)
        info: Any = get_worker_info()
        seen = {"worker": [info.id, info.num_workers, self.value], "text": Path("data").read_text()}
        return {**seen, **surroundings()}


def get_ready(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.value += worker + 100


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Where the script begins, which is this process's folder, and where it goes on."""
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after, tmp_path / "deaths"):
        folder.mkdir()
    (before / "data").write_text("the right one")
    monkeypatch.chdir(before)
    umask, cpus, limit = os.umask(0o022), os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before, after
    os.umask(umask)
    os.sched_setaffinity(0, cpus)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def go_on(after: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script does to itself after its first batch."""
    (after / "data").write_text("the wrong one")
    monkeypatch.chdir(after)
    monkeypatch.setenv("HARD_KNOCKS", "changed")
    monkeypatch.syspath_prepend("/hard/knocks")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--changed"])
    os.umask(0o077)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


class OwnProcess(multiprocessing.context.SpawnProcess):
    def run(self) -> None:
        os.environ["HARD_KNOCKS"] = type(self).__name__
        super().run()


class OwnContext(multiprocessing.context.SpawnContext):
    Process = OwnProcess  # type: ignore[assignment]


OWN = OwnContext()


@pytest.mark.parametrize("context", ["fork", OWN, "forkserver"], ids=["fork", "spawn", "forkserver"])
@thorough(after=1)
def test_4_late_workers_and_successors_of_dead_ones_start_as_at_iter(
    context: Any, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = surroundings()
    options: dict[str, Any] = {"multiprocessing_context": context, "workers": Processes(max_restarts=1)}
    dataset = Surrounded(tmp_path / "deaths", 5)
    batches = iter(DataLoader(dataset, None, num_workers=2, worker_init_fn=get_ready, **options))
    found = [next(batches)]  # the first worker is up
    dataset.value = 1
    go_on(folders[1], monkeypatch)
    mine = surroundings()
    if context is OWN:
        expected.update(variable="OwnProcess", folder=str(folders[0].with_name("renamed")))
        folders[0].rename(expected["folder"])
    with pytest.warns(WorkerReplaced):
        found += batches
    assert surroundings() == mine, "the consumer is as it was"
    assert [sample.pop("worker") for sample in found] == [[0, 2, 100], [1, 2, 101]] * 12
    assert {sample.pop("text") for sample in found} == {"the right one"}
    if context is OWN:
        assert all(isinstance(process, OwnProcess) for process in batches._workers)
        del found[:6]  # they may have been loaded before the renaming
    for sample in found:
        for what in OF_THE_SERVER if context == "forkserver" else ():
            del sample[what]
        assert sample == {what: expected[what] for what in sample}


@dataclass(eq=False)
class ForksAt(Dataset):
    """A child is forked at sample 3 and comes back from user code, `how` says where and with what."""

    folder: Path
    how: str

    def __len__(self) -> int:
        return 16

    def start(self, worker: int) -> None:
        if worker == 0 and self.fork() == 0:
            time.sleep(0.02)

    def __getitem__(self, index: int) -> Any:
        if index == 3 and self.how in ("returns", "raises", "and the worker waits"):
            child = self.fork()
            if child == 0:
                time.sleep(0.02)
                if self.how == "raises":
                    raise ValueError("in the child")
                return torch.full((LARGE,), -1.0), -1  # into whose block?
            if self.how == "and the worker waits":
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            time.sleep(0.08)
        return torch.full((LARGE,), float(index)), index

    def fork(self) -> int:
        child = os.fork()
        (self.folder / str(child or os.getpid())).touch()
        return child


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("returns", {}),
        ("raises", DYNAMIC),
        ("in the init function", {}),
        ("in the init function", DYNAMIC),
        ("and the worker waits", {}),
    ],
    ids=str,
)
@thorough(after=2)
def test_7_a_child_that_comes_back_from_user_code_is_gone(
    how: str, options: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = ForksAt(tmp_path, how)
    if how == "in the init function":
        options = {**options, "worker_init_fn": dataset.start}
    with DataLoader(dataset, None, **{"num_workers": 2, "persistent_workers": True, **options}) as loader:
        for _ in range(2):
            found = [(large.min().item(), large.max().item(), number) for large, number in loader]
            assert found == [(number, number, number) for number in range(16)]
        # With dynamic the other worker may have loaded everything before this one is up.
        assert wait_until(lambda: os.listdir(tmp_path) != [], LIMIT)
        pids = {int(name) for name in os.listdir(tmp_path)}
        assert wait_until(
            lambda: not pids & {entry.pid for entry in process_table() if not entry.zombie}, LIMIT
        )
        statistics = loader.statistics()
        assert (statistics.rejected_frames, statistics.worker_restarts) == (0, 0)
    assert capfd.readouterr().err == ""


SILENT = """
    import os, pathlib, sys, traceback, warnings
    {change}
    from fastq_loader import DataLoader, Processes
    from tests.end_to_end.test_hard_knocks_workers import Noisy

    out = pathlib.Path({out!r})
    try:
        warnings.simplefilter("ignore", DeprecationWarning)
        dataset = Noisy(pathlib.Path({folder!r}), 7 if {restarts} else -1)
        loader = DataLoader(
            dataset, None, num_workers=2, multiprocessing_context={method!r}, workers=Processes({restarts}),
            persistent_workers={method!r} != "fork",  # others take seconds to start
        )
        for _ in range(2):
            found = [(batch.min().item(), batch.max().item()) for batch in loader]
            assert found == [(number, number) for number in range(24)], found
        loader.close()
        out.write_text("good")
    except BaseException:
        out.write_text(traceback.format_exc())
"""


class Noisy(Doomed):
    """Prints, as far as there is anything to print to, and so does some C library."""

    def __getitem__(self, index: int) -> Any:
        if sys.stdout is not None and not sys.stdout.closed:
            print("sample", index)
        for descriptor in (1, 2):
            with suppress(OSError):
                os.write(descriptor, b"noise" * 20_000)
        self.perhaps_die(index)
        return torch.full((LARGE,), float(index))


NONE = "sys.stdin = sys.stdout = sys.stderr = None"
CHANGES = {
    "free descriptors": f"os.closerange(0, 3); {NONE}",  # as in a program that was started without streams
    "None": NONE,
    "closed": "sys.stdout.close(); sys.stderr.close()",
}


@pytest.mark.parametrize(
    ("change", "method", "restarts"),
    [
        ("free descriptors", "fork", 2),
        ("closed", "fork", 2),
        ("None", "spawn", 0),
        ("free descriptors", "spawn", 2),
        ("free descriptors", "forkserver", 2),
    ],
)
@thorough(after=1)
def test_10_streams_may_be_missing(change: str, method: str, restarts: int, tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "deaths"
    folder.mkdir()
    source = SILENT.format(
        change=CHANGES[change], folder=str(folder), method=method, restarts=restarts, out=str(out)
    )
    result = run_script(source, warm=True)
    assert out.read_text() == "good"
    assert (result.returncode, result.left) == (0, ())
    assert "Traceback" not in result.stderr


def break_off(index: int) -> int:
    """End the connection of the answers, once: as a program does that closes a descriptor twice."""
    with suppress(FileExistsError):
        Path(os.environ["TMPDIR"], "broken").touch(exist_ok=False)
        for name, target in open_descriptors().items():
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(name)) as end:
                    if end.type == socket.SOCK_SEQPACKET:
                        end.shutdown(socket.SHUT_RDWR)
    return index


@thorough(but={"schedule": "dynamic"})
@pytest.mark.parametrize("schedule", ["round_robin", "dynamic"])
@pytest.mark.parametrize("restarts", [0, 1])
def test_p2_a_worker_whose_connection_breaks_is_dead(
    schedule: str, restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    loader: Any = DataLoader(
        CrimeAt(break_off, at=5),
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
