"""A process ends while a loader and its iterator live, wherever it runs and however it ends.

Nothing of ours outlives it, and its exit code is what it is with torch's loader.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tests.conftest import run_script, torchs_segments_removed
from tests.support.ends import ENDS, LOADERS, WHERE
from tests.support.thorough import thorough

pytestmark = pytest.mark.processes

#: Children that are forked, with every loader; the others, with what hung for ever there.
EVERY = [
    *(("fork", loader) for loader in LOADERS),
    # A program leaves busy workers torch's five seconds to finish a sample: test_lifecycle.py.
    *(("program", loader) for loader in LOADERS if "busy" not in loader),
    *((where, loader) for where in WHERE[2:] for loader in ("restarts", "busy, restarts", "far", "torch")),
]


@pytest.mark.parametrize(("where", "loader"), EVERY)
@thorough(after=1)
def test_processes_end_in_every_way_with_all_that_their_loaders_started(where: str, loader: str) -> None:
    """Side by side."""
    ends = ENDS.copy()
    if where not in ("fork", "program") or "workers" in loader:  # torch is imported for each child, or by it
        ends = {how: ends[how] for how in ("raise", "sys.exit")}
    if loader == "torch":  # its workers look every five seconds whether their parent is there
        ends = {"raise": 1}
    script = f"from tests.support import ends; ends.run({where!r}, {loader!r}, {list(ends)!r})"
    with torchs_segments_removed() if loader == "torch" else nullcontext():
        result = run_script(script, warm=True)
    if where == "program" and "SIGINT" in ends:
        ends["SIGINT"] = -2
    assert result.stdout.count("one batch was handed out") == len(ends), result.stderr
    assert result.stdout.splitlines()[-1] == f"exit codes {ends}", result.stderr
    assert not result.left
    if loader != "torch":  # whose SIGCHLD handler may raise at any moment, and then its error is shown
        assert ("ValueError: on purpose" in result.stderr) == ("torch." not in where)
