"""A SIGTERM to the whole job while its workers import: they outlive it, as later (see `test_preemption`)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import ROOT, running_script, wait_until

pytestmark = pytest.mark.processes

#: Stops whoever imports it, and says so.
GATE = """
import os, sys, time
if "spawn_main" in str(sys.orig_argv):
    open(os.path.join(os.environ["GATE"], str(os.getpid())), "w").close()
    while not os.path.exists(os.path.join(os.environ["GATE"], "open")):
        time.sleep(0.02)
"""
JOB = """
    import signal, sys
    import __main__
    import fastq_loader
    __main__.__file__ = {main!r}
    signal.signal(signal.SIGTERM, lambda *_: print("saved", flush=True))
    loader = fastq_loader.DataLoader(range(8), 2, num_workers=2, multiprocessing_context="spawn")
    print([batch.tolist() for batch in loader], flush=True)
"""


@pytest.mark.parametrize(("gate", "waiting"), [("sitecustomize", 1), ("program", 2)])
def test_spawned_workers_outlive_sigterm_before_they_are_up(gate: str, waiting: int, tmp_path: Path) -> None:
    """While the interpreter starts that they are forked from, and while they import the program."""
    (tmp_path / "program.py").touch()
    (tmp_path / f"{gate}.py").write_text(GATE)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "GATE": str(tmp_path)}
    with running_script(JOB.format(main=str(tmp_path / "program.py")), env=environment) as script:
        assert wait_until(lambda: len(list(tmp_path.glob("[0-9]*"))) == waiting, 60)
        os.killpg(script.pid, signal.SIGTERM)
        script.wait_for("saved")
        (tmp_path / "open").touch()
        result = script.finish(60)
    assert (result.returncode, result.left) == (0, ()), result
    assert result.stdout.endswith("[[0, 1], [2, 3], [4, 5], [6, 7]]\n"), result
