"""A process ends while a loader and its iterator live, wherever it runs and however it ends.

Nothing of ours outlives it, and its exit code is what it is with torch's loader. `FASTQ_ALL_ENDS=1` tries
every combination, in some minutes.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import product

import pytest

from tests.conftest import run_script, torchs_segments_removed
from tests.support.ends import ENDS, LOADERS, WHERE

pytestmark = pytest.mark.processes

#: torch's ends them with its workers, which look every five seconds whether their parent is there.
OURS = [loader for loader in LOADERS if loader != "torch"]
EVERY = list(product(WHERE, OURS, ENDS))
#: Each child with what hung for ever there; each loader, and each end, in a child that was forked.
SOME = [
    *((where, "restarts", how) for where in WHERE for how in ("raise", "sys.exit")),
    *(("fork", loader, "raise") for loader in OURS),
    *(("fork", "restarts", how) for how in ENDS),
    *(("program", "restarts", how) for how in ENDS),
    *(("spawn", "far", "raise"), ("torch.multiprocessing.spawn", "busy, restarts", "return")),
    *((where, "torch", "raise") for where in WHERE),
]


@pytest.mark.parametrize(
    ("where", "loader", "how"), EVERY if "FASTQ_ALL_ENDS" in os.environ else list(dict.fromkeys(SOME))
)
def test_a_process_ends_with_all_that_its_loader_started(where: str, loader: str, how: str) -> None:
    if where == "program" and "busy" in loader:
        pytest.skip("a program leaves its workers torch's five seconds to finish a sample: test_lifecycle.py")
    script = f"from tests.support import ends; ends.run({where!r}, {loader!r}, {how!r})"
    with torchs_segments_removed() if loader == "torch" else nullcontext():
        result = run_script(script, warm=where != "program")
    assert "one batch was handed out" in result.stdout
    code = ENDS[how]
    if where == "program":
        expected = -2 if how == "SIGINT" else code
        assert result.returncode == expected, result.stderr
    else:
        assert result.stdout.splitlines()[-1] == f"exit code {code}", result.stderr
    assert not result.left
    if loader != "torch":  # whose SIGCHLD handler may raise at any moment, and then its error is shown
        assert ("ValueError: on purpose" in result.stderr) == (how == "raise" and "torch." not in where)
