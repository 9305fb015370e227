"""What every test may use: a check that nothing is left behind, and scripts run as processes of their own.

A test marked `processes` fails when it leaves more children, descriptors, threads or files than it found. All
of it is read from /proc, so that what the interpreter does not know about (a worker's child, a thread of
ZeroMQ, a zombie) counts as well.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import TracebackType
from typing import NamedTuple
from warnings import WarningMessage

import pytest
import torch
from hypothesis import Phase, settings

# A commit is judged by the same examples every time. New ones are looked for on purpose, as long as one
# likes: pytest --hypothesis-profile=search --hypothesis-seed=N.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("search", derandomize=False, print_blob=True)
# For a mutation run: a mutant is dead with the first failure, however large its example.
settings.register_profile("mutation", derandomize=True, phases=(Phase.explicit, Phase.generate))
settings.load_profile("repeatable")

# A shell that starts the tests in the background lets them ignore Ctrl-C, and their scripts inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
SETTLE_SECONDS = 3.0


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


def _process(pid: int) -> ProcessEntry | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may hold spaces and parentheses itself.
    head, _, tail = stat.rpartition(")")
    state, parent, _group, session = tail.split()[:4]
    return ProcessEntry(pid, head.partition("(")[2], state, int(parent), int(session))


def process_table() -> list[ProcessEntry]:
    """Every process that this one can see."""
    entries = (_process(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return [entry for entry in entries if entry is not None]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _is_helper(entry: ProcessEntry) -> bool:
    """Whether this is multiprocessing's resource tracker or fork server: they live as long as the program."""
    own, parents = _command(entry.pid), _command(entry.parent)
    if b"multiprocessing.resource_tracker import" in own:
        return True
    # A worker forked by the fork server has the fork server's command line, and the fork server for a parent.
    server = b"multiprocessing.forkserver import"
    return server in own and server not in parents


def descendants(root: int | None = None) -> dict[int, ProcessEntry]:
    """Children of `root` (default: this process) and theirs, zombies too, without helpers (see above)."""
    children: dict[int, list[ProcessEntry]] = {}
    for entry in process_table():
        children.setdefault(entry.parent, []).append(entry)
    found: dict[int, ProcessEntry] = {}
    pending = [os.getpid() if root is None else root]
    while pending:
        for entry in children.get(pending.pop(), ()):
            pending.append(entry.pid)
            found[entry.pid] = entry
    return {pid: entry for pid, entry in found.items() if not _is_helper(entry)}


def open_descriptors() -> dict[int, str]:
    """Descriptor → what it points at, without those that lead to multiprocessing's helpers."""
    helpers = {
        getattr(resource_tracker._resource_tracker, "_fd", None),
        getattr(forkserver._forkserver, "_forkserver_alive_fd", None),
    }
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in helpers:
            with suppress(FileNotFoundError):  # the listing's own descriptor
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def live_threads() -> set[str]:
    """Python's threads, and ZeroMQ's, which Python does not list."""
    found = {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            name = (task / "comm").read_text().strip()
            if name.startswith("ZMQ"):
                found.add(f"{name} ({task.name})")
    return found


def held_memory() -> int:
    """Bytes of memory that this process and its children hold; a shared page is counted once."""
    total = 0
    for pid in (os.getpid(), *descendants()):
        with suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 1024 * total


def new_shared_memory(before: Iterable[str]) -> set[str]:
    """Entries of /dev/shm that were not there before, without those that strangers' processes use."""
    inodes: dict[int, str] = {}
    for name in set(os.listdir("/dev/shm")) - set(before):
        with suppress(FileNotFoundError):
            inodes[os.stat(f"/dev/shm/{name}").st_ino] = name
    if not inodes:
        return set()
    own = {os.getpid(), *descendants()}
    for entry in process_table():
        if entry.pid not in own:
            with suppress(OSError):
                lines = Path(f"/proc/{entry.pid}/maps").read_text().splitlines()
                # By inode: a semaphore is mapped under a name that it has lost since.
                used = {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
                inodes = {inode: name for inode, name in inodes.items() if inode not in used}
    return set(inodes.values())


@dataclass(frozen=True)
class Belongings:
    """What this process holds at one moment."""

    processes: frozenset[str]
    descriptors: frozenset[str]
    shared_memory: frozenset[str]
    temporary: frozenset[str]
    threads: frozenset[str]

    @classmethod
    def now(cls) -> Belongings:
        temporary = os.listdir(tempfile.gettempdir())
        return cls(
            # By number alone: a process that is killed, or that renames itself, is no new one.
            processes=frozenset(map(str, descendants())),
            descriptors=frozenset(f"{fd} -> {target}" for fd, target in open_descriptors().items()),
            shared_memory=frozenset(os.listdir("/dev/shm")),
            # multiprocessing keeps one folder ("pymp-…") for the life of a program.
            temporary=frozenset(name for name in temporary if not name.startswith("pymp-")),
            threads=frozenset(live_threads()),
        )

    def beyond(self, before: Belongings) -> dict[str, list[str]]:
        """What is here and was not there before, by kind."""
        new = {
            field.name: sorted(getattr(self, field.name) - getattr(before, field.name))
            for field in fields(self)
        }
        if new["shared_memory"]:
            new["shared_memory"] = sorted(new_shared_memory(before.shared_memory))
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
    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
    patch.setattr(tempfile, "tempdir", None)
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest, _own_temporary_folder: None) -> Iterator[None]:
    """Compare what the process holds before and after a test marked `processes`."""
    if request.node.get_closest_marker("processes") is None:
        yield
        return
    cuda = torch.cuda.is_initialized()
    children = set(descendants())
    before = Belongings.now()
    yield
    if request.node.stash.get(FAILED, False):
        # The failure's traceback keeps the test's variables alive; the next test shall not suffer from it.
        _kill(set(descendants()) - children)
        return
    deadline = time.monotonic() + SETTLE_SECONDS
    left = Belongings.now().beyond(before)
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
        left = Belongings.now().beyond(before)
    if torch.cuda.is_initialized() != cuda:
        left.pop("descriptors", None)  # the driver's, which stay open for the program's life
        left.pop("threads", None)
    if left:
        if "processes" in left:
            left["processes"] = [str(descendants().get(int(pid), pid)) for pid in left["processes"]]
        _kill(set(descendants()) - children)
        listing = "\n".join(f"  {kind}: {', '.join(names)}" for kind, names in left.items())
        pytest.fail(f"left behind {SETTLE_SECONDS:.0f} s after the test:\n{listing}", pytrace=False)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:  # a wrapper yields for the report and returns it
    report = yield
    if call.when == "call":
        item.stash[FAILED] = report.failed
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chaos-seconds", type=float, default=6.0, help="how long each run of tests marked chaos may go on"
    )
    parser.addoption(
        "--chaos-seed", type=int, default=None, help="of the first run; drawn if it is not given"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Python 3.12 warns at every fork beside a thread; pytest's own threads are no fault of the loader. A
    chaos test may take as long as it was told to, and hang for no more than two minutes."""
    for item in items:
        if item.get_closest_marker("chaos") is not None:
            item.add_marker(pytest.mark.timeout(config.getoption("--chaos-seconds") + 120))
        if item.get_closest_marker("processes") is not None:
            text = "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
            item.add_marker(pytest.mark.filterwarnings(text))


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended. Times are in seconds; `finished` is a reading of `time.monotonic()`."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    finished: float
    left: tuple[str, ...]
    """Processes of the script's session that outlived it by more than a second (they were killed then)."""


class Script:
    """A Python script in a session of its own, with the repository on its path and its output in files.

    Pipes would not do: a worker that outlives the script holds their other end, and reading would wait for
    it.
    """

    def __init__(
        self, source: str, *, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="script-")
        folder = Path(self._folder.name)
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        script = folder / "script.py"
        # The guard keeps the script usable under start methods that import it again in the workers.
        body = textwrap.indent(textwrap.dedent(source).strip(), "    ")
        script.write_text(f'if __name__ == "__main__":\n{body}\n')
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._started = time.monotonic()
            self._process = subprocess.Popen(
                [*prefix, sys.executable, str(script)],
                env={**os.environ, "PYTHONPATH": path, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def __enter__(self) -> Script:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()
        self._process.wait()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> str:
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    def processes(self) -> list[ProcessEntry]:
        """Who is alive in the script's session, the script included."""
        return [entry for entry in process_table() if entry.session == self.pid and not entry.zombie]

    def kill_all(self) -> None:
        _kill(entry.pid for entry in self.processes())

    def wait_for(self, text: str, timeout: float = 30) -> None:
        """Wait until the script has printed `text`."""

        def settled() -> bool:
            return text in self.stdout or self._process.poll() is not None

        if not wait_until(settled, timeout) or text not in self.stdout:
            raise AssertionError(f"the script never printed {text!r}\n{self._output()}")

    def finish(self, timeout: float = 20) -> ScriptResult:
        """Wait for the end; a script that takes longer than `timeout` seconds from here is a failure."""
        try:
            returncode = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            alive = ", ".join(map(str, self.processes()))
            raise AssertionError(
                f"the script still ran after {timeout} s ({alive})\n{self._output()}"
            ) from None
        finished = time.monotonic()
        wait_until(lambda: not self.processes(), 1)
        left = tuple(map(str, self.processes()))
        self.kill_all()
        return ScriptResult(returncode, self.stdout, self.stderr, finished - self._started, finished, left)

    def _output(self) -> str:
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


@contextmanager
def running_script(
    source: str, *, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> Iterator[Script]:
    """Start a script, to be watched, signalled and finished by the caller."""
    with Script(source, env=env, prefix=prefix) as script:
        yield script


def run_script(
    source: str,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 20,
    prefix: Sequence[str] = (),
) -> ScriptResult:
    """Run a script to its end.

    `env` adds to the environment; `prefix` is a command that runs another one (`unshare -m`). What a worker
    needs must be importable (tests.support.crimes): workers that are not forked see
    nothing that the script defines.
    """
    with running_script(source, env=env, prefix=prefix) as script:
        return script.finish(timeout)
