"""What the doctor says: each planted fault is found with its remedy, and where there is none nothing is."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import pytest
import torch

from fastq_loader import __main__ as command
from fastq_loader import doctor
from fastq_loader.doctor import CHANGE, NOTE, OK, Finding
from fastq_loader.insight import machine
from fastq_loader.ipc import claim_table, endpoints
from tests.conftest import ROOT, run_script
from tests.support.sandbox import NEEDED


def found(check: Callable[[], Any], level: str = CHANGE) -> dict[str, str]:
    """What a check says at a level."""
    return {finding.what: finding.text for finding in check() if finding.level == level}


@pytest.mark.processes
def test_a_machine_that_has_all_is_fine_and_batches_move(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert {line.split()[0] for line in page.splitlines()[:-2]} <= {OK, NOTE}
    assert "\nok      batches: 16 of two workers are equal to those of none\n" in page
    assert page.endswith("\n\nAll is fine.\n")


def _refused(*_: Any) -> Any:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def _no_threads(count: int) -> None:
    raise BlockingIOError(errno.EAGAIN, "can't start new thread")


#: Of packages, as pip has them.
VERSIONS = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "pyzmq": "27.3", "msgpack": "1.1.0"}


def _version(name: str) -> str:
    if name not in VERSIONS:
        raise metadata.PackageNotFoundError(name)
    return VERSIONS[name]


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], Any], str, str]] = {
    "an old version": (
        lambda patch: patch.setitem(VERSIONS, "torch", "2.5.1+cu121"),
        doctor._versions,
        "torch",
        r"2\.5\.1\+cu121; run pip install -U 'torch>=2\.6'",
    ),
    "a missing package": (
        lambda patch: patch.delitem(VERSIONS, "msgpack"),
        doctor._versions,
        "msgpack",
        r"missing; run pip install -U 'msgpack>=1\.0\.7'",
    ),
    "a container without locks of open files": (
        lambda patch: patch.setattr(claim_table, "set_lock", _refused),
        doctor._system_calls,
        "locks of open files",
        "Operation not permitted.*allow it in the container's seccomp profile",
    ),
    "little memory left in the cgroup": (
        lambda patch: patch.setattr(machine, "memory_bytes", lambda: 100_000_000),
        doctor._memory,
        "memory",
        "100 MB are left for this process; give its container or job more",
    ),
    "a pids limit": (
        lambda patch: patch.setattr(endpoints, "expect_threads", _no_threads),
        doctor._descriptors_and_threads,
        "threads",
        "can't start new thread; run `ulimit -u unlimited`, or raise the pids limit",
    ),
    "a TMPDIR that is not there": (
        lambda patch: patch.setenv("TMPDIR", "/no/such/folder"),
        doctor._sockets,
        "sockets",
        "because TMPDIR=/no/such/folder is no folder that can be written to; set TMPDIR to a folder that can",
    ),
    "no folder for sockets": (
        lambda patch: patch.setattr(endpoints, "endpoint_folder", _refused),
        doctor._sockets,
        "sockets",
        "none can be made: .*not permitted; set TMPDIR to a folder that can, with a path of 75 bytes at most",
    ),
    "a quota of half a CPU": (
        lambda patch: patch.setattr(machine, "cpus", lambda: 0.5),
        doctor._cpus,
        "CPUs",
        "0.5 of .* are for this process .*; raise the quota of its container",
    ),
    "a GPU that torch does not see": (
        lambda patch: patch.setattr("os.path.exists", lambda path: True),
        doctor._accelerator,
        "accelerator",
        "cannot use the NVIDIA GPU; install a CUDA build of torch",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_its_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check, what, text = FAULTS[name]
    monkeypatch.setattr(metadata, "version", _version)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert what not in found(check)
    plant(monkeypatch)
    assert re.search(text, found(check)[what])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ("NOFILE, (64, 64)", r"descriptors: 64 may be .*; run `ulimit -n \d+` \(the hard limit is 64\)"),
        ("FSIZE, (1 << 28, 1 << 28)", r"ulimit -f: .*; run `ulimit -f unlimited`"),
        ("AS, (used + (1 << 30), -1)", r"ulimit -v: 1\.. GB of .*; run `ulimit -v unlimited`"),
    ],
)
def test_a_limit_of_the_process_is_found(limits: str, text: str) -> None:
    source = f"""
        import resource
        from fastq_loader.__main__ import main
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_{limits})
        raise SystemExit(main(["doctor"]))
    """
    result = run_script(source, warm=True)
    assert result.returncode == 1, result
    assert re.search(rf"^change  {text}$", result.stdout, re.MULTILINE), result.stdout


@NEEDED
@pytest.mark.processes
@pytest.mark.parametrize("call", ["memfd_create", "eventfd", "pidfd_open"])
def test_a_call_that_a_container_refuses_is_found(call: str) -> None:
    source = f"""
        from fastq_loader.__main__ import main
        from tests.support.sandbox import refuse
        refuse({call!r})
        raise SystemExit(main(["doctor"]))
    """
    result = run_script(source, warm=True)
    line = next(line for line in result.stdout.splitlines() if f" {call}: " in line)
    if call == "pidfd_open":
        assert (result.returncode, line.split()[0]) == (0, NOTE)
    else:
        assert (result.returncode, line.split()[0]) == (1, CHANGE)
        assert "allow it in the container's seccomp profile or sandbox, or use num_workers=0" in line


@pytest.mark.processes
@pytest.mark.parametrize("samples", [(1, 2), (0, None)])
def test_batches_that_come_out_wrong_or_not_at_all_are_found(
    samples: tuple[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without, with_workers = samples

    def read(self: Any, index: int) -> Any:
        number = without if torch.utils.data.get_worker_info() is None else with_workers
        return torch.full((4,), number)

    monkeypatch.setattr(doctor._Samples, "__getitem__", read)
    assert re.search(
        "two workers are not those of none|give none: TypeError", found(doctor._batches)["batches"]
    )


def test_a_check_that_fails_is_a_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check() -> Iterator[Finding]:
        yield Finding(NOTE, "before", "it")
        raise KeyError("VmSize")

    monkeypatch.setattr(doctor, "CHECKS", (check,))
    assert doctor.report() == 1
    assert capsys.readouterr().out == (
        "note    before: it\nchange  check: this could not be looked at: KeyError('VmSize')\n\n1 to change.\n"
    )


def test_the_oldest_versions_are_those_of_the_package() -> None:
    declared = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
    assert dict(re.findall(r'"(\w+)>=([\d.]+)"', declared)) == doctor.OLDEST
