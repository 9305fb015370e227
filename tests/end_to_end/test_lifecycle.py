"""Rows P1, P3 to P6c and P8 to P11: starts, exits, signals, forks, and tight surroundings."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from fastq_loader import DataLoader, Processes
from fastq_loader.workers import payload
from tests.conftest import (
    descendants,
    new_shared_memory,
    open_descriptors,
    run_script,
    running_script,
    wait_until,
)
from tests.support import crimes
from tests.support.crimes import CountsPickling, LoaderInside, Rows, WorkerReport


def numbers(batches: Iterable[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def reports(loader: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [report for batch in loader for report in batch]


MORE_THAN_CORES = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
EIGHT = [[0, 1], [2, 3], [4, 5], [6, 7]]


# P1: start methods


@pytest.mark.processes
@pytest.mark.parametrize(
    "context",
    [
        "fork",
        "spawn",
        "forkserver",
        pytest.param(multiprocessing.get_context("fork"), id="a context"),
        pytest.param(torch.multiprocessing.get_context("fork"), id="a context of torch"),
    ],
)
def test_p1_start_methods(context: Any) -> None:
    loader = DataLoader(WorkerReport(), num_workers=2, collate_fn=list, multiprocessing_context=context)
    found = reports(loader)
    assert [report["index"] for report in found] == [0, 1, 2, 3]
    assert [report["worker"] for report in found] == [0, 1, 0, 1]
    assert all(report["daemon"] for report in found)
    assert {report["threads"] for report in found} == {1}
    pids = {report["pid"] for report in found}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert torch.get_num_threads() > 0


# P3: a parent that is killed

KILLED_PARENT = """
    import time
    import fastq_loader
    from fastq_loader import DataLoader
    from tests.support.crimes import CrimeAt, dawdle

    # Worker 0 hangs in a sample, worker 1 waits for work.
    loader = DataLoader(
        CrimeAt(dawdle, at=2), num_workers=2, prefetch_factor=1, persistent_workers=True,
        multiprocessing_context="{method}", {options}
    )
    batches = iter(loader)
    kept = [next(batches), next(batches)]
    print("ready", flush=True)
    time.sleep(60)
"""


RESTARTS = "schedule=fastq_loader.Dynamic(window=2), workers=fastq_loader.Processes(max_restarts=3)"


@pytest.mark.processes
@pytest.mark.parametrize("options", ["", RESTARTS], ids=["as torch", "with restarts"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_p3_a_killed_parent_leaves_nothing_after_a_second(method: str, options: str, tmp_path: Path) -> None:
    memory = set(os.listdir("/dev/shm"))

    def files() -> set[str]:
        # A killed program cannot remove the folder of multiprocessing's own fork server ("pymp-…").
        return {name for name in os.listdir(tmp_path) if not name.startswith("pymp-")}

    with running_script(
        KILLED_PARENT.format(method=method, options=options), env={"TMPDIR": str(tmp_path)}
    ) as script:
        script.wait_for("ready")
        assert len(script.processes()) >= 3
        os.kill(script.pid, signal.SIGKILL)
        assert wait_until(lambda: not script.processes(), 1), script.processes()
        assert wait_until(lambda: not files(), 1), files()
        assert wait_until(lambda: not new_shared_memory(memory), 1), new_shared_memory(memory)


STOPPED_PARENT = """
    import time
    import fastq_loader
    from fastq_loader import DataLoader
    from tests.support.crimes import Slow

    loader = DataLoader(Slow(60, 0.05), batch_size=4, num_workers=2, timeout=1, {options})
    for number, batch in enumerate(loader):
        print("ready", batch.tolist(), flush=True)
    print("done", loader.statistics().worker_restarts)
"""


@pytest.mark.processes
@pytest.mark.parametrize("options", ["", RESTARTS], ids=["as torch", "with restarts"])
def test_p3_a_parent_that_is_stopped_and_continued_goes_on(options: str) -> None:
    """For longer than its timeout: that is not its workers' fault."""
    with running_script(STOPPED_PARENT.format(options=options)) as script:
        script.wait_for("ready")
        os.kill(script.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(script.pid, signal.SIGCONT)
        result = script.finish()
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ready") == 15
    assert result.stdout.endswith("done 0\n")
    assert result.left == ()


# P4: signals

INTERRUPTED = """
    import time
    import fastq_loader
    from fastq_loader import DataLoader
    from tests.support.crimes import Slow

    loader = DataLoader(
        Slow(1000, {sample}), num_workers=2, persistent_workers={persistent}, {options}
    )
    for batch in loader:
        print("ready", flush=True)
        time.sleep({step})
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sample", "step", "persistent"),
    [
        pytest.param(0.4, 0, True, id="while samples are loaded"),
        pytest.param(0, 60, False, id="while workers wait"),
    ],
)
@pytest.mark.parametrize("options", ["", RESTARTS], ids=["as torch", "with restarts"])
def test_p4_ctrl_c_shows_one_traceback(sample: float, step: float, persistent: bool, options: str) -> None:
    source = INTERRUPTED.format(sample=sample, step=step, persistent=persistent, options=options)
    with running_script(source) as script:
        script.wait_for("ready")
        time.sleep(0.3)
        os.killpg(script.pid, signal.SIGINT)
        result = script.finish(timeout=10)
    assert result.returncode == -signal.SIGINT
    assert result.stderr.count("Traceback (most recent call last)") == 1, result.stderr
    assert result.stderr.rstrip().endswith("KeyboardInterrupt"), result.stderr
    assert result.stderr.count("KeyboardInterrupt") == 1, result.stderr
    assert result.left == ()


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_p4_signal_handlers_are_untouched(persistent: bool) -> None:
    watched = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in watched]
    with DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=persistent) as loader:
        for _ in loader:
            assert [signal.getsignal(number) for number in watched] == before
    assert [signal.getsignal(number) for number in watched] == before


@pytest.mark.processes
def test_p4_a_handler_of_the_users_sees_no_trouble() -> None:
    """A program that counts its own children's ends is not disturbed, and does not disturb."""
    ends: list[int] = []
    previous = signal.signal(signal.SIGCHLD, lambda number, _frame: ends.append(number))
    try:
        loader = DataLoader(range(8), batch_size=2, num_workers=2)
        assert numbers(loader) == EIGHT
        assert subprocess.run(["true"], check=False).returncode == 0
        assert numbers(loader) == EIGHT
    finally:
        signal.signal(signal.SIGCHLD, previous)


@pytest.mark.processes
def test_p4_the_users_sigterm_handler_runs_in_no_worker() -> None:
    """A handler that saves a checkpoint must not do so in a worker that is stopped in a long sample."""
    result = run_script(
        """
        import os, signal, time
        from fastq_loader import DataLoader
        from tests.support.crimes import CrimeAt, dawdle

        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"checkpoint saved\\n"))
        loader = DataLoader(CrimeAt(dawdle, at=1), num_workers=2)
        assert next(iter(loader)).tolist() == [0]
        loader.close()
        os.kill(os.getpid(), signal.SIGTERM)
        """
    )
    assert result.stderr == "", result.stderr
    assert result.stdout == "checkpoint saved\n", "once, in the parent"
    assert result.left == ()


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_p4_the_loader_works_outside_the_main_thread(persistent: bool) -> None:
    found: list[list[list[int]]] = []

    def work() -> None:
        with DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=persistent) as loader:
            found.extend(numbers(loader) for _ in range(2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert found == [EIGHT, EIGHT]


# P5: exits

LOADER = """
    import atexit, sys, threading, time
    from fastq_loader import DataLoader
    from tests.support.crimes import Rows, Slow

    loader = DataLoader(Rows(40, 50_000), num_workers=2, persistent_workers=True)
    batches = iter(loader)
    kept = [next(batches) for _ in range(3)]
"""

ENDINGS = {
    "in the middle of an epoch": "",
    "after an epoch": "kept += batches",
    "never advanced": "other = iter(DataLoader(Rows(4), num_workers=2))",
    "not persistent": "other = iter(DataLoader(Rows(40), num_workers=2)); next(other)",
    "a cycle": "loader.itself = loader; cycle = [batches]; cycle.append(cycle); del loader, batches",
    "while samples are loaded": "other = iter(DataLoader(Slow(40, 0.5), num_workers=2)); next(other)",
    "a thread inside next": (
        "other = DataLoader(Slow(40, 0.5), num_workers=2); "
        "threading.Thread(target=lambda: list(other), daemon=True).start(); time.sleep(0.3)"
    ),
    "after an exit handler": "atexit.register(lambda: next(batches))",
}

LAST_WORD = """
    print("end", time.monotonic(), flush=True)
"""


def ending(source: str, last: str = "") -> tuple[Any, float]:
    """Run the script that makes a loader and goes on with `source`; how it ended, and how long that took."""
    lines = [
        LOADER.rstrip(),
        *(f"    {line}" for line in source.splitlines()),
        LAST_WORD.rstrip(),
        f"    {last}",
    ]
    result = run_script("\n".join(lines))
    return result, result.finished - float(result.stdout.split()[-1])


CLOSES_LATE = """
    import atexit, threading, time
    atexit.register(lambda: loader.close())  # before ours: it runs after the loaders were ended
    from fastq_loader import DataLoader
    from tests.support.crimes import Slow

    loader = DataLoader(Slow(40, 0.5), num_workers=2)
    threading.Thread(target=lambda: list(loader), daemon=True).start()
    time.sleep(0.3)
    print("end", time.monotonic(), flush=True)
"""


@pytest.mark.processes
def test_p5_an_exit_handler_may_close_what_a_daemon_thread_is_inside_of() -> None:
    result = run_script(CLOSES_LATE)
    assert (result.stderr, result.returncode) == ("", 0)
    assert result.finished - float(result.stdout.split()[-1]) < 2


@pytest.mark.processes
@pytest.mark.parametrize("how", ENDINGS)
def test_p5_the_end_of_a_script_is_quiet_and_quick(how: str) -> None:
    result, seconds = ending(ENDINGS[how])
    assert result.stderr == "", result.stderr
    assert result.returncode == 0
    assert seconds < 2
    assert result.left == ()


@pytest.mark.processes
def test_p5_sys_exit_is_quiet_and_quick() -> None:
    result, seconds = ending("", "sys.exit(3)")
    assert result.stderr == "", result.stderr
    assert result.returncode == 3
    assert seconds < 2
    assert result.left == ()


@pytest.mark.processes
def test_p5_an_unhandled_exception_is_all_that_is_shown() -> None:
    result, seconds = ending("", "1 / 0")
    assert result.stderr.startswith("Traceback (most recent call last)")
    assert result.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    assert result.stderr.count("\n") <= 5, result.stderr
    assert result.returncode == 1
    assert seconds < 2
    assert result.left == ()


# P6: forks of the user's


FORKED = """
    import gc, os, sys, warnings
    from fastq_loader import DataLoader

    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside a thread
    loader = DataLoader(range(40), batch_size=2, num_workers=2, persistent_workers={persistent})
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(5)]
    child = os.fork()
    if child == 0:
        {act}
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen += [batch.tolist() for batch in batches]
    assert seen == [[2 * i, 2 * i + 1] for i in range(20)], seen
    assert len(list(loader)) == 20
    print("child", status, flush=True)
"""

IN_THE_CHILD = {
    "exits": "",
    "drops everything": "del batches, loader, seen; gc.collect()",
    "closes": "loader.close()",
    "iterates anew": "assert len(list(loader)) == 20",
    "closes and iterates": "loader.close(); assert len(list(loader)) == 20",
}


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("what", IN_THE_CHILD)
def test_p6_a_fork_of_the_users_harms_neither_side(what: str, persistent: bool) -> None:
    result = run_script(FORKED.format(act=IN_THE_CHILD[what], persistent=persistent))
    assert result.stderr == "", result.stderr
    assert result.stdout == "child 0\n"
    assert result.returncode == 0
    assert result.left == ()


@pytest.mark.processes
def test_p6_a_forked_child_cannot_advance_its_parents_iterator() -> None:
    act = """try:
            next(batches)
        except RuntimeError:
            sys.exit(0)
        sys.exit(9)"""
    result = run_script(FORKED.format(act=act, persistent=False))
    assert result.stderr == "", result.stderr
    assert result.stdout == "child 0\n"


# P6b: when the start method is read


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A change in this process, which a forked worker sees and a spawned one does not."""
    monkeypatch.setattr(crimes, "MARK", "changed")
    method = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(method, force=True)


@pytest.mark.processes
@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize(("method", "mark"), [("spawn", "as imported"), ("fork", "changed")])
def test_p6b_the_global_start_method_is_read_when_iteration_starts(method: str, mark: str) -> None:
    other = "fork" if method == "spawn" else "spawn"
    multiprocessing.set_start_method(other, force=True)
    loader = DataLoader(WorkerReport(), num_workers=1, collate_fn=list)
    multiprocessing.set_start_method(method, force=True)
    assert {report["mark"] for report in reports(loader)} == {mark}


@pytest.mark.processes
@pytest.mark.usefixtures("marked")
@pytest.mark.parametrize("as_object", [False, True])
def test_p6b_the_attribute_is_read_when_iteration_starts(as_object: bool) -> None:
    loader = DataLoader(WorkerReport(), num_workers=1, collate_fn=list, multiprocessing_context="spawn")
    loader.multiprocessing_context = multiprocessing.get_context("fork") if as_object else "fork"
    assert {report["mark"] for report in reports(loader)} == {"changed"}


# P6c: what persistent workers cost, and what dropping them gives back


@pytest.mark.processes
@pytest.mark.parametrize(("method", "times"), [("fork", 0), ("spawn", 1)])
def test_p6c_the_dataset_is_sent_once(method: str, times: int) -> None:
    dataset = CountsPickling()
    with DataLoader(
        dataset, num_workers=1, persistent_workers=True, multiprocessing_context=method
    ) as loader:
        for _ in range(3):
            assert numbers(loader) == [[0], [1], [2], [3]]
            assert dataset.pickled == times


@pytest.mark.processes
@MORE_THAN_CORES
def test_p6c_the_dataset_is_pickled_once_for_all_workers() -> None:
    dataset = CountsPickling()
    loader = DataLoader(dataset, num_workers=3, multiprocessing_context="spawn")
    assert numbers(loader) == [[0], [1], [2], [3]]
    assert dataset.pickled == 1
    assert numbers(loader) == [[0], [1], [2], [3]]
    assert dataset.pickled == 2, "workers of another iteration see the dataset as it is then"


class Shared(torch.utils.data.Dataset[tuple[int, float, bool]]):
    """What goes to a spawned worker as descriptors: a tensor and a view of it; and a plain attribute."""

    def __init__(self) -> None:
        self.tensor = torch.arange(100.0)
        self.view = self.tensor[10:]
        self.tag = 1

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[int, float, bool]:
        self.tensor[10 + index] = -1.0
        return self.tag, self.view[index].item(), self.tensor.is_shared()


@pytest.mark.processes
@MORE_THAN_CORES
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_p6c_workers_that_start_late_see_the_dataset_as_it_was(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(payload, "get_sharing_strategy", lambda: strategy)
    dataset = Shared()
    loader = DataLoader(dataset, num_workers=3, collate_fn=list, multiprocessing_context="spawn")
    batches = iter(loader)
    # What torch counts for each worker is pickled for each, and then none may start late.
    assert len(multiprocessing.active_children()) == (1 if strategy == "file_descriptor" else 3)
    dataset.tag = 2
    tensor, dataset.tensor, dataset.view = dataset.tensor, torch.zeros(1), torch.zeros(1)
    assert [batch for batch in batches] == [[(1, -1.0, True)]] * 6  # noqa: C416 - until it is exhausted
    assert tensor[10:16].tolist() == [-1.0] * 6, "the tensor is shared with the workers, as in torch"


@pytest.mark.processes
@MORE_THAN_CORES
def test_p1_spawned_workers_start_one_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with DataLoader(
        WorkerReport(),
        num_workers=3,
        collate_fn=list,
        multiprocessing_context="spawn",
        persistent_workers=True,
    ) as loader:
        batches = iter(loader)
        assert [bool(worker.pid) for worker in loader.statistics().workers] == [True, False, False]
        assert len(multiprocessing.active_children()) == 1
        found = reports(batches)
        assert [report["worker"] for report in found] == [at % 3 for at in range(len(found))]
        assert len(multiprocessing.active_children()) == 3
        pids = [worker.pid for worker in loader.statistics().workers]
        assert [report["pid"] for report in found[:3]] == pids


@pytest.mark.processes
@MORE_THAN_CORES
@pytest.mark.parametrize("batches", [0, 1])
def test_p1_a_loader_can_be_closed_before_all_its_workers_were_started(
    batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    loader = DataLoader(Rows(8), num_workers=4, multiprocessing_context="spawn")
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    assert len(multiprocessing.active_children()) == 1 + batches
    loader.close()
    assert not multiprocessing.active_children()


@pytest.mark.processes
@pytest.mark.parametrize("advance", [0, 2, 8])
def test_p6c_dropping_a_loader_frees_everything(advance: int) -> None:
    descriptors = len(open_descriptors())
    dataset = Rows(8)
    loader = DataLoader(dataset, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    for _ in range(advance):
        next(iterator)
    watched = [weakref.ref(thing) for thing in (dataset, loader, iterator)]
    del dataset, loader, iterator
    gc.collect()
    assert [reference() for reference in watched] == [None, None, None]
    assert wait_until(lambda: not descendants(), 3)
    assert wait_until(lambda: len(open_descriptors()) <= descriptors, 3)


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"in_order": False},
        {"schedule": "dynamic"},
        {"workers": Processes(max_restarts=1)},
        {"batch_sampler": [[0, 1], [2], [3, 4, 5], [6, 7]]},
        {"sampler": [0] * 7, "batch_size": 2, "prefetch_factor": 8},
        {"multiprocessing_context": "spawn"},
    ],
    ids=str,
)
def test_p6c_workers_end_beside_the_last_step(options: dict[str, Any]) -> None:
    loader = DataLoader(Rows(8), num_workers=2, **options)
    iterator = iter(loader)
    others = running() - workers_of(loader)  # a zygote, where workers are replaced
    for batch in range(len(loader)):
        next(iterator)
        if batch < len(loader) - 1:
            time.sleep(0.05)  # longer than it takes to leave
            assert workers_of(loader) <= running()
    assert wait_until(lambda: running() == others, 5)
    assert next(iterator, None) is None
    assert len(list(loader)) == len(loader)


@pytest.mark.processes
def test_p6c_persistent_workers_outlive_the_last_step() -> None:
    loader = DataLoader(Rows(8), num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    for _ in range(8):
        next(iterator)
    time.sleep(0.05)
    assert workers_of(loader) == running()
    assert next(iterator, None) is None
    pids = workers_of(loader)
    assert len(list(loader)) == 8
    assert workers_of(loader) == pids == running()


def workers_of(loader: DataLoader[Any]) -> set[int]:
    return {worker.pid for worker in loader.statistics().workers}


def running() -> set[int]:
    """The processes below this one that have not ended."""
    return {pid for pid, entry in descendants().items() if not entry.zombie}


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_p6c_a_process_exits_with_huge_indices_in_flight(persistent: bool) -> None:
    result = run_script(
        f"""
        import time
        from fastq_loader import DataLoader
        from tests.support.crimes import HugeIndices, SlowLengthOf

        loader = DataLoader(
            SlowLengthOf(), batch_sampler=HugeIndices(100, 5_000_000), num_workers=2, prefetch_factor=10,
            persistent_workers={persistent},
        )
        batches = iter(loader)
        assert next(batches).tolist() == [5_000_000]
        print("end", time.monotonic(), flush=True)
        """
    )
    assert result.stderr == "", result.stderr
    assert result.returncode == 0
    assert result.finished - float(result.stdout.split()[-1]) < 3
    assert result.left == ()


# P8, P9: little memory, few descriptors, long paths


@functools.cache
def private_mounts() -> tuple[str, ...] | None:
    """A command that runs another with mounts of its own, or None where that is not permitted."""
    for command in (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")):
        if shutil.which("unshare") is None:
            return None
        probe = [*command, "mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", "/dev/shm"]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return command
    return None


KEEP = """
    import os, resource
    from fastq_loader import DataLoader
    from tests.support.crimes import ManyFields

    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    {check}
    loader = DataLoader(ManyFields({length}, {fields}, {width}), batch_size=4, num_workers=2)
    kept = list(loader)
    assert len(kept) == {length} // 4
    for number, batch in enumerate(kept):
        for j in range({fields}):
            field = batch[f"field{{j}}"]
            assert field.shape == (4, {width})
            assert field[:, 0].tolist() == [4 * number + i + j for i in range(4)]
            assert field[:, -1].tolist() == [4 * number + i + j for i in range(4)]
    print("kept", len(kept))
"""


@pytest.mark.processes
def test_p8_many_kept_batches_need_few_descriptors() -> None:
    result = run_script(KEEP.format(check="", length=1600, fields=50, width=8), timeout=60)
    assert result.stderr == "", result.stderr
    assert result.stdout == "kept 400\n"
    assert result.left == ()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("length", "fields", "width"),
    [pytest.param(1600, 50, 64, id="small tensors"), pytest.param(256, 2, 32_768, id="large tensors")],
)
def test_p8_kept_batches_fit_beside_a_small_dev_shm(length: int, fields: int, width: int) -> None:
    """20 MB of small tensors and 67 MB of large ones, with 8 MB in /dev/shm and 128 descriptors."""
    unshare = private_mounts()
    if unshare is None:
        pytest.skip("no private mount namespace is permitted here (needs root or user namespaces)")
    mount = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"'
    check = 'assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 8 << 20'
    source = KEEP.format(check=check, length=length, fields=fields, width=width)
    result = run_script(source, timeout=60, prefix=[*unshare, "sh", "-c", mount, "sh"])
    assert result.stderr == "", result.stderr
    assert result.stdout == f"kept {length // 4}\n"
    assert result.left == ()


@pytest.mark.processes
def test_p9_a_long_temp_folder_works(tmp_path: Path) -> None:
    folder = tmp_path / ("t" * max(1, 150 - len(str(tmp_path)) - 1))
    folder.mkdir()
    assert len(str(folder)) >= 150
    result = run_script(
        """
        from fastq_loader import DataLoader
        from tests.support.crimes import Rows

        with DataLoader(Rows(40, 50_000), batch_size=2, num_workers=2, persistent_workers=True) as loader:
            for _ in range(2):
                assert [batch[0, 0].item() for batch in loader] == list(range(0, 40, 2))
        print("done")
        """,
        env={"TMPDIR": str(folder)},
    )
    assert result.stderr == "", result.stderr
    assert result.stdout == "done\n"
    assert os.listdir(folder) == []


# P10: several loaders at once


def _rank(rank: int, answers: Any) -> None:
    torch.manual_seed(0)
    loader = DataLoader(range(100 * rank, 100 * rank + 40), batch_size=4, num_workers=2)
    answers.put((rank, [torch.cat(list(loader)).tolist() for _ in range(3)]))


@pytest.mark.processes
def test_p10_ranks_side_by_side() -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, answers)) for rank in range(3)]
    for process in ranks:
        process.start()
    found = dict(answers.get() for _ in ranks)
    for process in ranks:
        process.join(10)
        assert process.exitcode == 0
        process.close()
    answers.close()
    assert found == {rank: [list(range(100 * rank, 100 * rank + 40))] * 3 for rank in range(3)}


@pytest.mark.processes
def test_p10_a_loader_inside_a_worker() -> None:
    assert numbers(DataLoader(LoaderInside(0), num_workers=2)) == [[0], [1], [3], [6]]


@pytest.mark.processes
def test_p10_a_loader_with_workers_inside_a_worker_is_refused_as_by_torch() -> None:
    with pytest.raises(AssertionError, match="daemonic processes are not allowed to have children"):
        list(DataLoader(LoaderInside(1), num_workers=1))


@pytest.mark.processes
def test_p10_a_loop_inside_a_loop() -> None:
    outer, inner = (DataLoader(range(4), num_workers=2, persistent_workers=keep) for keep in (False, True))
    with inner:
        assert [(a.item(), b.item()) for a in outer for b in inner] == [
            (a, b) for a in range(4) for b in range(4)
        ]


@pytest.mark.processes
def test_p10_two_loaders_in_threads() -> None:
    found: dict[int, list[list[list[int]]]] = {}

    def work(start: int) -> None:
        loader = DataLoader(range(start, start + 40), batch_size=2, num_workers=2)
        found[start] = [numbers(loader) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {
        start: [[[start + 2 * i, start + 2 * i + 1] for i in range(20)]] * 5 for start in (0, 1000)
    }


# P11: inherited state


@pytest.fixture
def unusual_state() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with torch.no_grad():
        yield
    torch.set_default_dtype(dtype)


def state_in(loader: Callable[..., Any], method: str) -> set[tuple[Any, ...]]:
    found = loader(WorkerReport(), num_workers=2, collate_fn=list, multiprocessing_context=method)
    return {(report["dtype"], report["grad"]) for report in reports(found)}


@pytest.mark.processes
@pytest.mark.usefixtures("unusual_state")
def test_p11_forked_workers_inherit_the_default_dtype_and_the_grad_mode() -> None:
    expected = state_in(TorchDataLoader, "fork")
    assert expected == {(torch.float64, False)}
    assert state_in(DataLoader, "fork") == expected


@pytest.mark.processes
@pytest.mark.usefixtures("unusual_state")
def test_p11_spawned_workers_start_afresh() -> None:
    assert state_in(DataLoader, "spawn") == {(torch.float32, True)}
