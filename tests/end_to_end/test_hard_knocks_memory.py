"""Programs that are hard on memory, descriptors and the system: whatever torch's loader bears, ours bears.

Each runs in a process of its own, with torch's loader beside ours where its result is the measure.
"""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from fastq_loader.memory.arena import AVAILABLE
from tests.conftest import ROOT, run_script
from tests.support.sandbox import NEEDED, optional

pytestmark = [pytest.mark.processes, pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")]


def run(source: str, *, path: Path | None = None, prefix: tuple[str, ...] = (), timeout: float = 60) -> None:
    """Run a script that must end well, and say nothing on the way; `path` comes first on its own."""
    env = {} if path is None else {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    script = f"from tests.support.tight import *\n{textwrap.dedent(source)}"
    result = run_script(script, timeout=timeout, env=env, prefix=prefix, warm=not (path or prefix))
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    said = result.stderr.splitlines()
    assert [line for line in said if not (prefix and line.startswith("Error in cpuinfo: "))] == []
    assert result.left == ()


# ---- descriptors ------------------------------------------------------------------------------------


def test_a_training_script_with_more_than_1024_open_files() -> None:
    run(
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        data = TensorDataset(torch.arange(32 * 40_000).view(32, 40_000))
        train = OURS(data, batch_size=4, num_workers=2, persistent_workers=True)
        total = 0
        for epoch in range(2):
            for (rows,) in train:
                total += int(rows.sum())
            # `rows` is alive while the workers of the validation are forked.
            for (rows,) in OURS(data, batch_size=8, num_workers=2):
                total += int(rows.sum())
        assert total == 4 * int(data.tensors[0].sum())
        """
    )


def test_a_fork_without_free_descriptors_closes_none_of_the_users() -> None:
    run(
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        iterator = iter(OURS(Numbered(16, 160_000), batch_size=4, num_workers=2))
        rows = next(iterator)
        assert end_of(fork(lambda: None)) == 0
        mine = take_all_descriptors()
        for turn in range(3):
            assert end_of(fork(lambda: None)) == 0
            for number in mine:
                os.fstat(number)
        for number in mine:
            os.close(number)
        assert len(list(iterator)) == 3
        """
    )


def test_forks_on_several_threads_while_batches_come_and_go() -> None:
    run(
        """
        warnings.simplefilter("ignore")
        sys.setswitchinterval(1e-5)
        current, stop, failures = [], threading.Event(), []

        def watch(batch, number):
            for _ in range(5):
                time.sleep(0.002)
                if not is_number(batch, number):
                    os._exit(3)

        def look():
            while not stop.is_set():
                mine = current[-1:]
                if mine:
                    number = int(mine[0][0]) - 1
                    pid = fork(lambda: watch(mine[0], number))
                    mine = None
                    if end_of(pid):
                        failures.append(number)

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        numbers = []
        for batch in OURS(Numbered(300, 160_000), batch_size=None, num_workers=2):
            current[:] = [batch]
            numbers.append(int(batch[0]) - 1)
            time.sleep(0.002)
        stop.set()
        for thread in threads:
            thread.join()
        assert numbers == list(range(300))
        assert not failures, failures
        """
    )


# ---- system calls that are not there ----------------------------------------------------------------


def without(**names: str) -> str:
    """Code that takes names out of modules, as far as they are there."""
    lines = [f"import {', '.join(names)}"]
    for module, text in names.items():
        lines += [f"for name in {text.split()}:", f"    vars({module}).pop(name, None)"]
    return "\n".join(lines)


#: A Python that was built with old headers, as conda's are; every process of the script imports this first.
OLD_HEADERS = without(
    os="pidfd_open memfd_create eventfd eventfd_read eventfd_write EFD_CLOEXEC EFD_NONBLOCK EFD_SEMAPHORE "
    "MFD_CLOEXEC MFD_ALLOW_SEALING",
    fcntl="F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK F_ADD_SEALS F_GET_SEALS",
    signal="pidfd_send_signal",
)


def test_a_python_that_lacks_names_of_what_the_kernel_can_do(tmp_path: Path) -> None:
    """Under every start method, and where workers are replaced."""
    (tmp_path / "sitecustomize.py").write_text(OLD_HEADERS)
    run(
        """
        assert not hasattr(os, "memfd_create")
        assert not hasattr(os, "pidfd_open")
        for method in ("fork", "spawn", "forkserver"):
            loader = OURS(range(40), 4, num_workers=2, multiprocessing_context=method)
            assert torch.cat(list(loader)).tolist() == list(range(40))

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
                          workers=fastq_loader.Processes(2), timeout=wait, **FORK)
            assert list(loader) == list(range(12))
            assert loader.statistics().worker_restarts == 1
            os.unlink("died")
        """,
        path=tmp_path,
    )


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
WINDOWS += "\ndel multiprocessing.reduction.DupFd; sys.modules['fcntl'] = sys.modules['resource'] = None"


@pytest.mark.parametrize(("name", "lacks"), [("darwin", ""), ("win32", WINDOWS)])
def test_another_system_loads_without_workers_and_imports_all_that_is_there(name: str, lacks: str) -> None:
    result = run_script(
        f"""
{ELSEWHERE}
{lacks}
sys.platform = "{name}"
import warnings, fastq_loader.__main__
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
    fastq_loader.DataLoader(data, num_workers=2, schedule="dynamic")
except RuntimeError as error:
    assert "memfd_create" in str(error), error
    print("said so")
assert fastq_loader.__main__.main([]) == 0
"""
    )
    assert (result.stderr, result.stdout[:14], result.returncode) == ("", "said so\nusage:", 0)
    assert result.left == ()


# ---- memory that goes back --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        "[(number, 'word') for number in range(count)]",
        "{f'{seq}_{number}': number for number in range(count)}",
        "[(torch.zeros(4).numpy(), number) for number in range(count)]",
    ],
)
def test_structures_that_change_with_every_batch_take_no_more_memory_than_torchs(make: str) -> None:
    run(
        f"""
        import random

        class Batches(Numbered):
            def __getitem__(self, seq):
                count = random.Random(seq).randint(2000, 5000)
                return {make}

        used = []
        for kind in BOTH:
            loader = kind(Batches(60, 0), None, num_workers=2, collate_fn=identity, **FORK)
            used += [held_memory() for seq, batch in enumerate(loader) if seq == 58]
        assert used[1] <= 1.5 * used[0], used
        """
    )


def test_memory_of_large_batches_goes_back_for_every_mix_of_sizes() -> None:
    """Of those that were kept for a while, too."""
    run(
        """
        for nbytes in (8_000, 70_000, 1_000_000):
            data = Numbered(2600, lambda index: 100_000_000 if index < 6 else nbytes)
            kept = []
            for number, batch in enumerate(OURS(data, batch_size=None, num_workers=2)):
                kept = [*kept, batch] if number < 6 else []
                if number == 2500:
                    assert memfd_bytes() < 20 * nbytes + (2 << 20), (nbytes, memfd_bytes())
        """
    )


def test_a_loop_that_alternates_large_and_small_batches_keeps_its_blocks() -> None:
    """A loader that gave them back would make new ones in every epoch. One that keeps them may still make a
    few where the timing of an epoch asks for more at once than ever before."""
    run(
        """
        for every, small in ((2, 8_000), (3, 8_000), (100, 8_000), (2, 500_000), (7, 500_000)):
            data = Numbered(40 * every, lambda index: small if (index + 1) % every else 20_000_000)
            loader = OURS(data, batch_size=None, num_workers=2, persistent_workers=True)
            assert all(is_number(batch, at) for at, batch in enumerate(loader))
            grown = []
            while not grown or grown[-1] > 2:
                before = loader.statistics().blocks_grown
                for batch in loader:
                    pass
                grown.append(loader.statistics().blocks_grown - before)
                assert len(grown) < 4, (every, small, grown)
            loader.close()
        """
    )


# ---- children of a worker's -------------------------------------------------------------------------


def test_a_collate_function_that_forks_a_helper_uses_its_blocks_again() -> None:
    run(
        """
        def by_fork(numbers):
            assert end_of(fork(lambda: None)) == 0

        def by_preexec(numbers):
            subprocess.run(["true"], preexec_fn=os.getpid, check=True)

        for way in (by_fork, by_preexec):
            def collate(numbers):
                batch = empty((250_000,), torch.float32).fill_(numbers[0] + 1)
                way(numbers)
                return batch

            loader = OURS(range(200), num_workers=2, collate_fn=collate, **FORK)
            for number, batch in enumerate(loader):
                assert is_number(batch, number)
                assert memfd_bytes() < 12 << 20, memfd_bytes()
        """
    )


# ---- address space ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "workers", "mega", "keep", "extra"),
    [
        ("fork", 2, 300, 0, 1200),
        ("fork", 8, 150, 0, 2200),
        ("fork", 2, 100, 12, 1900),
        ("spawn", 2, 300, 0, 1200),
    ],
)
def test_what_torch_loads_in_little_address_space_loads_here(
    method: str, workers: int, mega: int, keep: int, extra: int
) -> None:
    run(
        f"""
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
        """,
        timeout=90,
    )


def test_as_many_batches_can_be_kept_in_little_address_space_and_the_loop_goes_on_after() -> None:
    run(
        """
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
            del loading, kept
        assert counts[0] <= counts[1]
        """
    )


def test_batches_are_as_ever_where_blocks_are_mapped_one_by_one() -> None:
    run(
        """
        from tests.support.datasets import SAMPLES, MapDataset, assert_same, identity

        limited(12_000)
        for sample in sorted(SAMPLES.keys() - {"drawn"}):
            data = MapDataset(sample, 64)
            options = dict(batch_size=32, num_workers=2, collate_fn=identity, **FORK)
            for expected, batch in zip(BOTH[0](data, **options), OURS(data, **options)):
                assert_same(expected, batch)
        """
    )


@pytest.mark.parametrize("kind", ["torch.utils.data.DataLoader", "OURS"])
def test_an_answer_that_finds_no_memory_is_an_error(kind: str) -> None:
    run(
        f"""
        class Texts(Numbered):
            def __getitem__(self, index):
                return bytes(200 << 20) if index == 2 else index

        batches = iter({kind}(Texts(9, 0), batch_size=None, num_workers=1, **FORK))
        assert [next(batches), next(batches)] == [0, 1]
        limited(150)
        try:
            next(batches)
        except (MemoryError, RuntimeError) as error:
            assert type(error) in (MemoryError, fastq_loader.WorkerDied)
        else:
            raise AssertionError("a limit that is none")
        """
    )


# ---- limits, sandboxes, no /proc --------------------------------------------------------------------

ALL_KINDS = """
data = Numbered(12, 300_000)
for loader, options in [
    (BOTH[0], {}),
    (OURS, {}),
    (OURS, {"schedule": "dynamic", "workers": fastq_loader.Processes(2)}),
    (OURS, {"multiprocessing_context": METHOD}),
]:
    kept = list(loader(data, batch_size=None, num_workers=3, **options))
    assert len(kept) == 12 and all(is_number(batch, number) for number, batch in enumerate(kept))
"""


def run_quietly(source: str, prefix: tuple[str, ...] = ()) -> None:
    """The same with warnings ignored; torch says that it misses /proc."""
    head = "from tests.support.sandbox import *\nwarnings.simplefilter('ignore')\n"
    run(head + textwrap.dedent(source), prefix=prefix, timeout=90)


def test_a_kept_batch_of_each_epoch_takes_its_own_bytes_of_address_space_and_no_descriptor() -> None:
    run_quietly(
        """
        def taken():
            ours = [line.split()[0].split("-") for line in open("/proc/self/maps") if "memfd:fastq" in line]
            mapped = sum(int(end, 16) - int(start, 16) for start, end in ours)
            return mapped, len(os.listdir("/proc/self/fd"))

        nothing, descriptors = taken()
        kept = []
        for epoch in range(8):
            loader = OURS(Numbered(4, 1_000_000), batch_size=None, num_workers=2, **FORK)
            kept += [batch for batch in loader if batch[0] == 3]
            mapped, opened = taken()
            assert mapped <= len(kept) * 1.25 * 1_000_000 and opened == descriptors, (epoch, mapped, opened)
        assert len(kept) == 8 and all(is_number(batch, 2) for batch in kept)
        kept.clear()
        assert taken() == (nothing, descriptors) == (0, descriptors)
        """
    )


@pytest.mark.parametrize("mega", [2, 40])
def test_where_files_are_limited_small_batches_come_as_ever_and_large_ones_say_why_not(mega: int) -> None:
    run_quietly(
        f"""
        resource.setrlimit(resource.RLIMIT_FSIZE, ({mega} << 20, {mega} << 20))
        for loader in BOTH:
            for nbytes in (8, 10_000, {mega} * 20_000):
                loading = loader(Numbered(40, nbytes), batch_size=None, num_workers=2)
                assert all(is_number(batch, number) for number, batch in enumerate(loading))
        try:
            list(OURS(Numbered(4, {mega} << 20), batch_size=None, num_workers=2))
        except MemoryError as error:
            assert "ulimit -f" in str(error)
        else:
            raise AssertionError("a limit that is none")
        """
    )


def test_little_memory_for_data_need_not_hold_the_stacks_of_all_workers() -> None:
    run_quietly(
        """
        used = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + (80 << 20), resource.RLIM_INFINITY))
        for loader in BOTH:
            loading = loader(Numbered(8, 10_000), batch_size=None, num_workers=4)
            assert all(is_number(batch, number) for number, batch in enumerate(loading))
        """
    )


@NEEDED
def test_calls_that_a_sandbox_may_refuse_are_done_without() -> None:
    run_quietly(f"refuse(*{optional()!r})\nMETHOD = 'fork'\n{ALL_KINDS}")


def test_without_proc_all_is_as_ever() -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    hide = 'mount -t tmpfs none /proc && exec "$@"'
    run_quietly(f"METHOD = 'spawn'\n{ALL_KINDS}", prefix=("unshare", "-m", "sh", "-c", hide, "sh"))


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
                print(list(OURS(range(3), batch_size=None, num_workers=2, **FORK)))
            except OSError as error:
                assert "the loader needs 10 threads" in str(error) and "`ulimit -u`" in str(error), error
                assert len(os.listdir("/proc/self/task")) == used
                print("refused")
        """
    result = run_script(script, env={"TMPDIR": "/tmp"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["refused"] * 8 + ["[0, 1, 2]"]
