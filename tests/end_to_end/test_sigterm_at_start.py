"""A SIGTERM to the whole job while its workers import: they outlive it, as later (see `test_preemption`)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fastq_loader.workers import local_pool
from tests.conftest import ROOT, running_script, wait_until

pytestmark = pytest.mark.processes

#: Workers stop at the gate in the middle of their first import, before anything of ours has run in them.
GATE = """
import os, sys, time
if "spawn_main" in str(sys.orig_argv):
    open(os.path.join(os.environ["GATE"], str(os.getpid())), "w").close()
    while not os.path.exists(os.path.join(os.environ["GATE"], "open")):
        time.sleep(0.02)
"""
JOB = """
    import signal
    import fastq_loader
    signal.signal(signal.SIGTERM, lambda *_: print("saved", flush=True))
    loader = fastq_loader.DataLoader(range(8), 2, num_workers=2, multiprocessing_context="spawn")
    batches = iter(loader)
    print("started", flush=True)
    print([batch.tolist() for batch in batches], flush=True)
"""


def test_spawned_workers_outlive_sigterm_before_they_are_up(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(GATE)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    at_once = min(2, local_pool.cores())
    with running_script(JOB, env={"PYTHONPATH": path, "GATE": str(tmp_path)}) as script:
        script.wait_for("started")
        assert wait_until(lambda: len(list(tmp_path.glob("[0-9]*"))) == at_once, 60)
        os.killpg(script.pid, signal.SIGTERM)
        script.wait_for("saved")
        (tmp_path / "open").touch()
        result = script.finish(60)
    assert (result.returncode, result.left) == (0, ()), result
    assert result.stdout.endswith("[[0, 1], [2, 3], [4, 5], [6, 7]]\n"), result
