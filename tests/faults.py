"""Plants faults in the package, one at a time, and runs the tests that have to find them.

`python -m tests.faults` is the proof that the tests guard the promises. `fault_table.py` has the faults.
Nothing here changes the repository: each job plants its faults in a copy in the temporary folder, and the
tests of that copy import the copy's package. A fault counts as found if pytest reports a failed test in the
file that is named for it, or else in the default run, and that test fails again when it is run alone; or if
that file hangs. A test that fails without the fault as well finds nothing.

    python -m tests.faults                        all faults, in two copies at once
    python -m tests.faults --all                  each test that fails, for each fault (takes hours)
    python -m tests.faults packing "dead worker"  faults with one of these texts in any of their fields
    python -m tests.faults --list                 the table of faults
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.fault_table import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[1]
#: Not copied. What was compiled has the paths of the repository in it.
_LEFT_OUT = (".git", ".hypothesis", ".*_cache", "__pycache__", "build", "mutants", "*.egg-info")
#: Seconds of one test, of the run of a file, and of the default run.
_TEST, _FILE, _ALL = 60, 300, 3600
#: Not in the default run: in a copy with a fault it finds that its place is gone.
_OF_PLACES = "tests/test_faults.py"
#: Variable in the environment of the processes of a copy.
_MARK = "PLANTED_FAULTS"
#: A failed test in pytest's summary.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
_HEADER = ("fault", "file", "promise", "found by", "seconds")


class Found(NamedTuple):
    """What became of a fault.

    Attributes:
        fault: the fault.
        tests: ids of the failed tests: the first, or all; none if it was not found.
        seconds: until it was found.
        note: what else there is to say.
    """

    fault: Fault
    tests: tuple[str, ...]
    seconds: float
    note: str = ""


class Run(NamedTuple):
    """A run of pytest: its failed tests, or none with the reason ("" if all have passed)."""

    tests: tuple[str, ...]
    why: str


#: All tests of a run have passed.
GREEN = Run((), "")
#: Stands for a failed test: the run has hit its limit.
HANG = "(the run hangs)"


def place_of(fault: Fault, root: Path = ROOT) -> str:
    """What is wrong with the place of a fault; "" if it is there exactly once."""
    file = root / "fastq_loader" / fault.file
    if not file.is_file():
        return f"there is no {fault.file}"
    count = file.read_text().count(fault.old)
    return "" if count == 1 else f"its place occurs {count} times in {fault.file}"


class Copy:
    """A copy of the repository, in which one job runs its tests.

    Args:
        folder: a folder of its own, in which it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.root, self._temporary = folder / "r", folder / "t"
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        self._environment = {**os.environ, "TMPDIR": str(self._temporary), _MARK: str(self.root)}
        self._environment.pop("PYTHONPATH", None)
        code = "import fastq_loader; print(fastq_loader.__file__)"
        imported = subprocess.check_output(
            [sys.executable, "-c", code], cwd=self.root, env=self._environment, text=True
        )
        assert Path(imported.strip()).is_relative_to(self.root), (
            f"{imported.strip()} is not the copy's package"
        )

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Plant a fault while the context lasts."""
        file = self.root / "fastq_loader" / fault.file
        text = file.read_text()
        try:
            self._write(file, text.replace(fault.old, fault.new))
            yield
        finally:
            self._write(file, text)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        # Two versions of one second and one size would be one for Python.
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def run(self, *tests: str, limit: float, every: bool = False) -> Run:
        """Run tests, the default run if none is named, up to the first that fails, or every one."""
        self._temporary.mkdir()
        options = [
            *([] if every else ["-x"]),
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            f"timeout={_TEST}",
            f"--ignore={_OF_PLACES}",
        ]
        command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
        try:
            with subprocess.Popen(
                command,
                cwd=self.root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process:
                try:
                    output = process.communicate(timeout=limit)[0].decode(errors="replace")
                except subprocess.TimeoutExpired:
                    return Run((HANG,), "")
                finally:
                    self.end_all()
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)
        if process.returncode == 0:
            return GREEN
        failed = _FAILED.findall(output) if process.returncode == 1 else []
        if not failed:
            return Run((), f"pytest ended with {process.returncode}: {output.strip().rpartition(chr(10))[2]}")
        return Run(tuple(test.removeprefix("tests/") for test in failed), "")

    def end_all(self) -> None:
        """End all processes of a run, whatever their session: their environment has the copy's mark."""
        mark = f"{_MARK}={self.root}".encode() + b"\0"
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if mark in Path("/proc", name, "environ").read_bytes():
                    os.kill(int(name), signal.SIGKILL)


def find(fault: Fault, copy: Copy, every: bool = False) -> Found:
    """Plant a fault, and look which test finds it, or which tests do, twice."""
    began, note = time.monotonic(), ""
    with copy.planted(fault):
        run = copy.run(limit=_ALL, every=True) if every else copy.run(fault.found_by, limit=_FILE)
        if run == GREEN and not every:
            run, note = copy.run(limit=_ALL), f"not by {fault.found_by}"
        seconds = time.monotonic() - began
        if not run.tests:
            return Found(fault, (), seconds, run.why or "all tests pass")
        if run.tests != (HANG,):
            again = copy.run(*run.tests, limit=_ALL if every else _FILE, every=every)
            if not again.tests:
                return Found(fault, (), seconds, f"not when it is run again: {', '.join(run.tests)}")
            run = again
    names = (fault.found_by,) if run.tests == (HANG,) else run.tests
    without = copy.run(*names, limit=_ALL if every else _FILE, every=every)
    tests = tuple(test for test in run.tests if test not in without.tests)
    return Found(fault, tests, seconds, note if tests else f"{', '.join(names)} fails without it, too")


def find_all(faults: Sequence[Fault], jobs: int, every: bool = False) -> Iterator[Found]:
    """Look for these faults, in so many copies at once."""
    copies: SimpleQueue[Copy] = SimpleQueue()

    def found(fault: Fault) -> Found:
        copy = copies.get()
        try:
            return find(fault, copy, every)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(jobs) as pool:
        made = list(pool.map(Copy, [Path(folder, str(number)) for number in range(jobs)]))
        for copy in made:
            copies.put(copy)
        try:
            yield from pool.map(found, faults)
        except BaseException:  # Ctrl-C, which the tests do not get: their sessions are others
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in made:
                copy.end_all()
            raise


def line(*cells: str) -> str:
    return " | ".join(cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a fault was not found, or has no place."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.partition("\n\n")[0])
    parser.add_argument("which", nargs="*", help="texts in the name, file, promise or test file of a fault")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--all", action="store_true", help="every test that finds a fault, not the first")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="copies at once (default: 2)")
    options = parser.parse_args(argv)
    faults = [
        fault
        for fault in FAULTS
        if not options.which or any(text in " ".join(vars(fault).values()) for text in options.which)
    ]
    if not faults:
        parser.error(f"no fault has {' or '.join(options.which)}")
    if options.list:
        print(line(*_HEADER[:-1]))
        for fault in faults:
            print(line(fault.name, fault.file, fault.promise, fault.found_by))
        return 0
    misplaced = {fault.name: wrong for fault in faults if (wrong := place_of(fault))}
    for name, wrong in misplaced.items():
        print(f"{name}: {wrong}")
    if misplaced:
        return 1
    print(line(*_HEADER), flush=True)
    lost = 0
    for found in find_all(faults, options.jobs, options.all):
        fault, lost = found.fault, lost + (not found.tests)
        where = ", ".join(found.tests) or "NOTHING"
        where += f" ({found.note})" if found.note else ""
        print(line(fault.name, fault.file, fault.promise, where, f"{found.seconds:.0f}"), flush=True)
    print(f"{len(faults) - lost} of {len(faults)} faults are found")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
