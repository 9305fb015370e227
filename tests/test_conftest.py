"""The harness itself: a script that is forked finds what it would find in a new interpreter, and ends so."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.conftest import (
    Script,
    descendants,
    process_table,
    run_script,
    running_script,
    wait_until,
)
from tests.support import thorough
from tests.support.forking import end_of, fork

pytestmark = pytest.mark.processes

STATE = """
    import json, multiprocessing, os, pickle, random, resource, signal, sys, tempfile, threading, warnings
    from multiprocessing import process, resource_tracker
    import numpy, torch, torch.utils.data

    def of_main(number: int):
        pass

    assert pickle.loads(pickle.dumps(of_main)) is of_main and of_main.__annotations__ == {"number": int}
    assert sys.argv == [__file__] and sys.path[0] == os.path.dirname(__file__) and __name__ == "__main__"
    assert os.getpid() == os.getsid(0) == os.getpgrp()
    links = [f"/proc/self/fd/{fd}" for fd in sorted(os.listdir("/proc/self/fd"))]
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    streams = (sys.stdin, sys.stdout, sys.stderr)
    seeds = [random.random(), numpy.random.rand(), torch.initial_seed()]
    print(json.dumps([seeds, {
        "spec": sys.modules["__main__"].__spec__,
        "path": sys.path[1:],
        "flags": [*sys.flags, *sys.warnoptions],
        "warnings": list(map(str, warnings.filters)),
        "hook": sys.excepthook is sys.__excepthook__,
        "folders": [os.getcwd(), process.ORIGINAL_DIR, tempfile.gettempdir()],
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "masks": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "Umask")],
        "limits": [resource.getrlimit(what) for what in range(16)],
        "threads": [thread.name for thread in threading.enumerate()],
        "torch's": [torch.get_num_threads(), str(torch.get_default_dtype()), torch.cuda.is_initialized()],
        "method": multiprocessing.get_start_method(allow_none=True),
        "process": multiprocessing.current_process().name,
        "tracker": resource_tracker._resource_tracker._pid,
        "descriptors": [(fd, os.path.basename(os.readlink(fd))) for fd in links if os.path.exists(fd)],
        "streams": [(each.encoding, each.errors, each.line_buffering, each.mode) for each in streams],
        "ours": [name for name in sys.modules if name.startswith("fastq_loader")],
    }]))
"""


def state(script: Script) -> tuple[list[float], dict[str, Any]]:
    """What is drawn, and what there is, in a script."""
    result = script.finish()
    assert result.stderr == ""
    seeds, found = json.loads(result.stdout)
    return seeds, found


@thorough.thorough()
def test_a_warm_script_finds_what_a_fresh_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script("print()", warm=True)  # what follows is new to the server
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("HOME", raising=False)
    with running_script(STATE, env={"GIVEN": "one"}) as fresh:  # beside the warm ones, which take turns
        warm = []
        for _ in range(2):
            with running_script(STATE, env={"GIVEN": "one"}, warm=True) as script:
                warm.append(state(script))
        seeds, expected = state(fresh)
    assert [found for _, found in warm] == [expected, expected]
    assert all(len(set(drawn)) == 3 for drawn in zip(seeds, *(each for each, _ in warm), strict=True))


@thorough.thorough(but={"warm": True})
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("end", "code", "stdout", "stderr"),
    [
        pytest.param("", 0, "handled", "", marks=thorough.thorough()),
        ("sys.exit(3)", 3, "handled", ""),
        ("os._exit(4)", 4, "", ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "", ""),
        ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "handled", "KeyboardInterrupt"),
        ("1 / 0", 1, "handled", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_script_ends_as_it_says(end: str, code: int, stdout: str, stderr: str, warm: bool) -> None:
    result = run_script(
        f"import atexit, os, signal, sys\natexit.register(print, 'handled')\n{end}", warm=warm
    )
    assert (result.returncode, result.stdout.strip(), result.left) == (code, stdout, ())
    assert result.stderr.strip().endswith(stderr)
    assert bool(result.stderr) == bool(stderr)


def test_what_a_warm_script_leaves_is_named_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "LEFT_SECONDS", 0.05)
    source = "import os, signal\nprint(os.fork() or signal.pause(), flush=True)\nos._exit(0)"
    result = run_script(source, warm=True)
    child = int(result.stdout)
    assert [name.split()[0] for name in result.left] == [str(child)]
    assert wait_until(lambda: child not in {entry.pid for entry in process_table() if not entry.zombie}, 5)


def test_a_script_that_hangs_is_a_failure_and_the_next_one_runs() -> None:
    with pytest.raises(AssertionError, match=r"still ran after 0\.05 s"):
        run_script("import signal\nsignal.pause()", timeout=0.05, warm=True)
    with running_script("print('ready', flush=True)", warm=True) as script:
        script.wait_for("ready")
        assert script.finish().returncode == 0


class Collected:
    """A plugin of a run of pytest: the names of its tests, and whether it is a thorough one."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name.removeprefix("test_") for item in session.items]
        self.is_thorough = thorough.is_thorough


def pytest_run(file: Path, *options: str) -> tuple[int, Collected]:
    """The exit code of a run with our `conftest.py`, within this process, and the tests that it selected."""
    off = [f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "timeout", "warnings")]
    plain = ["--import-mode=importlib", "-c", os.devnull, "--basetemp", str(file.parent / "base")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thorough, "is_thorough", False)  # and afterwards what it was
        code = pytest.main(
            ["-p", "tests.conftest", *off, *plain, *options, str(file)], [found := Collected()]
        )
    return code, found


@pytest.mark.parametrize(("body", "code"), [("pytest.skip()", pytest.ExitCode.NO_TESTS_COLLECTED), ("1", 0)])
def test_a_run_of_skipped_tests_fails_where_some_must_run(body: str, code: int, tmp_path: Path) -> None:
    file = tmp_path / f"test_that_ends_with_{code}.py"
    file.write_text(f"import pytest\ndef test_it():\n    {body}\n")
    assert [pytest_run(file)[0], pytest_run(file, "--must-run")[0]] == [0, code]


SWITCHED = """
import pytest
from hypothesis import given, strategies
from tests.support.thorough import examples, seeds, thorough

each = pytest.mark.parametrize

def test_promise(): ...

@thorough()
def test_variation(): ...

@thorough(after=2)
@each("n", [5, 6, 7])
def test_first(n): ...

@thorough(but={"method": "fork", "order": [1, 2]})
@each(("method", "order"), [("fork", 1), ("fork", 2), ("fork", 3), ("spawn", 1)])
def test_but(method, order): ...

@each("n", [1, pytest.param(2, marks=thorough())])
def test_case(n): ...

@seeds(1, 3)
def test_seed(seed): ...

@examples(30)
@given(strategies.integers())
def test_property(n): ...
"""
BY_DEFAULT = "promise first[5] first[6] but[fork-1] but[fork-2] case[1] seed[0] property"
VARIED = "variation first[7] but[fork-3] but[spawn-1] case[2] seed[1] seed[2]"


@thorough.thorough(after=3)
@pytest.mark.parametrize(
    ("options", "selected"),
    [
        ((), BY_DEFAULT),
        (("--thorough",), f"{BY_DEFAULT} {VARIED}"),
        (("--thorough-only",), f"{VARIED} property"),
        (("--seeds", "7:9"), BY_DEFAULT.replace("seed[0]", "seed[7] seed[8]")),
        (("--seeds", "7"), BY_DEFAULT.replace("seed[0]", "seed[7]")),
    ],
)
def test_the_default_run_has_each_promise_and_a_thorough_one_its_variations(
    options: tuple[str, ...], selected: str, tmp_path: Path
) -> None:
    (file := tmp_path / "test_switched.py").write_text(SWITCHED)
    code, found = pytest_run(file, "--collect-only", *options)
    assert (code, sorted(found.names)) == (0, sorted(selected.split()))
    assert found.is_thorough == any("thorough" in option for option in options)


@pytest.mark.parametrize(
    ("paths", "options", "processes"),
    [
        (False, {"numprocesses": None}, 2),
        (True, {"numprocesses": None}, None),
        (False, {"numprocesses": 0}, 0),
        (False, {"numprocesses": None, "maxfail": 1}, None),
        (False, {}, "no pytest-xdist"),
    ],
)
def test_a_whole_run_uses_two_processes_where_nothing_else_is_said(
    paths: bool, options: dict[str, Any], processes: Any
) -> None:
    source = pytest.Config.ArgsSource.ARGS if paths else pytest.Config.ArgsSource.TESTPATHS
    config: Any = SimpleNamespace(
        args_source=source, option=SimpleNamespace(**options), getoption=options.get
    )
    conftest.pytest_cmdline_main(config)
    assert getattr(config.option, "numprocesses", "no pytest-xdist") == processes


def test_one_of_two_processes_starts_no_others() -> None:
    option = SimpleNamespace(numprocesses=None)
    source = pytest.Config.ArgsSource.TESTPATHS
    config: Any = SimpleNamespace(args_source=source, option=option, getoption={}.get, workerinput={})
    conftest.pytest_cmdline_main(config)
    assert option.numprocesses is None


@pytest.mark.parametrize(("number", "quick"), [(5, 5), (30, 10), (200, 20)])
def test_a_property_has_a_tenth_of_its_examples_by_default(
    number: int, quick: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_thorough, expected in ((False, quick), (True, number)):
        monkeypatch.setattr(thorough, "is_thorough", is_thorough)
        assert thorough.examples(number).max_examples == expected


def test_descendants_are_found_below_helpers_too_and_helpers_are_none() -> None:
    """The quick look at the children must not hide what the process table has."""
    run_script("print()", warm=True)  # the server of scripts runs, and is a helper

    def found() -> list[int]:
        assert descendants().keys() == descendants(os.getpid()).keys()
        return [*descendants()]

    assert wait_until(lambda: found() == [], 5)
    child = fork(signal.pause)
    assert found() == [child]
    os.kill(child, signal.SIGKILL)
    end_of(child)
    with running_script("import signal\nprint('up', flush=True)\nsignal.pause()", warm=True) as script:
        script.wait_for("up")
        assert found() == [script.pid]
    assert wait_until(lambda: found() == [], 5)
