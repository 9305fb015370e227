"""Children that a test forks, and tests that run in one."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from tests.conftest import process_table, wait_until


def fork(work: Callable[[], Any]) -> int:
    """A child that does some work and leaves, with 1 if that fails; its process id."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def end_of(pid: int) -> int:
    """The exit code of a child, which is waited for."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a child of this process, with limits and signals of its own: much quicker than a script.

    The child ends well, prints nothing to stderr, and leaves no process.
    """

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with tempfile.TemporaryFile() as stderr:

            def work() -> None:
                os.setsid()
                os.dup2(stderr.fileno(), 2)
                sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
                torch.set_num_threads(1)  # OpenMP's are not forked, and would be waited for
                test(*arguments, **named)

            pid = fork(work)
            code = end_of(pid)
            stderr.seek(0)
            lines = stderr.read().decode().splitlines(keepends=True)
            text = "".join(line for line in lines if not line.startswith("Error in cpuinfo: "))  # torch's
            assert (code, text) == (0, ""), f"exit code {code}\n{text}"

        def left() -> list[str]:
            return [str(each) for each in process_table() if each.session == pid and not each.zombie]

        assert wait_until(lambda: not left(), 30), left()

    return run
