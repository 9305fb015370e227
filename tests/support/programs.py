"""Programs in files of their own, run by a warm script: workers can import their `__main__`."""

from __future__ import annotations

import os
import sys
import tempfile
from multiprocessing import process
from pathlib import Path
from types import CodeType

PROGRAM = "program.py"


def at_once(*runs: tuple[str, list[str], dict[str, str]]) -> CodeType:
    """Run the programs of some folders at the same time. Returns in the fork that runs one, with the code to
    execute in `__main__`.

    Args:
        runs: folders, each with the program's arguments, and what is added to its environment.
    """
    children = []
    for folder, arguments, environment in runs:
        children.append(os.fork())
        if not children[-1]:
            return _become(folder, arguments, environment)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))


def _become(folder: str, arguments: list[str], environment: dict[str, str]) -> CodeType:
    os.chdir(folder)
    process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    os.environ.update(environment, PYTHONPATH=f"{os.environ['PYTHONPATH']}:{folder}")
    tempfile.tempdir = os.environ.get("TMPDIR")
    path = str(Path(folder, PROGRAM))
    sys.path[0] = folder
    sys.argv = [PROGRAM, *arguments]
    sys.modules["__main__"].__file__ = path
    return compile(Path(path).read_text(), path, "exec", dont_inherit=True)
