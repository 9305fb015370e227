"""Programs that are hard on memory, descriptors and the system: whatever torch's loader bears, ours bears.

Each runs in a process of its own, with torch's loader beside ours where its result is the measure.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader, Processes
from fastq_loader.memory.arena import AVAILABLE
from tests.conftest import ROOT, open_descriptors, run_script, wait_until
from tests.support.datasets import Sized
from tests.support.forking import end_of, fork, in_child
from tests.support.loaders import MANY_WORKERS
from tests.support.sandbox import NEEDED, optional, refuse
from tests.support.thorough import thorough

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
    pytest.mark.usefixtures("forked_workers"),
    MANY_WORKERS,
]
OURS: Any = partial(DataLoader, batch_size=None, num_workers=2)


@dataclass(eq=False)
class Numbered(Sized, Dataset[torch.Tensor]):
    """Samples of so many bytes, or as many as a function of the index says, each full of its index + 1."""

    length: int
    nbytes: int | Callable[[int], int]

    def __getitem__(self, index: int) -> torch.Tensor:
        nbytes = self.nbytes(index) if callable(self.nbytes) else self.nbytes
        return torch.full((nbytes // 8,), index + 1)


def is_number(batch: torch.Tensor, number: int) -> bool:
    """Whether all of a batch is number + 1: pages that went back to the system read as 0."""
    return bool((batch == number + 1).numpy().all())


def are_numbers(batches: Iterable[torch.Tensor]) -> bool:
    """The same of all batches; of large ones, for each page."""
    steps = ((batch, 512 if len(batch) > 1 << 20 else 1) for batch in batches)
    return all(is_number(batch[::step], number) for number, (batch, step) in enumerate(steps))


def memfd_bytes() -> int:
    """Bytes of pages behind the shared memory of our loaders."""
    found = [os.stat(fd) for fd, target in open_descriptors().items() if "memfd:fastq_loader" in target]
    return sum({status.st_ino: status.st_blocks * 512 for status in found}.values())


# ---- descriptors ------------------------------------------------------------------------------------


@in_child
def test_a_training_script_with_more_than_1024_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    for _ in range(1100):
        os.open(os.devnull, os.O_RDONLY)
    data = Numbered(8, 1_000_000)
    train = OURS(data, persistent_workers=True)
    for _ in range(2):
        for number, rows in enumerate(train):
            assert is_number(rows, number)
        # `rows` is alive while the workers of the validation are forked.
        assert are_numbers(OURS(data))
        assert is_number(rows, 7)


@in_child
def test_a_fork_without_free_descriptors_closes_none_of_the_users() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    iterator = iter(OURS(Numbered(16, 160_000)))
    rows = next(iterator)
    assert end_of(fork(lambda: None)) == 0
    mine: list[int] = []
    with suppress(OSError):
        while True:
            mine.append(os.dup(0))
    for _ in range(3):
        assert end_of(fork(lambda: None)) == 0
        for number in mine:
            os.fstat(number)
    for number in mine:
        os.close(number)
    assert len(list(iterator)) == 15
    assert is_number(rows, 0)


# ---- system calls that are not there ----------------------------------------------------------------


def without(**names: str) -> str:
    """Code that takes names out of modules, as far as they are there."""
    lines = [f"import {', '.join(names)}"]
    for module, text in names.items():
        lines += [f"for name in {text.split()}:", f"    vars({module}).pop(name, None)"]
    return "\n".join(lines) + "\n"


#: A Python that was built with old headers, as conda's are.
OLD_HEADERS = without(
    os="pidfd_open memfd_create eventfd eventfd_read eventfd_write EFD_CLOEXEC EFD_NONBLOCK EFD_SEMAPHORE "
    "MFD_CLOEXEC MFD_ALLOW_SEALING",
    fcntl="F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK F_ADD_SEALS F_GET_SEALS",
    signal="pidfd_send_signal",
)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=thorough()), "forkserver"])
@thorough(after=1)
def test_a_python_that_lacks_names_of_what_the_kernel_can_do(method: str, tmp_path: Path) -> None:
    """A worker is replaced there, too. Without fork, every process runs `sitecustomize` when it starts."""
    source = f"""
import pathlib, warnings
from fastq_loader import DataLoader, Processes
from tests.end_to_end.test_restarts import Doomed
assert not hasattr(os, "memfd_create") and not hasattr(os, "pidfd_open")
warnings.simplefilter("ignore")
for wait in (0, 20):
    (folder := pathlib.Path({str(tmp_path)!r}, str(wait))).mkdir()
    loader = DataLoader(Doomed(folder, 5), None, num_workers=2, schedule="dynamic", timeout=wait,
                        workers=Processes(2), multiprocessing_context="{method}")
    assert len(list(loader)) == 24
    assert loader.statistics().worker_restarts == 1
"""
    (tmp_path / "sitecustomize.py").write_text(OLD_HEADERS)
    forked = method == "fork"
    env = {} if forked else {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    result = run_script((OLD_HEADERS if forked else "import os") + source, env=env, warm=forked)
    assert (result.stderr, result.returncode, result.left) == ("", 0, ())


#: What there is not on another system; torch, which there is, was imported before.
ELSEWHERE = """
import multiprocessing.reduction, multiprocessing.forkserver, sys
import torch, torch.utils.data, torch.multiprocessing, numpy, zmq, msgpack, mmap, ctypes
""" + without(
    os="memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING pidfd_open eventfd eventfd_write EFD_CLOEXEC EFD_NONBLOCK "
    "pipe2 sched_getaffinity sched_setscheduler sched_getscheduler SCHED_OTHER SCHED_BATCH sched_param",
    signal="pidfd_send_signal",
)
WINDOWS = without(
    os="fork register_at_fork sysconf getuid O_CLOEXEC O_NONBLOCK SEEK_DATA SEEK_HOLE",
    select="poll epoll",
    signal="SIGKILL SIGCHLD SIGRTMIN SIGUSR1 SIGALRM SIGHUP SIGPIPE SIG_BLOCK SIG_UNBLOCK SIG_SETMASK "
    "pthread_sigmask getitimer setitimer",
)
WINDOWS += "del multiprocessing.reduction.DupFd; sys.modules['fcntl'] = sys.modules['resource'] = None"


@pytest.mark.parametrize(("name", "lacks"), [("win32", WINDOWS), ("darwin", "")])
@thorough(after=1)
def test_another_system_loads_without_workers_and_imports_all_that_is_there(name: str, lacks: str) -> None:
    """What torch's own workers do there: `test_torchs_workers.py`."""
    result = run_script(
        f"""
{ELSEWHERE}
{lacks}
sys.platform = "{name}"
import warnings, fastq_loader.extras.tools.command
data = torch.utils.data.TensorDataset(torch.arange(40).view(20, 2))
seen = []
for loader in (torch.utils.data.DataLoader, fastq_loader.DataLoader):
    seen.append([batch[0].tolist() for batch in loader(data, batch_size=3)])
assert seen[0] == seen[1]
assert fastq_loader.empty((300, 300)).shape == (300, 300)
loader = fastq_loader.DataLoader(data, batch_size=3, schedule="dynamic", persistent_workers=False)
assert len(list(loader)) == 7
loader.statistics(), loader.close(), repr(loader)
class Broken(list):
    def __getitem__(self, index):
        return [7, 8, 9][index] if index != 1 else [][index]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    assert len(list(fastq_loader.DataLoader(Broken(range(3)), errors=fastq_loader.Skip(limit=1.0)))) == 2
fastq_loader.DataLoader(data, num_workers=2)
try:
    iter(fastq_loader.DataLoader(data, num_workers=2, schedule="dynamic"))
except RuntimeError as error:
    assert "memfd_create" in str(error), error
    print("said so")
assert fastq_loader.extras.tools.command.main([]) == 0
""",
        warm=True,
    )
    assert (result.stderr, result.stdout[:14], result.returncode) == ("", "said so\nusage:", 0)
    assert result.left == ()


# ---- memory that goes back --------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [8_000, 70_000, 1_000_000])
@thorough(after=1)
@in_child
def test_memory_of_large_batches_goes_back(nbytes: int) -> None:
    """Of those that were kept for a while, too."""
    data = Numbered(1400, lambda index: 30_000_000 if index < 6 else nbytes)
    kept: list[torch.Tensor] = []
    others = memfd_bytes()  # of loaders of this process, of which this one is a fork
    for number, batch in enumerate(OURS(data)):
        kept = [*kept, batch] if number < 6 else []
        if number == 1300:
            assert memfd_bytes() - others < 20 * nbytes + (2 << 20)
    assert number == 1399


# ---- limits, sandboxes ------------------------------------------------------------------------------


@NEEDED
@in_child
def test_where_a_sandbox_refuses_calls_that_workers_can_do_without_all_is_as_ever() -> None:
    refuse(*optional())
    for options in ({"schedule": "dynamic", "workers": Processes(2)}, {"multiprocessing_context": "fork"}):
        kept = list(OURS(Numbered(12, 300_000), **options))
        assert len(kept) == 12
        assert are_numbers(kept)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be a user that runs nothing else")
def test_p8_too_few_threads_are_an_error_and_the_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """zmq would end it by SIGABRT."""
    monkeypatch.setattr("tempfile.tempdir", "/tmp")

    @in_child
    def run() -> None:
        os.setuid(50_000 + os.getpid() % 10_000)  # root is not bound by the limit, others' threads count
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self is its own again
        used, most = len(os.listdir("/proc/self/task")), resource.getrlimit(resource.RLIMIT_NPROC)[1]
        for extra in (0, 1, 2, 3, 4, 6, 8, 9):
            resource.setrlimit(resource.RLIMIT_NPROC, (used + extra, most))
            with pytest.raises(OSError, match=r"the loader needs 10 threads.*`ulimit -u`"):
                list(OURS(range(3)))
            assert wait_until(lambda: len(os.listdir("/proc/self/task")) == used, 30)
        resource.setrlimit(resource.RLIMIT_NPROC, (used + 10, most))
        assert list(OURS(range(3))) == [0, 1, 2]

    run()
