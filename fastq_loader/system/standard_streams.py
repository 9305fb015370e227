"""Standard streams that are missing: programs without a console, daemons.

Runs in the consumer and in the zygote. `sys.stdout` may be None there, or closed, and the descriptors 0 to 2
may be free. The next thing that is opened gets their number then; were it the shared memory, whatever writes
to "standard output", some C library perhaps, would write into somebody's batch.
"""

from __future__ import annotations

import contextlib
import os
import sys


def occupy() -> None:
    """Put /dev/null where one of the descriptors 0 to 2 is free: for good, and for the children too."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened > descriptor:  # another thread was faster
                os.close(opened)
            else:
                os.set_inheritable(opened, True)


def flush() -> None:
    """Write out what was printed, so far as there is anything to print to."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
