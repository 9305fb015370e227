"""Programs that are hard on memory, descriptors and the system: whatever torch's loader bears, ours bears.

Each runs in a process of its own, with torch's loader beside ours where torch holds.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from fastq_loader.memory.arena import AVAILABLE
from tests.conftest import ROOT, ScriptResult, run_script

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
]

#: What the scripts share: both loaders, and how many bytes of pages lie behind ours.
COMMON = """
import gc, os, resource, signal, subprocess, sys, threading, time, warnings
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, TensorDataset
import fastq_loader
from fastq_loader import empty

BOTH = (torch.utils.data.DataLoader, fastq_loader.DataLoader)
OURS = fastq_loader.DataLoader

def memfd_bytes():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if "memfd:fastq_loader" in os.readlink(f"/proc/self/fd/{name}"):
                status = os.stat(f"/proc/self/fd/{name}")
                found[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            pass
    return sum(found.values())
"""


def run(source: str, timeout: float = 60, path: Path | None = None) -> ScriptResult:
    """Run a script that must end well, and say nothing on the way; `path` comes first on its own."""
    env = {} if path is None else {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    result = run_script(COMMON + textwrap.dedent(source), timeout=timeout, env=env)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert result.stderr == ""
    assert result.left == ()
    return result


# ---- descriptors ------------------------------------------------------------------------------------


def test_a_training_script_with_more_than_1024_open_files() -> None:
    result = run(
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        data = TensorDataset(torch.arange(32 * 40_000).view(32, 40_000))
        seen = []
        for loader in BOTH:
            train = loader(data, batch_size=4, num_workers=2, persistent_workers=True)
            total = 0
            for epoch in range(2):
                for (rows,) in train:
                    total += int(rows.sum())
                # `rows` is looked at while the workers of the validation are forked.
                for (rows,) in loader(data, batch_size=8, num_workers=2):
                    total += int(rows.sum())
            seen.append(total)
            del train, rows
        assert seen[0] == seen[1], seen
        print("trained")
        """
    )
    assert result.stdout == "trained\n"


def test_a_fork_without_descriptors_closes_nothing_of_the_users() -> None:
    result = run(
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        data = TensorDataset(torch.arange(16 * 40_000).view(16, 40_000))

        def fork(act):
            pid = os.fork()
            if not pid:
                try:
                    act()
                    os._exit(0)
                finally:
                    os._exit(1)
            return pid

        def end(pid):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        for loader in BOTH:
            iterator = iter(loader(data, batch_size=4, num_workers=2))
            (rows,) = next(iterator)
            assert end(fork(lambda: None)) == 0
            mine = []
            try:
                while True:
                    mine.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                pass
            for turn in range(3):
                assert end(fork(lambda: None)) == 0
                for number in mine:
                    os.fstat(number)
            for number in mine:
                os.close(number)
            assert len([rows for (rows,) in iterator]) == 3
        print("whole")
        """
    )
    assert result.stdout == "whole\n"


def test_what_a_child_looks_at_stays_where_no_pipe_to_it_could_be_made() -> None:
    result = run(
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

        class Numbered(Dataset):
            def __len__(self):
                return 40
            def __getitem__(self, index):
                return torch.full((500_000,), index + 1)  # pages that went back read as 0

        for loader in BOTH:
            iterator = iter(loader(Numbered(), batch_size=None, num_workers=2))
            look, go = os.pipe()
            batch = next(iterator)
            mine = []
            try:
                while True:
                    mine.append(os.dup(0))
            except OSError:
                pass
            pid = os.fork()
            if not pid:
                os.read(look, 1)
                os._exit(0 if bool((batch == 1).all()) else 3)
            for number in mine:
                os.close(number)
            del batch
            assert [int(batch[0]) for batch in iterator] == list(range(2, 41))
            os.write(go, b"x")
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print("whole")
        """
    )
    assert result.stdout == "whole\n"


def test_forks_on_several_threads_while_batches_come_and_go() -> None:
    result = run(
        """
        class Numbered(Dataset):
            def __len__(self):
                return 300
            def __getitem__(self, index):
                return torch.full((20_000,), index)

        warnings.simplefilter("ignore")
        sys.setswitchinterval(1e-5)
        for loader in BOTH:
            current, stop, failures = [], threading.Event(), []

            def look():
                while not stop.is_set():
                    mine = current[-1:]
                    if not mine:
                        continue
                    pid = os.fork()
                    if not pid:
                        number = int(mine[0][0])
                        for _ in range(5):
                            time.sleep(0.002)
                            if not bool((mine[0] == number).numpy().all()):
                                os._exit(3)
                        os._exit(0)
                    mine = None
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    if code:
                        failures.append(code)

            threads = [threading.Thread(target=look) for _ in range(3)]
            for thread in threads:
                thread.start()
            numbers = []
            loading = loader(Numbered(), batch_size=None, num_workers=2)
            for batch in loading:
                current[:] = [batch]
                numbers.append(int(batch[0]))
                time.sleep(0.002)
            stop.set()
            for thread in threads:
                thread.join()
            assert numbers == list(range(300))
            assert not failures, failures
            current.clear()
            del batch, loading
        print("whole")
        """
    )
    assert result.stdout == "whole\n"


def test_forks_beside_a_kept_batch_cost_no_descriptors() -> None:
    result = run(
        """
        data = TensorDataset(torch.arange(16 * 40_000).view(16, 40_000))
        for loader in BOTH:
            iterator = iter(loader(data, batch_size=4, num_workers=2))
            (kept,) = next(iterator)
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(50):
                subprocess.run(["true"], preexec_fn=os.getpid, check=True)
            assert len(os.listdir("/proc/self/fd")) <= before + 2, loader
        print("none")
        """
    )
    assert result.stdout == "none\n"


# ---- system calls that are not there ----------------------------------------------------------------

#: A Python that was built with old headers, as conda's are; every process of the script imports this first.
OLD_HEADERS = """
import fcntl, os, signal

for module, names in (
    (os, "pidfd_open memfd_create eventfd eventfd_read eventfd_write EFD_CLOEXEC EFD_NONBLOCK EFD_SEMAPHORE"),
    (os, "MFD_CLOEXEC MFD_ALLOW_SEALING"),
    (fcntl, "F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK F_ADD_SEALS F_GET_SEALS"),
    (signal, "pidfd_send_signal"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_python_that_lacks_names_of_what_the_kernel_can_do(method: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OLD_HEADERS)
    result = run(
        f"""
        assert not hasattr(os, "memfd_create")
        assert not hasattr(os, "pidfd_open")
        data = TensorDataset(torch.arange(40 * 20_000).view(40, 20_000))
        options = dict(batch_size=4, num_workers=2, multiprocessing_context="{method}")
        seen = [[int(rows.sum()) for (rows,) in loader(data, **options)] for loader in BOTH]
        assert seen[0] == seen[1]
        assert len(seen[0]) == 10
        print("loaded")
        """,
        path=tmp_path,
    )
    assert result.stdout == "loaded\n"


def test_workers_are_replaced_by_a_python_that_lacks_the_names(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OLD_HEADERS)
    result = run(
        """
        class Deadly(Dataset):
            def __len__(self):
                return 12
            def __getitem__(self, index):
                if index == 5 and not os.path.exists("died"):
                    open("died", "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                return index

        os.chdir(sys.path[0])
        warnings.simplefilter("ignore")
        for wait in (0, 20):
            loader = OURS(Deadly(), batch_size=None, num_workers=2, schedule="dynamic",
                          workers=fastq_loader.Processes(2), timeout=wait)
            assert list(loader) == list(range(12))
            assert loader.statistics().worker_restarts == 1
            os.unlink("died")
        print("replaced")
        """,
        path=tmp_path,
    )
    assert result.stdout == "replaced\n"


#: What there is not on another system; torch, which there is, was imported before.
ELSEWHERE = """
import multiprocessing.reduction, multiprocessing.forkserver, os, select, signal, sys
import torch, torch.utils.data, torch.multiprocessing, numpy, zmq, msgpack, mmap, ctypes

for module, names in (
    (os, "memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING pidfd_open eventfd eventfd_write"),
    (os, "EFD_CLOEXEC EFD_NONBLOCK pipe2 sched_getaffinity sched_setscheduler sched_getscheduler"),
    (os, "SCHED_OTHER SCHED_BATCH sched_param"),
    (signal, "pidfd_send_signal"),
):
    for name in names.split():
        delattr(module, name)
"""
WINDOWS = """
for module, names in (
    (os, "fork register_at_fork sysconf getuid O_CLOEXEC O_NONBLOCK SEEK_DATA SEEK_HOLE"),
    (multiprocessing.reduction, "DupFd"),
    (select, "poll epoll"),
    (signal, "SIGKILL SIGCHLD SIGRTMIN SIGUSR1 SIG_BLOCK SIG_UNBLOCK SIG_SETMASK pthread_sigmask"),
):
    for name in names.split():
        delattr(module, name)
sys.modules["fcntl"] = sys.modules["resource"] = None
"""


@pytest.mark.parametrize(("name", "lacks"), [("darwin", ""), ("win32", WINDOWS)])
def test_another_system_loads_without_workers_and_says_so_with_them(name: str, lacks: str) -> None:
    result = run_script(
        ELSEWHERE
        + lacks
        + f"""
sys.platform = "{name}"
import fastq_loader
data = torch.utils.data.TensorDataset(torch.arange(40).view(20, 2))
seen = []
for loader in (torch.utils.data.DataLoader, fastq_loader.DataLoader):
    seen.append([batch[0].tolist() for batch in loader(data, batch_size=3)])
assert seen[0] == seen[1]
assert fastq_loader.empty((300, 300)).shape == (300, 300)
loader = fastq_loader.DataLoader(data, batch_size=3, schedule="dynamic", persistent_workers=False)
assert len(list(loader)) == 7
loader.statistics(), loader.close(), repr(loader)
try:
    fastq_loader.DataLoader(data, num_workers=2)
except RuntimeError as error:
    assert "memfd_create" in str(error), error
    print("said so")
"""
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "said so\n"
    assert result.stderr == ""
    assert result.left == ()


# ---- memory that goes back --------------------------------------------------------------------------


def test_memory_of_kept_batches_goes_back_while_batches_are_small() -> None:
    result = run(
        """
        class Shrinking(Dataset):
            def __len__(self):
                return 6200
            def __getitem__(self, index):
                return torch.zeros(2_500_000 if index < 200 else 2000)

        for loader in BOTH:
            kept, late = [], []
            for number, batch in enumerate(loader(Shrinking(), batch_size=None, num_workers=2)):
                if number < 200:
                    kept.append(batch)
                elif number == 200:
                    kept.clear()
                if number in (201, 2400, 6000):
                    late.append(memfd_bytes())
            if loader is OURS:
                print(*late, file=sys.stdout)
                assert late[1] < 5 << 20, late
                assert late[2] < 5 << 20, late
        """
    )
    assert result.stdout


def test_memory_of_large_batches_goes_back_for_every_mix_of_sizes() -> None:
    result = run(
        """
        class Shrinking(Dataset):
            def __init__(self, nbytes):
                self.nbytes = nbytes
            def __len__(self):
                return 3006
            def __getitem__(self, index):
                return torch.zeros(100_000_000 if index < 6 else self.nbytes, dtype=torch.uint8)

        for nbytes in (8_000, 70_000, 1_000_000):
            for number, batch in enumerate(OURS(Shrinking(nbytes), batch_size=None, num_workers=2)):
                if number == 2500:
                    print(nbytes, memfd_bytes())
                    assert memfd_bytes() < 20 * nbytes + (2 << 20), (nbytes, memfd_bytes())
        """
    )
    assert len(result.stdout.splitlines()) == 3


def test_a_loop_that_alternates_large_and_small_batches_keeps_its_blocks() -> None:
    result = run(
        """
        class Alternating(Dataset):
            def __init__(self, every, small):
                self.every, self.small = every, small
            def __len__(self):
                return 40 * self.every
            def __getitem__(self, index):
                nbytes = self.small if (index + 1) % self.every else 20_000_000
                return torch.full((nbytes,), index % 251, dtype=torch.uint8)

        for every, small in ((2, 8_000), (3, 8_000), (100, 8_000), (2, 500_000), (7, 500_000)):
            loader = OURS(Alternating(every, small), batch_size=None, num_workers=2, persistent_workers=True)
            assert all(bool((batch == at % 251).all()) for at, batch in enumerate(loader))
            before = loader.statistics().blocks_grown
            for batch in loader:
                pass
            print(every, small, before, loader.statistics().blocks_grown - before)
            loader.close()
        """
    )
    grown = [line.split() for line in result.stdout.splitlines()]
    assert all(int(again) <= 2 for *_, again in grown), result.stdout


# ---- children of a worker's -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["os.fork", "preexec_fn"])
def test_a_collate_function_that_forks_a_helper_uses_its_blocks_again(way: str) -> None:
    result = run(
        f"""
        way = "{way}"

        def collate(numbers):
            batch = empty((250_000,), torch.float32).fill_(numbers[0])
            if way == "os.fork":
                pid = os.fork()
                if not pid:
                    os._exit(0)
                os.waitpid(pid, 0)
            else:
                subprocess.run(["true"], preexec_fn=os.getpid, check=True)
            return batch

        for loader in BOTH:
            peak = 0
            for number, batch in enumerate(loader(range(400), num_workers=2, collate_fn=collate)):
                assert bool((batch == number).all())
                peak = max(peak, memfd_bytes())
            if loader is OURS:
                print(peak)
                assert peak < 12 << 20, peak
        """
    )
    assert result.stdout


def test_what_a_workers_child_looks_at_is_not_written_again_before_it_ends() -> None:
    result = run(
        """
        done, say = os.pipe()

        def collate(numbers):
            batch = empty((250_000,), torch.float32).fill_(numbers[0])
            if numbers[0] % 10 == 0 and not os.fork():
                for _ in range(30):
                    time.sleep(0.01)
                    if not bool((batch == numbers[0]).numpy().all()):
                        os.write(say, b"!")
                os.write(say, b".")
                os._exit(0)
            return batch

        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for loader in BOTH:
            late = 0
            loading = loader(range(200), num_workers=2, collate_fn=collate, persistent_workers=True)
            for number, batch in enumerate(loading):
                assert bool((batch == number).all())
                batch.zero_()
                time.sleep(0.002)
            heard = b""
            while len(heard) < 20:
                heard += os.read(done, 100)
            assert heard == b"." * 20, heard
            for batch in loading:  # their children have ended: the blocks are used again
                pass
            while len(heard) < 40:
                heard += os.read(done, 100)
            if loader is OURS:
                loader = loading.statistics()
                print(loader.blocks_grown)
                assert loader.blocks_grown < 60, loader
            del loading
        """
    )
    assert result.stdout


# ---- address space ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("workers", "mega", "keep", "extra"), [(2, 300, 0, 1200), (8, 150, 0, 2200), (2, 100, 12, 1900)]
)
def test_what_torch_loads_in_little_address_space_loads_here(
    workers: int, mega: int, keep: int, extra: int, method: str
) -> None:
    if method == "spawn" and workers > 2:
        pytest.skip("eight imports of torch at once take the test's whole time")
    result = run_script(
        f"""
import warnings
from tests.support.tight import BOTH, OURS, Big, limited, right, torch

warnings.simplefilter("ignore")  # of many workers on few cores
limited({extra})
for loader in BOTH:
    kept = []
    data = Big({mega}, {keep} + 2 * {workers} + 1)
    options = dict(num_workers={workers}, prefetch_factor=1, multiprocessing_context="{method}")
    number = -1
    for number, batch in enumerate(loader(data, batch_size=None, **options)):
        assert right(batch, number)
        if number < {keep}:
            kept.append(batch)
    assert number == len(data) - 1
    assert all(right(batch, number) for number, batch in enumerate(kept))
    del batch
    kept.clear()
print("loaded")
""",
        timeout=90,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "loaded\n"
    assert result.stderr == ""
    assert result.left == ()


def test_as_many_batches_can_be_kept_in_little_address_space_and_the_loop_goes_on_after() -> None:
    result = run_script(
        """
from tests.support.tight import BOTH, OURS, Big, limited, right, torch

limited(1600)
counts = []
for loader in BOTH:
    loading = iter(loader(Big(80, 40), batch_size=None, num_workers=2, prefetch_factor=1))
    kept = []
    try:
        for batch in loading:
            kept.append(batch)
    except (RuntimeError, MemoryError) as error:
        pass
    else:
        raise AssertionError("a limit that is none")
    assert all(right(batch, number) for number, batch in enumerate(kept))
    counts.append(len(kept))
    if loader is OURS:
        del batch
        kept.clear()
        rest = [int(batch[0]) - 1 for batch in loading]
        assert rest == sorted(rest)
        assert rest[-1] == 39, rest
        print(len(rest) + counts[-1])
    del loading, kept
print(counts)
assert counts[0] <= counts[1]
""",
        timeout=60,
    )
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    assert result.stderr == ""
    assert result.left == ()


def test_batches_are_as_ever_where_blocks_are_mapped_one_by_one() -> None:
    result = run_script(
        """
from tests.support.tight import BOTH, OURS, Big, limited, right, torch
from tests.support.datasets import SAMPLES, MapDataset, assert_same, identity

limited(12_000)
for sample in sorted(SAMPLES.keys() - {"drawn"}):
    for batch_size in (None, 32):
        data = MapDataset(sample, 128)
        options = dict(batch_size=batch_size, num_workers=2, collate_fn=identity)
        for expected, batch in zip(torch.utils.data.DataLoader(data, **options), OURS(data, **options)):
            assert_same(expected, batch)
print("the same")
""",
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "the same\n"
    assert result.stderr == ""
    assert result.left == ()
