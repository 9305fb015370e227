"""The harness itself: a script that is forked finds what it would find in a new interpreter, and ends so."""

from __future__ import annotations

import gc
import os
import signal

import pytest

from tests import conftest
from tests.conftest import descendants, process_table, run_script, running_script, wait_until
from tests.support import thorough
from tests.support.forking import end_of, fork

pytestmark = pytest.mark.processes


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
    assert wait_until(lambda: child not in {entry.pid for entry in process_table() if not entry.zombie}, 30)


def test_descendants_are_found_below_helpers_too_and_helpers_are_none() -> None:
    """The quick look at the children must not hide what the process table has."""
    gc.collect()  # workers of a test that was not checked
    run_script("print()", warm=True)  # the server of scripts runs, and is a helper

    def found() -> list[int]:
        assert wait_until(lambda: descendants().keys() == descendants(os.getpid()).keys(), 30)
        return [*descendants()]

    assert wait_until(lambda: found() == [], 30)
    child = fork(signal.pause)
    assert found() == [child]
    os.kill(child, signal.SIGKILL)
    end_of(child)
    with running_script("import signal\nprint('up', flush=True)\nsignal.pause()", warm=True) as script:
        script.wait_for("up")
        assert found() == [script.pid]
    assert wait_until(lambda: found() == [], 30)
