"""The harness itself: a script that is forked finds what it would find in a new interpreter, and ends so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import (
    ROOT,
    process_table,
    run_script,
    running_script,
    torchs_segments_removed,
    wait_until,
)

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


def state(**options: Any) -> tuple[list[float], dict[str, Any]]:
    """What is drawn, and what there is, in a script."""
    result = run_script(STATE, **options)
    assert result.stderr == ""
    seeds, found = json.loads(result.stdout)
    return seeds, found


def test_a_warm_script_finds_what_a_fresh_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script("print()", warm=True)  # what follows is new to the server
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("HOME", raising=False)
    seeds, fresh = state(env={"GIVEN": "one"})
    warm = [state(env={"GIVEN": "one"}, warm=True) for _ in range(2)]
    assert [found for _, found in warm] == [fresh, fresh]
    assert all(len(set(drawn)) == 3 for drawn in zip(seeds, *(each for each, _ in warm), strict=True))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("end", "code", "stdout", "stderr"),
    [
        ("", 0, "handled", ""),
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


def test_what_a_warm_script_leaves_is_named_and_killed() -> None:
    source = "import os, signal\nprint(os.fork() or signal.pause(), flush=True)\nos._exit(0)"
    result = run_script(source, warm=True)
    child = int(result.stdout)
    assert [name.split()[0] for name in result.left] == [str(child)]
    assert wait_until(lambda: child not in {entry.pid for entry in process_table() if not entry.zombie}, 5)


def test_a_script_that_hangs_is_a_failure_and_the_next_one_runs() -> None:
    with pytest.raises(AssertionError, match=r"still ran after 0\.2 s"):
        run_script("import signal\nsignal.pause()", timeout=0.2, warm=True)
    with running_script("print('ready', flush=True)", warm=True) as script:
        script.wait_for("ready")
        assert script.finish().returncode == 0


def test_of_torchs_segments_those_of_ended_workers_are_removed() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    names = [f"torch_{number}_test{os.getpid()}_0" for number in (os.getpid(), ended.pid)]
    kept = [names[0], f"own_{ended.pid}_test{os.getpid()}_0", f"torch_{ended.pid}_test{os.getpid()}_before"]
    segments = [Path("/dev/shm", name) for name in (*kept, names[1])]
    try:
        segments[2].touch()
        with torchs_segments_removed():
            for segment in segments:
                segment.touch()
        assert [segment.exists() for segment in segments] == [True, True, True, False]
    finally:
        for segment in segments:
            segment.unlink(missing_ok=True)


def test_a_run_in_which_all_tests_skip_fails_where_some_must_run(tmp_path: Path) -> None:
    plugins, where = (
        "-p tests.conftest -p no:cacheprovider",
        f"-c {os.devnull} --basetemp {tmp_path / 'base'}",
    )
    skips, runs = "import pytest\ndef test_it():\n    pytest.skip()\n", "def test_it():\n    assert True\n"
    for name, source, status in (("skips", skips, pytest.ExitCode.NO_TESTS_COLLECTED), ("runs", runs, 0)):
        (file := tmp_path / f"test_{name}.py").write_text(source)
        for options, expected in (("", 0), ("--must-run", status)):
            line = f"-m pytest {plugins} {where} {options} {file}".split()
            done = subprocess.run([sys.executable, *line], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == expected, done.stdout + done.stderr
