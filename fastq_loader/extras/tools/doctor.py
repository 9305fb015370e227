"""`python -m fastq_loader doctor`: which workers run on this machine, what they need, and what to change.

Runs in a process of its own, started on the shell. Each check examines a need of the workers, tries it if
that is quick, and yields lines; the last but one moves batches through two workers. Nothing is changed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from fastq_loader.extras.insight import machine, processes
from fastq_loader.extras.tools.leaves import digest, leaves
from fastq_loader.ipc import limits, sockets
from fastq_loader.ipc.claim_table import WORKERS, Busy, ClaimTable
from fastq_loader.loader import DataLoader
from fastq_loader.system import calls
from fastq_loader.system.terminal import printable

#: The oldest versions of the dependencies that will do; `pyproject.toml` has the same.
OLDEST = {"torch": "2.8", "numpy": "1.26", "pyzmq": "26", "msgpack": "1.0.7"}

OK, CHANGE, NOTE = "ok", "change", "note"

#: Descriptors and threads needed by a pool, with some for the user, and by each of its workers.
_DESCRIPTORS, _THREADS = (64, 5), (2, 4)
#: Bytes of data, of a file and of memory below which batches soon run out of room.
_LEAST_DATA, _LEAST_FILE, _LEAST_MEMORY = 2 << 30, 1 << 30, 512 << 20
#: Seconds that the workers of `_batches` have for a batch, also where they import torch on a busy machine.
_PATIENCE = 60


class Finding(NamedTuple):
    """A line of the report: OK, CHANGE or NOTE; the subject; what was seen, with the remedy."""

    level: str
    what: str
    text: str


def report() -> int:
    """Run the checks and print their lines. Return the exit code: 1 if there is something to change."""
    changes = 0
    for check in CHECKS if calls.AVAILABLE else ANYWHERE:
        for level, what, text in _tried(check):
            print(printable(f"{level:<6}  {what}: {text}"), flush=True)
            changes += level == CHANGE
    print(f"\n{changes} to change." if changes else "\nAll is fine.")
    return 1 if changes else 0


def _tried(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:  # an unforeseen failure gets a line, too
        yield Finding(CHANGE, check.__name__.strip("_"), f"this check failed: {error!r}")


def _judged(fine: bool, what: str, seen: str, remedy: str) -> Finding:
    return Finding(OK, what, seen) if fine else Finding(CHANGE, what, f"{seen}; {remedy}")


def _versions() -> Iterator[Finding]:
    yield Finding(OK, "python", platform.python_version())
    for name, oldest in OLDEST.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "missing"
        remedy = f"run pip install -U '{name}>={oldest}'"
        yield _judged(_numbers(version) >= _numbers(oldest), name, version, remedy)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def _workers() -> Iterator[Finding]:
    lacking, seen = calls.missing(), "this package's own run"
    if lacking:
        seen = (
            f"with num_workers > 0 torch's own run, because {lacking} is missing: the same batches, at "
            "torch's speed; what torch lacks needs num_workers=0"
        )
    remedy = f"allow {lacking} here: in the container's seccomp profile, its sandbox or its limits"
    yield _judged(not lacking, "workers", seen, remedy) if calls.AVAILABLE else Finding(NOTE, "workers", seen)


def _locks() -> Iterator[Finding]:
    seen = "there"
    try:
        with open(os.devnull, "r+b") as file:
            table = ClaimTable(file.fileno(), memoryview(bytearray(8 * (WORKERS + 8))).cast("Q"))
            table.offer(1)
            table.claim(1, 0)
            table.close()
    except (OSError, Busy) as error:
        seen = f"missing or refused: {error}".partition(";")[0]  # advice follows
    remedy = "allow them in the container's seccomp profile or sandbox, or use num_workers=0"
    yield _judged(seen == "there", "locks of open files", seen, remedy)


def _memory() -> Iterator[Finding]:
    sizes = processes.fields("/proc/self/status")
    for name, flag, used, least in (
        ("DATA", "d", sizes["VmData:"] << 10, _LEAST_DATA),
        ("FSIZE", "f", 0, _LEAST_FILE),
    ):
        if (limit := calls.limit_of(name)) is not None:
            seen = f"{_size(limit - used)} of {_size(limit)} are left for batches"
            yield _judged(limit - used >= least, f"ulimit -{flag}", seen, f"run `ulimit -{flag} unlimited`")
    if (limit := calls.limit_of("AS")) is not None:
        needed, allowed = calls.arena_room()
        seen = (
            f"{_size(allowed)} of {_size(limit)} are left for batches, and own workers need {_size(needed)}"
        )
        yield _judged(allowed >= needed, "ulimit -v", seen, "run `ulimit -v unlimited`")
    free = machine.memory_bytes()
    seen, remedy = f"{_size(free)} are left for this process", "give its container or job more"
    yield _judged(free >= _LEAST_MEMORY, "memory", seen, remedy)
    with suppress(OSError):
        there = os.statvfs("/dev/shm")
        size = _size(there.f_blocks * there.f_frsize)
        yield Finding(NOTE, "/dev/shm", f"{size}; not needed here (torch's workers do need it)")


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.0f} MB"


def _descriptors_and_threads() -> Iterator[Finding]:
    import resource  # not every system has it

    workers = max(2, math.ceil(machine.cpus()))
    needed = len(os.listdir("/proc/self/fd")) + _DESCRIPTORS[0] + _DESCRIPTORS[1] * workers
    soft, hard = (sys.maxsize if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    seen = f"{soft} may be open, and {workers} workers need some {needed}"
    remedy = f"run `ulimit -n {2 * needed}` (the hard limit is {hard})"
    yield _judged(soft >= needed, "descriptors", seen, remedy)
    failed = ""
    try:
        limits.require_threads(_THREADS[0] + _THREADS[1] * workers)
    except BlockingIOError as error:
        failed = f", but not enough for {workers} workers: {error.strerror}"
    remedy = "run `ulimit -u unlimited`, or raise the pids limit of the container"
    yield _judged(not failed, "threads", f"can be started{failed}", remedy)


def _sockets() -> Iterator[Finding]:
    failed = ""
    try:
        sockets.Line(0).close()
    except OSError as error:
        failed = f"none can be opened for a worker: {error}"
    remedy = "allow Unix sockets with abstract addresses in this sandbox"
    yield _judged(not failed, "sockets", failed or "can be opened", remedy)


def _cpus() -> Iterator[Finding]:
    cpus = machine.cpus()
    seen = f"{cpus:.3g} of {os.cpu_count()} are for this process (affinity, quota, LOCAL_WORLD_SIZE)"
    yield _judged(cpus >= 1, "CPUs", seen, "raise the quota of its container (docker run --cpus)")


def _start_method() -> Iterator[Finding]:
    method = multiprocessing.get_context().get_start_method()
    about = "its script needs `if __name__ == '__main__':`, and imports take seconds: let workers persist"
    yield Finding(OK, "start method", method if method == "fork" else f"{method}; {about}")


class _Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(1 << 14) * index


def _batches() -> Iterator[Finding]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [digest(leaves(batch)) for batch in DataLoader(_Samples(), 4)]
        try:
            with DataLoader(_Samples(), 4, num_workers=2, timeout=_PATIENCE) as loader:
                equal = [digest(leaves(batch)) for batch in loader] == expected
            seen = f"{len(expected)} from two workers {'equal' if equal else 'differ from'} those without any"
        except Exception as error:
            equal, seen = False, f"two workers gave none: {type(error).__name__}: {error}"
    yield _judged(equal, "batches", seen, "make the changes above; without any, please report it")


def _images() -> Iterator[Finding]:
    """The decoders of `fastq_loader.images`. They are needed only there, so nothing has to be changed."""
    from fastq_loader.extras.images import decoders

    for kind, library in decoders.chosen().items():
        yield Finding(NOTE, f"decoder of {kind}", library)


def _accelerator() -> Iterator[Finding]:
    """Runs after the workers, which must not inherit an initialised device."""
    if torch.accelerator.is_available():
        seen, pins = f"{torch.accelerator.current_accelerator()}, host memory can be page-locked", True
        try:
            torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
        except RuntimeError as error:
            seen, pins = f"host memory cannot be page-locked: {error}", False
        yield _judged(pins, "accelerator", seen, "run `ulimit -l unlimited`")
    else:
        unused = os.path.exists("/proc/driver/nvidia/gpus")
        seen = f"torch {torch.__version__} cannot use the NVIDIA GPU" if unused else "none"
        yield _judged(not unused, "accelerator", seen, "install a CUDA build of torch, as new as the driver")


#: All checks in order: the one that initialises a device is the last.
CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    *(_versions, _workers, _locks, _memory, _descriptors_and_threads, _sockets, _cpus),
    *(_start_method, _batches, _images, _accelerator),
)
#: Checks for a system on which torch's own workers run, whatever is changed.
ANYWHERE = (_versions, _workers, _cpus, _start_method, _batches, _images, _accelerator)
