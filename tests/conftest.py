"""What every test may use: a check that nothing is left behind, and scripts run as processes of their own.

A test marked `processes` fails when it leaves more children, descriptors, threads or files than it found. All
of it is read from /proc, so that what the interpreter does not know about (a worker's child, a thread of
ZeroMQ, a zombie) counts as well.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from warnings import WarningMessage

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.support import thorough
from tests.support.script_server import SERVER, WarmProcess

# A commit is judged by the same examples every time. New ones are looked for on purpose, as long as one
# likes: pytest --hypothesis-profile=search --hypothesis-seed=N.
# None has a deadline: a busy machine is no defect.
slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", slow, derandomize=True)
settings.register_profile("search", slow, derandomize=False, print_blob=True)
# For a mutation run: a mutant is dead with the first failure, however large its example.
settings.register_profile("mutation", slow, derandomize=True, phases=(Phase.explicit, Phase.generate))
settings.load_profile("repeatable")

# A shell that starts the tests in the background lets them ignore Ctrl-C, and their scripts inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
SETTLE_SECONDS = 30.0  # a limit: what is left settles in milliseconds on an idle machine
SCRIPT_SECONDS = 180.0  # a limit, too: most scripts take a second or two
LEFT_SECONDS = 30.0  # a limit, too: then the processes that a script left are killed


def _read(path: str) -> str:
    """A file of /proc; nothing where the process is gone, or not ours to look into."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


class ProcessEntry(NamedTuple):
    """One line of the process table."""

    pid: int
    name: str
    state: str
    parent: int
    session: int

    def __str__(self) -> str:
        return f"{self.pid} {self.name}{' (zombie)' if self.zombie else ''}"

    @property
    def zombie(self) -> bool:
        return self.state == "Z"


def process_table() -> list[ProcessEntry]:
    """Every process that this one can see."""
    entries = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # The name stands in parentheses and may hold spaces and parentheses itself.
        head, _, tail = _read(f"/proc/{pid}/stat").rpartition(")")
        if tail:
            state, parent, _group, session = tail.split()[:4]
            name = head.partition("(")[2]
            entries.append(ProcessEntry(int(pid), name, state, int(parent), int(session)))
    return entries


def _is_helper(entry: ProcessEntry) -> bool:
    """Whether this lives as long as the program: multiprocessing's resource tracker and fork server, the
    server of scripts, and what forks far workers."""
    if entry.pid in (SERVER.pid, *_forks_far_workers):
        return True
    own, parents = (_read(f"/proc/{pid}/cmdline") for pid in (entry.pid, entry.parent))
    # A worker forked by the fork server has the fork server's command line, and the fork server for a parent.
    server = "multiprocessing.forkserver import"
    return "multiprocessing.resource_tracker import" in own or (server in own and server not in parents)


def _children(pid: int) -> list[int]:
    """The children of a process, zombies too: much quicker than the process table."""
    tasks = os.listdir(f"/proc/{pid}/task") if os.path.exists(f"/proc/{pid}/task") else []
    return [int(child) for task in tasks for child in _read(f"/proc/{pid}/task/{task}/children").split()]


def _has_only_helpers() -> bool:
    """Whether all children are helpers without children of their own. False if the kernel does not say."""
    if not os.path.exists("/proc/thread-self/children"):
        return False
    known = {SERVER.pid, *_forks_far_workers, resource_tracker._resource_tracker._pid}
    known.add(forkserver._forkserver._forkserver_pid)
    # Twice, as the list may lack one where another ends while it is read.
    for children in (set(_children(os.getpid())) for _ in range(2)):
        if not children <= known or any(map(_children, children)):
            return False
    return True


def descendants(root: int | None = None) -> dict[int, ProcessEntry]:
    """Children of `root` (default: this process) and theirs, zombies too, without helpers (see above)."""
    if root is None and _has_only_helpers():
        return {}
    children: dict[int, list[ProcessEntry]] = {}
    for entry in process_table():
        children.setdefault(entry.parent, []).append(entry)
    found: list[ProcessEntry] = []
    pending = [os.getpid() if root is None else root]
    while pending:
        found += (new := children.get(pending.pop(), []))
        pending += (entry.pid for entry in new)
    return {entry.pid: entry for entry in found if not _is_helper(entry)}


def open_descriptors() -> dict[int, str]:
    """Descriptor → what it points at, without those that lead to helpers (see above)."""
    helpers = {
        SERVER.descriptor,
        getattr(resource_tracker._resource_tracker, "_fd", None),
        getattr(forkserver._forkserver, "_forkserver_alive_fd", None),
    }
    found: dict[int, str] = {}
    for fd in set(map(int, os.listdir("/proc/self/fd"))) - helpers:
        with suppress(FileNotFoundError):  # the listing's own descriptor
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def live_threads() -> set[str]:
    """Python's threads, and ZeroMQ's, which Python does not list."""
    names = {task: _read(f"/proc/self/task/{task}/comm").strip() for task in os.listdir("/proc/self/task")}
    found = {f"{name} ({task})" for task, name in names.items() if name.startswith("ZMQ")}
    return found | {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}


def held_memory() -> int:
    """Bytes of memory that this process and its children hold; a shared page is counted once. Without pages
    of files: our share of torch's grows when a stranger ends."""
    rollups = "".join(_read(f"/proc/{pid}/smaps_rollup") for pid in (os.getpid(), *descendants()))
    return 1024 * sum(int(kib) for kib in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", rollups, re.MULTILINE))


#: What other programs leave in /dev/shm (SPDL, joblib), and what torch does, with the id of its process.
_OTHERS_MEMORY = re.compile(r"psm_|sem\.loky-|torch_(\d+)_")


def new_shared_memory(before: Iterable[str]) -> set[str]:
    """Entries of /dev/shm that were not there before. Those that another program uses, or has left, do not
    count; nor does the memory of a torch worker that was killed."""
    inodes: dict[str, str] = {}
    own = {os.getpid(), *descendants()}
    for name in set(os.listdir("/dev/shm")) - set(before):
        with suppress(FileNotFoundError):
            made = _OTHERS_MEMORY.match(name)
            if made is None or int(made[1] or 0) in own:
                inodes[str(os.stat(f"/dev/shm/{name}").st_ino)] = name
    strangers = {entry.pid for entry in process_table()} - own if inodes else ()
    for pid in strangers:
        # By inode: a semaphore is mapped under a name that it has lost since.
        for inode in re.findall(r" (\d+) +/dev/shm/", _read(f"/proc/{pid}/maps")):
            inodes.pop(inode, None)
    return set(inodes.values())


@contextmanager
def torchs_segments_removed() -> Iterator[None]:
    """Remove the shared memory that torch's workers leave in this block, for no test of ours to answer for.

    A worker of torch's that ends between `shm_open` and `shm_unlink` of a tensor leaves a segment with its
    number: when it is killed, and when an epoch is broken off, whose end waits for no thread of its queue.
    """
    before = set(os.listdir("/dev/shm"))
    yield
    for name in set(os.listdir("/dev/shm")) - before:
        if (made := re.match(r"torch_(\d+)_", name)) and not os.path.exists(f"/proc/{made[1]}"):
            with suppress(FileNotFoundError):  # another run of the tests was quicker
                os.unlink(f"/dev/shm/{name}")


_OTHERS_FILES = re.compile(r"pymp-.*|[a-z0-9_]{8}")


def belongings() -> dict[str, set[str]]:
    """What this process holds now, by kind."""
    return {
        # By number alone: a process that is killed, or that renames itself, is no new one.
        "processes": set(map(str, descendants())),
        "descriptors": {f"{fd} -> {target}" for fd, target in open_descriptors().items()},
        "shared memory": set(os.listdir("/dev/shm")),
        # multiprocessing keeps one folder ("pymp-…") for the life of a program. Python tries whether it may
        # write there by a file without a prefix, which a process that is killed in that moment leaves.
        "files": {name for name in os.listdir(tempfile.gettempdir()) if not _OTHERS_FILES.fullmatch(name)},
        "threads": live_threads(),
    }


def acquired(before: dict[str, set[str]]) -> dict[str, set[str]]:
    """What this process holds now and did not hold before, by kind."""
    new = {kind: names - before[kind] for kind, names in belongings().items()}
    if new["shared memory"]:
        new["shared memory"] = new_shared_memory(before["shared memory"])
    return {kind: names for kind, names in new.items() if names}


def of_kind(caught: Iterable[WarningMessage], kind: type[Warning]) -> list[WarningMessage]:
    """The warnings of a kind: Python 3.12 and later have one more for every fork beside threads."""
    return [warning for warning in caught if issubclass(warning.category, kind)]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until `condition()` holds; the answer is whether it did within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give this run a temp folder, so that another program's files are not taken for a leak."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
        patch.setattr(tempfile, "tempdir", None)
        yield


_forks_far_workers: list[int] = []


@pytest.fixture(scope="module")
def warm_far_workers() -> Iterator[None]:
    """Far workers are started in a tenth of the time, by a fork."""
    from tests.support import far_workers

    with far_workers.warm_far_workers() as pid:
        _forks_far_workers.append(pid)
        yield
    _forks_far_workers.remove(pid)


@pytest.fixture(scope="session")
def _interpreter(_own_temporary_folder: None) -> Iterator[Any]:
    from fastq_loader.workers import interpreters

    kept = interpreters.interpreter("forkserver")
    [key] = [key for key, each in interpreters._running.items() if each is kept]
    _forks_far_workers.append(kept._child.pid)
    del interpreters._running[key]
    yield key, kept
    kept.close()


@pytest.fixture(scope="module")
def warm_interpreter(_interpreter: Any) -> Iterator[None]:
    """The interpreter that forkserver's workers are forked from is there, as if another loader of the program
    had started it: each test would wait for one of its own."""
    from fastq_loader.workers import interpreters

    key, kept = _interpreter
    interpreters._running[key] = kept
    yield
    interpreters._running.pop(key, None)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest, _own_temporary_folder: None) -> Iterator[None]:
    """Compare what the process holds before and after a test marked `processes`."""
    if request.node.get_closest_marker("processes") is None:
        yield
        if stopping := sys.modules.get("fastq_loader.workers.stopping"):
            stopping.wait()  # for workers that end in the background: the next test may count processes
        return
    cuda, failures = torch.cuda.is_initialized(), request.session.testsfailed
    before = belongings()
    yield
    left: dict[str, set[str]] = {}

    def settled() -> bool:
        nonlocal left
        left = acquired(before)
        if left:
            gc.collect()
        return not left

    # A failure's traceback keeps the test's variables alive; the next test shall not suffer from it.
    if request.session.testsfailed == failures:
        wait_until(settled, SETTLE_SECONDS)
    if torch.cuda.is_initialized() != cuda:
        left.pop("descriptors", None)  # the driver's, which stay open for the program's life
        left.pop("threads", None)
    new = {pid: str(entry) for pid, entry in descendants().items() if str(pid) not in before["processes"]}
    _kill(new)
    if left:
        left |= {"processes": set(new.values())} if new else {}
        listing = "\n".join(f"  {kind}: {', '.join(sorted(names))}" for kind, names in left.items())
        pytest.fail(f"left behind {SETTLE_SECONDS:.0f} s after the test:\n{listing}", pytrace=False)


@pytest.fixture
def forked_workers() -> Iterator[None]:
    """Workers are forked where nothing else is said, as before Python 3.14: for what they have to inherit."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: its properties ask for it."""
    thorough.is_thorough = config.getoption("--thorough") or config.getoption("--thorough-only")


#: With these a person watches, or one test after the other has to come.
_ALONE = ("usepdb", "trace", "maxfail", "collectonly", "tx")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's own, which reads the number
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A whole run uses two processes if pytest-xdist is installed and no `-n` was given."""
    if hasattr(config, "workerinput"):  # this is one of the two
        return
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    alone = any(config.getoption(name, None) for name in _ALONE)
    if whole and not alone and getattr(config.option, "numprocesses", 0) is None:
        config.option.numprocesses = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="each promise in its variations, too")
    parser.addoption("--thorough-only", action="store_true", help="these, without the default run's tests")
    parser.addoption("--seeds", metavar="FROM:TO", help="for tests that draw their configuration")
    parser.addoption("--must-run", action="store_true", help="fail where all tests were skipped")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The seeds of tests that draw their configuration: see `tests.support.thorough.seeds`."""
    if (marker := metafunc.definition.get_closest_marker("seeds")) is None:
        return
    default, in_all = marker.args
    if given := metafunc.config.getoption("--seeds"):
        first, _, end = given.partition(":")
        metafunc.parametrize("seed", range(int(first), int(end or int(first) + 1)))
    else:
        varied = [pytest.param(seed, marks=pytest.mark.thorough) for seed in range(default, in_all)]
        metafunc.parametrize("seed", [*range(default), *varied])


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Python 3.12 warns at every fork beside a thread; pytest's own threads are no fault of the loader."""
    for item in items:
        if item.get_closest_marker("processes") is not None:
            text = "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
            item.add_marker(pytest.mark.filterwarnings(text))
    varied = set(variations(items))
    if config.getoption("--thorough-only"):  # the default run has the others; properties get more examples
        left_out = {item for item in items if item not in varied and not _is_property(item)}
    else:
        left_out = set() if thorough.is_thorough else varied
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _is_property(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def variations(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests, and the cases of parametrised tests, that run with `--thorough` only."""
    cases: Counter[tuple[str, str]] = Counter()

    def is_varied(item: pytest.Item, after: int = 0, but: Mapping[str, Any] = MappingProxyType({})) -> bool:
        name = item.nodeid.partition("[")[0], f"{after} {but}"
        cases[name] += 1
        values = item.callspec.params if but and isinstance(item, pytest.Function) else {}
        kept = [
            values[argument] in value if isinstance(value, list) else values[argument] == value
            for argument, value in but.items()
        ]
        return cases[name] > after and not (kept and all(kept))

    return [
        item
        for item in items
        if sum(is_varied(item, **each.kwargs) for each in item.iter_markers("thorough"))
    ]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A step of CI whose packages are missing must not look like one that has passed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # none in a process of xdist's
    if reporter is None or not session.config.getoption("--must-run"):
        return
    if exitstatus == 0 and not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_collection_finish() -> None:
    """What was imported until here is not garbage: a collection in a test need not look through it."""
    gc.collect()
    gc.freeze()


class ScriptResult(NamedTuple):
    """How and when a script ended; `finished` is a reading of `time.monotonic()`, in seconds."""

    returncode: int
    stdout: str
    stderr: str
    finished: float
    left: tuple[str, ...]
    """Processes of the script's session that outlived it by more than a second (they were killed then)."""


class Script:
    """A Python script in a session of its own, with the repository on its path and its output in files.

    With pipes, reading would wait for a worker that outlives the script and holds their other end.

    Args:
        source: what it runs. What a worker needs must be importable (tests.support.crimes): workers that are
            not forked see nothing that the script defines.
        env: is added to the environment.
        prefix: a command that runs another one (`unshare -m`).
        warm: fork a process that has imported torch (tests.support.script_server), which is much quicker. Not
            for what depends on the state of a new interpreter: imports, exit handlers, memory.
    """

    def __init__(
        self,
        source: str,
        *,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        warm: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="script-")
        script, self._stdout, self._stderr = (
            Path(self._folder.name, name) for name in ("script.py", "stdout", "stderr")
        )
        # The guard keeps the script usable under start methods that import it again in the workers.
        body = textwrap.indent(textwrap.dedent(source).strip(), "    ")
        script.write_text(f'if __name__ == "__main__":\n{body}\n')
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, **(env or {})}
        self._process: subprocess.Popen[bytes] | WarmProcess
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            if warm:
                assert not prefix, "a command needs an interpreter of its own: not with warm=True"
                self._process = SERVER.start(str(script), environment, stdout.name, stderr.name)
            else:
                self._process = subprocess.Popen(
                    [*prefix, sys.executable, str(script)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )
        self.pid = self._process.pid

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        _kill(entry.pid for entry in self.processes())
        self._process.wait()
        self._folder.cleanup()

    def processes(self) -> list[ProcessEntry]:
        """Who is alive in the script's session, the script included."""
        return [entry for entry in process_table() if entry.session == self.pid and not entry.zombie]

    def wait_for(self, text: str, timeout: float = SCRIPT_SECONDS) -> None:
        """Wait until the script has printed `text`."""
        wait_until(lambda: text in _read(str(self._stdout)) or self._process.poll() is not None, timeout)
        assert text in _read(str(self._stdout)), f"the script never printed {text!r}\n{self._output()}"

    def finish(self, timeout: float = SCRIPT_SECONDS) -> ScriptResult:
        """Wait for the end; a script that takes longer than `timeout` seconds from here is a failure."""
        try:
            returncode = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            alive = ", ".join(map(str, self.processes()))
            text = f"the script still ran after {timeout} s ({alive})\n{self._output()}"
            raise AssertionError(text) from None
        finished = time.monotonic()
        wait_until(lambda: not self.processes(), LEFT_SECONDS)
        left = tuple(map(str, self.processes()))
        _kill(entry.pid for entry in self.processes())
        output = (_read(str(path)) for path in (self._stdout, self._stderr))
        return ScriptResult(returncode, *output, finished, left)

    def _output(self) -> str:
        return f"--- stdout\n{_read(str(self._stdout))}\n--- stderr\n{_read(str(self._stderr))}"


#: To be watched, signalled and finished by the caller.
running_script = Script


def run_script(source: str, *, timeout: float = SCRIPT_SECONDS, **arguments: Any) -> ScriptResult:
    """Run a `Script` to its end."""
    with Script(source, **arguments) as script:
        return script.finish(timeout)
