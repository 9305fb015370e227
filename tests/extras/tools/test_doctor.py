"""What the doctor says: each planted fault is found with its remedy, and where there is none nothing is."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fastq_loader.extras.tools import command, doctor
from fastq_loader.extras.tools.doctor import CHANGE, NOTE, OK, Finding
from tests.conftest import ROOT, run_script
from tests.support.sandbox import NEEDED

LOCKS, IPC = "fastq_loader.system.locks", "fastq_loader.ipc"
MACHINE = "fastq_loader.extras.insight.machine"


def found(check: Callable[[], Any]) -> dict[str, str]:
    """What a check wants to be changed."""
    return {finding.what: finding.text for finding in check() if finding.level == CHANGE}


@pytest.mark.processes
def test_a_machine_that_has_all_is_fine_and_batches_move(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert {line.split()[0] for line in page.splitlines()[:-2]} <= {OK, NOTE}
    assert "\nok      batches: 16 from two workers equal those without any\n" in page
    assert re.search("\nnote    decoder of baseline JPEG on GPUs: .+\n", page)
    assert page.endswith("\n\nAll is fine.\n")


def _raising(error: Exception) -> Callable[..., Any]:
    def raising(*_: Any) -> Any:
        raise error

    return raising


REFUSED = _raising(PermissionError(errno.EPERM, "Operation not permitted"))
FULL = _raising(BlockingIOError(errno.EAGAIN, "can't start new thread"))
#: The check, what it looks at, a patch, and what it says then.
FAULTS: list[tuple[Callable[[], Any], str, str, Any, str]] = [
    (doctor._versions, "torch", "importlib.metadata.version", lambda name: "2.5", "2.5; run pip install -U"),
    (doctor._locks, "locks of open files", f"{LOCKS}.try_lock", REFUSED, "allow them in the container"),
    (doctor._memory, "memory", f"{MACHINE}.memory_bytes", lambda: 10**8, "100 MB are left .*; give its"),
    (doctor._descriptors_and_threads, "threads", f"{IPC}.limits.require_threads", FULL, "run `ulimit -u"),
    (doctor._sockets, "sockets", f"{IPC}.sockets.Line", REFUSED, "none can be .*; allow Unix sockets"),
    (doctor._cpus, "CPUs", f"{MACHINE}.cpus", lambda: 0.5, "0.5 of .* are for .*; raise the quota"),
    (doctor._accelerator, "accelerator", "os.path.exists", lambda path: True, "; install a CUDA build"),
]


@pytest.mark.parametrize(("check", "what", "patched", "fault", "text"), FAULTS)
def test_a_planted_fault_is_found_with_its_remedy(
    check: Any, what: str, patched: str, fault: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert what not in found(check)
    monkeypatch.setattr(patched, fault)
    assert re.search(text, found(check)[what])


#: Code that makes a fault of a process, and the line of the page about it.
PROCESSES = {
    "limit(resource.RLIMIT_NOFILE, (64, 64))": r"descriptors: 64 .*; run `ulimit -n \d+` \(the hard",
    "limit(resource.RLIMIT_AS, (used + (1 << 30), -1))": "ulimit -v: .*; run `ulimit -v unlimited`",
    "refuse('memfd_create')": "workers: .* because memfd_create is missing.*; allow memfd_create here",
}
TORCHS = "calls.AVAILABLE = False"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The pages of processes with these faults, and their exit codes."""
    result = run_script(
        f"""
        import os, resource, sys
        from fastq_loader.extras.tools.command import main
        from fastq_loader.system import calls
        from tests.support.forking import end_of, fork
        from tests.support.sandbox import refuse
        limit = resource.setrlimit
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

        def page(fault):
            exec(fault, globals())
            print("\\nexit code", main(["doctor"]), flush=True)

        for fault in {[*PROCESSES, TORCHS]!r}:
            print("====", fault, flush=True)
            assert end_of(fork(lambda: page(fault))) == 0
        """,
        warm=True,
    )
    assert result.returncode == 0, result
    return dict(part.split("\n", 1) for part in result.stdout.split("==== ")[1:])


@NEEDED
@pytest.mark.processes
@pytest.mark.parametrize("fault", PROCESSES)
def test_a_fault_of_the_process_is_found_on_the_shell(fault: str, pages: dict[str, str]) -> None:
    assert pages[fault].endswith("\nexit code 1\n")
    assert re.search(f"^change  {PROCESSES[fault]}", pages[fault], re.MULTILINE), pages[fault]


@NEEDED
@pytest.mark.processes
def test_where_torchs_own_workers_run_it_says_so_and_finds_nothing_to_change(pages: dict[str, str]) -> None:
    page = pages[TORCHS]
    assert page.endswith("\nexit code 0\n")
    assert re.search(
        "^note    workers: .*torch's own run, because memfd_create is missing", page, re.MULTILINE
    )
    assert "\nok      batches: 16 from two workers equal those without any\n" in page
    assert "eventfd" not in page


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
        "two workers differ from those without|gave none: TypeError", found(doctor._batches)["batches"]
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
        "note    before: it\nchange  check: this check failed: KeyError('VmSize')\n\n1 to change.\n"
    )


def test_the_oldest_versions_are_those_of_the_package() -> None:
    declared = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
    assert dict(re.findall(r'"(\w+)>=([\d.]+)"', declared)) == doctor.OLDEST
