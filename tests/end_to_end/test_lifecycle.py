"""Rows P1, P3 to P6c, P8, P10 and P11: starts, exits, signals, forks, and tight surroundings."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch

from fastq_loader import DataLoader, Processes
from tests.conftest import (
    ROOT,
    descendants,
    new_shared_memory,
    open_descriptors,
    run_script,
    running_script,
    torchs_segments_removed,
    wait_until,
)
from tests.end_to_end.test_hard_knocks_workers import DONE, contents
from tests.support import crimes
from tests.support.crimes import ManyFields, Rows, WorkerReport, load_inside
from tests.support.datasets import Made
from tests.support.forking import in_child
from tests.support.inheritance import AS_ROOT, SURROUNDINGS
from tests.support.loaders import MANY_WORKERS, PERSISTENT, Trainer, exactly, numbers
from tests.support.sandbox import mounted
from tests.support.thorough import thorough

pytestmark = [pytest.mark.processes, MANY_WORKERS]


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Changes in this process, which forked workers inherit, and others do not."""
    monkeypatch.setattr(crimes, "MARK", "changed")
    dtype, method = torch.get_default_dtype(), multiprocessing.get_start_method(allow_none=True)
    torch.set_default_dtype(torch.float64)
    with torch.no_grad():
        yield
    torch.set_default_dtype(dtype)
    multiprocessing.set_start_method(method, force=True)


INHERITED, AFRESH = (torch.float64, False, "changed"), (torch.float32, True, "as imported")


@pytest.mark.usefixtures("changed", "warm_interpreter")
@pytest.mark.parametrize(
    ("given", "everywhere", "later", "state"),
    [("fork", None, None, INHERITED), (None, "spawn", None, AFRESH), ("spawn", None, "fork", INHERITED)],
)
def test_p1_p6b_p11_the_start_method_is_read_when_iteration_starts(
    given: Any, everywhere: str | None, later: Any, state: Any, tmp_path: Path
) -> None:
    """From the argument, the global default, or the attribute that was set later.

    Workers that inherit nothing drop their dataset when they end, as in torch from 2.14 on."""
    multiprocessing.set_start_method("fork" if everywhere == "spawn" else "spawn", force=True)
    dataset = WorkerReport(path=str(path := tmp_path / "dropped"))
    loader: Any = DataLoader(dataset, num_workers=2, collate_fn=list, multiprocessing_context=given)
    if everywhere is not None:
        multiprocessing.set_start_method(everywhere, force=True)
    if later is not None:
        loader.multiprocessing_context = later
    found = [report for batch in loader for report in batch]
    assert [(report["index"], report["worker"]) for report in found] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert {(report["daemon"], report["threads"]) for report in found} == {(True, 1)}
    workers = {report["pid"] for report in found}
    assert len(workers | {os.getpid()}) == 3
    assert {(report["dtype"], report["grad"], report["mark"]) for report in found} == {state}
    assert dataset.pickled == (state is AFRESH), "once for all workers"
    if state is AFRESH:
        dropped = {f"{pid} None" for pid in workers}  # modules are there, and `get_worker_info()` is None
        assert wait_until(lambda: path.exists() and set(path.read_text().splitlines()) == dropped, 30)


#: What the scripts below begin with.
IMPORTS = """
    import atexit, gc, os, pathlib, sys, threading, time, warnings
    import fastq_loader
    from fastq_loader import DataLoader
    from fastq_loader.ipc.sockets import ConsumerSocket
    from fastq_loader.workers import stopping
    from tests.conftest import wait_until
    from tests.end_to_end.test_hard_knocks_workers import Caches
    from tests.support.crimes import CrimeAt, Rows, Slow, dawdle, slow_length
    from tests.support.datasets import Made
    from tests.support.gates import Gates, is_inside
    stopping.ORDERLY = 60  # whoever waits for that is not quick
"""
RESTARTS = "schedule=fastq_loader.Dynamic(window=2), workers=fastq_loader.Processes(max_restarts=3)"


KILLED_PARENT = f"""
    {IMPORTS}
    # Worker 0 hangs in a sample, worker 1 waits for work.
    loader = DataLoader(
        CrimeAt(dawdle, at=2), num_workers=2, prefetch_factor=1, persistent_workers=True,
        multiprocessing_context="{{method}}", {{options}}
    )
    batches = iter(loader)
    kept = [next(batches), next(batches)]
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("method", "options"),
    [("fork", ""), ("fork", RESTARTS), ("spawn", RESTARTS), ("forkserver", "")],
    ids=["fork", "fork with restarts", "spawn with restarts", "forkserver"],
)
@thorough(after=2)
def test_p3_a_killed_parent_leaves_nothing(method: str, options: str, tmp_path: Path) -> None:
    memory = set(os.listdir("/dev/shm"))

    def files() -> set[str]:
        return set(os.listdir(tmp_path))

    source = KILLED_PARENT.format(method=method, options=options)
    with running_script(source, env={"TMPDIR": str(tmp_path)}, warm=True) as script:
        script.wait_for("ready")
        assert len(script.processes()) >= 3
        os.kill(script.pid, signal.SIGKILL)
        assert wait_until(lambda: not script.processes(), 30), script.processes()
        assert wait_until(lambda: not files(), 30), files()
        assert wait_until(lambda: not new_shared_memory(memory), 30), new_shared_memory(memory)


STOPPED_PARENT = f"""
    {IMPORTS}
    loader = DataLoader(Slow(24, 0.02), batch_size=4, num_workers=2, timeout=5, {{options}})
    for number, batch in enumerate(loader):
        print("ready", batch.tolist(), flush=True)
    print("done", loader.statistics().worker_restarts)
"""


@pytest.mark.parametrize("options", [RESTARTS, ""], ids=["with restarts", "as torch"])
@thorough(after=1)
def test_p3_a_parent_that_is_stopped_for_longer_than_its_timeout_goes_on(options: str) -> None:
    with running_script(STOPPED_PARENT.format(options=options), warm=True) as script:
        script.wait_for("ready")
        os.kill(script.pid, signal.SIGSTOP)
        time.sleep(5.2)
        os.kill(script.pid, signal.SIGCONT)
        result = script.finish()
    assert (result.stderr, result.returncode, result.left) == ("", 0, ())
    assert result.stdout.count("ready") == 6
    assert result.stdout.endswith("done 0\n")


INTERRUPTED = f"""
    {IMPORTS}
    for batch in DataLoader(Slow(1000, {{sample}}), num_workers=2, {{options}}):
        print("ready", flush=True)
        time.sleep({{step}})
"""


@pytest.mark.parametrize(
    ("sample", "step", "options"),
    [
        pytest.param(0.2, 0, RESTARTS, id="while samples are loaded, with restarts"),
        pytest.param(0.2, 0, "persistent_workers=True", id="while samples are loaded"),
        pytest.param(0, 60, "", id="while workers wait"),
    ],
)
@thorough(after=1)
def test_p4_ctrl_c_shows_one_traceback(sample: float, step: float, options: str) -> None:
    source = INTERRUPTED.format(sample=sample, step=step, options=options)
    with running_script(source, warm=True) as script:
        script.wait_for("ready")
        if step:
            time.sleep(0.2)  # until the workers have nothing to do
        os.killpg(script.pid, signal.SIGINT)
        result = script.finish()
    assert result.returncode == -signal.SIGINT
    assert result.stderr.count("Traceback (most recent call last)") == 1, result.stderr
    assert result.stderr.rstrip().endswith("KeyboardInterrupt"), result.stderr
    assert result.stderr.count("KeyboardInterrupt") == 1, result.stderr
    assert result.left == ()


@thorough(after=1)
@PERSISTENT
def test_p4_the_users_handlers_are_untouched_and_work(persistent: bool) -> None:
    ends: list[int] = []
    previous = signal.signal(signal.SIGCHLD, lambda number, _frame: ends.append(number))
    try:
        watched = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)
        before = [signal.getsignal(number) for number in watched]
        with DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=persistent) as loader:
            for _ in range(2):
                for _ in exactly(4, loader):
                    assert [signal.getsignal(number) for number in watched] == before
                assert subprocess.run(["true"], check=False).returncode == 0
        assert [signal.getsignal(number) for number in watched] == before
        assert ends
    finally:
        signal.signal(signal.SIGCHLD, previous)


#: Loaders in every state, objects that are left to the end of the interpreter, a handler that was registered
#: before torch is imported (it runs after the loaders were ended), and samples that write files.
IN_EVERY_STATE = f"""
    import atexit
    atexit.register(lambda: begin())
    {IMPORTS}
    def begin():
        for restarts in (0, 2):  # "fork", as the fork server's folder is gone
            options = dict(workers=fastq_loader.Processes(restarts), multiprocessing_context="fork")
            try:
                kept.append(iter(DataLoader(range(8), num_workers=2, **options)))
                assert next(kept[-1]).item() == 0
            except RuntimeError as error:  # from Python 3.12 on, nothing can be started any more
                assert sys.version_info >= (3, 12) and "interpreter shutdown" in str(error), error

    over = DataLoader(Rows(8), num_workers=2, persistent_workers=True)
    kept = list(over)
    over.itself = over
    del over
    cycle = [DataLoader(Rows(40), num_workers=2)]
    cycle += [iter(cycle[0]), cycle]
    next(cycle[1])
    huge = iter(DataLoader(
        Made(slow_length, 1), batch_sampler=[[bytes(5_000_000)]] * 100, num_workers=2, prefetch_factor=10,
        persistent_workers=True,
    ))
    assert next(huge).tolist() == [5_000_000]
    batches = iter(DataLoader(Rows(40, 50_000), num_workers=2, persistent_workers=True))
    kept += [next(batches) for _ in range(3)]
    atexit.register(lambda: next(batches))
    caches = Caches(pathlib.Path({{folder!r}}))
    writing = [iter(DataLoader(caches, num_workers=2, persistent_workers=stays)) for stays in (True, False)]
    kept += [next(each) for each in writing * 2]
    caches.wait_for(4)
    writing.pop()
    print("end", time.monotonic(), flush=True)
    {{last}}
"""


@pytest.mark.parametrize(("last", "code"), [("1 / 0", 1), ("", 0), ("sys.exit(3)", 3)])
@thorough(after=1)
def test_p5_p6c_p8_the_end_of_a_script_is_quiet_and_quick_and_samples_are_finished(
    last: str, code: int, tmp_path: Path
) -> None:
    result = run_script(IN_EVERY_STATE.format(folder=str(tmp_path), last=last))
    assert (result.returncode, result.left) == (code, ())
    if last == "1 / 0":
        assert result.stderr.startswith("Traceback (most recent call last)")
        assert result.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
        assert result.stderr.count("\n") <= 5, result.stderr
    else:
        assert result.stderr == ""
    assert {*contents(tmp_path)} == {*DONE}
    assert result.finished - float(result.stdout.split()[-1]) < 40


INSIDE_NEXT = f"""
    {IMPORTS}
    gates = Gates(pathlib.Path({{folder!r}}))
    samples = Made(lambda index: (gates.arrive(index), time.sleep(0.5)), 40)
    slow = DataLoader(samples, num_workers=2, multiprocessing_context="fork")
    thread = threading.Thread(target=lambda: list(slow), daemon=True)
    thread.start()
    for index in (0, 1):
        gates.expect(index)
    assert wait_until(lambda: is_inside(ConsumerSocket.wait, thread), 60)
    print("end", time.monotonic(), flush=True)
"""


def test_p5_so_is_it_while_a_thread_is_inside_next(tmp_path: Path) -> None:
    result = run_script(INSIDE_NEXT.format(folder=str(tmp_path)), warm=True)
    assert (result.stderr, result.returncode, result.left) == ("", 0, ())
    assert result.finished - float(result.stdout.split()[-1]) < 40


FORKED = f"""
    {IMPORTS}
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside a thread

    def advance():
        try:
            next(batches)
        except RuntimeError:
            return
        sys.exit(9)

    def drop():
        global batches, loader, seen
        del batches, loader, seen
        gc.collect()

    def close_and_iterate():
        loader.close()
        iterate()

    def iterate():
        assert len(list(loader)) == 20

    loader = DataLoader(range(40), batch_size=2, num_workers=2, persistent_workers={{persistent}})
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(5)]
    acts = [lambda: None, drop, lambda: loader.close(), iterate, close_and_iterate, advance]
    children = []
    for act in acts:
        children.append(os.fork())
        if children[-1] == 0:
            act()
            sys.exit(0)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * len(acts)
    seen += [batch.tolist() for batch in batches]
    assert seen == [[2 * i, 2 * i + 1] for i in range(20)], seen
    assert len(list(loader)) == 20
"""


@PERSISTENT
@thorough(after=1)
def test_p6_forks_of_the_users_harm_neither_side(persistent: bool) -> None:
    """Whatever the children do with their copies; they cannot advance their parent's iterator."""
    result = run_script(FORKED.format(persistent=persistent), warm=True)
    assert (result.stderr, result.returncode, result.left) == ("", 0, ())


def workers_of(loader: DataLoader[Any]) -> set[int]:
    return {worker.pid for worker in loader.statistics().workers}


@pytest.mark.parametrize("advance", [2, 0, 8])
@thorough(after=1)
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
    assert wait_until(lambda: not descendants(), 30)
    assert wait_until(lambda: len(open_descriptors()) <= descriptors, 30)


def running() -> set[int]:
    """The processes below this one that have not ended."""
    return {pid for pid, entry in descendants().items() if not entry.zombie}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"persistent_workers": True},
        {"in_order": False, "schedule": "dynamic"},
        {"workers": Processes(max_restarts=1)},
    ],
    ids=str,
)
@thorough(after=2)
def test_p6c_workers_end_beside_the_last_step_unless_they_are_persistent(options: dict[str, Any]) -> None:
    loader = DataLoader(Rows(8), num_workers=2, **options)
    iterator = iter(loader)
    others = running() - workers_of(loader)  # a zygote, where workers are replaced
    for batch in range(len(loader)):
        next(iterator)
        if batch < len(loader) - 1:
            time.sleep(0.02)  # longer than it takes to leave
            assert workers_of(loader) <= running()
    pids = workers_of(loader)
    if loader.persistent_workers:
        time.sleep(0.05)
        others = pids
    assert wait_until(lambda: running() == others, 30)
    assert next(iterator, None) is None
    assert len(list(loader)) == len(loader)
    assert (workers_of(loader) == pids) is loader.persistent_workers


@pytest.mark.parametrize(
    ("length", "fields", "width"),
    [pytest.param(400, 50, 256, id="small tensors"), pytest.param(256, 2, 32_768, id="large tensors")],
)
@thorough(after=1)
@in_child
def test_p8_kept_batches_need_few_descriptors_and_no_dev_shm(length: int, fields: int, width: int) -> None:
    """20 MB of small tensors and 67 MB of large ones, with 128 descriptors, and with 8 MB in /dev/shm where
    another one can be mounted there."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    if mounted("/dev/shm", "size=8m"):
        assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 8 << 20
    kept: list[Any] = list(DataLoader(ManyFields(length, fields, width), batch_size=4, num_workers=2))
    assert len(kept) == length // 4
    for number, batch in enumerate(kept):
        for at in range(fields):
            field = batch[f"field{at}"]
            assert field.shape == (4, width)
            assert field[:, 0].tolist() == field[:, -1].tolist() == [4 * number + i + at for i in range(4)]


def _rank(rank: int, answers: Any) -> None:
    loader = DataLoader(range(100 * rank, 100 * rank + 40), batch_size=4, num_workers=2)
    answers.put([torch.cat(list(loader)).tolist() for _ in range(2)])


def test_p10_ranks_side_by_side() -> None:
    context = multiprocessing.get_context("fork")
    answers = [context.SimpleQueue() for _ in range(2)]
    ranks = [context.Process(target=_rank, args=each) for each in enumerate(answers)]
    for process in ranks:
        process.start()
    for rank, (process, answer) in enumerate(zip(ranks, answers, strict=True)):
        assert answer.get() == [list(range(100 * rank, 100 * rank + 40))] * 2
        answer.close()
        process.join(60)
        assert process.exitcode == 0
        process.close()


def test_p10_a_loader_inside_a_worker_loads_and_may_have_no_workers_as_in_torch() -> None:
    assert numbers(DataLoader(Made(partial(load_inside, 0), 4), num_workers=2)) == [[0], [1], [3], [6]]
    with pytest.raises(AssertionError, match="daemonic processes are not allowed to have children"):
        list(DataLoader(Made(partial(load_inside, 1), 4), num_workers=1))


@pytest.mark.parametrize(
    ("kind", "method", "options"),
    [
        (DataLoader, "fork", {"persistent_workers": True}),
        (torch.utils.data.DataLoader, "fork", {"persistent_workers": True}),
        (DataLoader, "fork", {"workers": Processes(max_restarts=1), "schedule": "dynamic"}),
    ],
)
@thorough(after=1)
def test_p6c_workers_of_a_loader_in_a_cycle_end_when_the_collector_runs(
    kind: Any, method: str, options: dict[str, Any]
) -> None:
    resource_tracker.ensure_running()  # which stays
    before = running()
    with torchs_segments_removed():
        trainer = Trainer(kind, multiprocessing_context=method, **options)
        watched = weakref.ref(trainer)
        assert len(running() - before) >= 2
        del trainer
        gc.collect()
        assert watched() is None
        assert wait_until(lambda: running() == before, 30), running() - before


#: Its workers do not import it: another user may not read it.
LOWERS_ITS_RIGHTS = """
    import os, sys, __main__
    from torch.utils.data import DataLoader as Torchs
    from fastq_loader import DataLoader
    from tests.support.inheritance import RIGHTS, SURROUNDINGS, Inherited
    del __main__.__file__
    method, *changes = {changes!r}
    options = dict(num_workers=1, collate_fn=list, multiprocessing_context=method)
    loader = DataLoader(Inherited(), **options)
    [[before]] = list(loader)
    for name in changes:
        (SURROUNDINGS | RIGHTS)[name]()
    [[after]] = list(loader)
    [[torchs]] = list(Torchs(Inherited(), **options))
    assert after["ids"] == (os.getresuid(), os.getresgid(), os.getgroups()), after
    assert after != before
    assert method == "forkserver" or after == torchs, (after, torchs)
"""
ANOTHER = "user, groups and capabilities"


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        pytest.param("spawn", [*SURROUNDINGS], id="surroundings"),
        pytest.param("spawn", [*SURROUNDINGS, ANOTHER], id="all", marks=AS_ROOT),
        pytest.param("forkserver", [ANOTHER], id="under forkserver", marks=AS_ROOT),
        *(pytest.param("spawn", [one], id=one, marks=AS_ROOT) for one in ("group id", "groups", "namespace")),
    ],
)
@thorough(after=1)
def test_p1_workers_inherit_what_the_program_has_then_also_as_root(method: str, changes: list[str]) -> None:
    source = LOWERS_ITS_RIGHTS.format(changes=[method, *changes])
    result = run_script(source, env={"TMPDIR": "/tmp"}, warm=True)
    assert (result.stdout, result.stderr, result.returncode, result.left) == ("", "", 0, ())


#: A program that iterates while the interpreters that it starts take a minute to import.
KILLED_MEANWHILE = """
import multiprocessing, os, sys
from fastq_loader import DataLoader
if __name__ == "__main__":
    os.set_inheritable(1, True)
    print("begins", flush=True)
    list(DataLoader(range(4), num_workers=1, multiprocessing_context="spawn"))
"""
SLOW_TO_IMPORT = """
import os, sys, time
if "multiprocessing.spawn" in " ".join(sys.orig_argv):
    open(os.environ["IMPORTING"], "w").close()
    time.sleep(60)
    print("written afterwards")
"""


def test_p3_a_program_that_is_killed_while_its_workers_interpreter_imports_lets_go_of_its_output(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_TO_IMPORT)
    (tmp_path / "program.py").write_text(KILLED_MEANWHILE)
    path = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "IMPORTING": str(tmp_path / "importing"),
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, str(tmp_path / "program.py")]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as program:
        assert wait_until((tmp_path / "importing").exists, 120)
        program.kill()
        killed = time.monotonic()
        assert program.stdout is not None
        assert program.stdout.read() == b"begins\n", "it ends when all who hold it are gone"
        assert time.monotonic() - killed < 30


#: A `sitecustomize`: each process registers handlers when it starts, and each worker does so later.
HANDLERS = """
import atexit, os, pathlib, weakref
class Registers:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        register("in a worker")
        return index
kept = Registers()
def register(when):
    atexit.register(note, f"handler {when}", os.getpid())
    weakref.finalize(kept, note, f"finalizer {when}", os.getpid())
def note(text, by):
    with pathlib.Path(os.environ["NOTES"]).open("a") as notes:
        print(text if by == os.getpid() else f"{text}, of another process", file=notes)
register("at the start")
"""
REGISTERS = """
    import sitecustomize
    from fastq_loader import DataLoader
    list(DataLoader(sitecustomize.Registers(), num_workers=2, multiprocessing_context="spawn"))
"""


def test_p7_exit_handlers_run_in_the_process_that_registered_them(tmp_path: Path) -> None:
    """Not in the children of an interpreter that had registered them when it began to fork."""
    (tmp_path / "sitecustomize.py").write_text(HANDLERS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    notes = tmp_path / "notes"
    result = run_script(REGISTERS, env={"PYTHONPATH": path, "NOTES": str(notes)})
    assert (result.stdout, result.stderr, result.returncode, result.left) == ("", "", 0, ())
    found = notes.read_text().splitlines()
    assert "of another process" not in notes.read_text()
    assert [found.count(f"{kind} in a worker") for kind in ("handler", "finalizer")] == [2, 2]
