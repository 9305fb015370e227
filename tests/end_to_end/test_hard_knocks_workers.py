"""What the world does to workers: surroundings that change, exits that take a while, forks, closed streams.

Each test is a defect that was found once, or the guard against it. Where torch's loader holds, it runs beside
ours.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.context
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from fastq_loader import DataLoader, Processes, WorkerReplaced, empty
from fastq_loader.ipc.sockets import WorkerSocket
from fastq_loader.memory import allocator
from fastq_loader.memory.allocator import AddressSpace
from fastq_loader.memory.ledger import SMALLEST
from fastq_loader.workers import stopping
from tests.conftest import descendants, run_script, running_script, wait_until
from tests.support.crimes import CrimeAt, dawdle, ignore_sigterm_and_hang
from tests.support.pair import paired

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
    [{}, {"schedule": "dynamic"}, {"schedule": "dynamic", "workers": Processes(max_restarts=2)}],
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
        import time
        from pathlib import Path
        from fastq_loader import DataLoader
        from tests.end_to_end.test_hard_knocks_workers import Caches

        loader = DataLoader(Caches(Path({str(tmp_path)!r})), num_workers=2, persistent_workers={persistent})
        batches = iter(loader)
        next(batches), next(batches)
        time.sleep(0.3)  # both are at their next sample
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
def test_8_where_no_thread_can_be_started_they_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in exit handlers of Python 3.12."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    batches = iter(DataLoader(Caches(tmp_path), num_workers=2))
    next(batches), next(batches)
    assert wait_until(lambda: len(contents(tmp_path)) == 2, 5)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        del batches
    assert contents(tmp_path) == ["begun, done"] * 2
    assert not descendants()


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
        from tests.support.crimes import CrimeAt, dawdle

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


# ---- workers that start late --------------------------------------------------------------------------


def surroundings() -> dict[str, Any]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "folder": os.getcwd(),
        "variable": os.environ.get("HARD_KNOCKS"),
        "umask": status["Umask"].strip(),
        "cpus": status["Cpus_allowed_list"].strip(),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "path": "/hard/knocks" in sys.path,
        "arguments": sys.argv[1:],
    }


class Surrounded(Dataset):
    """What the worker sees, and what a file says whose path is relative. Sample `deadly` kills one worker."""

    def __init__(self, deadly: int = -1) -> None:
        self.deadly = deadly

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.deadly and not os.path.exists("died"):
            Path("died").touch()
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        info = get_worker_info()
        assert info is not None
        return {"worker": info.id, "text": Path("data").read_text(), **surroundings()}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Where the script begins, which is this process's folder, and where it goes on."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
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
    cpus = Path("/proc/self/status").read_text().split("Cpus_allowed_list:")[1].split()[0]
    os.sched_setaffinity(0, {int(cpus[-1])})
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


#: A child of the fork server has the server's; what is multiprocessing's comes along.
OF_THE_SERVER = ("variable", "umask", "cpus", "priority", "files")


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@LOADERS
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_4_workers_that_start_late_start_as_at_iter(
    loader_class: Any, method: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})  # one worker starts at a time
    expected = surroundings()
    loader = loader_class(Surrounded(), None, num_workers=3, multiprocessing_context=method)
    batches = iter(loader)
    go_on(folders[1], monkeypatch)
    mine = surroundings()
    found = list(batches)
    assert surroundings() == mine, "the consumer is as it was"
    assert {sample.pop("worker") for sample in found} == {0, 1, 2}
    assert {sample.pop("text") for sample in found} == {"the right one"}
    for sample in found:
        for what in OF_THE_SERVER if method == "forkserver" else ():
            del sample[what]
        assert sample == {what: expected[what] for what in sample}


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_4_the_successor_of_a_dead_worker_starts_as_at_iter(
    method: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = surroundings()
    loader = DataLoader(
        Surrounded(4), None, num_workers=1, multiprocessing_context=method, workers=Processes(max_restarts=1)
    )
    batches = iter(loader)
    found = [next(batches)]
    go_on(folders[1], monkeypatch)
    with pytest.warns(WorkerReplaced):
        found += batches
    assert len(found) == 12
    for sample in found:
        assert sample["text"] == "the right one"
        for what in OF_THE_SERVER if method == "forkserver" else ():
            del sample[what]
        assert sample == {**sample, **{what: expected[what] for what in expected if what in sample}}


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_4_the_folder_may_have_another_name_by_then(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    batches = iter(DataLoader(Surrounded(), None, num_workers=3, multiprocessing_context="spawn"))
    next(batches)  # the first worker is up
    monkeypatch.chdir(folders[1])
    folders[0].rename(folders[0].with_name("renamed"))
    assert {sample["worker"] for sample in batches} == {0, 1, 2}


class OwnProcess(multiprocessing.context.SpawnProcess):
    """A context's own kind of process, which says so in the worker."""

    def run(self) -> None:
        os.environ["HARD_KNOCKS"] = type(self).__name__
        super().run()


class OwnContext(multiprocessing.context.SpawnContext):
    Process = OwnProcess  # type: ignore[assignment]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_4_late_workers_are_processes_of_the_users_context(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    loader = DataLoader(Surrounded(), None, num_workers=2, multiprocessing_context=OwnContext())
    batches = iter(loader)
    found = list(batches)
    assert {(sample["worker"], sample["variable"]) for sample in found} == {
        (0, "OwnProcess"),
        (1, "OwnProcess"),
    }
    assert all(isinstance(process, OwnProcess) for process in batches._workers)


# ---- errors after the fetch ---------------------------------------------------------------------------

LARGE = 100_000  # float32: a block of its own


class Full(Dataset):
    """At sample 4 nothing more can be made in the worker's part of the shared memory."""

    def __init__(self, at_4: Callable[[], None], keeps: bool = True) -> None:
        self.at_4 = at_4
        self.keeps = keeps
        self.kept: torch.Tensor | None = None

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        blocks = allocator._current
        assert blocks is not None
        start, end = blocks.mapping.region(0)
        middle = (start + end) // 2 // SMALLEST * SMALLEST
        sample = empty((LARGE,), torch.float32).fill_(index) if self.keeps else torch.full((LARGE,), index)
        if index == 4:
            blocks._space = AddressSpace(())
            self.kept = sample  # what is shipped has to be a copy
            self.at_4()
        elif index == 5:
            blocks._space = AddressSpace(((middle, end - middle),))
        return sample


def all_is_well() -> None:
    pass


def complain() -> None:
    raise ValueError("a bad sample")


def refuse_one_answer() -> None:
    send, sent = WorkerSocket.send, []

    def refuse(socket: WorkerSocket, message: Any) -> None:
        if not sent:
            sent.append(message)
            raise OverflowError("too much for one message")
        send(socket, message)

    WorkerSocket.send = refuse  # type: ignore[method-assign]


def lose_all_blocks() -> None:
    """As if this were the worker's first batch."""
    blocks = allocator._current
    assert blocks is not None
    blocks._lost = [blocks._idle, blocks._promised]  # type: ignore[attr-defined]
    blocks._idle, blocks._promised = [], []
    complain()


def outcome(batches: Iterator[Any]) -> Any:
    try:
        return next(batches)[0].item()
    except StopIteration:
        raise
    except Exception as error:
        return error


@pytest.mark.processes
@pytest.mark.parametrize(
    ("at_4", "keeps", "kind", "text"),
    [
        pytest.param(all_is_well, True, MemoryError, "do not fit", id="no room for the copy"),
        pytest.param(complain, False, ValueError, "a bad sample", id="the user's, with a block at hand"),
        pytest.param(lose_all_blocks, False, RuntimeError, "ValueError: a bad sample", id="none at hand"),
        pytest.param(refuse_one_answer, False, RuntimeError, "too much for one", id="too much for a message"),
    ],
)
def test_13_an_error_after_the_fetch_is_at_the_batchs_place(
    at_4: Callable[[], None], keeps: bool, kind: type[Exception], text: str
) -> None:
    dataset = Full(at_4, keeps)
    with DataLoader(
        dataset, None, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    ) as loader:
        batches = iter(loader)
        found = [outcome(batches) for _ in range(10)]
        assert found[:4] + found[5:] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert type(found[4]) is kind
        assert text in str(found[4])
        assert next(batches, None) is None
        statistics = loader.statistics()
        assert statistics.rejected_frames == 0
        assert statistics.blocks_in_use <= 1  # the dataset's


def test_13_a_batch_that_failed_leaves_its_blocks_for_the_error() -> None:
    with paired() as pair:
        blocks, start = pair.allocator, pair.arena.mapping.region(0)[0]
        blocks._space = AddressSpace(((start, 4 * SMALLEST),))
        block = blocks.take(4 * SMALLEST)
        used = [(block.offset, block.size)]
        blocks.ship(used)
        with pytest.raises(MemoryError):
            blocks.take(100)
        assert blocks.take(100, failed=True).offset == block.offset
        assert blocks.finish(used) == (used, [])


# ---- forks in a worker --------------------------------------------------------------------------------


class ForksAt(Dataset):
    """A child is forked at sample 3 and comes back from user code, `how` says where and with what."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder = folder
        self.how = how

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 3 and self.how != "when it is pickled":
            child = os.fork()
            (self.folder / str(child or os.getpid())).touch()
            if child == 0:
                time.sleep(0.1)
                if self.how == "raises":
                    raise ValueError("in the child")
                return torch.full((100_000,), -1.0), -1  # into whose block?
            if self.how == "and the worker waits":
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                assert status == 0, status
            time.sleep(0.3)
        sample = torch.full((100_000,), float(index)), index
        return ForksWhenPickled(self.folder, sample) if self.how == "when it is pickled" else sample


class ForksWhenPickled:
    def __init__(self, folder: Path, sample: Any) -> None:
        self.folder = folder
        self.sample = sample

    def __reduce__(self) -> Any:
        if self.sample[1] == 3 and not contents(self.folder):
            child = os.fork()
            (self.folder / str(child or os.getpid())).touch()
            if child == 0:
                return tuple, ((-1, -1),)
            time.sleep(0.3)
        return tuple, (self.sample,)


class ForksInStream(IterableDataset):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[Any]:
        for index in range(8):
            yield torch.full((100_000,), float(index)), index
            if index == 3 and os.fork() == 0:
                (self.folder / str(os.getpid())).touch()
                return


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


HOW = ["returns", "raises", "and the worker waits", "when it is pickled"]


def check_fork(loader: Any, folder: Path, expected: list[int]) -> None:
    """Every batch comes once, whole, and the child is gone while the workers live."""
    for _ in range(2):
        found = [(large.min().item(), large.max().item(), number) for large, number in loader]
        assert found == [(number, number, number) for number in expected]
    pids = [int(name) for name in os.listdir(folder)]
    assert pids
    assert wait_until(lambda: all(state_of(pid) in ("Z", "gone") for pid in pids), 3), "it runs on"


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("how", HOW)
def test_7_a_child_that_comes_back_from_user_code_is_gone(
    method: str, how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch does not run beside it: its child is gone after 5 s, but takes its parent's tasks until then."""
    dataset = ForksAt(tmp_path, how)
    with DataLoader(
        dataset, None, num_workers=2, persistent_workers=True, multiprocessing_context=method
    ) as loader:
        check_fork(loader, tmp_path, list(range(16)))
        assert loader.statistics().rejected_frames == 0
    assert capfd.readouterr().err == ""


@pytest.mark.processes
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("restarts", [0, 2])
def test_7_it_claims_nothing(how: str, restarts: int, tmp_path: Path) -> None:
    with DataLoader(
        ForksAt(tmp_path, how),
        None,
        num_workers=2,
        schedule="dynamic",
        workers=Processes(max_restarts=restarts),
        persistent_workers=True,
    ) as loader:
        check_fork(loader, tmp_path, list(range(16)))
        assert loader.statistics().rejected_frames == 0
        assert loader.statistics().worker_restarts == 0


@pytest.mark.processes
def test_7_a_child_that_ends_a_stream_is_gone(tmp_path: Path) -> None:
    with DataLoader(ForksInStream(tmp_path), None, num_workers=1, persistent_workers=True) as loader:
        check_fork(loader, tmp_path, list(range(8)))


def fork_in_init(worker: int) -> None:
    assert get_worker_info() is not None
    if os.fork() == 0:
        return


@pytest.mark.processes
def test_7_a_child_of_the_init_function_is_gone() -> None:
    loader = DataLoader(range(8), None, num_workers=2, worker_init_fn=fork_in_init, persistent_workers=True)
    assert list(loader) == list(range(8))
    own = {process.pid for process in loader._iterator._workers}

    def strangers() -> list[Any]:
        return [entry for pid, entry in descendants().items() if pid not in own and not entry.zombie]

    assert wait_until(lambda: not strangers(), 3), strangers()
    del loader


# ---- SIGCHLD that is ignored --------------------------------------------------------------------------

DAEMON = """
    import multiprocessing, pathlib, signal, warnings
    from fastq_loader import DataLoader as Ours, Processes, WorkerReplaced
    from torch.utils.data import DataLoader as Torchs
    from tests.end_to_end.test_restarts import Doomed, die, leave

    def length(loader):
        return len(list(loader))

    signal.signal(signal.SIGCHLD, {handler})
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", WorkerReplaced)
    loader = {loader}
    print(length(loader), length(loader))
    if hasattr(loader, "close"):
        loader.close()
    else:
        del loader
    print(multiprocessing.active_children())
"""


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("what", ["None", "die", "leave"])
def test_9_sigchld_may_be_ignored(method: str, what: str, tmp_path: Path) -> None:
    dataset = f"Doomed(pathlib.Path({str(tmp_path)!r}), {-1 if what == 'None' else 7}, {what})"
    loader = (
        f"Ours({dataset}, 2, num_workers=2, multiprocessing_context={method!r}, workers=Processes(2), "
        "persistent_workers=True)"
    )
    result = run_script(DAEMON.format(handler="signal.SIG_IGN", loader=loader), timeout=40)
    assert (result.stderr, result.stdout) == ("", "12 12\n[]\n")
    assert (result.returncode, result.left) == (0, ())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("loader", "method"),
    [
        ("Torchs", "fork"),
        ("Ours", "fork"),
        ("Ours", "spawn"),
    ],  # torch sometimes needs a moment more
)
def test_9_without_restarts_it_is_as_in_torch(loader: str, method: str) -> None:
    source = DAEMON.format(
        handler="signal.SIG_IGN",
        loader=f"{loader}(range(24), 2, num_workers=2, multiprocessing_context={method!r})",
    )
    result = run_script(source, timeout=40)
    assert (result.stderr, result.returncode, result.left) == ("", 0, ())
    assert result.stdout.startswith("12 12\n")


@pytest.mark.processes
def test_9_a_handler_of_the_users_runs_in_no_helper(tmp_path: Path) -> None:
    """One that reaps whatever has ended would take the exit codes of the workers."""
    handler = 'lambda *_: print("SIGCHLD in", multiprocessing.current_process().name, flush=True)'
    dataset = f"Doomed(pathlib.Path({str(tmp_path)!r}), 7, leave, times=2)"
    loader = f"Ours({dataset}, 2, num_workers=1, multiprocessing_context='fork', workers=Processes(3))"
    result = run_script(DAEMON.format(handler=handler, loader=loader))
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert {"12 12", "[]"} <= set(lines)
    assert {line for line in lines if "SIGCHLD" in line} == {"SIGCHLD in MainProcess"}


# ---- standard streams that are missing ----------------------------------------------------------------

SILENT = """
    import os, pathlib, sys, traceback, warnings
    from fastq_loader import DataLoader as Ours, Processes
    from torch.utils.data import DataLoader as Torchs
    from tests.end_to_end.test_hard_knocks_workers import Noisy

    {change}
    out = pathlib.Path({out!r})
    try:
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = {loader}
        for _ in range(2):
            found = [(batch.min().item(), batch.max().item()) for batch in loader]
            assert found == [(number, number) for number in range(12)], found
        if hasattr(loader, "close"):
            loader.close()
        out.write_text("good")
    except BaseException:
        out.write_text(traceback.format_exc())
"""


class Noisy(Dataset):
    """Prints, as far as there is anything to print to, and so does some C library. One worker dies."""

    def __init__(self, mark: str = "") -> None:
        self.mark = mark

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if sys.stdout is not None and not sys.stdout.closed:
            print("sample", index)
        for descriptor in (1, 2):
            with suppress(OSError):
                os.write(descriptor, b"noise" * 20_000)
        if index == 7 and self.mark and not os.path.exists(self.mark):
            Path(self.mark).touch()
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((LARGE,), float(index))


CHANGES = {
    "None": "sys.stdin = sys.stdout = sys.stderr = None",
    "no stdout": "sys.stdout = None",
    "closed": "sys.stdout.close(); sys.stderr.close()",
    "free descriptors": "",
}


def silent(change: str, loader: str, folder: Path) -> None:
    """Run the loader in a program without streams."""
    out = folder / "out"
    streams = "<&- >&- 2>&-" if change == "free descriptors" else f"2> {folder / 'err'}"
    source = SILENT.format(change=CHANGES[change], loader=loader, out=str(out))
    result = run_script(source, timeout=60, prefix=["sh", "-c", f'exec "$@" {streams}', "sh"])
    assert out.read_text() == "good"
    assert (result.returncode, result.left) == (0, ())
    if change == "no stdout":
        text = (folder / "err").read_text()
        assert "Traceback" not in text, text


@pytest.mark.processes
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("restarts", [0, 2])
def test_10_streams_may_be_missing(change: str, method: str, restarts: int, tmp_path: Path) -> None:
    mark = str(tmp_path / "died") if restarts else ""
    options = f"num_workers=2, multiprocessing_context={method!r}, workers=Processes({restarts})"
    silent(change, f"Ours(Noisy({mark!r}), None, {options})", tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize("change", ["None", "no stdout", "closed"])  # with free descriptors it hangs
def test_10_streams_may_be_missing_in_torch(change: str, tmp_path: Path) -> None:
    silent(change, "Torchs(Noisy(), None, num_workers=2)", tmp_path)


@pytest.mark.processes
def test_8_nothing_is_waited_for_when_the_last_worker_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn of an epoch would take the whole instant that workers are given."""
    readable = stopping.readable
    waits: list[tuple[int, float | None]] = []

    def watched(descriptors: list[int], seconds: float | None) -> list[int]:
        waits.append((len(descriptors), seconds))
        return readable(descriptors, seconds)

    monkeypatch.setattr(stopping, "readable", watched)
    for _ in range(3):
        assert len(list(DataLoader(range(8), 2, num_workers=2))) == 4
    assert waits
    assert not [seconds for watching, seconds in waits if not watching and seconds]
