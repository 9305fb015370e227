"""Child processes: whether they have ended, and what is left of them then.

Runs in the consumer and in the zygote. Where SIGCHLD is ignored, as daemons have it, the system reaps
children by itself, and multiprocessing takes a child whose exit code it cannot get for one that still runs.
Only a descriptor says when it has ended.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
from multiprocessing.process import BaseProcess
from typing import Any

#: The exit code of a process that nobody here could ask for its own (multiprocessing's number for that).
UNKNOWN_EXIT = 255


def release(process: BaseProcess) -> None:
    """Close what a process that has ended holds here. Not by its own close(): code outside may ask it for its
    number and its exit code still."""
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    popen: Any = process._popen  # type: ignore[attr-defined]
    if popen is None:  # it was never started
        return
    if popen.returncode is None:  # somebody else reaped it: SIGCHLD is ignored
        popen.returncode = UNKNOWN_EXIT
    popen.close()
