"""Where, when and of which package a run was, and how much of the machine the consumer may use."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.digest import PACKAGE, ROOT, digest

DISTRIBUTIONS = ("torch", "numpy", "pyzmq", "torchdata", "spdl-core", "spdl-io", "grain")


def describe() -> dict[str, Any]:
    """CPU, cores, memory, load, versions of Python and of the packages that are there, and the date."""
    # ARM kernels name no model.
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version()} | _versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def revision() -> dict[str, str]:
    """The commit, and the digest of the package's files. A copy that is no clone has its commit from the
    environment variable BENCH_COMMIT."""
    changed = " with changes" if _git("status", "--porcelain", "--", PACKAGE) else ""
    commit = _git("rev-parse", "--short=10", "HEAD") or os.environ.get("BENCH_COMMIT", "unknown")
    return {"commit": commit + changed, "package": digest()}


def age(runs: Sequence[dict[str, Any]]) -> str:
    """How old the rows of these runs are that were measured with another package; "" where none were."""
    now, found = digest(), {}
    for run in runs:
        if run["revision"]["package"] != now:
            commit = run["revision"]["commit"]
            later = _git("rev-list", "--count", f"{commit.split(' ')[0]}..HEAD", "--", PACKAGE)
            found[commit] = f"{commit} ({run['machine']['date'][:10]}, {later or 'unknown'} commits ago)"
    return f"Rows of another package than this: commit {', '.join(found.values())}" if found else ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()


def use_one_thread() -> None:
    """Give torch's operations one thread each, here and in processes below, as torch's workers have.

    With more, libgomp's threads spin while they wait for each other. On 2 cores that something else used too,
    blocks of large_u8 without workers then ranged from 2.5 to 1,700 batches/s; with one thread each, from 970
    to 1,460.
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for processes that loaders spawn: only torch and we set it there


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
